# SPDX-License-Identifier: Apache-2.0
"""Builds of the package with an edited CUDA header, to measure alternatives.

The edited header is in a folder that nvcc searches first when it compiles some sources; all other
objects are those of the package. All variants can be built in one run. They are never shipped.
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from bench.common import ROOT, WORK
from tools.cuda_toolkit import cmake_options

Result = TypeVar("Result")

# Sources of append_attention's plan and of its bf16 kernels.
BF16_ATTENTION = (
    "attention/append_attention/append_attention.cu",
    "attention/append_attention/append_attention_bf16.cu",
)

Edits = Mapping[str, str]  # pattern, which must match exactly once -> replacement


def constants(**values: int) -> Edits:
    """Return edits that change the values of `constexpr int` constants."""
    return {
        rf"(constexpr int {name} = )[^;]+;": rf"\g<1>{value};" for name, value in values.items()
    }


SPLITS_HEADER, PTX_HEADER = "attention/append_attention/cuda/plan.cuh", "common/ptx.cuh"
# Other sizes of leaves and chunks. The product's sizes are fixed, so that bits do not depend on the
# load; the fastest of these for each load shows what this costs.
FREE_SPLITS = {
    "leaf512": constants(kLeafTokens=512, kChunkLeaves=4),
    "leaf2048": constants(kLeafTokens=2048, kChunkLeaves=1),
    "chunk512": constants(kLeafTokens=256, kChunkLeaves=2),
    "chunk8192": constants(kLeafTokens=2048, kChunkLeaves=4),
}
NO_MMA = {r"(void mma_m16n8k16\(.*?\) \{).*?\n\}\n": r"\g<1>}\n"}
# Edited header and edits of each variant.
VARIANTS: dict[str, tuple[str, Edits]] = {
    "no_mma": (PTX_HEADER, NO_MMA),
    **{name: (SPLITS_HEADER, edits) for name, edits in FREE_SPLITS.items()},
}


def write_overlay(folder: Path, header: str, edits: Edits) -> None:
    """Write an edited `header` of csrc/ below `folder`."""
    text = (ROOT / "csrc" / header).read_text()
    for pattern, other in edits.items():
        text, count = re.subn(pattern, other, text, flags=re.DOTALL)
        assert count == 1, f"csrc/{header} has {count} times {pattern}"
    path = folder / header
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def targets(names: Iterable[str] = tuple(VARIANTS)) -> list[str]:
    """Return the CMake targets of variants."""
    return [f"_C_{name}" for name in names]


def cmake_arguments() -> list[str]:
    """Write the headers of all variants, and return the CMake arguments that declare them."""
    folders = {name: WORK / "variants" / name for name in VARIANTS}
    for name, (header, edits) in VARIANTS.items():
        write_overlay(folders[name], header, edits)
    return [
        f"-DSPECOPS_CUDA_VARIANTS={';'.join(map(str, folders.values()))}",
        f"-DSPECOPS_CUDA_VARIED={';'.join(f'csrc/{source}' for source in BF16_ATTENTION)}",
    ]


def build(names: Sequence[str]) -> dict[str, ModuleType]:
    """Build variants at the same time, as far as they are missing, and load their modules."""
    tree, configured = _tree()
    configure = ["cmake", *configured, "-B", str(tree), *cmake_arguments()]
    log = WORK / "variants" / "log"
    with log.open("w") as file:
        for command in (configure, ["cmake", "--build", str(tree), "--target", *targets(names)]):
            done = subprocess.run(command, stdout=file, stderr=file, check=False)
            assert done.returncode == 0, f"variants: see {log}"
    return {name: _load(name, WORK / "variants" / name) for name in names}


def _tree() -> tuple[Path, list[str]]:
    """Return a build folder and its CMake arguments; reuse the package's build if there is one."""
    for name in (f"cmake-{sys.implementation.cache_tag}", "prebuilt"):
        cache = ROOT / "build" / name / "CMakeCache.txt"
        if cache.exists() and "SPECOPS_CUDA:BOOL=ON" in cache.read_text():
            return cache.parent, ["-S", str(ROOT)]
    import pybind11

    return WORK / "variants" / "build", [
        "-G",
        "Ninja",
        "-S",
        str(ROOT),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={WORK / 'variants' / 'package'}",
        "-DSPECOPS_ISAS=portable",
        "-DSPECOPS_WERROR=OFF",
        *cmake_options(),
    ]


def using(module: ModuleType, call: Callable[[], Result]) -> Callable[[], Result]:
    """Return `call` bound to another compiled module of attention ops, also in a captured graph."""
    from specops import attention  # not at the top: a build needs this file before specops

    def run() -> Result:
        before = attention._C
        attention._C = module  # type: ignore[misc, assignment]
        try:
            return call()
        finally:
            attention._C = before  # type: ignore[misc]

    return run


def _load(name: str, folder: Path) -> ModuleType:
    (path,) = folder.glob("_C*.so")
    # Python derives the entry point from the last part of the module's name.
    spec = importlib.util.spec_from_file_location(f"variant_{name}._C", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
