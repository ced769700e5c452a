# SPDX-License-Identifier: Apache-2.0
"""Loader of EAGLE-3 heads as published by speculators, SpecForge and the authors of the method."""

from pathlib import Path

import torch
from torch import Tensor

from specops.engine.models.blocks.block import Norm
from specops.engine.models.eagle.layout import MASK_HIDDEN, Eagle3Config, read_eagle3_config
from specops.engine.models.eagle.modules import Eagle3, Eagle3Weights
from specops.engine.models.head_files import open_head, refuse_unread
from specops.engine.models.kv import KvCache
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.state_head import StateHeadLoader, try_row
from specops.engine.models.transformer import Transformer
from specops.engine.models.weights import WeightSource

_FILES = ("pytorch_model.bin",)
# Ignored tensors: t2d duplicates d2t, and inv_freq is computed from the configuration.
_UNREAD = ("t2d", "rotary_emb.inv_freq")


def load_eagle3(
    target: Transformer,
    directory: str | Path,
    *,
    target_directory: str | Path,
    quantization: str | None = None,
) -> Eagle3:
    """Load an EAGLE-3 head.

    Args:
        target: the model that it drafts for.
        directory: the head's directory, with a config.json of its own.
        target_directory: the directory that the target was loaded from.
        quantization: format of the layers' projections and of the head's LM head; None: quantize
            the layers like the target's.

    Raises:
        ModelError: a file, a field or a tensor is missing, damaged or does not fit the target.
    """
    directory = Path(directory)
    source = open_head(directory, target.settings.of_drafter(quantization), _FILES)
    config = read_eagle3_config(directory, source.names(), target)
    loader = StateHeadLoader(
        source, config, directory, target, Path(target_directory), config.prefix
    )
    weights = _load(loader, source, config, target.hidden_size)
    refuse_unread(source, directory, "an EAGLE-3 head", _UNREAD)
    head = Eagle3(config, weights, target.hidden_size)

    def run(batch: MtpBatch, cache: KvCache) -> Tensor:
        states = torch.zeros(1, head.hidden_size, dtype=head.dtype, device=head.device)
        return head.forward(batch, states, cache)[0]

    try_row(directory, head, run)
    return head


def _load(
    loader: StateHeadLoader, source: WeightSource, config: Eagle3Config, width: int
) -> Eagle3Weights:
    norm = loader.blocks.norm
    prefix = config.prefix
    num_aux_layers = len(config.aux_layers)
    fc_norms: tuple[Norm, ...] = ()
    if config.fc_norm:
        fc_norms = tuple(norm(f"{prefix}fc_norm.{index}", width) for index in range(num_aux_layers))
    joined = num_aux_layers * width
    is_parallel = config.mask_token_id is not None
    return Eagle3Weights(
        parts=loader.parts(config.layer_prefixes, joined),
        fc_norms=fc_norms,
        input_norm=norm(f"{prefix}input_norm", joined) if config.norm_before_fc else None,
        hidden_norm=norm(f"{config.layer_prefixes[0]}hidden_norm"),
        mask_hidden=source.tensor(MASK_HIDDEN, 1, 1, joined)[0] if is_parallel else None,
    )
