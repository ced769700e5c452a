# SPDX-License-Identifier: Apache-2.0
# Toolchain file: specops for 64-bit ARM Linux, built and tried on a machine of another kind
# (make -C tools test-arm). SPECOPS_ARM_SYSROOT holds the ARM system that the module is to run on.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++ CACHE STRING "The cross compiler")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -cpu max -L ${SPECOPS_ARM_SYSROOT})
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES SPECOPS_ARM_SYSROOT)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# Where Debian's pyconfig.h looks for the one of the machine.
set(CMAKE_CXX_STANDARD_INCLUDE_DIRECTORIES ${SPECOPS_ARM_SYSROOT}/usr/include)
