# SPDX-License-Identifier: Apache-2.0
"""Serving engine built from the specops ops; `python -m specops.engine` runs its server."""

from typing import TYPE_CHECKING, Any

from specops._garbage import garbage_collection_paused
from specops.api.config import EngineConfig
from specops.api.errors import ContextOverflow, EngineError, ModelError, QueueFull, UnknownAdapter
from specops.api.outputs import (
    Completion,
    RequestOutput,
    SpeculativeStats,
    StepDrafts,
    TokenLogprob,
)
from specops.api.sampling_params import SamplingParams
from specops.api.speculative_config import SpeculativeConfig
from specops.api.structured import StructuredOutput

if TYPE_CHECKING:
    from specops.engine.engine import Engine

__all__ = [
    "Completion",
    "ContextOverflow",
    "Engine",
    "EngineConfig",
    "EngineError",
    "ModelError",
    "QueueFull",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "SpeculativeStats",
    "StepDrafts",
    "StructuredOutput",
    "TokenLogprob",
    "UnknownAdapter",
]


def __getattr__(name: str) -> Any:
    """Import `Engine` on first use: a server process does not need torch, whose import is slow."""
    if name != "Engine":
        raise AttributeError(f"module 'specops.engine' has no attribute {name!r}")
    with garbage_collection_paused():
        from specops.engine.engine import Engine

    globals()[name] = Engine
    return Engine
