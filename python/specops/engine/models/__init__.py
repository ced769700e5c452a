# SPDX-License-Identifier: Apache-2.0
"""Decoder-only models over the specops ops, and the loader of Hugging Face directories."""

from specops.engine.models.config import ModelConfig
from specops.engine.models.loader import load_model
from specops.engine.models.transformer import KvCache, StepBatch, Transformer

__all__ = ["KvCache", "ModelConfig", "StepBatch", "Transformer", "load_model"]
