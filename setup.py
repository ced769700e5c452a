# SPDX-License-Identifier: Apache-2.0
"""Hands the build of specops._C to CMake and ninja; CMakeLists.txt lists the sources.

SPECOPS_CUDA=auto|ON|OFF says whether CUDA kernels are built (auto: if nvcc is there and the
installed torch has CUDA, which an isolated build cannot see), SPECOPS_CUDA_ARCHS for which GPUs
(`80 90a`; default: those of this machine, else that list). SPECOPS_ISAS names the instruction sets
of the CPU kernels: `all`, as a wheel needs them, `native`, those that this machine runs best, or a
list such as `native portable`. SPECOPS_TARGETS names what else to build (`all _simt`: the
interpreter, for tests). Warnings are errors in place, as `make` builds, and nowhere else: who
installs has other compilers.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))  # build front ends do not put the project there

import cuda_toolkit  # noqa: E402


class CMakeBuild(build_ext):
    """Configure once, then let ninja decide what is out of date."""

    def run(self) -> None:
        self.werror = "ON" if self.inplace else "OFF"  # setuptools takes inplace back meanwhile
        super().run()

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        out = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        out.mkdir(parents=True, exist_ok=True)
        work = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        options = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}",
            f"-DSPECOPS_ISAS={';'.join(os.environ.get('SPECOPS_ISAS', '').split()) or 'all'}",
            f"-DSPECOPS_WERROR={self.werror}",
            *cuda_toolkit.cmake_options(),
            *os.environ.get("SPECOPS_CMAKE_ARGS", "").split(),
        ]
        subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", work, *options], check=True)
        targets = os.environ.get("SPECOPS_TARGETS", "all").split()
        subprocess.run(["cmake", "--build", work, "--target", *targets], check=True)


setup(ext_modules=[Extension("specops._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
