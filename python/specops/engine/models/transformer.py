# SPDX-License-Identifier: Apache-2.0
"""Decoder model that calls the specops ops, with layers of any kind.

The forward pass runs a ragged batch with any number of rows per request: prefill chunks, decode and
verification rows can be in one batch. All steps use one set of activation buffers, so a step
allocates nothing.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specops import batching, dense
from specops.dense import PackedWeight
from specops.engine.models.batch import StepBatch
from specops.engine.models.blocks.block import Norm, RopeTables
from specops.engine.models.blocks.layer import Layer
from specops.engine.models.blocks.logit_cap import LogitCap
from specops.engine.models.blocks.per_layer import PerLayerEmbeddings
from specops.engine.models.blocks.stack import LayerStack
from specops.engine.models.config import ModelConfig
from specops.engine.models.kv import KvCache
from specops.engine.models.weight_cache import CachedWeights
from specops.engine.models.weights import WeightSettings
from specops.engine.parallel.ranks import ALONE, Ranks


class Transformer(LayerStack):
    """Decoder model: weights and forward pass, on the device of the weights.

    Args:
        config: the model's configuration.
        max_model_len: number of supported positions.
        embedding: [vocab_size, hidden_size], scaled already.
        layers: the layers in order.
        final_norm: norm after the layers.
        lm_head: LM head for this rank's range of the vocabulary.
        kv_dtype: dtype of keys and values on pages.
        settings: settings that the weights were read with.
        cached: cache of the packed weights, if any.
        ropes: the layers' RoPE tables, which MTP modules share.
        per_layer: embeddings of the layers; None: they have none.
        ranks: tensor-parallel ranks over which the model is sharded.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        max_model_len: int,
        embedding: Tensor,
        layers: Sequence[Layer],
        final_norm: Norm,
        lm_head: PackedWeight,
        kv_dtype: torch.dtype,
        settings: WeightSettings,
        cached: CachedWeights | None,
        ropes: RopeTables,
        per_layer: PerLayerEmbeddings | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(
            layers,
            lm_head,
            hidden_size=config.hidden_size,
            dtype=embedding.dtype,
            device=embedding.device,
            logits_divisor=config.logits_divisor,
            projections=() if per_layer is None else (per_layer.projection,),
        )
        self.config = config
        self.max_model_len = max_model_len
        self.embedding = embedding
        self.final_norm = final_norm
        self.kv_dtype, self.settings, self.ropes = kv_dtype, settings, ropes
        self.cached, self.ranks, self._per_layer = cached, ranks, per_layer
        cap = config.logit_cap
        self._cap = None if cap is None else LogitCap(cap, self.device)
        # The norm after each layer: the next layer's input norm, or the final norm.
        self._next_norms = [layer.input_norm for layer in layers[1:]] + [final_norm]
        self._row_numbers = torch.empty(0, dtype=torch.int32, device=self.device)

    def reserve(self, rows: int) -> None:
        """Allocate buffers for steps of up to `rows` rows; they do not move afterwards."""
        super().reserve(rows)
        self.ranks.reserve(rows, self.hidden_size, self.device)
        if self._per_layer is not None:
            self._per_layer.reserve(rows)
        if len(self._row_numbers) < rows:
            self._row_numbers = torch.arange(rows, dtype=torch.int32, device=self.device)

    def bytes_of_whole_layers(self) -> int:
        """Return the KV bytes per token of the layers without a sliding window.

        Only these layers read all of a shared prefix.
        """
        windows = [(layer.attention.sliding_window, layer.attention.kv) for layer in self.layers]
        return sum(
            kv.bytes_read_per_token
            for window, kv in windows
            if window is None or window >= self.max_model_len
        )

    def forward(
        self,
        batch: StepBatch,
        cache: KvCache,
        aux_hidden_states: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Run all layers over the rows of a step, and write their keys and values.

        Args:
            batch: the rows.
            cache: KV cache from `new_kv_cache`.
            aux_hidden_states: tensors [rows, hidden_size] by layer; each receives its layer's
                output.

        Returns:
            [rows, hidden_size], the states after the final norm, which the LM head and MTP modules
            read. They are in one of the model's buffers: the next call overwrites it.
        """
        rows = self.activations.first(batch.token_ids.shape[0])
        residual, normed, branch = rows.residual, rows.normed, rows.branch
        dense.embedding(batch.token_ids, self.embedding, out=residual)
        dense.rms_norm(residual, *self.layers[0].input_norm, out=normed)
        embedded: Sequence[Tensor | None] = [None] * len(self.layers)
        if self._per_layer is not None:
            embedded = self._per_layer.run(batch.token_ids, residual, batch.sums).unbind(1)
        for index, layer in enumerate(self.layers):
            views, own = rows.layers[index], embedded[index]
            layer.run(batch, cache.layers[index], rows, views, embedded=own)
            weight, eps = self._next_norms[index]
            dense.rms_norm(branch, weight, eps, residual=residual, out=normed)
            if aux_hidden_states and index in aux_hidden_states:
                numbers = self._row_numbers[: residual.shape[0]]
                batching.gather_output_rows(residual, numbers, out=aux_hidden_states[index])
        return normed

    def logits(
        self, hidden: Tensor, *, out: Tensor | None = None, sums: Tensor | None = None
    ) -> Tensor:
        """Return the fp32 logits [rows, vocabulary] of states that `forward` returned."""
        if self.ranks.size == 1:
            out = super().logits(hidden, out=out, sums=sums)
        else:
            if out is None:
                shape = (len(hidden), self.config.vocab_size)
                out = torch.empty(shape, dtype=torch.float32, device=self.device)
            self.ranks.join_columns(super().logits(hidden, sums=sums), out)
        if self._cap is not None:
            self._cap.apply(out)
        return out

    def states(self, rows: int) -> Tensor:
        """Return the buffer in which `forward` returns the states of `rows` rows."""
        return self.activations.first(rows).normed
