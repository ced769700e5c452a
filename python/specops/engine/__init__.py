# SPDX-License-Identifier: Apache-2.0
"""A minimal decoding engine composed of the specops ops; `python -m specops.engine` serves it."""

from specops.engine.config import EngineConfig
from specops.engine.engine import Engine
from specops.engine.errors import ContextOverflow, EngineError, ModelError, QueueFull
from specops.engine.outputs import (
    Completion,
    RequestOutput,
    SpeculativeStats,
    StepDrafts,
    TokenLogprob,
)
from specops.engine.sampling_params import SamplingParams
from specops.engine.speculative_config import SpeculativeConfig
from specops.engine.structured import StructuredOutput

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
]
