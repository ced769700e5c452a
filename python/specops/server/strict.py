# SPDX-License-Identifier: Apache-2.0
"""Base class of all bodies."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Body with exactly the declared fields and types: no further fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
