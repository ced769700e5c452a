# SPDX-License-Identifier: Apache-2.0
"""Builds of the package in which a constant of a CUDA kernel differs: what a choice costs.

A variant is a header of csrc/ with other values, in a folder that nvcc searches first; the rest is
built as ever, into bench/work/. Nothing of it is ever shipped.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from bench.common import ROOT, WORK
from tools.cuda_toolkit import cmake_options


def write_overlay(folder: Path, header: str, constants: Mapping[str, int]) -> None:
    """Writes `header` of csrc/ below `folder`, each `constexpr int` given its other value."""
    text = (ROOT / "csrc" / header).read_text()
    for name, value in constants.items():
        pattern = rf"(constexpr int {name} = )[^;]+;"
        text, count = re.subn(pattern, rf"\g<1>{value};", text)
        assert count == 1, f"csrc/{header} has no constant {name}"
    path = folder / header
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def build(variants: Mapping[str, Mapping[str, int]], header: str) -> dict[str, ModuleType]:
    """Builds and loads the compiled module of every variant, all at the same time."""
    import pybind11

    builds = {}
    for name, constants in variants.items():
        work = WORK / f"variant-{name}"
        write_overlay(work / "overlay", header, constants)
        configure = [
            *("cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(work)),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={work / 'module'}",
            f"-DSPECOPS_CUDA_OVERLAY={work / 'overlay'}",
            *("-DSPECOPS_ISAS=portable", "-DSPECOPS_WERROR=OFF"),
            *cmake_options(),
        ]
        with (work / "log").open("w") as log:
            subprocess.run(configure, check=True, stdout=log, stderr=log)
            jobs = str(max(1, len(os.sched_getaffinity(0)) // len(variants)))
            command = ["cmake", "--build", str(work), "--target", "_C", "--parallel", jobs]
            builds[name] = subprocess.Popen(command, stdout=log, stderr=log)
    for name, process in builds.items():
        assert process.wait() == 0, f"variant {name}: see {WORK / f'variant-{name}' / 'log'}"
    return {name: _load(name) for name in variants}


def _load(name: str) -> ModuleType:
    (path,) = (WORK / f"variant-{name}" / "module").glob("_C*.so")
    # The last part of the name is what the file's entry point is called after.
    spec = importlib.util.spec_from_file_location(f"variant_{name}._C", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
