# SPDX-License-Identifier: Apache-2.0
"""Hands the build of specops._C to CMake and ninja; CMakeLists.txt lists the sources."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configure once, then let ninja decide what is out of date."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        out = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        out.mkdir(parents=True, exist_ok=True)
        work = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        options = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}",
            *os.environ.get("SPECOPS_CMAKE_ARGS", "").split(),
        ]
        subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", work, *options], check=True)
        subprocess.run(["cmake", "--build", work], check=True)


setup(ext_modules=[Extension("specops._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
