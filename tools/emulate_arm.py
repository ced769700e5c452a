# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.emulate_arm`: build and test specops for 64-bit ARM Linux on another machine.

It cross-compiles specops._C, downloads an ARM system (Python and its libraries from Debian's
packages, torch and the test dependencies from wheels), and runs tests under qemu's user-mode
emulation, which compare all ARM instruction sets bit by bit. Nothing is installed on this machine:
everything is in build/arm, except the module, which is in python/specops. An emulator shows neither
timing nor the order in which threads of a real ARM see each other's writes.

With --wheel, it makes a wheel instead, for Debian's Python and C library or newer ones, and checks
that the bundled model completes a text with it.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "arm"
SYSROOT, SITE, PYTHON = WORK / "sysroot", WORK / "site", WORK / "python"

_TEXT: dict[str, Any] = {"capture_output": True, "text": True, "check": True}

# Required programs, with the Debian package of each.
PROGRAMS = {
    "qemu-aarch64-static": "qemu-user-static",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "apt-get": "apt",
    "cmake": "cmake",
    "ninja": "ninja-build",
}
# Debian's Python and its dependencies, except those that are needed only for installation.
PACKAGES = ("libgomp1", "libstdc++6")
LEFT_OUT = re.compile(r"(dpkg|tar|install-info|gcc-\d+-base|perl.*|libperl.*)$")

# The last version supported by specops whose ARM wheel is not a GPU build.
TORCH = "torch==2.10.0"
# Installed with --no-deps, since pip would choose dependencies for this machine's architecture.
WHEELS = """
numpy safetensors tokenizers jinja2 markupsafe
pytest pytest-xdist execnet iniconfig packaging pluggy pygments hypothesis sortedcontainers
sympy mpmath networkx filelock fsspec typing_extensions
"""
GLIBCS = (28, 27, 17)  # minor glibc versions of the wheels that ARM's system accepts

# Tests that run by default: bits of the vectorized ops, and texts of the engine.
TESTS = """
tests/test_dense.py tests/test_quantized.py tests/test_moe.py tests/test_attention.py
tests/test_attention_8bit.py tests/test_attention_sinks.py tests/test_linear_attention.py
tests/test_sampling.py tests/test_verify.py
tests/test_trees.py::test_a_node_is_a_row_of_plain_decoding
tests/test_trees.py::test_cache_after_compaction_equals_plain_decoding
tests/test_suffix_cache.py tests/test_suffix_tree.py tests/test_ngram.py
tests/test_threads.py::test_thread_count_changes_no_bit
tests/test_lossless.py::test_speculation_changes_no_bit_on_any_instruction_set
tests/test_isas.py::test_instruction_sets_have_the_same_bits
"""
# Excluded: tests of the interpreter, which is not built for ARM (one CPU test needs it, too), and
# of the portable instruction set, which is tested on every machine.
ELSEWHERE = "simt cuda portable"
# Excluded long cases of tests whose shorter cases run.
LONGEST = """
the_overlay_in_the_workspace 256-1024 700-640 4200-70
heads3-128 600-heads2-96 neon_bf16-13
"""


def missing() -> list[str]:
    """Return the commands that install missing programs; empty if none is missing."""
    packages = sorted(name for program, name in PROGRAMS.items() if not shutil.which(program))
    commands = []
    if shutil.which("dpkg"):
        output = subprocess.run(["dpkg", "--print-foreign-architectures"], **_TEXT).stdout
        if "arm64" not in output.split():
            commands.append("dpkg --add-architecture arm64 && apt-get update")
    if packages:
        commands.append("apt-get install " + " ".join(packages))
    return commands


def needed(name: str, state: str) -> bool:
    """Return whether a step must run, because its mark in build/arm is not `state`."""
    mark = WORK / f"{name}.done"
    return not (mark.exists() and mark.read_text() == state)


def done(name: str, state: str) -> None:
    (WORK / f"{name}.done").write_text(state)


def python_version() -> str:
    """Return the version of Debian's Python, such as 3.11."""
    output = subprocess.run(["apt-cache", "show", "python3-minimal:arm64"], **_TEXT).stdout
    match = re.search(r"python(3\.\d+)-minimal", output)
    if match is None:
        raise SystemExit("test-arm: apt-cache knows no python3-minimal:arm64; run apt-get update")
    return match[1]


def make_sysroot(version: str) -> None:
    """Unpack Debian's packages below build/arm/sysroot."""
    if not needed("sysroot", version):
        return
    shutil.rmtree(SYSROOT, ignore_errors=True)
    packages = [f"{name}:arm64" for name in (f"python{version}", *PACKAGES)]
    no = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances", "pre-depends")
    command = ["apt-cache", "depends", "--recurse", *(f"--no-{kind}" for kind in no), *packages]
    names = re.findall(r"^(\S+):arm64$", subprocess.run(command, **_TEXT).stdout, re.MULTILINE)
    names = sorted({name for name in names if not LEFT_OUT.match(name)})
    names.append(f"libpython{version}-dev")  # Python's headers; its dependencies would add libc's
    folder = WORK / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    fetch = ["apt-get", "-qq", "download", *(f"{name}:arm64" for name in names)]
    subprocess.run(fetch, cwd=folder, check=True, stderr=subprocess.DEVNULL)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, SYSROOT], check=True)
    shutil.rmtree(folder)
    done("sysroot", version)


def make_site(version: str) -> None:
    """Install the wheels below build/arm/site."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in pins if not line.startswith("torch==")]
    wheels = [TORCH, *WHEELS.split()]
    state = " ".join([version, *wheels, *pins])
    if not needed("site", state):
        return
    shutil.rmtree(SITE, ignore_errors=True)
    (WORK / "constraints.txt").write_text("\n".join(pins))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-compile", "--no-deps", "--target", str(SITE), "--only-binary=:all:"]
    command += ["--python-version", version, "--implementation", "cp"]
    for glibc in GLIBCS:
        command += ["--platform", f"manylinux_2_{glibc}_aarch64"]
    command += ["--platform", "manylinux2014_aarch64", "-c", str(WORK / "constraints.txt")]
    subprocess.run([*command, *wheels], check=True)
    done("site", state)


def make_python(version: str, cpu: str, *paths: Path) -> None:
    """Write a script that runs ARM's Python under qemu, and that child processes run as well.

    Args:
        version: Python version.
        cpu: qemu's name of the CPU.
        paths: module folders, in addition to the wheels.
    """
    found = ":".join(map(str, (SITE, *paths)))
    PYTHON.write_text(f"""#!/bin/sh
export PYTHONHOME="{SYSROOT}/usr" PYTHONPATH="{found}"
exec qemu-aarch64-static -cpu {cpu} -L "{SYSROOT}" -0 "{PYTHON}" \\
  "{SYSROOT}/usr/bin/python{version}" "$@"
""")
    PYTHON.chmod(0o755)


def options_of(version: str) -> list[str]:
    """Return the CMake options that build for ARM."""
    tag = f"cpython-{version.replace('.', '')}-aarch64-linux-gnu"
    options = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "tools" / "aarch64.cmake",
        "SPECOPS_ARM_SYSROOT": SYSROOT,
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": SYSROOT / "usr" / "include" / f"python{version}",
        "PYTHON_MODULE_EXTENSION": f".{tag}.so",
        "PYTHON_MODULE_DEBUG_POSTFIX": "",
        "PYTHON_IS_DEBUG": "OFF",
    }
    return [f"-D{name}={value}" for name, value in options.items()]


def build(version: str) -> None:
    """Build specops._C for ARM, with every instruction set."""
    import pybind11

    options = [
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={ROOT / 'python' / 'specops'}",
        *options_of(version),
    ]
    folder = WORK / "cmake"
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, "--log-level=NOTICE", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder], check=True)


def make_wheel(version: str) -> Path:
    """Build a wheel for ARM in build/arm/wheels from the source distribution."""
    source, wheels = WORK / "source", WORK / "wheels"
    for folder in (source, wheels):
        shutil.rmtree(folder, ignore_errors=True)
    sdist = "from setuptools.build_meta import build_sdist; build_sdist('build/arm/source')"
    quiet: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-c", sdist], cwd=ROOT, **quiet)
    (archive,) = source.glob("*.tar.gz")
    shutil.unpack_archive(archive, source)
    environment = {
        "SPECOPS_CMAKE_ARGS": " ".join(options_of(version)),
        "SPECOPS_ISAS": "all",
        "SPECOPS_CUDA": "OFF",
    }
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel"]
    command += ["--plat-name", "linux_aarch64", "--dist-dir", str(wheels)]
    unpacked = archive.with_name(archive.name.removesuffix(".tar.gz"))
    subprocess.run(command, cwd=unpacked, env={**os.environ, **environment}, **quiet)
    (wheel,) = wheels.glob("*.whl")
    return wheel


def complete_from(wheel: Path, version: str, cpu: str) -> None:
    """Complete a text with specops from a wheel, not from this tree."""
    installed = WORK / "installed"
    shutil.rmtree(installed, ignore_errors=True)
    shutil.unpack_archive(wheel, installed, "zip")
    make_python(version, cpu, installed)
    command = [PYTHON, "-m", "specops", "complete", "def add(a, b):", "--max-tokens", "8"]
    text = subprocess.run([*command, "--temperature", "0"], cwd=installed, **_TEXT).stdout
    assert text.strip(), "no text came"
    print(f"{wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e6:.1f} MB: {text!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--if-possible", action="store_true", help="do without what is missing")
    parser.add_argument("--cpu", default="max", help="qemu's name of the CPU; max has bfloat16")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--wheel", action="store_true", help="a wheel, and a text completed by it")
    parser.add_argument("--workers", default="1", help="test processes side by side")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    if platform.machine() in ("aarch64", "arm64"):
        print("test-arm: this is an ARM machine, where `make test` runs everything")
        return 0
    if commands := missing():
        print("test-arm: needs what is not installed here:", *commands, sep="\n  ")
        return 0 if arguments.if_possible else 1
    WORK.mkdir(parents=True, exist_ok=True)
    version = python_version()
    make_sysroot(version)
    make_site(version)
    if arguments.wheel:
        if version != platform.python_version().rpartition(".")[0]:
            print(f"test-arm: a wheel for Debian's Python is made by Python {version}")
            return 1
        complete_from(make_wheel(version), version, arguments.cpu)
        return 0
    make_python(version, arguments.cpu, ROOT / "python", ROOT)
    build(version)
    if arguments.build_only:
        return 0
    without = ELSEWHERE if arguments.pytest else ELSEWHERE + LONGEST
    tests = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
    tests += ["-k", " and ".join(f"not {name}" for name in without.split())]
    tests += ["-n", arguments.workers, "--dist", "worksteal"]
    tests += arguments.pytest or TESTS.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
