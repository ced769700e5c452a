# SPDX-License-Identifier: Apache-2.0
"""Prebuilt modules for the GPU check: compiling would take most of the minutes on a rented GPU.

    python -m tools.gpu_check.prebuilt make FOLDER --archs 90a      where there is nvcc
    make gpu-check PREBUILT=FOLDER                                  where there is the GPU

A folder is used only if it was built from exactly the sources of this tree (a hash over csrc,
CMakeLists.txt and the benchmark kernels; time stamps do not count), for this Python and for the
architecture of this GPU. Any other folder is refused with a message, and nothing runs.
"""

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.cuda_toolkit import ROOT, cmake_options, find_nvcc, gpu_archs

STAMP = "built.json"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# Destination folder of each module, by the prefix of its name.
PLACES = {
    "_C": ROOT / "python" / "specops",
    "_simt": ROOT / "build" / "simt",
    "read_bandwidth_cuda": ROOT / "bench" / "work",
    "gpu_facts_cuda": ROOT / "bench" / "work",
}
BENCH_KERNELS = ("read_bandwidth", "gpu_facts")


class Refused(Exception):
    """Error that says why a folder is not used, or not made."""


@dataclass(frozen=True)
class Stamp:
    """Sources that a folder was built from, and targets that it was built for.

    Attributes:
        sources: `sources_hash` of the source tree.
        suffix: suffix of extension modules: the Python version and the platform.
        archs: GPU architectures, as nvcc names them.
        files: sha256 of each compressed file, by name.
    """

    sources: str
    suffix: str
    archs: list[str]
    files: dict[str, str]


def sources_hash(root: Path = ROOT) -> str:
    """Return a hash over every file that the modules are compiled from."""
    digest = hashlib.sha256()
    files = [path for path in (root / "csrc").rglob("*") if path.is_file()]
    files += [root / "CMakeLists.txt", *(root / "bench" / f"{name}.cu" for name in BENCH_KERNELS)]
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(_hash(path).encode())
    return digest.hexdigest()


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stamp(folder: Path, archs: Sequence[str], root: Path = ROOT) -> Stamp:
    """Write the stamp of a folder of modules; call it right after building them."""
    files = {path.name: _hash(path) for path in sorted(folder.glob("*.so.gz"))}
    made = Stamp(sources_hash(root), SUFFIX, list(archs), files)
    (folder / STAMP).write_text(json.dumps(asdict(made), indent=1) + "\n")
    return made


def check(folder: Path, archs: Sequence[str], root: Path = ROOT) -> Stamp:
    """Return the stamp of a folder after checking it for GPUs of these architectures.

    Raises:
        Refused: the folder cannot be used here.
    """
    if not (folder / STAMP).is_file():
        raise Refused(f"{folder} has no {STAMP}: it was not made by tools.gpu_check.prebuilt")
    found = Stamp(**json.loads((folder / STAMP).read_text()))
    if found.sources != sources_hash(root):
        raise Refused(f"{folder} was built from other sources than stand here: build it again")
    if found.suffix != SUFFIX:
        raise Refused(f"{folder} is for Python {found.suffix}, this one is {SUFFIX}")
    if missing := [arch for arch in archs if arch not in found.archs]:
        built = " ".join(found.archs)
        raise Refused(f"{folder} is built for sm_{built}, this GPU is sm_{missing[0]}")
    for name, wanted in found.files.items():
        if not (folder / name).is_file() or _hash(folder / name) != wanted:
            raise Refused(f"{folder}: {name} is not the file that was built")
    if not any(name.startswith("_C.") for name in found.files):
        raise Refused(f"{folder} holds no _C{SUFFIX}")
    return found


def use(folder: Path, archs: Sequence[str], places: dict[str, Path] | None = None) -> list[Path]:
    """Unpack the modules to the folders that import them, once `check` accepts them."""
    copied = []
    for name in check(folder, archs).files:
        place = (places or PLACES)[name.split(".")[0]]
        place.mkdir(parents=True, exist_ok=True)
        # Write a new file and rename it: a process may have the old file mapped.
        new = place / f"{name}.new"
        new.write_bytes(gzip.decompress((folder / name).read_bytes()))
        copied.append(new.replace(place / name.removesuffix(".gz")))
    return copied


def pack(folder: Path) -> None:
    """Replace each module by its compressed file: the interpreter with its checks is large."""
    for path in sorted(folder.glob("*.so")):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()


def print_sizes(folder: Path, max_mib: float | None = None, max_files: int | None = None) -> None:
    """Print the size of each file of a folder.

    Raises:
        Refused: the folder has too many files, or a file that is too large.
    """
    sizes = {path.name: path.stat().st_size / 2**20 for path in sorted(folder.iterdir())}
    for name, mib in sizes.items():
        print(f"{mib:8.2f} MiB  {name}")
    if too_large := [name for name, mib in sizes.items() if max_mib and mib > max_mib]:
        raise Refused(f"{folder}: {too_large[0]} is larger than {max_mib:g} MiB")
    if max_files is not None and len(sizes) > max_files:
        raise Refused(f"{folder} has {len(sizes)} files, the most is {max_files}")


def make(folder: Path, archs: Sequence[str], *, with_variants: bool = False) -> Stamp:
    """Build the package's module, the interpreter and the benchmark kernels into a folder.

    with_variants: build the modules of bench/variants.py in the same run. They stay in bench/work.
    """
    import pybind11

    from bench import variants

    os.environ |= {"SPECOPS_CUDA": "ON", "SPECOPS_CUDA_ARCHS": " ".join(archs)}
    folder.mkdir(parents=True, exist_ok=True)
    work = ROOT / "build" / "prebuilt"
    configure = [
        "cmake",
        "-G",
        "Ninja",
        "-S",
        str(ROOT),
        "-B",
        str(work),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder}",
        # The check is about the GPU, so the portable CPU kernels are enough.
        "-DSPECOPS_ISAS=portable",
        "-DSPECOPS_WERROR=OFF",
        *cmake_options(),
        *(variants.cmake_arguments() if with_variants else []),
    ]
    targets = ["_C", "_simt", *(variants.targets() if with_variants else [])]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", str(work), "--target", *targets], check=True)
    shutil.copy(PLACES["_simt"] / f"_simt{SUFFIX}", folder)
    for name in BENCH_KERNELS:
        code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        flags = ["-std=c++20", "-O3", *code, "-shared", "-Xcompiler", "-fPIC"]
        source = ROOT / "bench" / f"{name}.cu"
        command = [str(find_nvcc()), *flags, str(source), "-o", str(folder / f"{name}_cuda.so")]
        subprocess.run(command, check=True)
    # Line numbers only help to debug the interpreter, and take a third of its size.
    subprocess.run(["strip", "-g", *folder.glob("*.so")], check=True)
    pack(folder)
    return stamp(folder, archs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `make` or `use`."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.prebuilt", description=__doc__)
    parser.add_argument("what", choices=("make", "use"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--archs", default="90a", help="to make: such as `80 90a`")
    parser.add_argument("--max-mib", type=float, help="to make: refuses larger files")
    parser.add_argument("--max-files", type=int, help="to make: refuses more files")
    parser.add_argument("--variants", action="store_true", help="to make: builds variants as well")
    parser.add_argument("--use", action="store_true", help="to make: uses the folder afterwards")
    parser.add_argument("--rehearsal", action="store_true", help="only look whether it can be used")
    asked = parser.parse_args(arguments)
    folder = asked.folder.resolve()
    try:
        if asked.what == "make":
            made = make(folder, asked.archs.split(), with_variants=asked.variants)
            print_sizes(folder, asked.max_mib, asked.max_files)
            print(f"{folder}: {len(made.files)} modules for sm_{' '.join(made.archs)}")
            if asked.use:
                use(folder, gpu_archs())
        elif asked.rehearsal:
            check(folder, ())
            print(f"{folder} can be used")
        else:
            copied = use(folder, gpu_archs())
            print(f"{len(copied)} modules of {folder}")
    except Refused as refused:
        print(refused)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
