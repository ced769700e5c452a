# SPDX-License-Identifier: Apache-2.0
"""Instruction sets of portable numerics: all compute the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import specops
import torch
from shared_fixtures import every_isa
from specops import attention, batching, dense, quantization, sampling
from specops.attention import PagedBatch, PagedKv
from specops.engine import Engine, EngineConfig, SamplingParams
from specops.sampling import SamplingTensors
from test_experts import FAMILIES, engine_directory
from torch import Tensor

NUM_ROWS, WIDTH, NUM_TOKENS = 5, 256, 150


def attended(randn: Callable[..., Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
    """Return rotated queries of one sequence, and their attention."""
    q, k, v = (randn(NUM_TOKENS, heads, head_dim) for heads in (4, 2, 2))
    pages = -(-NUM_TOKENS // 16)
    cache = PagedKv(*(q.new_zeros(pages, 16, 2, head_dim) for _ in "kv"))
    lens, indptr = torch.tensor([NUM_TOKENS]).int(), torch.tensor([0, pages]).int()
    modes, indices = torch.zeros(1).int(), torch.arange(pages).int()
    rows = batching.prepare_batch(lens, lens, modes, indptr, indices, page_size=16)
    q = attention.rope_append_kv(
        q,
        k,
        v,
        cache,
        rows.cache_slots,
        rows.positions,
        attention.rope_cos_sin(256, head_dim, 1e4),
        q_norm_weight=randn(head_dim),
        k_norm_weight=randn(head_dim),
    )
    paged = PagedBatch(rows.qo_indptr, indptr, indices, lens)
    return q, attention.append_attention(q, cache, paged)


def quantized(weight: Tensor, kind: str) -> dense.PackedWeight:
    return dense.pack_weight(quantization.quantize_weight(weight.float(), kind=kind, group=32))


# Results of each kind of op for tensors of a dtype, made by `randn`.
OPS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "rms_norm": lambda randn: dense.rms_norm(randn(NUM_ROWS, WIDTH), randn(WIDTH), 1e-6),
    "silu_mul": lambda randn: dense.silu_mul(randn(NUM_ROWS, WIDTH)),
    "gelu_tanh_mul": lambda randn: dense.gelu_tanh_mul(randn(NUM_ROWS, WIDTH)),
    "linear": lambda randn: dense.linear(
        randn(NUM_ROWS, WIDTH), dense.pack_weight(randn(48, WIDTH))
    ),
    "linear of tiny numbers": lambda randn: dense.linear(
        randn(NUM_ROWS, WIDTH) * 1e-36, dense.pack_weight(randn(48, WIDTH) * 1e-3)
    ),
    "linear of int8": lambda randn: dense.linear(
        randn(NUM_ROWS, WIDTH), quantized(randn(48, WIDTH), "int8")
    ),
    "linear of int4": lambda randn: dense.linear(
        randn(NUM_ROWS, WIDTH), quantized(randn(48, WIDTH), "int4")
    ),
    "attention": lambda randn: attended(randn, 64),
    "attention with heads of 512": lambda randn: attended(randn, 512),
    "top_logprobs": lambda randn: sampling.top_logprobs(3 * randn(4, 5000).float(), 20),
    "sample": lambda randn: sampling.sample(
        3 * randn(4, 5000).float(),
        torch.arange(4).int(),
        sampling=SamplingTensors(0.8, top_p=0.9, min_p=0.01, seeds=torch.arange(4)),
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_instruction_sets_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    results = {}
    for isa in every_isa():
        torch.manual_seed(3)
        found = OPS[name](lambda *shape: torch.randn(shape).to(dtype))
        if isa in specops.portable_isas():
            results[isa] = found if isinstance(found, tuple) else (found,)
    if len(results) < 2:
        pytest.skip("this build has one instruction set of portable numerics: make setup ISAS=all")
    first = results.pop("portable")
    for isa, found in results.items():
        for one, other in zip(first, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=isa)


def answers_on_every_set(**config: Any) -> list[Any]:
    """Return the tokens and logprobs of some answers, once per set of portable numerics."""
    params = [
        SamplingParams(max_tokens=24, temperature=t, seed=7, logprobs=2) for t in (0.0, 0.8, 1.2)
    ]
    prompts = [list(range(20, 90)), [5, 6, 7], [40, 50]]
    found = []
    for isa in specops.portable_isas():
        engine = Engine(EngineConfig(isa=isa, **config))
        for method in ("naive", "ngram"):
            done = engine.generate(prompts, params, speculative_config={"method": method})
            found.append([(one.token_ids, one.logprobs) for one in done])
    return found


@pytest.mark.ci
@pytest.mark.parametrize("quantization", ["none", "wint8", "wint4"])
def test_answers_are_equal(quantization: str) -> None:
    answers = answers_on_every_set(quantization=quantization, quantize_head=quantization)
    assert all(one == answers[0] for one in answers)


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_every_family_are_equal(family: str) -> None:
    answers = answers_on_every_set(model=engine_directory(family))
    assert all(one == answers[0] for one in answers)


def test_the_best_set_of_portable_numerics_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = specops.get_isa()
    specops.set_isa("portable")
    Engine(EngineConfig(numerics="portable"))
    assert specops.get_isa() == "portable"  # permitted, so it stays
    monkeypatch.setattr(specops, "get_isa", lambda: "avx512_bf16")
    monkeypatch.setattr(specops, "portable_isas", lambda: ["portable"])
    with pytest.raises(ValueError, match="this build has none of them"):
        Engine(EngineConfig(numerics="portable"))
    with pytest.raises(ValueError, match="isa must be one of portable with portable numerics"):
        Engine(EngineConfig(numerics="portable", isa="amx"))
    monkeypatch.setattr(specops, "portable_isas", lambda: ["portable", before])
    monkeypatch.setattr(specops, "get_isa", lambda: "another")
    Engine(EngineConfig(numerics="portable"))
    assert specops.runtime.get_isa() == before
