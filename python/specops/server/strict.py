# SPDX-License-Identifier: Apache-2.0
"""What all bodies have in common."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A body that has what it names, in the types that it names, and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
