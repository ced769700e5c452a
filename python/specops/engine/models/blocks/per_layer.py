# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings: each layer reads an embedding of its own for each token.

One table holds the embeddings of all layers. A projection of the token's input embedding is added
to them, and each layer adds a gated projection of its own part to its output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.blocks.block import BlockLoader, NewRows, Norm


class PerLayerEmbeddings:
    """Embeddings of all layers, for the rows of a step.

    Args:
        table: [tokens, num_layers * width].
        projection: projection of input embeddings to the width of the table.
        norm: norm of each layer's part of the projection.
        hidden_size: width of input embeddings.
    """

    def __init__(
        self, table: Tensor, projection: PackedWeight, norm: Norm, hidden_size: int
    ) -> None:
        self.projection = projection
        self._table, self._norm = table, norm
        self._width = len(norm.weight)
        self._projection_scale = hidden_size**-0.5
        # Rounded to the dtype, as if the table were scaled.
        self._table_scale = torch.tensor(self._width**0.5, dtype=table.dtype).item()
        self._rows = table.new_empty(2, 0, table.shape[1])

    def reserve(self, rows: int) -> None:
        """Allocate buffers for up to `rows` rows."""
        if self._rows.shape[1] < rows:
            self._rows = self._rows.new_empty(2, rows, self._rows.shape[2])

    def run(self, token_ids: Tensor, embedded: Tensor, sums: Tensor | None) -> Tensor:
        """Return the embeddings [rows, num_layers, width]; the next call overwrites them.

        Args:
            token_ids: int32 [rows].
            embedded: [rows, hidden_size], the rows' input embeddings.
            sums: workspace of linear layers.
        """
        num_rows = len(token_ids)
        self.reserve(num_rows)
        found, projected = self._rows[:, :num_rows].unbind()
        dense.linear(embedded, self.projection, out=projected, workspace=sums)
        projected.mul_(self._projection_scale)
        parts = projected.view(-1, self._width)
        dense.rms_norm(parts, *self._norm, out=parts)
        dense.embedding(token_ids, self._table, out=found)
        projected.add_(found.mul_(self._table_scale)).mul_(0.5**0.5)
        return projected.view(num_rows, -1, self._width)


def load_per_layer_embeddings(
    loader: BlockLoader, prefix: str, num_tokens: int, num_layers: int, width: int
) -> PerLayerEmbeddings:
    """Load the embeddings that all layers share; tensor names begin with `prefix`.

    Raises:
        ModelError: a tensor is missing or has the wrong shape.
    """
    source, hidden = loader.source, loader.hidden_size
    sizes = (num_layers * width,)
    return PerLayerEmbeddings(
        source.embedding(f"{prefix}embed_tokens_per_layer.weight", num_tokens, *sizes),
        source.linear(prefix, ("per_layer_model_projection",), sizes, hidden),
        loader.norm(f"{prefix}per_layer_projection_norm", width),
        hidden,
    )


@dataclass(frozen=True)
class PerLayerViews:
    """Activations of a step's rows."""

    gate: Tensor  # [rows, width], also the gated embedding
    gate_up: Tensor  # [rows, 2 * width], gate and embedding


@dataclass(frozen=True)
class PerLayerShape:
    """Width of a layer's own embeddings."""

    width: int

    def views(self, new: NewRows) -> PerLayerViews:
        """Return views of the activation buffers that `new` makes."""
        return PerLayerViews(
            new("per_layer_gate", self.width), new("per_layer_gate_up", 2 * self.width)
        )


@dataclass(frozen=True)
class PerLayerBranch:
    """Third branch of a layer: norm(projection(gelu(gate(x)) * embedding))."""

    gate: PackedWeight
    projection: PackedWeight
    norm: Norm

    @property
    def shape(self) -> PerLayerShape:
        """Sizes of the branch."""
        return PerLayerShape(self.gate.num_outputs)

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """Packed projections of the branch."""
        return (self.gate, self.projection)

    def run(
        self, x: Tensor, embedded: Tensor, views: PerLayerViews, sums: Tensor | None, out: Tensor
    ) -> None:
        """Compute the branch of the rows.

        Args:
            x: [rows, hidden_size], not normalized.
            embedded: [rows, width], the layer's own embeddings.
            views: views made by `shape`, with the same number of rows.
            sums: workspace of linear layers.
            out: [rows, hidden_size]; written.
        """
        gate, up = views.gate_up.chunk(2, dim=1)
        gate.copy_(dense.linear(x, self.gate, out=views.gate, workspace=sums))
        up.copy_(embedded)
        dense.gelu_tanh_mul(views.gate_up, out=views.gate)
        dense.linear(views.gate, self.projection, out=out, workspace=sums)
        dense.rms_norm(out, *self.norm, out=out)


def load_per_layer_branch(loader: BlockLoader, prefix: str, width: int) -> PerLayerBranch:
    """Load a layer's branch; tensor names begin with `prefix`.

    Raises:
        ModelError: a tensor is missing or has the wrong shape.
    """
    source, hidden = loader.source, loader.hidden_size
    return PerLayerBranch(
        source.linear(prefix, ("per_layer_input_gate",), (width,), hidden),
        source.linear(prefix, ("per_layer_projection",), (hidden,), width),
        loader.norm(f"{prefix}post_per_layer_input_norm"),
    )
