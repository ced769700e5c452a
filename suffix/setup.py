# SPDX-License-Identifier: Apache-2.0
"""Build specops_suffix: suffix_tree.py of the package, and its part of csrc/, through links."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

COMMON = [f"csrc/common/{name}.cpp" for name in ("cpus", "error_flag", "parallel")]

setup(
    ext_modules=[
        Pybind11Extension(
            "specops_suffix._C",
            sorted(["bindings.cpp", *glob("csrc/suffix_tree/suffix_*.cpp"), *COMMON]),
            depends=sorted(glob("csrc/suffix_tree/*.h") + glob("csrc/common/*.h")),
            include_dirs=["csrc"],
            cxx_std=20,
            # Contraction would change the scores of drafts, as in CMakeLists.txt.
            extra_compile_args=["-O2", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
            extra_link_args=["-pthread", "-s"],
        )
    ]
)
