# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1 and 2: a head that reads the target's final states; both versions have the same files.

Row i of the head reads the embedding of token i + 1 and the state of position i: the target's state
after its final norm or, after the first draft, the head's own state. Embedding and state are
concatenated in this order and projected to the head's width. There is no norm before the first
layer's attention and none after the last layer. The output is a state like the target's, which the
target's LM head reads.

Source: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty",
section 3.1. The layout is that of the authors' published files.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specops import dense
from specops.api.errors import ModelError
from specops.engine.models.blocks.layer import LayerNames
from specops.engine.models.families.dense_decoder import dense_decoder
from specops.engine.models.families.fields import count, read_config
from specops.engine.models.head_files import open_head, refuse_unread
from specops.engine.models.kv import KvCache
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.state_head import (
    NextTokens,
    StateHead,
    StateHeadConfig,
    StateHeadLoader,
    StateHeadWeights,
    gather_states,
    naming,
    try_row,
    with_qk_norms,
)
from specops.engine.models.transformer import Transformer

_FILES = ("pytorch_model.bin",)
_UNREAD = ("rotary_emb.inv_freq",)  # computed from the configuration
# Fields of unsupported variants, with their neutral values.
_FOREIGN = {"add_para_norm": (False, None), "logit_scale": (1, None)}
# The first layer has no norm before attention. This tensor exists, so it serves as a placeholder.
_FIRST = LayerNames(input_norm="post_attention_layernorm")


class Eagle(StateHead):
    """EAGLE-1 or 2 head on top of its target.

    Args:
        config: the head's configuration.
        weights: the head's weights.
        num_slots: number of request slots.
    """

    def __init__(self, config: StateHeadConfig, weights: StateHeadWeights, num_slots: int) -> None:
        super().__init__(config, weights, 0)
        self._pairs = self._new(0, 2 * self.hidden_size)
        self._half = self._new(0, self.hidden_size)
        self._tokens = NextTokens(num_slots, self.device)

    def reserve(self, rows: int) -> None:
        """Allocate buffers for steps of up to `rows` rows; they do not move afterwards."""
        super().reserve(rows)
        self._tokens.reserve(rows)
        if len(self._pairs) < rows:
            self._pairs = self._new(rows, 2 * self.hidden_size)
            self._half = self._new(rows, self.hidden_size)

    def forward(self, batch: MtpBatch, states: Tensor, cache: KvCache) -> Tensor:
        """Run the layers over the rows, and write their keys and values.

        Args:
            batch: the rows.
            states: [source rows, hidden_size]: the target's states after its final norm, or the
                result of this method.
            cache: KV cache from `new_kv_cache`.

        Returns:
            The states of all rows, which the LM head and the next draft read. They lie in the
            head's buffers: the next call overwrites them.
        """
        num_rows = batch.positions.shape[0]
        width = self.hidden_size
        weights = self._weights_of_head
        self.reserve(num_rows)
        rows = self.activations.first(num_rows)
        pairs, half = self._pairs[:num_rows], self._half[:num_rows]
        dense.embedding(self._tokens.of(batch), weights.embedding, out=half)
        pairs[:, :width].copy_(half)
        gather_states(batch, states, half)
        pairs[:, width:].copy_(half)
        dense.linear(pairs, weights.fc, weights.fc_bias, out=rows.residual, workspace=batch.sums)
        return self._run_layers(batch, cache, rows, rows.residual)


def load_eagle(
    target: Transformer,
    directory: str | Path,
    *,
    target_directory: str | Path,
    num_slots: int,
    quantization: str | None = None,
) -> Eagle:
    """Load an EAGLE-1 or 2 head.

    Args:
        target: the model that it drafts for.
        directory: the head's directory, with a config.json of its own.
        target_directory: the directory that the target was loaded from.
        num_slots: number of request slots.
        quantization: format of the layers' projections and of the head's own LM head, if any; None:
            the target's.

    Raises:
        ModelError: a file, a field or a tensor is missing, damaged or does not fit the target.
    """
    directory = Path(directory)
    source = open_head(directory, target.settings.of_drafter(quantization), _FILES)
    names = source.names()
    prefix = "model." if any(name.startswith("model.") for name in names) else ""
    raw = read_config(directory)
    with naming(directory):
        config = _read(raw, directory, names, prefix, target)
    loader = StateHeadLoader(source, config, directory, target, Path(target_directory), prefix)
    layers = [f"{prefix}layers.{index}." for index in range(len(config.layers))]
    weights = loader.parts(layers, 2 * config.hidden_size, has_final_norm=False)
    refuse_unread(source, directory, "an EAGLE head", _UNREAD)
    head = Eagle(config, weights, num_slots)

    def run(batch: MtpBatch, cache: KvCache) -> Tensor:
        states = torch.zeros(1, head.hidden_size, dtype=head.dtype, device=head.device)
        return head.forward(batch, states, cache)

    try_row(directory, head, run)
    return head


def _read(
    raw: Mapping[str, Any],
    directory: Path,
    names: Collection[str],
    prefix: str,
    target: Transformer,
) -> StateHeadConfig:
    if "speculators_model_type" in raw:
        raise ModelError(
            f"speculators_model_type must be absent, got {raw['speculators_model_type']!s:.60}"
        )
    for field, allowed in _FOREIGN.items():
        if raw.get(field) not in allowed:
            raise ModelError(f"{field} must be {allowed[0]}, got {raw[field]!r:.60}")
    num_layers = 0
    while any(name.startswith(f"{prefix}layers.{num_layers}.") for name in names):
        num_layers += 1
    if f"{prefix}fc.weight" not in names or not num_layers:
        raise ModelError(
            f"{directory}: the checkpoint holds no EAGLE head; looked for tensors named fc.weight "
            "and layers.0., with or without model."
        )
    if any(name.endswith("hidden_norm.weight") for name in names):
        raise ModelError(f"{directory}: the head is an EAGLE-3 head; use method eagle3")
    # Some files state the target's number of layers, and some do not mention biases.
    decoder = dense_decoder(
        {**raw, "architectures": ["EAGLE"], "num_hidden_layers": num_layers},
        qkv_bias=f"{prefix}layers.0.self_attn.q_proj.bias" in names,
        o_bias=f"{prefix}layers.0.self_attn.o_proj.bias" in names,
    )
    for field, of_target in (
        ("vocab_size", target.config.vocab_size),
        ("hidden_size", target.hidden_size),
    ):
        if getattr(decoder, field) != of_target:
            raise ModelError(
                f"{field} is {getattr(decoder, field)}, but the target has {of_target}"
            )
    first, *others = (
        with_qk_norms(one, f"{prefix}layers.{index}.self_attn.q_norm.weight" in names)
        for index, one in enumerate(decoder.layers)
    )
    return StateHeadConfig(
        hidden_size=decoder.hidden_size,
        layers=(replace(first, names=_FIRST), *others),
        norm_eps=decoder.rms_norm_eps,
        aux_layers=(),
        draft_vocab_size=count(raw, "draft_vocab_size", decoder.vocab_size),
    )
