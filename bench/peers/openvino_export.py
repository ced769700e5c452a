# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint for OpenVINO: `openvino_export.py CHECKPOINT OUT`.

The script runs with bench/.venv/export ahead of the peers' packages: the exporter needs an older
transformers than the measured one.
"""

import sys

from optimum.exporters.openvino import main_export

main_export(
    sys.argv[1],
    sys.argv[2],
    task="text-generation-with-past",
    library_name="transformers",
    stateful=True,
    convert_tokenizer=False,
)
