# SPDX-License-Identifier: Apache-2.0
"""Opening of a directory's weights, in safetensors or GGUF files.

How a module's weight is read depends on the module's tensors, not on lists of modules in a
configuration. A tensor that the decoder of its module does not use is an error.
"""

from pathlib import Path

from specops.checkpoints.checkpoint import Checkpoint
from specops.checkpoints.gguf import GgufCheckpoint, gguf_file
from specops.checkpoints.safetensors import SafetensorsCheckpoint, safetensors_files


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open the weights of a directory.

    Args:
        directory: directory with safetensors files, or one GGUF file.

    Raises:
        ModelError: a file is missing or damaged.
    """
    file = gguf_file(directory)
    return SafetensorsCheckpoint(directory) if file is None else GgufCheckpoint(file)


def weight_files(directory: Path) -> list[str]:
    """Return the names of the files that hold a directory's weights, in order.

    Raises:
        ModelError: there are no such files, or a file that the index names is missing.
    """
    file = gguf_file(directory)
    return safetensors_files(directory) if file is None else [file.name]
