# SPDX-License-Identifier: Apache-2.0
"""Compile kernels to machine code of one architecture, and read the output of ptxas and the PTX.

Nothing is linked and no host code is compiled, so this is quick. Sources that are unchanged since
the last run (with headers, flags and compiler) are not compiled again.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.cuda_toolkit import ROOT, nvcc_version
from tools.gates.budgets import BUDGETS, LARGE, LIMITS, Budget, blocks_per_sm, budget_of


@dataclass(frozen=True)
class Kernel:
    """One function of one architecture, as compiled. `threads` is None without launch bounds."""

    name: str
    arch: str
    entry: bool
    threads: int | None
    registers: int
    smem_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Compiled:
    """A source for one architecture: its kernels, and problems beyond those of budgets."""

    source: str
    arch: str
    kernels: tuple[Kernel, ...]
    problems: tuple[str, ...]
    seconds: float
    cached: bool = False


def cmake_list(name: str) -> list[str]:
    """Return a `set(name ...)` of CMakeLists.txt, the only list of sources and flags."""
    text = re.sub(r"#[^\n]*", "", (ROOT / "CMakeLists.txt").read_text())
    match = re.search(rf"\bset\({name}\b([^)]*)\)", text)
    assert match, f"CMakeLists.txt does not set {name}"
    return match[1].split()


def compile_error(nvcc: Path, source: Path, arch: str) -> str | None:
    """Return the errors and warnings of a compilation to PTX without optimization, or None."""
    command = [
        str(nvcc),
        *cmake_list("SPECOPS_NVCC_FLAGS"),
        "-Werror",
        "all-warnings",
        f"-I{ROOT / 'csrc'}",
        f"-arch=compute_{arch}",
        "-Xcicc",
        "-O0",
        "-ptx",
        "-o",
        os.devnull,
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"{source.name} sm_{arch} does not compile:\n{(done.stdout + done.stderr).strip()}"


def compile_source(nvcc: Path, source: Path, arch: str, work: Path) -> Compiled:
    """Compile one source for one architecture, or reuse the result of an identical compilation."""
    folder = work / f"sm_{arch}" / source.stem
    saved, depfile = folder / "result.json", folder / "deps"
    command = [
        str(nvcc),
        *cmake_list("SPECOPS_NVCC_FLAGS"),
        "-Werror",
        "all-warnings",
        f"-I{ROOT / 'csrc'}",
        "-gencode",
        f"arch=compute_{arch},code=sm_{arch}",
        "-cubin",
        "-Xptxas",
        "-v",
        "-keep",
        "-keep-dir",
        str(folder),
        "-MD",
        "-MF",
        str(depfile),
        "-o",
        str(folder / "kernel.cubin"),
        str(source),
    ]
    if saved.exists():
        result = json.loads(saved.read_text())
        if result["key"] == _key(nvcc, command, source, depfile):
            kernels = tuple(Kernel(**kernel) for kernel in result["kernels"])
            problems = tuple(result["problems"])
            return Compiled(source.name, arch, kernels, problems, result["seconds"], cached=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log, seconds = done.stdout + done.stderr, round(time.monotonic() - begun, 2)
    (folder / "log").write_text(log)
    if done.returncode != 0:
        return Compiled(source.name, arch, (), (f"does not compile:\n{log.strip()}",), seconds)
    ptx = (folder / f"{source.stem}.ptx").read_text()
    for path in folder.iterdir():
        if path.suffix not in (".ptx", ".cubin", "") or path.stat().st_size == 0:
            path.unlink()
    kernels = tuple(read_ptxas(log, arch, launch_bounds(ptx)))
    problems = tuple([*log_problems(log), *ptx_problems(ptx)])
    result = {
        "key": _key(nvcc, command, source, depfile),
        "kernels": [asdict(kernel) for kernel in kernels],
        "problems": problems,
        "seconds": seconds,
    }
    saved.write_text(json.dumps(result))
    return Compiled(source.name, arch, kernels, problems, seconds)


def _key(nvcc: Path, command: list[str], source: Path, depfile: Path) -> str:
    """Return a hash of all inputs: command, compiler, and every file outside the system folders."""
    text = re.sub(r"\\\n", " ", depfile.read_text()) if depfile.exists() else ""
    read = {Path(name).resolve() for name in text.split()[2:]} | {source.resolve()}
    digest = hashlib.sha256(repr((command, nvcc_version(nvcc))).encode())
    digest.update(Path(__file__).read_bytes())
    system = ("/usr/", str(nvcc.resolve().parent.parent))
    for path in sorted(path for path in read if not str(path).startswith(system)):
        digest.update(str(path).encode() + (path.read_bytes() if path.exists() else b"gone"))
    return digest.hexdigest()


def demangle(names: list[str]) -> list[str]:
    """Return readable names without namespaces and arguments: `silu_mul_kernel<bfloat16>`."""
    if not names:
        return []
    done = subprocess.run(
        ["c++filt", *names], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [_short(name) for name in done]


def _short(name: str) -> str:
    name = re.sub(r"\(anonymous namespace\)::|\bspecops::|\b_GLOBAL__N_\w*::", "", name)
    name = re.sub(r"\((?:int|unsigned int|long|bool|unsigned long|unsigned char)\)", "", name)
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:i]
            break
    return re.sub(r"^.*? (?=\w+(<|$))", "", name)


def launch_bounds(ptx: str) -> dict[str, int | None]:
    """Return the block size that each kernel is compiled for, by its mangled name."""
    bounds: dict[str, int | None] = {}
    for match in re.finditer(r"\.entry\s+(\w+)\s*\((.*?)^\{", ptx, re.DOTALL | re.MULTILINE):
        size = re.search(r"\.(?:max|req)ntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", match[2])
        sides = [int(side) for side in size.groups() if side] if size else []
        bounds[match[1]] = None
        for i, side in enumerate(sides):
            bounds[match[1]] = side if i == 0 else (bounds[match[1]] or 1) * side
    return bounds


def read_ptxas(log: str, arch: str, bounds: dict[str, int | None]) -> Iterator[Kernel]:
    """Yield the `-Xptxas -v` report of every function that was not inlined."""
    pattern = (
        r"Function properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads(?:\s*\n[^\n]*Used (\d+) registers([^\n]*))?"
    )
    found = re.findall(pattern, log)
    for match, name in zip(found, demangle([match[0] for match in found]), strict=True):
        smem = re.search(r"(\d+) bytes smem", match[5])
        yield Kernel(
            name=name,
            arch=arch,
            entry=match[0] in bounds,
            threads=bounds.get(match[0]),
            registers=int(match[4] or 0),
            smem_bytes=int(smem[1]) if smem else 0,
            stack_bytes=int(match[1]),
            spill_bytes=int(match[2]) + int(match[3]),
        )


def log_problems(log: str) -> Iterator[str]:
    """Yield assembler warnings, such as ignored directives and a lack of registers."""
    for line in log.splitlines():
        if re.search(r"\bwarning\b|\badvisory\b|C75\d\d", line, re.IGNORECASE):
            yield line.strip()


def ptx_problems(ptx: str) -> Iterator[str]:
    """Yield instructions whose result depends on the order in which blocks arrive."""
    for word in sorted(set(re.findall(r"\b(?:atom|red)\.[\w.:]*\.b?f(?:16|32|64)\w*", ptx))):
        yield f"{word}: atomics on floats add in order of arrival"


def judge(kernel: Kernel, budgets: tuple[Budget, ...] = BUDGETS) -> Iterator[str]:
    """Yield a phrase for each rule or budget that a kernel violates."""
    budget = budget_of(kernel.name, budgets)
    known = budget.spills.get(kernel.arch, 0) if kernel.entry else 0
    if kernel.spill_bytes > known:
        yield f"spills {kernel.spill_bytes} bytes"
    if kernel.stack_bytes and not known:
        yield f"keeps a stack frame of {kernel.stack_bytes} bytes"
    if not kernel.entry:
        return
    if kernel.smem_bytes:
        yield f"owns {kernel.smem_bytes} bytes of static shared memory"
    # Fewer threads share the registers of a smaller SM.
    most = min(255, budget.registers * 2048 // LIMITS[kernel.arch].threads)
    if kernel.registers > most:
        yield f"takes {kernel.registers} registers, its budget is {most}"
    if kernel.threads is None:
        yield "has no __launch_bounds__"
        return
    if budget.threads is not None and kernel.threads != budget.threads:
        yield f"is bound to {kernel.threads} threads, its budget says {budget.threads}"
    if kernel.arch not in budget.launched_on:
        return
    limits = LIMITS[kernel.arch]
    if budget.smem_bytes > limits.block_smem_bytes:
        yield f"has a budget of {budget.smem_bytes} bytes, a block has {limits.block_smem_bytes}"
    fits = blocks_per_sm(limits, kernel.registers, kernel.threads, budget.smem_bytes)
    wanted = budget.blocks_per_sm if kernel.arch in LARGE else 1
    if fits < wanted:
        yield f"fits an SM {fits} times, its budget says {wanted}"
