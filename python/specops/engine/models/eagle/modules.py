# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3's head: a decoder layer, or a few, that reads states of several layers of the target.

Its row i reads the embedding of token i + 1 and a state of position i: the states that leave some
of the target's layers, side by side and projected to the head's width; or, of a draft, the head's
own state. Token and state are normed and laid side by side, and the first layer's attention reads
both. A head of its own makes logits, often of fewer tokens than the target has.

Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", section 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.blocks.block import Norm
from specops.engine.models.blocks.layer import Layer
from specops.engine.models.blocks.stack import LayerStack
from specops.engine.models.eagle.layout import Eagle3Config
from specops.engine.models.kv import KvCache
from specops.engine.models.mtp.modules import MtpBatch


@dataclass(frozen=True, kw_only=True)
class Eagle3Weights:
    """The weights of a head; projections packed.

    Attributes:
        embedding: [vocab_size, hidden_size].
        fc: from the states of all layers that it reads to its width.
        fc_bias: of that; None: there is none.
        fc_norms: of each layer's states; none: there are no such norms.
        input_norm: of all these states together; None: there is no such norm.
        hidden_norm: of the state that a row reads.
        layers: in order; the first one's input norm is the embedding's.
        final_norm: behind them.
        lm_head: of drafts.
        token_map: int32 [draft vocabulary], the token of each of its rows; None: all tokens.
    """

    embedding: Tensor
    fc: PackedWeight
    fc_bias: Tensor | None
    fc_norms: tuple[Norm, ...]
    input_norm: Norm | None
    hidden_norm: Norm
    layers: tuple[Layer, ...]
    final_norm: Norm
    lm_head: PackedWeight
    token_map: Tensor | None


class Eagle3(LayerStack):
    """A head on top of its target.

    Args:
        config: what it was made from.
        weights: of it.
        target_size: width of the target's states.
    """

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, target_size: int) -> None:
        super().__init__(
            weights.layers,
            weights.lm_head,
            hidden_size=config.hidden_size,
            dtype=weights.embedding.dtype,
            device=weights.embedding.device,
            projections=[weights.fc],
        )
        self.config, self.weights = config, weights
        self._next_norms = [one.input_norm for one in weights.layers[1:]] + [weights.final_norm]
        self._target_size = target_size
        self._taps = self._new(0, len(config.taps) * target_size)
        self._states = self._new(0, self.hidden_size)
        self._pairs = self._new(0, 2 * self.hidden_size)
        self._recycled = self._new(0, self.hidden_size)

    def _new(self, rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=self.dtype, device=self.device)

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of steps with up to `rows` rows, which then stay where they are."""
        super().reserve(rows)
        if len(self._pairs) < rows:
            self._taps = self._new(rows, self._taps.shape[1])
            self._states = self._new(rows, self.hidden_size)
            self._pairs = self._new(rows, 2 * self.hidden_size)
            self._recycled = self._new(rows, self.hidden_size)

    def states_of(self, taps: Mapping[int, Tensor], sums: Tensor | None) -> Tensor:
        """Returns what rows of the target give the head to read.

        Args:
            taps: by layer, [rows, target's hidden_size]: the states that leave it.
            sums: workspace of projections; None: allocated.

        Returns:
            [rows, hidden_size], in a buffer of its own, which the next call overwrites.
        """
        weights = self.weights
        given = [taps[tap] for tap in self.config.taps]
        if weights.fc_norms:
            given = [
                dense.rms_norm(one, *norm)
                for one, norm in zip(given, weights.fc_norms, strict=True)
            ]
        rows = given[0].shape[0]
        joined = torch.cat(given, dim=1, out=self._taps[:rows])
        if weights.input_norm is not None:
            joined = dense.rms_norm(joined, *weights.input_norm)
        return dense.linear(
            joined, weights.fc, weights.fc_bias, out=self._states[:rows], workspace=sums
        )

    def forward(self, batch: MtpBatch, states: Tensor, cache: KvCache) -> tuple[Tensor, Tensor]:
        """Runs the layers over rows and writes their keys and values.

        Args:
            batch: the rows.
            states: [source rows, hidden_size], of `states_of`, or what this gave as the second.
            cache: from `new_kv_cache`.

        Returns:
            What the LM head reads, and what the next draft reads as states; both of all rows. They
            lie in the head's own buffers: the next call overwrites them.
        """
        weights, config, num_rows = self.weights, self.config, batch.positions.shape[0]
        self.reserve(num_rows)
        rows = self.activations.first(num_rows)
        first = weights.layers[0]
        pairs = dense.mtp_input(
            batch.row_to_request,
            batch.positions,
            batch.source_rows,
            batch.slots,
            batch.token_ids,
            batch.lens,
            batch.draft_token_ids,
            weights.embedding,
            first.input_norm.weight,
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
        for index, layer in enumerate(weights.layers):
            given = pairs if index == 0 else None
            layer.run(batch, cache.layers[index], rows, rows.layers[index], given)
            weight, eps = self._next_norms[index]
            dense.rms_norm(rows.branch, weight, eps, residual=rows.residual, out=rows.normed)
        recycled = self._recycled[:num_rows]
        recycled.copy_(rows.normed if config.norm_output else rows.residual)
        return rows.normed, recycled


def gather_states(batch: MtpBatch, states: Tensor, out: Tensor) -> None:
    """Copies the state that each row reads: one of `states`, or one that was kept."""
    source = batch.source_rows
    torch.index_select(states, 0, source.clamp(min=0), out=out)
    if batch.kept is not None:
        earlier = batch.kept.flatten(0, 1).index_select(0, (-2 - source).clamp(min=0))
        torch.where(source[:, None] < -1, earlier, out, out=out)
