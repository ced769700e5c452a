# SPDX-License-Identifier: Apache-2.0
"""Decoder-only models and MTP modules over the specops ops, and loaders for both."""

from specops.engine.models.config import ModelConfig
from specops.engine.models.loader import load_model
from specops.engine.models.mtp import (
    CONVENTIONS,
    MtpBatch,
    MtpConvention,
    MtpModule,
    MtpModules,
    MtpOutput,
    load_mtp,
)
from specops.engine.models.transformer import KvCache, LayerBatch, StepBatch, Transformer

__all__ = [
    "CONVENTIONS",
    "KvCache",
    "LayerBatch",
    "ModelConfig",
    "MtpBatch",
    "MtpConvention",
    "MtpModule",
    "MtpModules",
    "MtpOutput",
    "StepBatch",
    "Transformer",
    "load_model",
    "load_mtp",
]
