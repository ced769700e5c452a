# SPDX-License-Identifier: Apache-2.0
"""Build specops._C with CMake and ninja; CMakeLists.txt lists the sources.

Environment variables:

SPECOPS_CUDA: whether to build CUDA kernels: ON, OFF, or auto (the default): if nvcc is found and
    the installed torch has CUDA. An isolated build does not see the installed torch.
SPECOPS_CUDA_ARCHS: GPU architectures; default: those of this machine's GPUs, else `80 90a`.
SPECOPS_ISAS: instruction sets of the CPU kernels: `all` (the default, for wheels), `native` (the
    best of this machine), or a list such as `native portable`.
SPECOPS_TARGETS: CMake targets; `all _simt` also builds the interpreter, for tests.

Warnings are errors only in a build in place, as `make` does: users have other compilers.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))  # build front ends do not add the project

import cuda_toolkit  # noqa: E402


class CMakeBuild(build_ext):
    """Run CMake, then build with ninja what is out of date."""

    def run(self) -> None:
        self.werror = "ON" if self.inplace else "OFF"  # setuptools resets inplace in run()
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
