# SPDX-License-Identifier: Apache-2.0
"""Base class of all bodies."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Body with exactly the declared fields and types: no further fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CacheControl(Strict):
    """Mark of a prefix to cache, which has no effect: the engine caches all prefixes."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None
