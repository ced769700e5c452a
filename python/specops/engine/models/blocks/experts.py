# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: a router, gated experts (a few per row) and an optional shared MLP."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specops import dense, moe
from specops.dense import PackedWeight
from specops.engine.models.batch import LayerBatch
from specops.engine.models.blocks.block import (
    BlockLoader,
    MlpBlock,
    NewRows,
    Norm,
    Shape,
    bytes_of,
)
from specops.engine.models.blocks.column_parallel import ColumnParallelLinear
from specops.engine.models.blocks.mlp import RELU2, DenseMlp, DenseMlpConfig, relu2
from specops.engine.models.blocks.row_parallel import RowParallelLinear
from specops.engine.models.shards import Shard
from specops.engine.parallel.ranks import Ranks

_WIDTHS = "inner widths of an expert"


@dataclass(frozen=True)
class ExpertsViews:
    """Buffers of an MoE block in a step. A pair is a row and one of its top_k experts."""

    x: Tensor  # [rows, hidden_size], float32: router input
    scores: Tensor  # [rows, num_experts + gates], float32: router output
    logits: Tensor  # [rows, num_experts], view of scores
    shared_gate: Tensor | None  # [rows, 1, 1], view of scores: gate of the shared MLP
    expert_ids: Tensor  # [rows, top_k], int32
    expert_weights: Tensor  # [rows, top_k], float32
    factors: Tensor  # [rows, top_k], float32: factors on weights; [rows, 0] without
    row_indices: Tensor  # [pairs], int32
    places: Tensor  # [rows, top_k], int32
    gated: Tensor  # [pairs, width]
    expert_out: Tensor  # [pairs, out_size], float32
    shared: Any  # views of the shared MLP; None without one
    shared_out: Tensor  # [rows, hidden_size], float32; [rows, 0] without a shared MLP
    own_ids: Tensor  # [rows, top_k], int32: local expert indices; [rows, 0] without EP


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes of a mixture-of-experts block; `hidden_size` is the width of the router's inputs."""

    hidden_size: int
    out_size: int
    num_experts: int
    top_k: int
    width: int
    shared: Shape | None  # of the shared MLP
    has_shared_gate: bool
    has_factors: bool
    is_apart: bool = False

    def views(self, new: NewRows) -> ExpertsViews:
        """Return views of the activation buffers that `new` makes."""
        hidden, outputs, top_k = self.hidden_size, self.out_size, self.top_k
        places = new("places", top_k, torch.int32)
        pairs = places.shape[0] * top_k
        scores = new("router_logits", self.num_experts + self.has_shared_gate, torch.float32)
        return ExpertsViews(
            x=new("router_x", hidden, torch.float32),
            scores=scores,
            logits=scores[:, : self.num_experts],
            shared_gate=scores[:, self.num_experts :, None] if self.has_shared_gate else None,
            expert_ids=new("expert_ids", top_k, torch.int32),
            expert_weights=new("expert_weights", top_k, torch.float32),
            factors=new("expert_factors", top_k if self.has_factors else 0, torch.float32),
            row_indices=new("row_indices", top_k, torch.int32).view(pairs),
            places=places,
            gated=new("gated", top_k * self.width).view(pairs, self.width),
            expert_out=new("expert_out", top_k * outputs, torch.float32).view(pairs, outputs),
            shared=None if self.shared is None else self.shared.views(new),
            shared_out=new("shared_out", hidden if self.shared else 0, torch.float32),
            own_ids=new("own_expert_ids", top_k if self.is_apart else 0, torch.int32),
        )


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Settings of expert selection; see `moe.moe_route`.

    Attributes:
        top_k: experts per row.
        scoring: "softmax" or "sigmoid".
        num_groups: number of expert groups.
        top_k_groups: number of groups that a row may use.
        min_sum: lower bound of the sum by which weights are normalized; None: no normalization.
        scale: factor on all weights.
        bias: name of a tensor added to the scores for selection only; None: no such tensor.
        bias_shape: leading dimensions of that tensor, before the experts.
        norm: name of a tensor of factors on the router's inputs, which are then normed and divided
            by the root of their number; None: they are not normed.
        factors: name of a tensor of factors on the experts' weights; None: no such tensor.
    """

    top_k: int
    scoring: str = "softmax"
    num_groups: int = 1
    top_k_groups: int = 1
    min_sum: float | None = None
    scale: float = 1.0
    bias: str | None = None
    bias_shape: tuple[int, ...] = ()
    norm: str | None = None
    factors: str | None = None


@dataclass(frozen=True, kw_only=True)
class Router:
    """Weights of a router, in float32.

    Attributes:
        projection: projection of the inputs to scores, and perhaps to the shared MLP's gate.
        projection_bias: bias of the projection, or None.
        bias: bias that only affects the choice of experts, or None.
        norm: norm of the inputs, or None.
        factors: [num_experts], factors on the experts' weights, or None.
    """

    projection: PackedWeight
    projection_bias: Tensor | None
    bias: Tensor | None
    norm: Norm | None
    factors: Tensor | None


class Experts(MlpBlock):
    """Mixture of experts: sum of weight * down(activation(gate) * up), plus the shared MLP.

    The router always computes in float32: its weights and inputs are converted to float32, and
    nothing is rounded before experts are chosen.

    Attributes:
        gate_up: gate and up projections of all experts, from `moe.stack_experts`.
        down: down projections of all experts, one packed weight per virtual TP rank; the first
            virtual rank adds the bias.
    """

    shape: ExpertsShape

    def __init__(
        self,
        config: "ExpertsConfig",
        *,
        router: Router,
        gate_up: PackedWeight,
        gate_up_bias: Tensor | None,
        down: RowParallelLinear,
        shared: DenseMlp | None,
    ) -> None:
        width = sum(one.num_inputs for one in down.shards)
        self.shape = ExpertsShape(
            router.projection.num_inputs,
            down.shards[0].num_outputs,
            config.num_experts,
            config.routing.top_k,
            width,
            None if shared is None else shared.shape,
            config.shared_gate_name is not None,
            router.factors is not None,
        )
        self._routing, self._router = config.routing, router
        self._activation = config.activation
        self.gate_up, self.down, self._shared = gate_up, down, shared
        self._gate_up_bias = gate_up_bias
        self._indptr = torch.empty(
            config.num_experts + 1, dtype=torch.int32, device=router.projection.data.device
        )

    @property
    def projections(self) -> Sequence[ColumnParallelLinear | RowParallelLinear]:
        """Projections of the shared MLP."""
        return () if self._shared is None else self._shared.projections

    def expert_sums_size(self, rows: int) -> int:
        """Return how many floats of `LayerBatch.sums` experts need for up to `rows` rows."""
        pairs = rows * self.shape.top_k
        stacks = (self.gate_up, *self.down.shards)
        return max(moe.moe_linear_workspace_size(pairs, one) for one in stacks)

    def bytes_read(self, rows: int) -> float:
        """Return the expected bytes of weights read if rows choose their experts independently."""
        routing, count = self._routing, self.shape.num_experts
        read = 1.0 - (1.0 - routing.top_k / count) ** rows
        experts = sum(map(bytes_of, (self.gate_up, *self.down.shards)))
        return super().bytes_read(rows) + bytes_of(self._router.projection) + read * experts

    def run(self, x: Tensor, batch: LayerBatch, views: ExpertsViews, out: Tensor) -> None:
        """Compute the mixture of experts of the rows into `out`."""
        self.route(x, views)
        self.mix(x, batch, views, out)

    def mix(self, x: Tensor, batch: LayerBatch, views: ExpertsViews, out: Tensor) -> None:
        """Compute the mixture of the experts that `route` has chosen, and the shared MLP.

        Args:
            x: [rows, inputs of an expert].
            batch: metadata of the rows.
            views: views that `route` has written to.
            out: [rows, out_size]; written.
        """
        order = moe.ExpertOrder(self._indptr, views.row_indices, views.places)
        moe.moe_sort(views.expert_ids, self.shape.num_experts, order=order)
        indptr, gated = order.expert_indptr, views.gated
        moe.moe_linear(
            x,
            self.gate_up,
            indptr,
            order.row_indices,
            self._gate_up_bias,
            out=gated,
            workspace=batch.sums,
        )
        if self._activation == RELU2:
            relu2(gated, out=gated)
        ranks = self.down.ranks
        activated = self._activate_shared(x, batch, views)
        is_whole = ranks.num_virtual_ranks == 1
        partial_sums = out[None] if is_whole else ranks.partial_sums(out.shape, out.device)
        for index, partial_sum in enumerate(partial_sums):
            moe.moe_linear(
                self.down.inputs_of(index, gated),
                self.down.shards[index],
                indptr,
                bias=self.down.bias if ranks.rank == index == 0 else None,
                out=views.expert_out,
                workspace=batch.sums,
            )
            self._combine(index, batch, views, activated, partial_sum)
        if not is_whole:
            ranks.add(partial_sums, None, out)

    def _activate_shared(self, x: Tensor, batch: LayerBatch, views: ExpertsViews) -> Tensor | None:
        """Return the input of the shared MLP's last projection; None: there is no shared MLP."""
        return None if self._shared is None else self._shared.activate(x, batch, views.shared)

    def _combine(
        self,
        index: int,
        batch: LayerBatch,
        views: ExpertsViews,
        activated: Tensor | None,
        out: Tensor,
    ) -> None:
        """Add experts' outputs and shared MLP of virtual TP rank `index` into `out`."""
        of_shared = None
        if self._shared is not None and activated is not None:
            of_shared = views.shared_out
            self._shared.down.partial_sum(index, activated, of_shared, batch)
            if views.shared_gate is not None:
                whole = of_shared[:, None]
                dense.output_gate(whole, views.shared_gate, out=whole)
        moe.moe_combine(views.expert_out, views.places, views.expert_weights, of_shared, out=out)

    def route(self, x: Tensor, views: ExpertsViews) -> None:
        """Compute the router from `x` [rows, hidden_size], and choose the experts of each row."""
        routing, router = self._routing, self._router
        views.x.copy_(x)
        if router.norm is not None:
            dense.rms_norm(views.x, *router.norm, out=views.x)
        dense.linear(views.x, router.projection, router.projection_bias, out=views.scores)
        moe.moe_route(
            views.logits,
            routing.top_k,
            scoring=routing.scoring,
            bias=router.bias,
            num_groups=routing.num_groups,
            top_k_groups=routing.top_k_groups,
            min_sum=routing.min_sum,
            scale=routing.scale,
            expert_ids=views.expert_ids,
            expert_weights=views.expert_weights,
        )
        if router.factors is not None:
            chosen = views.expert_ids.view(-1)
            torch.index_select(router.factors, 0, chosen, out=views.factors.view(-1))
            views.expert_weights.mul_(views.factors)


@dataclass(frozen=True)
class OwnExperts:
    """Experts that one virtual TP rank holds as a whole.

    Attributes:
        places: int32 [num_experts of the block]: local index of each expert; -1: on another rank.
        gate_up, down: stacks from `moe.stack_experts`, with their biases.
    """

    places: Tensor
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None


class ExpertsApart(Experts):
    """Mixture of experts with whole experts distributed over ranks (expert parallelism).

    A partial sum covers a range of experts instead of a range of every expert's inner width. The
    shared MLP is still sharded by its inner width.
    """

    def __init__(
        self,
        config: "ExpertsConfig",
        own: Sequence[OwnExperts],
        *,
        router: Router,
        shared: DenseMlp | None,
        ranks: Ranks,
    ) -> None:
        super().__init__(
            config,
            router=router,
            gate_up=own[0].gate_up,
            gate_up_bias=None,
            down=RowParallelLinear([one.down for one in own], None, ranks),
            shared=shared,
        )
        self.shape = replace(self.shape, width=config.width, is_apart=True)
        self._own = own
        self._indptr = self._indptr[: config.num_experts // ranks.num_virtual_ranks + 1]

    def bytes_read(self, rows: int) -> float:
        """Return the expected bytes of weights read, over all local virtual TP ranks."""
        others = sum(bytes_of(one.gate_up) for one in self._own[1:])
        routing, count = self._routing, self.shape.num_experts
        return super().bytes_read(rows) + (1.0 - (1.0 - routing.top_k / count) ** rows) * others

    def mix(self, x: Tensor, batch: LayerBatch, views: ExpertsViews, out: Tensor) -> None:
        """Compute the mixture of the experts that `route` has chosen; see `Experts.mix`."""
        ranks = self.down.ranks
        activated = self._activate_shared(x, batch, views)
        order = moe.ExpertOrder(self._indptr, views.row_indices, views.places)
        indptr, chosen = order.expert_indptr, views.expert_ids.view(-1)
        partial_sums = ranks.partial_sums(out.shape, out.device)
        for index, (own, partial_sum) in enumerate(zip(self._own, partial_sums, strict=True)):
            torch.index_select(own.places, 0, chosen, out=views.own_ids.view(-1))
            moe.moe_sort(views.own_ids, len(indptr) - 1, order=order)
            moe.moe_linear(
                x,
                own.gate_up,
                indptr,
                order.row_indices,
                own.gate_up_bias,
                out=views.gated,
                workspace=batch.sums,
            )
            if self._activation == RELU2:
                relu2(views.gated, out=views.gated)
            moe.moe_linear(
                views.gated,
                own.down,
                indptr,
                bias=own.down_bias,
                out=views.expert_out,
                workspace=batch.sums,
            )
            self._combine(index, batch, views, activated, partial_sum)
        ranks.add(partial_sums, None, out)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Configuration of a mixture-of-experts block.

    Attributes:
        num_experts: number of experts.
        width: inner width of each expert.
        routing: settings of expert selection.
        shared: shared MLP, applied to every row; None: there is none.
        activation: activation of the gates, see `dense.pack_weight`; or "relu2", without gates.
        has_bias: whether the router and the experts' projections have biases.
        router_name: tensor name of the router.
        experts_name: tensor name prefix of the experts.
        projections: names of an expert's gate, up and down projections.
        shared_name: tensor name prefix of the shared MLP.
        shared_gate_name: tensor name of the projection to the shared MLP's scalar gate; None:
            there is no gate.
    """

    kind: ClassVar[str] = "a mixture of experts"
    has_experts: ClassVar[bool] = True

    num_experts: int
    width: int
    routing: Routing
    shared: DenseMlpConfig | None = None
    activation: str = "silu"
    has_bias: bool = False
    router_name: str = "gate"
    experts_name: str = "experts."
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_name: str = "shared_experts."
    shared_gate_name: str | None = None

    def narrowed(self, width: int) -> "ExpertsConfig":
        """Return this configuration with the inner width `width`."""
        shared = None if self.shared is None else self.shared.narrowed(width)
        return replace(self, width=width, shared=shared)

    @property
    def _fused_activation(self) -> str | None:
        """Activation that the first projection computes; None: it is a separate op."""
        return None if self.activation == RELU2 else self.activation

    @property
    def _parts(self) -> tuple[str, ...]:
        """Names of the modules that an expert's first projection consists of."""
        return self.projections[1:2] if self.activation == RELU2 else self.projections[:2]

    def load(self, loader: BlockLoader, prefix: str, router_inputs: int | None = None) -> Experts:
        """Load the block whose tensor names begin with `prefix`.

        Args:
            loader: source and settings.
            prefix: name prefix.
            router_inputs: width of the router's inputs; None: that of the experts' inputs, which is
                the loader's hidden size.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        source, hidden, count = loader.source, loader.hidden_size, self.num_experts
        router = self._load_router(loader, prefix, router_inputs or hidden)
        shared = None
        if self.shared is not None:
            shared = self.shared.load(loader, prefix + self.shared_name)
        experts, parts, what = prefix + self.experts_name, self._parts, self.projections[2:]
        sizes = [self.width] * len(parts)
        if loader.ranks.has_whole_experts:
            return ExpertsApart(
                self,
                self._load_own(loader, experts),
                router=router,
                shared=shared,
                ranks=loader.ranks,
            )
        every = range(count)
        local_width = loader.sharding.of_rank(self.width, _WIDTHS)
        shard = Shard(outputs=[local_width] * len(parts))
        gate_up_bias = down_bias = None
        if self.has_bias:
            gate_up_bias = source.expert_biases(experts, every, parts, sizes, shard=shard)
            down_bias = source.expert_biases(experts, every, what, (hidden,))
        down = [
            source.experts(experts, every, what, (hidden,), self.width, shard=one)
            for one in loader.sharding.of_inputs(self.width, _WIDTHS)
        ]
        return Experts(
            self,
            router=router,
            gate_up=source.experts(
                experts, every, parts, sizes, hidden, activation=self._fused_activation, shard=shard
            ),
            gate_up_bias=gate_up_bias,
            down=RowParallelLinear(down, down_bias, loader.ranks),
            shared=shared,
        )

    def _load_own(self, loader: BlockLoader, prefix: str) -> list[OwnExperts]:
        """Load the experts of this rank, one entry per local virtual TP rank."""
        source = loader.source
        hidden, parts, what = loader.hidden_size, self._parts, self.projections[2:]
        sizes = [self.width] * len(parts)
        source.ignore(prefix)
        whole = loader.sharding.of_rank(self.num_experts, "experts")
        count = len(whole) // loader.ranks.num_local_virtual_ranks
        found = []
        for begin in whole[::count]:
            which = range(begin, begin + count)
            gate_up_bias = down_bias = None
            if self.has_bias:
                gate_up_bias = source.expert_biases(prefix, which, parts, sizes)
                down_bias = source.expert_biases(prefix, which, what, (hidden,))
            places = torch.full((self.num_experts,), -1, dtype=torch.int32)
            places[begin : begin + count] = torch.arange(count)
            gate_up = source.experts(
                prefix, which, parts, sizes, hidden, activation=self._fused_activation
            )
            down = source.experts(prefix, which, what, (hidden,), self.width)
            places = places.to(gate_up.data.device)
            found.append(OwnExperts(places, gate_up, gate_up_bias, down, down_bias))
        return found

    def _load_router(self, loader: BlockLoader, prefix: str, inputs: int) -> Router:
        source, count, routing = loader.source, self.num_experts, self.routing

        def floats(name: str, *shape: int) -> Tensor:
            return source.tensor(prefix + name, *shape, dtype=torch.float32)

        projection = floats(f"{self.router_name}.weight", count, inputs)
        if self.shared_gate_name is not None:  # appended as the last output of the router
            gate = floats(f"{self.shared_gate_name}.weight", 1, inputs)
            projection = torch.cat([projection, gate])
        projection_bias = bias = norm = factors = None
        if self.has_bias:
            projection_bias = floats(f"{self.router_name}.bias", count)
        if routing.bias is not None:
            bias = floats(routing.bias, *routing.bias_shape, count).flatten()
        # Read the factors like norms, because random weights of norms are 1.
        if routing.norm is not None:
            weight = source.norm(prefix + routing.norm, inputs).float() * inputs**-0.5
            norm = Norm(weight, loader.norm_eps)
        if routing.factors is not None:
            factors = source.norm(prefix + routing.factors, count).float()
        return Router(
            projection=dense.pack_weight(projection),
            projection_bias=projection_bias,
            bias=bias,
            norm=norm,
            factors=factors,
        )
