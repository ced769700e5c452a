# SPDX-License-Identifier: Apache-2.0
"""Assistant models: small decoders that draft from the target's keys and values.

An assistant computes queries only. Each of its layers attends to the keys and values of the
target's last layer of its kind. A row reads the embedding of the newest token, in the target's
form, and the target's state of the position before it. For further drafts, it reads the draft and
its own last state, from the same position and over the same keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specops import dense
from specops.api.errors import ModelError
from specops.dense import PackedWeight
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import BlockLoader, Norm
from specops.engine.models.blocks.layer import Layer
from specops.engine.models.blocks.stack import LayerStack
from specops.engine.models.families import read_assistant_config
from specops.engine.models.head_files import open_head, refuse_unread
from specops.engine.models.kv import KvSpec
from specops.engine.models.mtp.modules import MtpBatch
from specops.engine.models.state_head import NextTokens
from specops.engine.models.transformer import Transformer

# Tensors of a coarse LM head, which chooses the tokens that the LM head considers. Here it
# considers all tokens.
_UNREAD = ("masked_embedding.centroids.weight", "masked_embedding.token_ordering")


class Assistant(LayerStack):
    """Assistant model on top of its target.

    Args:
        target: the model that it drafts for.
        layers: its layers, without keys and values.
        final_norm: norm after the layers.
        before: projection of a token's embedding and a state of the target to the layers' width.
        after: projection of the result to the width of the target's states.
        lm_head: LM head.
        sources: for each layer, the target's layer whose keys and values it reads.
        num_slots: number of request slots.
    """

    def __init__(
        self,
        target: Transformer,
        layers: Sequence[Layer],
        *,
        final_norm: Norm,
        before: PackedWeight,
        after: PackedWeight,
        lm_head: PackedWeight,
        sources: Sequence[int],
        num_slots: int,
    ) -> None:
        super().__init__(
            layers,
            lm_head,
            hidden_size=before.num_outputs,
            dtype=target.dtype,
            device=target.device,
            projections=(before, after),
        )
        self.target_size, self.sources = target.hidden_size, sources
        self._embedding = target.embedding
        self._before, self._after = before, after
        self._norms = [layer.input_norm for layer in layers] + [final_norm]
        self._tokens = NextTokens(num_slots, self.device)
        self._halves = self._states = target.embedding.new_empty(0)
        # Position and number of keys of the rows that draft, by request.
        self._seen = torch.zeros(2, num_slots, dtype=torch.int32, device=self.device)

    def reserve(self, rows: int) -> None:
        """Allocate buffers for steps of up to `rows` rows; they do not move afterwards."""
        super().reserve(rows)
        self._tokens.reserve(rows)
        if len(self._states) < rows:
            self._halves = self._embedding.new_empty(2, rows, self.target_size)
            self._states = self._embedding.new_empty(rows, 2 * self.target_size)

    def begin(self, batch: MtpBatch) -> LayerBatch:
        """Return the rows of the first pass, which draft from the target's states.

        Queries have the position of the next token, which has no key yet.
        """
        ends = (batch.qo_indptr[1:] - 1).clamp(min=0).long()
        positions = torch.where(batch.positions < 0, -1, batch.positions + 1).int()
        seen = self._seen[:, : len(ends)]
        seen[0].copy_(positions[ends])
        seen[1].copy_(batch.kv_lens)
        return self._with(batch, positions, batch.kv_lens)

    def repeat(self, batch: MtpBatch) -> LayerBatch:
        """Return the rows of a further draft: with the first pass's positions, over its keys."""
        requests = batch.row_to_request
        positions = self._seen[0].index_select(0, requests.clamp(min=0))
        seen = self._seen[1, : len(batch.kv_lens)]
        return self._with(batch, positions.masked_fill(requests < 0, -1), seen)

    @staticmethod
    def _with(batch: MtpBatch, positions: Tensor, kv_lens: Tensor) -> LayerBatch:
        return LayerBatch(
            positions=positions,
            cache_slots=positions.clamp(max=0).long(),  # no row writes to the cache
            qo_indptr=batch.qo_indptr,
            kv_indptr=batch.kv_indptr,
            kv_indices=batch.kv_indices,
            kv_lens=kv_lens,
            workspace=batch.workspace,
            sums=batch.sums,
        )

    def forward(
        self, batch: MtpBatch, attending: LayerBatch, states: Tensor, caches: Sequence[object]
    ) -> tuple[Tensor, Tensor]:
        """Run the layers over the rows.

        Args:
            batch: the rows, with the places of their tokens and states.
            attending: the same rows, as `begin` or `repeat` returned them.
            states: [source rows, target_size]: the target's states after its final norm, or the
                second result of this method.
            caches: the target's cache of each layer.

        Returns:
            The input of the LM head, and the states that the next draft reads, both for all rows.
            They lie in this object's buffers: the next call overwrites them.
        """
        num_rows = batch.positions.shape[0]
        self.reserve(num_rows)
        rows = self.activations.first(num_rows)
        pairs, (embedded, recycled) = self._states[:num_rows], self._halves[:, :num_rows]
        tokens, of_state = pairs.chunk(2, dim=1)
        tokens.copy_(dense.embedding(self._tokens.of(batch), self._embedding, out=embedded))
        # `states` may be `recycled`, which is therefore read first and written last.
        torch.index_select(states, 0, batch.source_rows.clamp(min=0), out=embedded)
        of_state.copy_(embedded)
        dense.linear(pairs, self._before, out=rows.residual, workspace=batch.sums)
        dense.rms_norm(rows.residual, *self._norms[0], out=rows.normed)
        for layer, norm, cache, views in zip(
            self.layers, self._norms[1:], caches, rows.layers, strict=True
        ):
            layer.run(attending, cache, rows, views)
            dense.rms_norm(rows.branch, *norm, residual=rows.residual, out=rows.normed)
        dense.linear(rows.normed, self._after, out=recycled, workspace=batch.sums)
        return rows.normed, recycled


def load_assistant(
    target: Transformer, directory: str | Path, *, num_slots: int, quantization: str | None = None
) -> Assistant | None:
    """Load an assistant model; return None if the directory holds another kind of model.

    Args:
        target: the model that it drafts for.
        directory: the assistant's directory, with a config.json of its own.
        num_slots: number of request slots.
        quantization: format of its projections and its LM head; None: the target's.

    Raises:
        ModelError: a file, a field or a tensor is missing, damaged or does not fit the target.
    """
    directory = Path(directory)
    config = read_assistant_config(directory) if directory.is_dir() else None
    if config is None:
        return None
    file = directory / "config.json"
    if target.ranks.size > 1:
        raise ModelError(
            f"{directory}: assistant models need tensor_parallel_size 1, got {target.ranks.size}"
        )
    if config.vocab_size != target.config.vocab_size:
        raise ModelError(
            f"{file}: vocab_size is {config.vocab_size}, but the target has "
            f"{target.config.vocab_size}"
        )
    source = open_head(directory, target.settings.of_drafter(quantization), ())
    loader = BlockLoader(
        source=source,
        hidden_size=config.hidden_size,
        norm_eps=config.rms_norm_eps,
        kv_dtype=target.kv_dtype,
        ropes=target.ropes,
    )
    hidden, width = config.hidden_size, target.hidden_size
    layers = [
        layer.load(loader, f"model.layers.{index}.") for index, layer in enumerate(config.layers)
    ]
    head = "lm_head" if "lm_head.weight" in source.names() else "model.embed_tokens"
    assistant = Assistant(
        target,
        layers,
        final_norm=loader.norm("model.norm"),
        before=source.linear("", ("pre_projection",), (hidden,), 2 * width, quantization="none"),
        after=source.linear("", ("post_projection",), (width,), hidden, quantization="none"),
        lm_head=source.linear(
            "",
            (head,),
            (config.vocab_size,),
            hidden,
            quantization=source.settings.quantize_head,
        ),
        sources=[_source_of(layer, target, file) for layer in layers],
        num_slots=num_slots,
    )
    refuse_unread(source, directory, "an assistant model", (*_UNREAD, "embed_tokens.weight"))
    return assistant


def _source_of(layer: Layer, target: Transformer, file: Path) -> int:
    """Return the target's layer whose keys and values a layer reads.

    Raises:
        ModelError: the target has no such layer.
    """
    own = layer.attention.kv
    assert isinstance(own, KvSpec)
    own = replace(own, is_shared=False)
    found = [index for index, one in enumerate(target.layers) if one.attention.kv == own]
    if found:
        return found[-1]
    raise ModelError(
        f"{file}: the target has no layer with {own.num_heads} heads of {own.head_dim} keys and a "
        f"sliding window of {own.window}"
    )
