# SPDX-License-Identifier: Apache-2.0
"""What is raised for files that cannot be read as a model."""


class ModelError(ValueError):
    """The model directory is missing, incomplete, or of a kind this engine does not run."""
