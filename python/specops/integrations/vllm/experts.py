# SPDX-License-Identifier: Apache-2.0
"""vLLM's mixtures of experts by `specops.moe`: routing, the experts' products, and their sum.

This module imports vLLM, so only the plug-in imports it, in a process of vLLM.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from specops import dense, moe
from specops.integrations.vllm import threads
from specops.integrations.vllm.packed_linear import DTYPES, free, put

_SCORINGS = ("softmax", "sigmoid")


class SpecopsRouter(CPURouter):  # type: ignore[misc]
    """vLLM's router by `specops.moe.moe_route`.

    Attributes:
        specops_faults: reasons why the op cannot compute this routing.
    """

    def __init__(self, router: CPURouter) -> None:
        """Copy the settings of vLLM's router."""
        super().__init__(router.top_k, router.global_num_experts)
        self.__dict__.update(vars(router))
        self.specops_faults = list(self._faults())

    def _faults(self) -> list[str]:
        faults = []
        if self.custom_routing_function is not None:
            faults.append("experts with a routing function of the model")
        if self._hash_indices_table is not None or self.scoring_func not in _SCORINGS:
            faults.append(f"experts with the scoring {self.scoring_func}")
        has_groups = self.use_grouped_topk and self.num_expert_group != 1
        if has_groups and self.e_score_correction_bias is None:
            faults.append("groups of experts without a bias")
        if self.eplb_state is not None:
            faults.append("load balancing of experts")
        return faults

    def _compute_routing(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return weights and ids of each row's experts.

        Without groups, vLLM on a CPU ignores a bias. This router applies it, as vLLM does on GPUs.
        """
        bias = self.e_score_correction_bias
        groups: dict[str, Any] = {}
        if self.use_grouped_topk:
            groups = {"num_groups": self.num_expert_group, "top_k_groups": self.topk_group}
        is_scaled = self.use_grouped_topk or bias is not None
        ids, weights = moe.moe_route(
            router_logits.float(),
            self.top_k,
            scoring=self.scoring_func,
            bias=None if bias is None else bias.detach().float(),
            min_sum=0.0 if self.renormalize else None,
            scale=self.routed_scaling_factor if is_scaled else 1.0,
            **groups,
        )
        return weights, ids


class SpecopsExperts(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """vLLM's unquantized experts by `specops.moe`.

    Attributes:
        specops_faults: reasons why the ops cannot compute these experts. If there are any, the
            engine does not start.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._gate_up: dense.PackedWeight | None = None
        self._down: dense.PackedWeight | None = None
        self.specops_faults: list[str] = []
        if config.activation != MoEActivation.SILU:
            self.specops_faults.append(f"experts with the activation {config.activation.value}")
        if config.swiglu_limit is not None:
            self.specops_faults.append("experts with a limit of their activation")
        if config.has_bias:
            self.specops_faults.append("experts with biases")
        if config.in_dtype not in DTYPES:
            self.specops_faults.append(f"experts of {config.in_dtype}")
        if config.dp_size > 1 or config.is_sequence_parallel:
            self.specops_faults.append("experts with data or sequence parallelism")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the experts' weights, and free the unpacked ones."""
        if layer.apply_router_weight_on_input:
            self.specops_faults.append("experts whose input is weighted")
        if self.specops_faults:
            return
        threads.start()
        self._gate_up = put(self._gate_up, _stacked(layer.w13_weight, "silu"))
        self._down = put(self._down, _stacked(layer.w2_weight, None))
        for name in ("w13_weight", "w2_weight"):
            free(layer, name)

    def forward_native(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return the weighted sum of each row's expert outputs, accumulated in float32.

        The experts of other ranks are left out. vLLM's runner adds the shared experts.
        """
        assert self._gate_up is not None and self._down is not None
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids]
        order = moe.moe_sort(topk_ids, layer.local_num_experts)
        gated = moe.moe_linear(x, self._gate_up, order.expert_indptr, order.row_indices)
        out = moe.moe_linear(gated, self._down, order.expert_indptr, out_dtype=torch.float32)
        return moe.moe_combine(out, order.places, topk_weights, dtype=x.dtype)

    forward_cpu = forward_native


def _stacked(weight: Tensor, activation: str | None) -> dense.PackedWeight:
    """Pack weights [experts, outputs, inputs]."""
    each = (dense.pack_weight(one, activation=activation) for one in weight.detach())
    return moe.stack_experts(each, len(weight))


def use_routers(model: nn.Module) -> None:
    """Replace vLLM's CPU routers in a loaded model by `SpecopsRouter`."""
    for module in model.modules():
        if isinstance(module, MoERunner) and type(module.router) is CPURouter:
            module.router = SpecopsRouter(module.router)
