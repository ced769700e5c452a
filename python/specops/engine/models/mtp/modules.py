# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (MTP) modules: their weights and their forward pass.

Module m = 1, 2, ... drafts the token m positions after the one that the target predicts. Its row i
reads the embedding of token i + m and a hidden state of position i: the target's after its final
norm, or that of the module before it. Both are normed, concatenated, projected to the hidden size
and passed through one decoder layer; the target's LM head reads the result.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.activations import StepViews
from specops.engine.models.blocks.block import Norm
from specops.engine.models.blocks.layer import Layer
from specops.engine.models.blocks.stack import LayerStack
from specops.engine.models.families.family import MtpConvention
from specops.engine.models.kv import KvCache
from specops.engine.models.transformer import Transformer


@dataclass(frozen=True)
class MtpModule:
    """Weights of one module, with a packed projection."""

    embed_norm: Norm
    hidden_norm: Norm
    projection: PackedWeight
    projection_bias: Tensor | None
    layer: Layer
    head_norm: Norm


class MtpOutput(NamedTuple):
    """Output of a module for its rows; both [rows, hidden_size], often the same tensor."""

    hidden: Tensor  # input of the LM head
    recycled: Tensor  # hidden state that the next draft or module reads


@dataclass(slots=True, kw_only=True)
class MtpBatch(LayerBatch):
    """Rows of one pass of a module, and the locations of their tokens and states.

    The first two fields are from `batching.DraftIndices`; the others are arguments of
    `dense.mtp_input`.
    """

    row_to_request: Tensor  # int32 [rows]
    source_rows: Tensor  # int32 [rows]
    slots: Tensor  # int32 [batch]
    token_ids: Tensor  # int32 [num_slots, max_len]
    lens: Tensor  # int32 [num_slots]
    draft_token_ids: Tensor  # int32 [num_slots, k]
    kept: Tensor | None = None  # [num_slots, window, hidden_size]: states of earlier steps


class MtpModules(LayerStack):
    """MTP modules of a checkpoint on top of their target, whose embedding and RoPE they share.

    Attributes:
        convention: tensor names and inputs of the modules.
        modules: the modules in drafting order.
        lm_head: the target's LM head, or its rows for a reduced draft vocabulary.
        token_map: int32 [draft vocabulary]: token id of each row of `lm_head`; None: all tokens.
    """

    def __init__(
        self,
        target: Transformer,
        convention: MtpConvention,
        modules: list[MtpModule],
        *,
        lm_head: PackedWeight,
        token_map: Tensor | None = None,
    ) -> None:
        super().__init__(
            [module.layer for module in modules],
            lm_head,
            hidden_size=target.hidden_size,
            dtype=target.dtype,
            device=target.device,
            projections=[module.projection for module in modules],
        )
        self.convention = convention
        self.modules = modules
        self.token_map = token_map
        self._embedding = target.embedding
        self._pairs = torch.empty(0, 2 * self.hidden_size, dtype=self.dtype, device=self.device)

    @property
    def num_modules(self) -> int:
        """Number of modules."""
        return len(self.modules)

    def reserve(self, rows: int) -> None:
        """Allocate buffers for steps of up to `rows` rows; they do not move afterwards."""
        super().reserve(rows)
        if len(self._pairs) < rows:
            self._pairs = self._pairs.new_empty(rows, 2 * self.hidden_size)

    def forward(self, index: int, batch: MtpBatch, hidden: Tensor, cache: KvCache) -> MtpOutput:
        """Run module `index` over the rows, and write their keys and values.

        Args:
            index: index of the module, from 0; its row at position i reads token i + index + 1.
            batch: the rows.
            hidden: [source rows, hidden_size], the target's states after its final norm, or the
                `recycled` output of this or the previous module.
            cache: KV cache from `new_kv_cache`.

        Returns:
            The states. They lie in this object's buffers: the next call overwrites them.
        """
        module, convention = self.modules[index], self.convention
        num_rows = batch.positions.shape[0]
        self.reserve(num_rows)
        rows = self.activations.first(num_rows)
        pairs = dense.mtp_input(
            dense.ModuleRows(batch.row_to_request, batch.positions, batch.source_rows),
            dense.TokenTables(batch.slots, batch.token_ids, batch.lens, batch.draft_token_ids),
            self._embedding,
            module.embed_norm.weight,
            module.hidden_norm.weight,
            hidden,
            eps=module.hidden_norm.eps,
            ahead=index + 1,
            kept=batch.kept,
            hidden_first=convention.hidden_first,
            mask_first_position=convention.masks_position_0,
            out=self._pairs[:num_rows],
        )
        dense.linear(
            pairs,
            module.projection,
            module.projection_bias,
            out=rows.residual,
            workspace=batch.sums,
        )
        dense.rms_norm(rows.residual, *module.layer.input_norm, out=rows.normed)
        module.layer.run(batch, cache.layers[index], rows, rows.layers[index])
        return self._finish(module, rows)

    def _finish(self, module: MtpModule, rows: StepViews) -> MtpOutput:
        hidden = dense.rms_norm(
            rows.branch, *module.head_norm, residual=rows.residual, out=rows.normed
        )
        return MtpOutput(hidden, hidden if self.convention.recycle_normed else rows.residual)
