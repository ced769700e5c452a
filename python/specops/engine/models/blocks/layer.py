# SPDX-License-Identifier: Apache-2.0
"""Decoder layer: norms, attention and an MLP."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from specops import dense
from specops.dense import PackedWeight
from specops.engine.models.adapters import AdapterSite
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.activations import LayerViews, StepViews
from specops.engine.models.blocks.block import (
    BlockLoader,
    MixingBlock,
    MlpBlock,
    Norm,
    Shape,
    bytes_of,
)
from specops.engine.models.blocks.per_layer import PerLayerBranch, load_per_layer_branch


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Decoder layer. The input of each branch is normed; in some families, the output is as well.

    Attributes:
        input_norm: norm before attention.
        attention: first branch, with any kind of attention.
        attention_norm: norm of the attention output; None: no such norm.
        mlp_norm: norm before the MLP.
        mlp: second branch.
        output_norm: norm of the MLP output; None: no such norm.
        branch_scale: factor on the output of both branches.
        per_layer: third branch, with an embedding of the layer; None: no such branch.
        scale: factor on the layer's output.
    """

    input_norm: Norm
    attention: MixingBlock
    attention_norm: Norm | None
    mlp_norm: Norm
    mlp: MlpBlock
    output_norm: Norm | None
    branch_scale: float = 1.0
    per_layer: PerLayerBranch | None = None
    scale: float = 1.0

    @property
    def shapes(self) -> Sequence[Shape]:
        """Shapes of the blocks, in the order of `LayerViews`."""
        both = (self.attention.shape, self.mlp.shape)
        return both if self.per_layer is None else (*both, self.per_layer.shape)

    @property
    def weights(self) -> Sequence[PackedWeight]:
        """Packed projections of all blocks."""
        return (*self.attention.weights, *self.mlp.weights, *self._per_layer_weights)

    @property
    def _per_layer_weights(self) -> Sequence[PackedWeight]:
        return () if self.per_layer is None else self.per_layer.weights

    @property
    def sites(self) -> Sequence[AdapterSite]:
        """Projections of both blocks that LoRA adapters may change."""
        return (*self.attention.sites, *self.mlp.sites)

    def bytes_read(self, rows: int) -> float:
        """Return the expected bytes of weights that a step of `rows` rows reads."""
        own = sum(map(bytes_of, self._per_layer_weights))
        return self.attention.bytes_read(rows) + self.mlp.bytes_read(rows) + own

    def run(
        self,
        batch: LayerBatch,
        cache: Any,
        rows: StepViews,
        views: LayerViews,
        own_input: Tensor | None = None,
        embedded: Tensor | None = None,
    ) -> None:
        """Run the layer on `rows.normed`, except for the last residual addition.

        The outputs of all branches but the last are added to `residual`. The last one stays in
        `branch`: the caller adds it in the fused norm that follows, which belongs to the next
        layer.

        Args:
            batch: metadata of the rows.
            cache: cache of this layer.
            rows: activations of the rows.
            views: views of the blocks.
            own_input: input of attention that replaces `normed`; its width may differ.
            embedded: the layer's own embeddings, if it has some.
        """
        normed, branch = rows.normed, rows.branch
        self.attention.run(
            normed if own_input is None else own_input, batch, cache, views.attention, branch
        )
        self._finish(branch, self.attention_norm)
        norm = self.mlp_norm
        dense.rms_norm(branch, norm.weight, norm.eps, residual=rows.residual, out=normed)
        self.mlp.run(normed, batch, views.mlp, branch)
        self._finish(branch, self.output_norm)
        if self.per_layer is not None:
            assert embedded is not None
            residual = rows.residual.add_(branch)
            self.per_layer.run(residual, embedded, views.per_layer, batch.sums, branch)
        if self.scale != 1.0:
            rows.residual.mul_(self.scale)
            branch.mul_(self.scale)

    def _finish(self, branch: Tensor, norm: Norm | None) -> None:
        """Norm and scale the output of a branch, where the layer does so."""
        if norm is not None:
            dense.rms_norm(branch, norm.weight, norm.eps, out=branch)
        if self.branch_scale != 1.0:
            branch.mul_(self.branch_scale)


class AnyAttentionConfig(Protocol):
    """Configuration of any kind of attention.

    Attributes:
        kind: name of the kind in error messages.
    """

    kind: ClassVar[str]

    def without_window(self) -> "AnyAttentionConfig":
        """Return this configuration without a sliding window."""

    def load(self, loader: BlockLoader, prefix: str) -> MixingBlock:
        """Load the block whose tensor names begin with `prefix`."""


class AnyMlpConfig(Protocol):
    """Configuration of any kind of MLP.

    Attributes:
        kind: name of the kind in error messages.
        has_experts: whether it has experts, which ranks may hold as a whole.
    """

    kind: ClassVar[str]
    has_experts: ClassVar[bool]

    def narrowed(self, width: int) -> "AnyMlpConfig":
        """Return this configuration with the inner width `width`."""

    def load(self, loader: BlockLoader, prefix: str) -> MlpBlock:
        """Load the block whose tensor names begin with `prefix`."""


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Tensor name prefixes of a layer's parts, relative to the prefix of the layer.

    The name of a norm or of the scale is None if the layer has none.
    """

    input_norm: str = "input_layernorm"
    attention: str = "self_attn."
    attention_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."
    output_norm: str | None = None
    scale: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Configuration of a layer.

    Attributes:
        attention: configuration of attention.
        mlp: configuration of the MLP.
        names: tensor names of the parts.
        branch_scale: factor on the output of both branches.
        per_layer_width: width of the layer's own embeddings; 0: it has none.
    """

    attention: AnyAttentionConfig
    mlp: AnyMlpConfig
    names: LayerNames = LayerNames()
    branch_scale: float = 1.0
    per_layer_width: int = 0

    def narrowed(self, width: int) -> "LayerConfig":
        """Return this configuration with an MLP and own embeddings of width `width`."""
        own = min(width, self.per_layer_width)
        return replace(self, mlp=self.mlp.narrowed(width), per_layer_width=own)

    def load(self, loader: BlockLoader, prefix: str) -> Layer:
        """Load the layer whose tensor names begin with `prefix`, with packed projections.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
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
            branch_scale=self.branch_scale,
            per_layer=self._load_per_layer(loader, prefix),
            scale=self._load_scale(loader, prefix),
        )

    def _load_scale(self, loader: BlockLoader, prefix: str) -> float:
        if self.names.scale is None:
            return 1.0
        # Read like a norm, because random weights of norms are 1.
        return loader.source.norm(prefix + self.names.scale, 1).item()

    def _load_per_layer(self, loader: BlockLoader, prefix: str) -> PerLayerBranch | None:
        if not self.per_layer_width:
            return None
        return load_per_layer_branch(loader, prefix, self.per_layer_width)
