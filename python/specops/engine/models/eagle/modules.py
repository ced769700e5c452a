# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3's head: a decoder layer, or a few, that reads states of several layers of the target.

Its row i reads the embedding of token i + 1 and a state of position i: the states that leave some
of the target's layers, side by side and projected to the head's width; or, of a draft, the head's
own state. Token and state are normed and laid side by side, and the first layer's attention reads
both. A head of its own makes logits, often of fewer tokens than the target has.

Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", section 3.
"""

from dataclasses import dataclass

from torch import Tensor

from specops import dense
from specops.engine.models.blocks.block import Norm
from specops.engine.models.eagle.layout import Eagle3Config
from specops.engine.models.kv import KvCache
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.state_head import StateHead, StateHeadWeights, gather_states


@dataclass(frozen=True, kw_only=True)
class Eagle3Weights:
    """The weights of a head; projections packed.

    Attributes:
        parts: what all heads on a target's states have; the first layer's input norm is the
            embedding's.
        fc_norms: of each layer's states; none: there are no such norms.
        input_norm: of all these states together; None: there is no such norm.
        hidden_norm: of the state that a row reads.
    """

    parts: StateHeadWeights
    fc_norms: tuple[Norm, ...]
    input_norm: Norm | None
    hidden_norm: Norm


class Eagle3(StateHead):
    """A head on top of its target.

    Args:
        config: what it was made from.
        weights: of it.
        target_size: width of the target's states.
    """

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, target_size: int) -> None:
        super().__init__(config, weights.parts, target_size)
        self.config, self.weights = config, weights
        self._pairs = self._new(0, 2 * self.hidden_size)
        self._recycled = self._new(0, self.hidden_size)
        self._normed = self._new(0, target_size if weights.fc_norms else 0)  # states of a layer

    def reserve(self, rows: int) -> None:
        """Allocates the buffers of steps with up to `rows` rows, which then stay where they are."""
        super().reserve(rows)
        if len(self._pairs) < rows:
            self._pairs = self._new(rows, 2 * self.hidden_size)
            self._recycled = self._new(rows, self.hidden_size)
            self._normed = self._new(rows, self._normed.shape[1])

    def _norm_joined(self, joined: Tensor) -> None:
        """Norms the states of each layer, or all of them together, in place."""
        width = joined.shape[1] // len(self.taps)
        for index, norm in enumerate(self.weights.fc_norms):
            of_layer = joined[:, index * width : (index + 1) * width]
            of_layer.copy_(dense.rms_norm(of_layer, *norm, out=self._normed[: len(joined)]))
        if self.weights.input_norm is not None:
            dense.rms_norm(joined, *self.weights.input_norm, out=joined)

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
        pairs = dense.mtp_input(
            batch.row_to_request,
            batch.positions,
            batch.source_rows,
            batch.slots,
            batch.token_ids,
            batch.lens,
            batch.draft_token_ids,
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
