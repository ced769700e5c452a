# SPDX-License-Identifier: Apache-2.0
"""A decoder layer: norms, attention and an MLP."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.activations import LayerViews, Rows
from specops.engine.models.blocks.block import BlockLoader, MixingBlock, MlpBlock, Norm


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A decoder layer. Each branch is normed before it; some families norm what it gives as well.

    Attributes:
        input_norm: before attention.
        attention: the first branch, of whatever kind.
        attention_norm: of what attention gives; None: there is none.
        mlp_norm: before the MLP.
        mlp: the second branch.
        output_norm: of what the MLP gives; None: there is none.
    """

    input_norm: Norm
    attention: MixingBlock
    attention_norm: Norm | None
    mlp_norm: Norm
    mlp: MlpBlock
    output_norm: Norm | None

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """The projections of both blocks."""
        return (*self.attention.weights, *self.mlp.weights)

    def bytes_read(self, rows: int) -> float:
        """Returns how many bytes of weights a step of so many rows is expected to read."""
        return self.attention.bytes_read(rows) + self.mlp.bytes_read(rows)

    def run(
        self,
        batch: LayerBatch,
        cache: Any,
        rows: Rows,
        views: LayerViews,
        given: Tensor | None = None,
    ) -> None:
        """Runs it from `normed`, all but its last addition: `branch` is yet to be added.

        Its attention is added to `residual`; the norm that follows, which adds `branch`, is the
        caller's: it belongs to what comes next.

        Args:
            batch: the rows.
            cache: of the layer.
            rows: their activations.
            views: of its blocks.
            given: what attention reads in place of `normed`, where that is wider.
        """
        normed, branch = rows.normed, rows.branch
        self.attention.run(
            normed if given is None else given, batch, cache, views.attention, branch
        )
        norm = self.attention_norm
        if norm is not None:
            dense.rms_norm(branch, norm.weight, norm.eps, out=branch)
        norm = self.mlp_norm
        dense.rms_norm(branch, norm.weight, norm.eps, residual=rows.residual, out=normed)
        self.mlp.run(normed, batch.sums, views.mlp, branch)
        norm = self.output_norm
        if norm is not None:
            dense.rms_norm(branch, norm.weight, norm.eps, out=branch)


class AnyAttentionConfig(Protocol):
    """What attention is made from.

    Attributes:
        kind: what errors call it.
    """

    kind: ClassVar[str]

    def without_window(self) -> "AnyAttentionConfig":
        """The same, but that rows see all positions."""

    def load(self, loader: BlockLoader, prefix: str) -> MixingBlock:
        """Loads the block whose tensors begin with `prefix`."""


class AnyMlpConfig(Protocol):
    """What an MLP is made from.

    Attributes:
        kind: what errors call it.
    """

    kind: ClassVar[str]

    def narrowed(self, width: int) -> "AnyMlpConfig":
        """The same, as narrow as can be."""

    def load(self, loader: BlockLoader, prefix: str) -> MlpBlock:
        """Loads the block whose tensors begin with `prefix`."""


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """What the names of a layer's parts begin with, behind the layer's own prefix.

    None: it has no such norm.
    """

    input_norm: str = "input_layernorm"
    attention: str = "self_attn."
    attention_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."
    output_norm: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What a layer is made from."""

    attention: AnyAttentionConfig
    mlp: AnyMlpConfig
    names: LayerNames = LayerNames()

    def narrowed(self, width: int) -> "LayerConfig":
        """The same with a narrow MLP."""
        return replace(self, mlp=self.mlp.narrowed(width))

    def load(self, loader: BlockLoader, prefix: str) -> Layer:
        """Loads the layer whose tensors begin with `prefix`, and packs its projections.

        Raises:
            ModelError: a tensor is missing, or has another shape.
        """
        names = self.names

        def norm(name: str | None) -> Norm | None:
            return None if name is None else loader.norm(prefix + name)

        return Layer(
            input_norm=loader.norm(prefix + names.input_norm),
            attention=self.attention.load(loader, prefix + names.attention),
            attention_norm=norm(names.attention_norm),
            mlp_norm=loader.norm(prefix + names.mlp_norm),
            mlp=self.mlp.load(loader, prefix + names.mlp),
            output_norm=norm(names.output_norm),
        )
