# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.bare_debian`: check that the wheel runs on a minimal Debian with Python.

As root, it makes a minimal Debian in build/bare by debootstrap, without compiler or make, and
installs the wheel of `make wheel` and its dependencies there without a network. Then the bundled
model completes a text twice, and the wheel must have the instruction sets of this tree's build. The
check prints seconds and MB. Dependencies are downloaded outside the system, so the running Python
must have the version of Debian's.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import specops

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "bare"
SYSTEM = WORK / "root"
PACKAGES = "python3,python3-venv"
PROMPT = "def add(a, b):"
# Build tools, which the system must not have.
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "make", "cmake", "ninja", "ld", "as")
PATHS = ("usr/bin", "usr/local/bin", "specops/bin")


def make_system(suite: str) -> None:
    """Make the Debian system, unless it exists."""
    if (SYSTEM / "usr/bin/python3").is_file():
        return
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite]
    subprocess.run([*command, str(SYSTEM)], check=True)


def inside(command: Sequence[str]) -> tuple[float, str]:
    """Run a command in the Debian system with a clean environment; return seconds and output."""
    clean = ["env", "-i", "LANG=C.UTF-8"]  # commands start in the root directory
    begin = time.monotonic()
    done = subprocess.run(
        ["chroot", str(SYSTEM), *clean, *command], check=True, text=True, stdout=subprocess.PIPE
    )
    return time.monotonic() - begin, done.stdout


def megabytes(path: Path) -> float:
    """Return the total size of the files of a folder in MB."""
    return sum(one.lstat().st_size for one in path.rglob("*") if not one.is_dir()) / 1e6


def missing() -> str:
    """Return what this machine lacks for the check; empty if nothing."""
    if os.geteuid():
        return "root is needed, for debootstrap and chroot"
    if shutil.which("debootstrap") is None and not SYSTEM.is_dir():
        return "apt-get install debootstrap"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="default: that of build/wheels")
    parser.add_argument("--suite", default="bookworm", help="of Debian (default: %(default)s)")
    args = parser.parse_args(arguments)
    wheels = [args.wheel] if args.wheel else sorted((ROOT / "build/wheels").glob("*.whl"))
    lack = missing()
    if len(wheels) != 1:
        lack = f"build/wheels must hold one wheel, which `make wheel` makes, got {len(wheels)}"
    if lack:
        print(lack)
        return 2
    make_system(args.suite)
    target = SYSTEM / "wheels"
    shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(SYSTEM / "specops", ignore_errors=True)
    packages = [f"{wheels[0]}[server]", "-c", str(ROOT / "constraints.txt")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(target)]
    subprocess.run([*pip, *packages], check=True)

    making, _ = inside(["usr/bin/python3", "-m", "venv", "specops"])
    install = ["specops/bin/pip", "install", "--quiet", "--no-deps"]
    installing, _ = inside([*install, *(f"wheels/{one.name}" for one in target.iterdir())])
    found = [name for name in COMPILERS for one in PATHS if (SYSTEM / one / name).exists()]
    assert not found, f"it has compilers: {found}"
    complete = [
        "specops/bin/specops",
        "complete",
        PROMPT,
        "--max-tokens",
        "1",
        "--temperature",
        "0",
    ]
    first, text = inside(complete)
    second, again = inside(complete)
    assert text and text == again, text
    _, isas = inside(
        ["specops/bin/python", "-c", "import specops; print(*specops.supported_isas())"]
    )
    assert isas.split() == specops.supported_isas(), f"instruction sets: {isas}"
    site = next((SYSTEM / "specops/lib").glob("python3*")) / "site-packages"
    print(
        json.dumps(
            {
                "wheel_mb": round(wheels[0].stat().st_size / 1e6, 1),
                "all_wheels_mb": round(megabytes(target), 1),
                "debian_mb": round(megabytes(SYSTEM) - megabytes(target) - megabytes(site), 1),
                "site_packages_mb": round(megabytes(site), 1),
                "torch_mb": round(megabytes(site / "torch"), 1),
                "specops_mb": round(megabytes(site / "specops"), 1),
                "venv_s": round(making, 1),
                "install_s": round(installing, 1),
                "first_token_s": round(first, 1),
                "again_s": round(second, 1),
            },
            indent=2,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
