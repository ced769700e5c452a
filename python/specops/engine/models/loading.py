# SPDX-License-Identifier: Apache-2.0
"""Log records about the progress of loading a model."""

import logging
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_LARGE_BYTES = 256 << 20  # smaller models load within a second, and are logged at level debug


def log_loading(directory: Path, num_bytes: int, dtype: str) -> Callable[[int, int], None]:
    """Log that a model is being loaded.

    Args:
        directory: the model's directory.
        num_bytes: size of its files.
        dtype: dtype in which it runs.

    Returns:
        A function to call with the number of loaded layers and of all layers. It logs every tenth,
        with the percentage as `fields["percent"]` of the record.
    """
    level = logging.INFO if num_bytes >= _LARGE_BYTES else logging.DEBUG
    unit, name = (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB")
    logger.log(level, "loading %s (%.1f %s, %s)", directory, num_bytes / unit, name, dtype)
    num_tenths = 0

    def loaded(count: int, total: int) -> None:
        nonlocal num_tenths
        if 10 * count // total > num_tenths:
            num_tenths = 10 * count // total
            percent = 10 * num_tenths
            extra = {"fields": {"percent": percent}}
            logger.log(level, "loading %s: %d %%", directory, percent, extra=extra)

    return loaded
