# SPDX-License-Identifier: Apache-2.0
"""Error for files that cannot be read as a model."""


class ModelError(ValueError):
    """Error: the model directory is missing, incomplete, or of an unsupported kind."""
