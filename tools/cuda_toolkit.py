# SPDX-License-Identifier: Apache-2.0
"""Location of nvcc, the CUDA version of the installed torch, and the GPUs of this machine.

setup.py, the gates and the GPU check use it, so it needs only the standard library, not torch. As a
program it prints the path of nvcc (or of nvdisasm, with that argument), or fails with a message.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Default architectures, for a machine without a GPU: those that the kernels support.
DEFAULT_ARCHS = ("80", "90a")

# Folder where `make` installs nvcc's wheels if the machine has no nvcc. nvdisasm gets a folder
# below it, since pip does not add to a folder that another wheel has made.
WHEELS = ROOT / ".venv" / "cuda"


@cache
def find_nvcc() -> Path | None:
    """Return nvcc from CUDA_HOME, the PATH, or a wheel (installed, or fetched by `make`)."""
    return _find_tool("nvcc", WHEELS)


@cache
def find_nvdisasm() -> Path | None:
    """Return nvdisasm, found as `find_nvcc` finds nvcc; it may be newer than nvcc."""
    return _find_tool("nvdisasm", WHEELS / "nvdisasm")


def _find_tool(name: str, wheels: Path) -> Path | None:
    folders = []
    if home := os.environ.get("CUDA_HOME"):
        folders.append(Path(home) / "bin")
    if on_path := shutil.which(name):
        folders.append(Path(on_path).parent)
    for site in (*map(Path, sys.path), wheels):
        folders += [site / "nvidia" / "cu13" / "bin", site / "nvidia" / f"cuda_{name}" / "bin"]
    for folder in folders:
        if os.access(folder / name, os.X_OK) and (folder / name).is_file():
            return folder / name
    return None


@cache
def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """Return nvcc's release, such as (13, 0)."""
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", output)
    assert match, f"{nvcc} --version names no release"
    return int(match[1]), int(match[2])


@cache
def toolkit_root(nvcc: Path) -> Path:
    """Return the folder of nvcc's headers and libraries, even if `nvcc` is a link or a script."""
    command = [nvcc, "--dryrun", "-c", "none.cu"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    match = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    return Path(match[1]).resolve() if match else nvcc.resolve().parent.parent


def static_runtime(nvcc: Path) -> Path | None:
    """Return libcudart_static.a; wheels keep it in lib, toolkits in lib64 or under targets."""
    root = toolkit_root(nvcc)
    for folder in (root / "lib64", root / "lib", *sorted(root.glob("targets/*/lib"))):
        if (folder / "libcudart_static.a").is_file():
            return folder / "libcudart_static.a"
    return None


def torch_cuda() -> tuple[int, int] | None:
    """Return the CUDA release of the installed torch; None without torch or for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda\b.*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None


def gpu_property(name: str) -> list[str]:
    """Return a property of each GPU from nvidia-smi; empty without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs, such as `NVIDIA H200`."""
    return gpu_property("name")


def gpu_archs() -> list[str]:
    """Return the architectures of this machine's GPUs, as nvcc names them; empty without one."""
    archs = sorted({number.replace(".", "") for number in gpu_property("compute_cap")})
    # nvcc accepts Hopper-only instructions only for 90a.
    return ["90a" if arch == "90" else arch for arch in archs if arch.isdecimal()]


def wanted_archs() -> list[str]:
    """Return the architectures of SPECOPS_CUDA_ARCHS, else of the GPUs, else the default list."""
    archs = os.environ.get("SPECOPS_CUDA_ARCHS", "").replace(";", " ").replace(",", " ").split()
    if bad := [arch for arch in archs if not re.fullmatch(r"\d{2,3}[af]?", arch)]:
        raise SystemExit(f"SPECOPS_CUDA_ARCHS must be like `80 90a`, got {' '.join(bad)}")
    return archs or gpu_archs() or list(DEFAULT_ARCHS)


def cuda_choice() -> tuple[bool, str]:
    """Return whether the package gets CUDA kernels, and why: SPECOPS_CUDA is `auto`, `ON` or `OFF`.

    `auto` requires nvcc and a torch with CUDA but no GPU: a build machine may have none.
    """
    choice = os.environ.get("SPECOPS_CUDA", "") or "auto"
    if choice not in ("auto", "ON", "OFF"):
        raise SystemExit(f"SPECOPS_CUDA must be auto, ON or OFF, got {choice}")
    if choice == "OFF":
        return False, "SPECOPS_CUDA=OFF"
    nvcc = find_nvcc()
    problem = _problem_of(nvcc)
    if choice == "ON":
        if problem:
            raise SystemExit(f"SPECOPS_CUDA=ON, but {problem}")
        return True, "SPECOPS_CUDA=ON"
    if problem:
        return False, problem
    assert nvcc is not None
    if importlib.util.find_spec("torch") is None:
        return False, (
            "no torch is installed where the build runs, as pip's isolated builds have none; "
            "SPECOPS_CUDA=ON builds CUDA kernels with nvcc alone"
        )
    torch = torch_cuda()
    if torch is None:
        return False, "the installed torch has no CUDA"
    if nvcc_version(nvcc)[0] > torch[0]:
        return False, (
            f"nvcc is of CUDA {nvcc_version(nvcc)[0]}, torch of CUDA {torch[0]}: "
            "a driver for torch may be too old for us"
        )
    return True, f"nvcc is {nvcc}, torch is built for CUDA {torch[0]}.{torch[1]}"


def cmake_options() -> list[str]:
    """Return the CUDA options for CMake and print the choice, so that it is never silent."""
    has_cuda, why = cuda_choice()
    if not has_cuda:
        print(f"specops: without CUDA kernels: {why}", flush=True)
        return ["-DSPECOPS_CUDA=OFF"]
    archs, nvcc = wanted_archs(), find_nvcc()
    assert nvcc is not None
    print(f"specops: with CUDA kernels for {' '.join(archs)}: {why}", flush=True)
    return [
        "-DSPECOPS_CUDA=ON",
        f"-DSPECOPS_NVCC={nvcc}",
        f"-DSPECOPS_CUDART={static_runtime(nvcc)}",
        f"-DSPECOPS_CUDA_ARCHS={';'.join(archs)}",
    ]


def _problem_of(nvcc: Path | None) -> str:
    if nvcc is None:
        return "nvcc is not in CUDA_HOME, on the PATH, or among the installed wheels"
    if nvcc_version(nvcc) < (12, 0):
        return f"{nvcc} is older than CUDA 12.0 and has no C++20"
    if static_runtime(nvcc) is None:
        return f"libcudart_static.a is missing under {toolkit_root(nvcc)}"
    return ""


def main() -> int:
    """Print the path of nvcc, or of nvdisasm."""
    if sys.argv[1:] == ["nvdisasm"]:
        print(find_nvdisasm() or "nvdisasm is not in CUDA_HOME, on the PATH, or among the wheels")
        return 0 if find_nvdisasm() else 1
    nvcc = find_nvcc()
    if problem := _problem_of(nvcc):
        print(problem, file=sys.stderr)
        return 1
    print(nvcc)
    return 0


if __name__ == "__main__":
    sys.exit(main())
