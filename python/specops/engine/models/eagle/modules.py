# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3's head: one or a few decoder layers that read auxiliary hidden states of the target.

Row i of the head reads the embedding of token i + 1 and a state of position i: the outputs of some
target layers, concatenated and projected to the head's width; or, after the first draft, the head's
own state. Embedding and state are normed and concatenated, and the first layer's attention reads
both. The head has its own LM head, often with a reduced vocabulary.

P-EAGLE drafts all tokens at once: the row of the newest token is followed by masks. Instead of the
unknown token and state, a mask reads a mask token and a learned state. Like the other rows, it
drafts the token two positions after its row.

Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", section 3; arXiv 2602.01469 (P-EAGLE).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specops import dense
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import Norm
from specops.engine.models.eagle.layout import Eagle3Config
from specops.engine.models.kv import KvCache
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.state_head import StateHead, StateHeadWeights, gather_states


@dataclass(frozen=True, kw_only=True)
class Eagle3Weights:
    """Weights of an EAGLE-3 head, with packed projections.

    Attributes:
        parts: weights that all heads on target states have; the first layer's input norm applies to
            the embedding.
        fc_norms: norms of the states of each target layer; may be empty.
        input_norm: norm of the states of all target layers together, or None.
        hidden_norm: norm of the state that a row reads.
        mask_hidden: [1, concatenated states] that P-EAGLE's masks read instead; None: the head
            drafts token by token.
    """

    parts: StateHeadWeights
    fc_norms: tuple[Norm, ...]
    input_norm: Norm | None
    hidden_norm: Norm
    mask_hidden: Tensor | None


class Eagle3(StateHead):
    """EAGLE-3 head on top of its target.

    Args:
        config: the head's configuration.
        weights: the head's weights.
        target_size: width of the target's states.
    """

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, target_size: int) -> None:
        super().__init__(config, weights.parts, target_size)
        self.config, self.weights = config, weights
        self._pairs = self._new(0, 2 * self.hidden_size)
        self._recycled = self._new(0, self.hidden_size)
        self._normed = self._new(0, target_size if weights.fc_norms else 0)  # scratch
        if weights.mask_hidden is not None:
            self._mask_pair, self._mask_residual = self._mask_row(weights.mask_hidden.clone())

    def reserve(self, rows: int) -> None:
        """Allocate buffers for steps of up to `rows` rows; they do not move afterwards."""
        super().reserve(rows)
        if len(self._pairs) < rows:
            self._pairs = self._new(rows, 2 * self.hidden_size)
            self._recycled = self._new(rows, self.hidden_size)
            self._normed = self._new(rows, self._normed.shape[1])

    def _mask_row(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention input and the residual of a mask, both [1, width]."""
        self.reserve(1)
        self._norm_joined(joined)
        parts = self.weights.parts
        state = dense.linear(joined, parts.fc, parts.fc_bias)
        normed = dense.rms_norm(state, *self.weights.hidden_norm)
        token = torch.tensor([self.config.mask_token_id], dtype=torch.int32, device=self.device)
        embedded = dense.embedding(token, parts.embedding)
        embedded = dense.rms_norm(embedded, *self.layers[0].input_norm)
        residual = normed if self.config.norm_before_residual else state
        return torch.cat([embedded, normed], dim=1), residual

    def _norm_joined(self, joined: Tensor) -> None:
        """Norm the states of each target layer, or all of them together, in place."""
        width = joined.shape[1] // len(self.aux_layers)
        for index, norm in enumerate(self.weights.fc_norms):
            of_layer = joined[:, index * width : (index + 1) * width]
            of_layer.copy_(dense.rms_norm(of_layer, *norm, out=self._normed[: len(joined)]))
        if self.weights.input_norm is not None:
            dense.rms_norm(joined, *self.weights.input_norm, out=joined)

    def forward(self, batch: MtpBatch, states: Tensor, cache: KvCache) -> tuple[Tensor, Tensor]:
        """Run the layers over the rows, and write their keys and values.

        Args:
            batch: the rows.
            states: [source rows, hidden_size], result of `states_of` or second result of this
                method.
            cache: KV cache from `new_kv_cache`.

        Returns:
            The input of the LM head, and the states that the next draft reads, both for all rows.
            They lie in the head's buffers: the next call overwrites them.
        """
        weights = self.weights
        config = self.config
        num_rows = batch.positions.shape[0]
        self.reserve(num_rows)
        rows = self.activations.first(num_rows)
        pairs = dense.mtp_input(
            dense.ModuleRows(batch.row_to_request, batch.positions, batch.source_rows),
            dense.TokenTables(batch.slots, batch.token_ids, batch.lens, batch.draft_token_ids),
            weights.parts.embedding,
            self.layers[0].input_norm.weight,
            weights.hidden_norm.weight,
            states,
            eps=config.norm_eps,
            kept=batch.kept,
            out=self._pairs[:num_rows],
        )
        if config.norm_before_residual:
            rows.residual.copy_(pairs[:, self.hidden_size :])
        else:
            gather_states(batch, states, rows.residual)
        normed = self._run_layers(batch, cache, rows, pairs)
        recycled = self._recycled[:num_rows]
        recycled.copy_(normed if config.norm_output else rows.residual)
        return normed, recycled

    def forward_masks(self, batch: LayerBatch, cache: KvCache) -> Tensor:
        """Run the layers over masks after the text, and write their keys and values.

        Args:
            batch: the rows.
            cache: KV cache from `new_kv_cache`.

        Returns:
            The input of the LM head for all rows, in the head's buffers.
        """
        num_rows = batch.positions.shape[0]
        self.reserve(num_rows)
        rows = self.activations.first(num_rows)
        pairs = self._pairs[:num_rows]
        pairs.copy_(self._mask_pair.expand_as(pairs))
        rows.residual.copy_(self._mask_residual.expand_as(rows.residual))
        return self._run_layers(batch, cache, rows, pairs)
