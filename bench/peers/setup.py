# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.peers.setup`: make bench/.venv, the environment of the peers.

arctic-inference and llama-cpp-python are installed last and may fail: they are built from source,
which needs a compiler and takes minutes. The benchmarks skip a missing peer.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parent
VENV = PEERS.parent / ".venv"
MEASURED = ("numpy", "transformers", "openvino", "openvino-genai", "openvino-tokenizers", "gguf")
# The exporter pins an older transformers and requires torchvision, which it does not need.
EXPORTER = ("transformers", "requests", "setuptools")
EXPORTER_ALONE = ("optimum-intel", "optimum")
# Build requirements for the suffix trees of arctic-inference. Its other requirements (grpc, CUDA)
# are not used by them, and an isolated build would fetch another torch.
ARCTIC_BUILD = ("nanobind", "setuptools", "wheel", "cmake", "ninja")


def main() -> None:
    """Install what is missing, torch first and alone."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.setup", description=__doc__)
    parser.add_argument("--pip-args", default="", help="handed to every pip call")
    extra = parser.parse_args().pip_args.split()
    if not (VENV / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)

    def pip(*arguments: str, constraints: str = "constraints.txt", check: bool = True) -> bool:
        command = [VENV / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += [*extra, "-c", PEERS / constraints, *arguments]
        return subprocess.run(list(map(str, command)), check=check).returncode == 0

    pip("torch")
    pip(*MEASURED, "nncf", "safetensors")
    export = ("--target", str(VENV / "export"), "--upgrade")
    pip(*export, *EXPORTER, constraints="constraints-export.txt")
    pip(*export, "--no-deps", *EXPORTER_ALONE, constraints="constraints-export.txt")
    pip(*ARCTIC_BUILD)
    python = [VENV / "bin" / "python", "-m", "nanobind", "--cmake_dir"]
    found = subprocess.run(python, check=True, capture_output=True, text=True).stdout.strip()
    os.environ.update(nanobind_DIR=found)
    os.environ["PATH"] = os.pathsep.join([str(VENV / "bin"), os.environ["PATH"]])
    if not pip("--no-deps", "--no-build-isolation", "arctic-inference", check=False):
        print("arctic-inference did not build; its rows will be missing")
    os.environ["CMAKE_ARGS"] = "-DGGML_NATIVE=ON"
    if not pip("llama-cpp-python", check=False):
        print("llama-cpp-python did not build; its rows will be missing")


if __name__ == "__main__":
    main()
