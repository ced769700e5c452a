# SPDX-License-Identifier: Apache-2.0
"""Decoder-only models and draft heads, computed with the specops ops, and their loaders."""

from specops.engine.models.assistant import Assistant, load_assistant
from specops.engine.models.batch import LayerBatch, StepBatch
from specops.engine.models.blocks.stack import LayerStack
from specops.engine.models.config import ModelConfig
from specops.engine.models.dflash import BlockDrafter, load_dflash
from specops.engine.models.eagle.first import Eagle, load_eagle
from specops.engine.models.eagle.loader import load_eagle3
from specops.engine.models.eagle.modules import Eagle3
from specops.engine.models.families import CONVENTIONS
from specops.engine.models.families.family import MtpConvention
from specops.engine.models.kv import CacheCapacity, KvBytes, KvCache, KvSpec, LayerKv
from specops.engine.models.loader import load_model
from specops.engine.models.mtp.loader import load_mtp
from specops.engine.models.mtp.modules import MtpBatch, MtpModule, MtpModules, MtpOutput
from specops.engine.models.prefix_layer import PrefixLayer
from specops.engine.models.prefix_states import PrefixStates
from specops.engine.models.residual_heads import ResidualHeads, load_hydra, load_medusa
from specops.engine.models.transformer import Transformer
from specops.engine.models.weight_cache import CachedWeights, WeightCache

__all__ = [
    "CONVENTIONS",
    "Assistant",
    "BlockDrafter",
    "CacheCapacity",
    "CachedWeights",
    "Eagle",
    "Eagle3",
    "KvBytes",
    "KvCache",
    "KvSpec",
    "LayerBatch",
    "LayerKv",
    "LayerStack",
    "ModelConfig",
    "MtpBatch",
    "MtpConvention",
    "MtpModule",
    "MtpModules",
    "MtpOutput",
    "PrefixLayer",
    "PrefixStates",
    "ResidualHeads",
    "StepBatch",
    "Transformer",
    "WeightCache",
    "load_assistant",
    "load_dflash",
    "load_eagle",
    "load_eagle3",
    "load_hydra",
    "load_medusa",
    "load_model",
    "load_mtp",
]
