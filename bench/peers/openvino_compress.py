# SPDX-License-Identifier: Apache-2.0
"""Quantize an exported model's weights to int8 or int4: `openvino_compress.py EXPORTED OUT KIND`.

The quantization is symmetric, as with OpenVINO's own tools. int8 has a scale for each output. int4
has groups of 128; the embedding and the head are then int8.
"""

import shutil
import sys
from pathlib import Path

import nncf
import openvino

MODES = {
    "int8": {"mode": nncf.CompressWeightsMode.INT8_SYM},
    "int4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 128, "ratio": 1.0},
}


def main(exported: Path, out: Path, kind: str) -> None:
    """Write the compressed model, and copy all other files."""
    shutil.copytree(exported, out, ignore=shutil.ignore_patterns("openvino_model.*"))
    model = openvino.Core().read_model(exported / "openvino_model.xml")
    openvino.save_model(nncf.compress_weights(model, **MODES[kind]), out / "openvino_model.xml")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
