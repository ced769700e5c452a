# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.peers.setup`: makes bench/.venv, the environment of the peers.

llama-cpp-python comes last and may fail: it is built from source, which takes minutes and a
compiler, and the bench leaves out a peer that is not there.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parent
VENV = PEERS.parent / ".venv"
MEASURED = ("numpy", "transformers", "openvino", "openvino-genai", "openvino-tokenizers", "gguf")
# The exporter pins an older transformers and asks for torchvision, which it does not need.
EXPORTER = ("transformers", "requests", "setuptools")
EXPORTER_ALONE = ("optimum-intel", "optimum")


def main() -> None:
    """Installs what is missing, torch first and alone."""
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
    os.environ["CMAKE_ARGS"] = "-DGGML_NATIVE=ON"
    if not pip("llama-cpp-python", check=False):
        print("llama-cpp-python did not build; its rows will be missing")


if __name__ == "__main__":
    main()
