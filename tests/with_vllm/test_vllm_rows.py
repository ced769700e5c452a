# SPDX-License-Identifier: Apache-2.0
"""Rows of every layer have the same bits alone and in a batch; layers of specops equal vLLM's."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    """Set the configuration that vLLM's layers require."""
    from vllm.config import VllmConfig, set_current_vllm_config

    made = VllmConfig()
    made.compilation_config.custom_ops = ["all"]
    with set_current_vllm_config(made):
        yield


def rows_that_differ(layer: Callable[..., Any], *inputs: Tensor) -> int:
    """Return how many rows of a call have other bits when they are computed alone."""

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        out = layer(*[one.clone() for one in given])
        return out if isinstance(out, tuple) else (out,)

    whole = call(*inputs)
    different = 0
    for row in range(len(inputs[0])):
        alone = call(*[one[row : row + 1] for one in inputs])
        different += any(
            not torch.equal(many[row : row + 1], one)
            for many, one in zip(whole, alone, strict=True)
        )
    return different


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 1000, 40_000])
@torch.inference_mode()  # as in vLLM; otherwise an op refuses weights that require gradients
def test_norm_is_row_identical_and_close_to_vllm(dtype: torch.dtype, width: int) -> None:
    from specops.integrations.vllm.layers import SpecopsRMSNorm
    from vllm.model_executor.layers.layernorm import RMSNorm

    ours, theirs = SpecopsRMSNorm(width, dtype=dtype), RMSNorm(width, dtype=dtype)
    ours.weight.data = theirs.weight.data = torch.randn(width).to(dtype)
    x, residual = torch.randn(2, 33, width).to(dtype).unbind()
    assert rows_that_differ(ours, x) == 0
    assert rows_that_differ(ours, x, residual) == 0
    per_head = torch.randn(5, 4, width).to(dtype)
    assert rows_that_differ(ours, per_head) == 0
    close = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    torch.testing.assert_close(ours(x.clone()), theirs(x.clone()), **close)
    got, want = ours(x.clone(), residual.clone()), theirs(x.clone(), residual.clone())
    torch.testing.assert_close(got[0], want[0], **close)
    torch.testing.assert_close(got[1], want[1], **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activation_is_row_identical_and_close_to_vllm(dtype: torch.dtype) -> None:
    from specops.integrations.vllm.layers import SpecopsSiluAndMul
    from vllm.model_executor.layers.activation import SiluAndMul

    x = torch.randn(33, 2 * 1000).to(dtype)
    assert rows_that_differ(SpecopsSiluAndMul(), x) == 0
    torch.testing.assert_close(SpecopsSiluAndMul()(x), SiluAndMul()(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary_embedding_of_vllm_is_row_identical(dtype: torch.dtype, is_neox: bool) -> None:
    """Therefore SPECOPS_VLLM does not replace vLLM's rotary embedding."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = get_rope(64, 4096, is_neox, {"rope_theta": 1e4, "rope_type": "default"}, dtype=dtype)
    q, k = torch.randn(100, 4 * 64).to(dtype), torch.randn(100, 2 * 64).to(dtype)
    assert rows_that_differ(rope, torch.arange(100) * 37, q, k) == 0


@pytest.mark.parametrize("remove_weight", [True, False])
def test_linear_is_row_identical_and_close_to_torch(remove_weight: bool) -> None:
    from specops.integrations.vllm.packed_linear import use_packed_linear

    weight, bias = torch.randn(96, 3072).bfloat16(), torch.randn(96).bfloat16()
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    use_packed_linear(layer, remove_weight)
    assert (layer.weight.numel() == 0) == remove_weight
    x = torch.randn(20, 3072).bfloat16()

    def product(x: Tensor) -> Tensor:
        out: Tensor = layer.cpu_linear(x, layer.weight, bias)  # type: ignore[operator]
        return out

    assert rows_that_differ(product, x) == 0
    want = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(product(x).float(), want, rtol=2e-2, atol=0.5)
    assert torch.equal(product(x.view(4, 5, -1)).view(20, -1), product(x))


ROUTING: dict[str, Any] = {
    "top_k": 3,
    "global_num_experts": 16,
    "use_grouped_topk": True,
    "num_expert_group": 4,
    "topk_group": 2,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"renormalize": False},
        {"use_grouped_topk": False, "scoring_func": "softmax"},
        {"use_grouped_topk": False, "scoring_func": "softmax", "renormalize": False},
        {"num_expert_group": 1, "topk_group": 1, "scoring_func": "softmax"},
    ],
)
def test_routing_is_row_identical_and_agrees_with_vllm(more: dict[str, Any]) -> None:
    from specops.integrations.vllm.experts import SpecopsRouter
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    given = ROUTING | more
    bias = torch.randn(16) / 4 if given["use_grouped_topk"] else None
    theirs = CPURouter(**given, e_score_correction_bias=bias)
    ours = SpecopsRouter(theirs)
    assert ours.specops_faults == []
    x, logits = torch.zeros(50, 8), torch.randn(50, 16)
    weights, ids = ours.select_experts(x, logits)
    assert rows_that_differ(ours.select_experts, x, logits) == 0
    their_weights, their_ids = theirs.select_experts(x, logits)
    order = their_ids.argsort(-1)
    assert torch.equal(ids, their_ids.gather(1, order))
    torch.testing.assert_close(weights, their_weights.gather(1, order))


def test_routing_without_groups_applies_the_bias() -> None:
    """On a CPU, vLLM's own router ignores this bias."""
    from specops.integrations.vllm.experts import SpecopsRouter
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    logits, bias = torch.randn(50, 16), torch.randn(16)
    given = ROUTING | {"use_grouped_topk": False}
    ours = SpecopsRouter(CPURouter(**given, e_score_correction_bias=bias))
    weights, ids = ours.select_experts(torch.zeros(50, 8), logits)
    scores = logits.sigmoid()
    want = (scores + bias).topk(3).indices.sort().values
    assert torch.equal(ids.long(), want)
    chosen = scores.gather(1, want)
    torch.testing.assert_close(weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    "more, fault",
    [
        ({"custom_routing_function": print}, "experts with a routing function of the model"),
        ({"scoring_func": "sqrtsoftplus"}, "experts with the scoring sqrtsoftplus"),
        ({"e_score_correction_bias": None}, "groups of experts without a bias"),
        ({"eplb_state": object()}, "load balancing of experts"),
    ],
)
def test_routing_reports_unsupported_options(more: dict[str, Any], fault: str) -> None:
    from specops.integrations.vllm.experts import SpecopsRouter
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    given = ROUTING | {"e_score_correction_bias": torch.zeros(16)} | more
    assert SpecopsRouter(CPURouter(**given)).specops_faults == [fault]


HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 64, 16


def batch_of(begin: int, end: int, blocks: list[int], causal: bool = True) -> Any:
    """Return vLLM's description of a step with the rows `begin` to `end` of a request."""
    places = torch.arange(begin, end)
    return SimpleNamespace(
        num_reqs=1,
        num_actual_tokens=end - begin,
        query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        max_seq_len=end,
        block_table_tensor=torch.tensor([blocks], dtype=torch.int32),
        slot_mapping=torch.tensor(blocks)[places // PAGE] * PAGE + places % PAGE,
        causal=causal,
    )


def backend(dtype: torch.dtype) -> tuple[Any, Any, Tensor]:
    """Return a builder of metadata, a layer's implementation and an empty cache."""
    from specops.integrations.vllm.attention import SpecopsAttentionImpl, SpecopsMetadataBuilder

    spec = SimpleNamespace(block_size=PAGE)
    builder = SpecopsMetadataBuilder(spec, [], None, torch.device("cpu"))
    impl = SpecopsAttentionImpl(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS)
    return builder, impl, torch.full((20, KV_HEADS, PAGE, 2 * HEAD_DIM), torch.nan, dtype=dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, cuts: list[int], blocks: list[int]) -> Tensor:
    """Return the attention of one request by the backend, in chunks that end at `cuts`."""
    builder, impl, cache = backend(q.dtype)
    outs = []
    for begin, end in zip([0, *cuts], cuts, strict=False):
        metadata = builder.build(0, batch_of(begin, end, blocks))
        out = torch.empty(end - begin, HEADS, HEAD_DIM, dtype=q.dtype)
        impl.forward(None, q[begin:end], k[begin:end], v[begin:end], cache, metadata, out)
        outs.append(out)
    return torch.cat(outs)


def test_block_of_a_drafter_attends_to_all_of_itself() -> None:
    """Another call wrote the context before the block. A model's own rows must be causal."""
    text, length, blocks = 37, 43, [4, 0, 2]
    q = torch.randn(length, HEADS, HEAD_DIM).bfloat16()
    k, v = torch.randn(2, length, KV_HEADS, HEAD_DIM).bfloat16().unbind()
    builder, impl, cache = backend(q.dtype)
    slots = batch_of(0, text, blocks).slot_mapping
    # One row more than must be written.
    slots = torch.cat((slots, torch.tensor([-1])))
    impl.do_kv_cache_update(None, k[: text + 1], v[: text + 1], cache, slots)
    given = batch_of(text, length, blocks, causal=False)
    out = torch.empty(length - text, HEADS, HEAD_DIM, dtype=q.dtype)
    metadata = builder.build_for_drafting(given, 0)
    impl.forward(None, q[text:], k[text:], v[text:], cache, metadata, out)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(one.float().transpose(0, 1) for one in (q[text:], k, v)), enable_gqa=True
    )
    torch.testing.assert_close(out.float(), want.transpose(0, 1), rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="attention supports only causal batches, got"):
        builder.build(0, given)


def test_attention_has_the_same_bits_in_any_chunks_and_blocks() -> None:
    length = 70
    q = torch.randn(length, HEADS, HEAD_DIM).bfloat16()
    k, v = torch.randn(2, length, KV_HEADS, HEAD_DIM).bfloat16().unbind()
    at_once = attend(q, k, v, [length], [0, 1, 2, 3, 4])
    one_by_one = attend(q, k, v, list(range(1, length + 1)), [19, 3, 0, 7, 5])
    chunks = attend(q, k, v, [5, 16, 17, 50, 70], [4, 3, 2, 1, 0])
    assert torch.equal(at_once, one_by_one) and torch.equal(at_once, chunks)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(one.float().transpose(0, 1) for one in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(at_once.float(), want.transpose(0, 1), rtol=2e-2, atol=2e-2)


def test_attention_reports_all_unsupported_options() -> None:
    from specops.integrations.vllm.attention import SpecopsAttentionImpl

    good = {"num_heads": 4, "head_size": 64, "scale": 1.0, "num_kv_heads": 2}
    assert SpecopsAttentionImpl(**good, logits_soft_cap=0.0).specops_faults == []
    wrong = {
        "head_size": 80,
        "alibi_slopes": [1.0],
        "logits_soft_cap": 30.0,
        "sinks": torch.zeros(4),
        "attn_type": "encoder_only",
        "kv_cache_dtype": "fp8",
    }
    assert SpecopsAttentionImpl(**(good | wrong)).specops_faults == [
        "attention with heads of 80 (supported: [64, 96, 128, 256])",
        "attention with ALiBi slopes",
        "attention with a soft cap of 30.0",
        "attention with sinks",
        "attention with the type encoder_only",
        "attention with the cache dtype fp8",
    ]


@pytest.mark.parametrize(
    "more, faults",
    [
        ({}, []),
        ({"var_hidden_size": 32}, ["an RMSNorm over a part of its width"]),
        ({"has_weight": False}, ["an RMSNorm without a weight"]),
    ],
)
def test_norm_reports_unsupported_options(more: dict[str, Any], faults: list[str]) -> None:
    from specops.integrations.vllm.layers import SpecopsRMSNorm

    assert SpecopsRMSNorm(64, **more).specops_faults == faults
