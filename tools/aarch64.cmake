# SPDX-License-Identifier: Apache-2.0
# Toolchain file for building specops for 64-bit ARM Linux on another machine, and testing it there
# (make -C tools test-arm). SPECOPS_ARM_SYSROOT is the folder of an ARM system for the module.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++ CACHE STRING "The cross compiler")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -cpu max -L ${SPECOPS_ARM_SYSROOT})
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES SPECOPS_ARM_SYSROOT)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# Debian's pyconfig.h includes the architecture's pyconfig.h from this folder.
set(CMAKE_CXX_STANDARD_INCLUDE_DIRECTORIES ${SPECOPS_ARM_SYSROOT}/usr/include)
