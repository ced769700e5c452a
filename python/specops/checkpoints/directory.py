# SPDX-License-Identifier: Apache-2.0
"""Opening of a directory's weights, in safetensors or GGUF files.

How a module's weight is read depends on the module's tensors, not on lists of modules in a
configuration. A tensor that the decoder of its module does not use is an error.
"""

from pathlib import Path

from specops.checkpoints.checkpoint import Checkpoint
from specops.checkpoints.gguf import GgufCheckpoint, gguf_files
from specops.checkpoints.safetensors import SafetensorsCheckpoint, safetensors_files


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open the weights of a directory.

    Args:
        directory: directory with safetensors files, or the GGUF files of one model.

    Raises:
        ModelError: a file is missing or damaged.
    """
    files = gguf_files(directory)
    return GgufCheckpoint(files[0]) if files else SafetensorsCheckpoint(directory)


def weight_files(directory: Path) -> list[str]:
    """Return the names of the files that hold a directory's weights, in order.

    Raises:
        ModelError: there are no such files, or a file that the index names is missing.
    """
    files = gguf_files(directory)
    return [file.name for file in files] if files else safetensors_files(directory)
