# SPDX-License-Identifier: Apache-2.0
"""Random calls of the ops, small enough for the interpreter; a seed identifies a case.

Each function makes the tensors from a generator on the CPU and returns a call over copies of them
on any device. Two runs of one case differ only in the machine that computes them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from specops import attention, batching, dense, linear_attention, moe, ngram, sampling
from specops.quantization import QuantizedWeight, num_groups
from torch import Tensor

from tools.gpu_check.numerics.trials import EQUAL, Limits

Call = Callable[[], list[Tensor]]
Move = Callable[[Tensor], Tensor]
Make = Callable[[torch.Generator, Move], Call]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOGITS_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Op:
    """Random cases of an op, and how far a device may be from the interpreter."""

    make: Make
    limits: Limits = EQUAL


def _number(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (1,), generator=generator))


def _one_of(generator: torch.Generator, *values: int) -> int:
    return values[_number(generator, 0, len(values) - 1)]


def _randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _dtype(generator: torch.Generator) -> torch.dtype:
    return DTYPES[_number(generator, 0, len(DTYPES) - 1)]


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def embedding(generator: torch.Generator, move: Move) -> Call:
    """Make a lookup of table rows."""
    width, vocab = 8 * _number(generator, 1, 40), _number(generator, 1, 300)
    ids = torch.randint(vocab, (_number(generator, 1, 40),), generator=generator).int()
    ids, table = move(ids), move(_randn(generator, vocab, width, dtype=_dtype(generator)))
    return lambda: [dense.embedding(ids, table)]


def gather_output_rows(generator: torch.Generator, move: Move) -> Call:
    """Make a gather of hidden-state rows, with -1 among the indices."""
    rows, width = _number(generator, 1, 60), 8 * _number(generator, 1, 40)
    hidden = move(_randn(generator, rows, width, dtype=_dtype(generator)))
    wanted = move(torch.randint(-1, rows, (_number(generator, 1, 40),), generator=generator).int())
    return lambda: [batching.gather_output_rows(hidden, wanted)]


def prepare_batch(generator: torch.Generator, move: Move) -> Call:
    """Make a ragged batch over a page table."""
    batch, page_size = _number(generator, 1, 12), 16
    qo_lens = torch.randint(0, 9, (batch,), generator=generator).int()
    kv_lens = qo_lens + torch.randint(0, 90, (batch,), generator=generator).int()
    pages = -(-kv_lens // page_size)
    kv_indptr = torch.cat([_ints(0), pages.cumsum(0)]).int()
    total = int(pages.sum())
    modes = torch.full((batch,), int(batching.OutputMode.ALL), dtype=torch.int32)
    tensors = (qo_lens, kv_lens, modes, kv_indptr, torch.randperm(total, generator=generator).int())
    moved = [move(tensor) for tensor in tensors]

    def call() -> list[Tensor]:
        made = batching.prepare_batch(*moved, page_size=page_size)
        return [x for x in vars(made).values() if isinstance(x, Tensor)]

    return call


def ngram_propose(generator: torch.Generator, move: Move) -> Call:
    """Make a lookup in texts of few distinct tokens, so that matches are common."""
    batch, width = _number(generator, 1, 8), _number(generator, 20, 200)
    token_ids = move(torch.randint(0, 6, (batch, width), generator=generator).int())
    lens = move(torch.randint(1, width + 1, (batch,), generator=generator).int())
    most, shape = move(torch.full((batch,), 5, dtype=torch.int32)), (batch, 5)

    def call() -> list[Tensor]:
        drafts = torch.full(shape, -1, dtype=torch.int32, device=token_ids.device)
        return list(ngram.ngram_propose(token_ids, lens, most, draft_token_ids=drafts))

    return call


def linear(generator: torch.Generator, move: Move) -> Call:
    """Make a product for any form of the kernel: few rows or tiles, with or without gating."""
    rows = _one_of(generator, 1, 2, 5, 8, 9, 16, 17, 33, 65, 130)
    inputs, outputs = 32 * _number(generator, 1, 12), 16 * _number(generator, 1, 12)
    dtype = _dtype(generator)
    x = move(_randn(generator, rows, inputs, dtype=dtype))
    weight = move(_randn(generator, outputs, inputs, dtype=dtype))
    activation = (None, "silu", "gelu_tanh", "swiglu_oai")[_number(generator, 0, 3)]
    packed = dense.pack_weight(weight, activation=activation)
    return lambda: [dense.linear(x, packed)]


@dataclass(frozen=True)
class QuantizedForm:
    """Kind of a quantized weight, and the rounding of the rows that it multiplies."""

    kind: str
    activations: str
    group: int = 0
    offsets: bool = False
    table: bool = False
    order: bool = False


def _quantized(
    generator: torch.Generator, move: Move, form: QuantizedForm, outputs: int, inputs: int
) -> dense.PackedWeight:
    """Return a random packed weight of a form."""
    shape = (outputs, inputs)
    if form.kind == "fp8":
        values = _randn(generator, *shape, dtype=torch.float8_e4m3fn)
    elif form.kind == "int8":
        values = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    else:
        values = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    blocks = -(-outputs // 128) if form.kind == "fp8" and form.group else outputs
    scales = torch.rand(blocks, num_groups(inputs, form.group), generator=generator) / 100
    offsets = torch.randn(scales.shape, generator=generator) / 100 if form.offsets else None
    table = torch.randint(-127, 128, (16,), generator=generator) if form.table else None
    order = torch.randperm(inputs, generator=generator).int() if form.order else None
    weight = QuantizedWeight(
        form.kind,
        move(values),
        move(scales),
        None if offsets is None else move(offsets),
        form.group,
        None if table is None else move(table.to(torch.int8)),
        None if order is None else move(order),
    )
    return dense.pack_weight(weight, activations=form.activations)


def _integer_form(generator: torch.Generator, *, ordered: bool) -> QuantizedForm:
    kind = ("int8", "int4")[_number(generator, 0, 1)]
    activations = ("int16", "int8")[_number(generator, 0, 1)]
    group = _one_of(generator, 0, 16, 32, 96, 128)
    has_offsets, has_table, has_order = (_number(generator, 0, 2) == 0 for _ in range(3))
    return QuantizedForm(
        kind, activations, group, has_offsets, has_table and kind == "int4", has_order and ordered
    )


def _quantized_linear(generator: torch.Generator, move: Move, form: QuantizedForm) -> Call:
    rows = _one_of(generator, 1, 5, 8, 9, 16, 17, 33, 5500)
    inputs, outputs = _number(generator, 1, 700), _number(generator, 1, 200)
    if rows > 33:  # enough tiles of rows for every GPU to round rows once
        inputs, outputs = inputs % 140 + 1, outputs % 16 + 1
    x = move(_randn(generator, rows, inputs, dtype=_dtype(generator)))
    packed = _quantized(generator, move, form, outputs, inputs)
    return lambda: [dense.linear(x, packed)]


def integer_linear(generator: torch.Generator, move: Move) -> Call:
    """Make a product of int8 or int4 weights, whose integer sums have no rounding."""
    return _quantized_linear(generator, move, _integer_form(generator, ordered=True))


def fp8_linear(generator: torch.Generator, move: Move) -> Call:
    """Make a product of fp8 weights."""
    form = QuantizedForm("fp8", "float", _one_of(generator, 0, 128))
    return _quantized_linear(generator, move, form)


def rms_norm(generator: torch.Generator, move: Move) -> Call:
    """Make a normalization of rows of any width."""
    rows, width, dtype = _number(generator, 1, 9), 8 * _number(generator, 1, 300), _dtype(generator)
    x = move(_randn(generator, rows, width, dtype=dtype))
    weight = move(_randn(generator, width, dtype=dtype))
    return lambda: [dense.rms_norm(x, weight, 1e-6)]


def silu_mul(generator: torch.Generator, move: Move) -> Call:
    """Make gate-and-up products under all activations."""
    rows, width, dtype = _number(generator, 1, 9), 8 * _number(generator, 1, 200), _dtype(generator)
    x = move(_randn(generator, rows, 2 * width, dtype=dtype) * 4)
    return lambda: [dense.silu_mul(x), dense.gelu_tanh_mul(x), dense.swiglu_oai_mul(x)]


def rope_append_kv(generator: torch.Generator, move: Move) -> Call:
    """Make a call that rotates keys and appends keys and values to a cache of zeros."""
    rows, kv_heads, group = _number(generator, 1, 12), _number(generator, 1, 3), 4
    head_dim, page_size, pages = _one_of(generator, 64, 96, 128), 16, 6
    dtype = _dtype(generator)
    heads = (group * kv_heads, kv_heads, kv_heads)
    q, k, v = (move(_randn(generator, rows, h, head_dim, dtype=dtype)) for h in heads)
    slots = move(torch.randperm(pages * page_size, generator=generator)[:rows])
    positions = move(torch.randint(0, 500, (rows,), generator=generator).int())
    cos_sin = move(attention.rope_cos_sin(500, head_dim, 10000.0))
    shape = (pages, page_size, kv_heads, head_dim)

    def call() -> list[Tensor]:
        caches = [torch.zeros(shape, dtype=dtype, device=q.device) for _ in range(2)]
        cache = attention.PagedKv(*caches)
        return [attention.rope_append_kv(q, k, v, cache, slots, positions, cos_sin), *caches]

    return call


@dataclass(frozen=True)
class PagedCase:
    """A random call of `append_attention`, without the arguments that a check varies."""

    q: Tensor
    cache: attention.PagedKv
    batch: attention.PagedBatch
    sm_scale: float | None = None  # for latents

    def call(self, **keywords: Any) -> list[Tensor]:
        """Run the call and return out and lse."""
        return list(
            attention.append_attention(
                self.q,
                self.cache,
                self.batch,
                sm_scale=self.sm_scale,
                return_lse=True,
                **keywords,
            )
        )

    def workspace_size(self) -> int:
        """Return the workspace size in floats."""
        batch, num_pages = self.batch.kv_lens.shape[0], self.batch.kv_indices.shape[0]
        return attention.attention_workspace_size(
            self.q.shape, self.cache.k.shape, num_pages, batch, self.q.device
        )


def paged_case(
    generator: torch.Generator,
    move: Move,
    *,
    most_tokens: int = 700,
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
    qo_len: int | None = None,
    cache_dtype: torch.dtype | None = None,
) -> PagedCase:
    """Make requests of 1 to 9 rows over shuffled pages; cache_dtype: 8-bit type, for bf16 queries.

    A head_dim of LATENT_KEY makes latents: a single cache, which holds the keys.
    """
    batch, page_size = _number(generator, 1, 3), _one_of(generator, 16, 32, 64)
    kv_heads, group = _number(generator, 1, 2), _one_of(generator, 1, 4, 8)
    head_dim = head_dim or _one_of(generator, 64, 96, 128, 256)
    dtype = torch.bfloat16 if cache_dtype else dtype or _dtype(generator)
    if qo_len is None:
        qo_lens = torch.randint(1, 10, (batch,), generator=generator).int()
    else:
        qo_lens = torch.full((batch,), qo_len, dtype=torch.int32)
    kv_lens = qo_lens + torch.randint(0, most_tokens, (batch,), generator=generator).int()
    pages = -(-kv_lens // page_size)
    total = int(pages.sum())
    is_latent = head_dim == LATENT_KEY
    shape = (total, page_size, 1 if is_latent else kv_heads, head_dim)
    q = _randn(generator, int(qo_lens.sum()), group * kv_heads, head_dim, dtype=dtype)
    caches = [_randn(generator, *shape, dtype=dtype) for _ in range(2)]
    scales: list[Tensor] = []
    if cache_dtype:
        caches = [(cache * 30).clamp(-120, 120).to(cache_dtype) for cache in caches]
        scales = [move(torch.rand(shape[:3], generator=generator) / 30) for _ in range(2)]
    where = (
        torch.cat([_ints(0), qo_lens.cumsum(0)]).int(),
        torch.cat([_ints(0), pages.cumsum(0)]).int(),
        torch.randperm(total, generator=generator).int(),
        kv_lens,
    )
    values = None if is_latent else move(caches[1])
    return PagedCase(
        move(q),
        attention.PagedKv(move(caches[0]), values, *scales),
        attention.PagedBatch(*(move(tensor) for tensor in where)),
        192**-0.5 if is_latent else None,
    )


def append_attention(generator: torch.Generator, move: Move) -> Call:
    """Make attention over several requests, rows and leaves."""
    return paged_case(generator, move).call


def append_prompts(generator: torch.Generator, move: Move) -> Call:
    """Make attention of prompts, whose rows fill several tiles."""
    return paged_case(generator, move, qo_len=_number(generator, 30, 90), most_tokens=300).call


def append_long(generator: torch.Generator, move: Move) -> Call:
    """Make attention over several chunks of 2,048 tokens, which blocks may share."""
    head_dim, rows = _one_of(generator, 64, 128), _one_of(generator, 1, 5, 9)
    return paged_case(generator, move, most_tokens=7000, head_dim=head_dim, qo_len=rows).call


def append_8bit_attention(generator: torch.Generator, move: Move) -> Call:
    """Make attention over int8 and fp8 caches."""
    return paged_case(generator, move, cache_dtype=_one_of(generator, *CACHES_8BIT)).call


def append_latent_attention(generator: torch.Generator, move: Move) -> Call:
    """Make attention over latents, which CUDA supports in 16 bits only."""
    dtype = _one_of(generator, torch.bfloat16, torch.float16)
    return paged_case(generator, move, head_dim=LATENT_KEY, dtype=dtype).call


def rope_append_latent(generator: torch.Generator, move: Move) -> Call:
    """Make a call that appends latents, normalized or not, and rotated keys to a cache of zeros."""
    rows, heads, dtype = _number(generator, 1, 12), _number(generator, 1, 9), _dtype(generator)
    q = move(_randn(generator, rows, heads, LATENT_KEY, dtype=dtype))
    kv = move(_randn(generator, rows, LATENT_KEY, dtype=dtype))
    slots = move(torch.randperm(96, generator=generator)[:rows])
    positions = move(torch.randint(0, 500, (rows,), generator=generator).int())
    cos_sin = move(attention.rope_cos_sin(500, 64, 10000.0))
    weight = move(_randn(generator, 512, dtype=dtype)) if _number(generator, 0, 1) else None
    interleaved = bool(_number(generator, 0, 1))

    def call() -> list[Tensor]:
        cache = torch.zeros(6, 16, 1, LATENT_KEY, dtype=dtype, device=q.device)
        out = attention.rope_append_latent(
            q, kv, cache, slots, positions, cos_sin, interleaved=interleaved, norm_weight=weight
        )
        return [out, cache]

    return call


def merge_states(generator: torch.Generator, move: Move) -> Call:
    """Make a merge of states of any weight, with empty ones among them."""
    states, rows, heads = (_number(generator, 1, n) for n in (9, 6, 4))
    outs = move(_randn(generator, states, rows, heads, 64, dtype=_dtype(generator)))
    lses = torch.randn(states, rows, heads, generator=generator) * 10
    lses[torch.rand(lses.shape, generator=generator) < 0.2] = -torch.inf
    lses = move(lses)
    return lambda: list(attention.merge_states(outs, lses))


def _logits(generator: torch.Generator, rows: int) -> Tensor:
    vocab = _number(generator, 2, 6000)
    dtype = LOGITS_DTYPES[_number(generator, 0, 1)]
    return _randn(generator, rows, vocab, dtype=dtype) * 4


def sample(generator: torch.Generator, move: Move) -> Call:
    """Make rows with all kinds of filters; half of the rows are greedy."""
    rows = _number(generator, 1, 5)
    logits = move(_logits(generator, rows))
    filters = {
        "temperature": (torch.rand(rows, generator=generator) - 0.5).clamp(min=0) * 3,
        "top_k": torch.randint(0, 60, (rows,), generator=generator).int(),
        "top_p": 1 - torch.rand(rows, generator=generator) * 0.9,
        "seeds": torch.randint(0, 1 << 40, (rows,), generator=generator),
    }
    given = sampling.SamplingTensors(**{name: move(tensor) for name, tensor in filters.items()})
    positions = move(torch.randint(0, 9000, (rows,), generator=generator).int())
    return lambda: [sampling.sample(logits, positions, sampling=given)]


def verify(generator: torch.Generator, move: Move) -> Call:
    """Make chains of four drafts, the most probable tokens or random ones, under every strategy."""
    batch, drafts = _number(generator, 1, 3), 4
    logits = _logits(generator, batch * (drafts + 1))
    likely = logits.argmax(-1).view(batch, -1)[:, :drafts].int()
    other = torch.randint(0, logits.shape[1], likely.shape, generator=generator).int()
    given = torch.where(torch.rand(likely.shape, generator=generator) < 0.7, likely, other)
    strategy = move(torch.randint(0, 3, (batch,), generator=generator).int())
    filters = sampling.SamplingTensors(
        temperature=move(torch.full((batch,), 0.9)),
        top_p=move(1 - torch.rand(batch, generator=generator) * 0.5),
        seeds=move(torch.randint(0, 1 << 40, (batch,), generator=generator)),
    )
    positions = move(torch.randint(0, 9000, (batch,), generator=generator).int())
    indptr = move(torch.arange(batch + 1, dtype=torch.int32) * (drafts + 1))
    moved, chains = move(logits), sampling.Drafts(indptr, move(given.contiguous()))
    return lambda: list(
        sampling.verify(moved, chains, positions, strategy=strategy, sampling=filters)
    )


def top_logprobs(generator: torch.Generator, move: Move) -> Call:
    """Make a query for the most probable tokens and their logprobs."""
    logits = move(_logits(generator, _number(generator, 1, 4)))
    n = min(5, logits.shape[1])
    return lambda: list(sampling.top_logprobs(logits, n))


def moe_route(generator: torch.Generator, move: Move) -> Call:
    """Make a routing by softmax or sigmoid, with or without groups."""
    groups = _one_of(generator, 1, 4)
    experts, top_k = groups * _number(generator, 4, 40), _number(generator, 1, 4)
    shape = (_number(generator, 1, 12), experts)
    logits = move(_randn(generator, *shape, dtype=torch.float32))
    bias = move(_randn(generator, experts, dtype=torch.float32) / 8)
    options: dict[str, Any] = {"num_groups": groups, "top_k_groups": max(1, groups // 2)}
    options["scoring"] = ("softmax", "sigmoid")[_number(generator, 0, 1)]
    return lambda: list(moe.moe_route(logits, top_k, bias=bias, min_sum=1e-20, **options))


def moe_experts(generator: torch.Generator, move: Move) -> Call:
    """Make a mixture of experts: sorted pairs, the product of each expert, and the sum per row."""
    inputs, outputs = 32 * _number(generator, 1, 8), 16 * _number(generator, 1, 8)
    dtype = _dtype(generator)
    return _experts(
        generator,
        move,
        inputs,
        dtype,
        lambda: dense.pack_weight(move(_randn(generator, outputs, inputs, dtype=dtype))),
    )


def integer_experts(generator: torch.Generator, move: Move) -> Call:
    """Make a mixture of experts with int8 or int4 weights."""
    form = _integer_form(generator, ordered=False)
    inputs, outputs = _number(generator, 1, 300), _number(generator, 1, 100)
    make = partial(_quantized, generator, move, form, outputs, inputs)
    return _experts(generator, move, inputs, _dtype(generator), make)


def fp8_experts(generator: torch.Generator, move: Move) -> Call:
    """Make a mixture of experts with fp8 weights."""
    form = QuantizedForm("fp8", "float", _one_of(generator, 0, 128))
    inputs, outputs = _number(generator, 1, 300), _number(generator, 1, 100)
    make = partial(_quantized, generator, move, form, outputs, inputs)
    return _experts(generator, move, inputs, _dtype(generator), make)


def _experts(
    generator: torch.Generator,
    move: Move,
    inputs: int,
    dtype: torch.dtype,
    make_weight: Callable[[], dense.PackedWeight],
) -> Call:
    rows, experts, top_k = (_number(generator, 1, most) for most in (20, 6, 4))
    x = move(_randn(generator, rows, inputs, dtype=dtype))
    stacked = moe.stack_experts((make_weight() for _ in range(experts)), experts)
    ids = move(torch.randint(-1, experts, (rows, top_k), generator=generator).int())
    scales = move(torch.rand(rows, top_k, generator=generator))

    def call() -> list[Tensor]:
        order = moe.moe_sort(ids, experts)
        out = x.new_zeros(rows * top_k, stacked.num_outputs, dtype=torch.float32)
        moe.moe_linear(x, stacked, order.expert_indptr, order.row_indices, out=out)
        return [order.expert_indptr, order.places, moe.moe_combine(out, order.places, scales)]

    return call


def output_gate(generator: torch.Generator, move: Move) -> Call:
    """Make outputs gated by a sigmoid, and outputs gated by silu after a norm."""
    shape = (_number(generator, 1, 9), _number(generator, 1, 6), 16 * _number(generator, 1, 16))
    dtype = _dtype(generator)
    x, gate = (move(_randn(generator, *shape, dtype=dtype)) for _ in range(2))
    weight = move(_randn(generator, shape[-1], dtype=dtype))
    return lambda: [
        dense.output_gate(x, gate),
        dense.output_gate(x, gate, "silu", norm_weight=weight),
    ]


def linear_attention_rows(generator: torch.Generator, move: Move) -> Call:
    """Make requests that begin and continue: the convolution, then both ops with states."""
    keys, each, rows = (_number(generator, 1, most) for most in (3, 3, 12))
    key_dim, value_dim = (16 * _number(generator, 1, 8) for _ in range(2))
    values, dtype = keys * each, _dtype(generator)
    sizes = (keys * key_dim, keys * key_dim, values * value_dim)
    x = move(_randn(generator, 2 * rows, sum(sizes), dtype=dtype))
    weight = move(_randn(generator, 4, sum(sizes), dtype=dtype))
    a, b = (move(_randn(generator, 2 * rows, values, dtype=dtype)) for _ in range(2))
    a_log, dt_bias = (move(_randn(generator, values, dtype=torch.float32)) for _ in range(2))
    decays = move(_randn(generator, 2 * rows, values, key_dim, dtype=dtype))
    decay_bias = move(_randn(generator, values, key_dim, dtype=torch.float32))
    conv = move(_randn(generator, 2, 8, sum(sizes), dtype=dtype))
    states = move(_randn(generator, 2, 5, values, key_dim, value_dim, dtype=torch.float32))
    given = [
        move(torch.tensor(one, dtype=torch.int32))
        for one in ([1, 0], [0, rows, 2 * rows], [rows, rows + 9])
    ]

    def call() -> list[Tensor]:
        kept, space, inputs = states.clone(), states.clone(), conv.clone()
        by_channel = states.clone()
        mixed = linear_attention.causal_conv1d(x, weight, inputs, *given, bias=weight[0])
        q, k, v = mixed.split(list(sizes), 1)
        heads = [
            q.unflatten(1, (keys, -1)),
            k.unflatten(1, (keys, -1)),
            v.unflatten(1, (values, -1)),
        ]
        out = linear_attention.gated_delta_rule(*heads, a, b, a_log, dt_bias, kept, *given)
        decayed = linear_attention.gated_delta_rule(
            *heads, decays, b, a_log, decay_bias, by_channel, *given
        )
        query, key, value = heads
        queried = linear_attention.selective_state_update(
            value, a, key, query, a_log, dt_bias, dt_bias, space, *given
        )
        return [mixed, out, kept, decayed, by_channel, queried, space]

    return call


CACHES_8BIT = (torch.int8, torch.float8_e4m3fn)
LATENT_KEY = 576  # elements per token of a latent-attention key

# Limits for ops that use mma rounding or ex2 and similar functions. A unit in the last place of
# bf16 is 2^-8, and the final rounding hides earlier ones. The element limits are more than twice
# the errors of another mma rule and of approximate functions that are two units off, over forty
# seeds: 1 unit in 16-bit and 15 units in float32 results.
APPROXIMATE = Limits(most=2.0**-8, ulps=3.0, ulps_fp32=64.0)
# Token choices, which approximate powers decide where two tokens are nearly equal.
CHOICES = Limits(differing=0.01)
# Ids of experts are choices; their weights go through exp, which is another function on a GPU.
ROUTES = replace(APPROXIMATE, differing=0.01)
# A state decays by exp of minus a product of exp and log1p, whose error the exponent multiplies,
# and its elements may cancel. Two units in each function gave 13,663 units in an element, and 1e-5
# of the root mean square.
DECAYS = replace(APPROXIMATE, ulps_fp32=2.0**15)

# Verification first, in case the time is up before the end.
OPS: dict[str, Op] = {
    "verify": Op(verify, CHOICES),
    "sample": Op(sample, CHOICES),
    "append_attention": Op(append_attention, APPROXIMATE),
    "linear": Op(linear, APPROXIMATE),
    "linear int8 and int4": Op(integer_linear),
    "linear fp8": Op(fp8_linear, APPROXIMATE),
    "append_attention 8-bit": Op(append_8bit_attention, APPROXIMATE),
    "append_attention prompts": Op(append_prompts, APPROXIMATE),
    "append_attention long": Op(append_long, APPROXIMATE),
    "moe_route": Op(moe_route, ROUTES),
    "moe experts": Op(moe_experts, APPROXIMATE),
    "moe experts int8 and int4": Op(integer_experts),
    "moe experts fp8": Op(fp8_experts, APPROXIMATE),
    "append_attention latents": Op(append_latent_attention, APPROXIMATE),
    "linear attention": Op(linear_attention_rows, DECAYS),
    "rope_append_kv": Op(rope_append_kv, APPROXIMATE),
    "rope_append_latent": Op(rope_append_latent, APPROXIMATE),
    "merge_states": Op(merge_states, APPROXIMATE),
    "top_logprobs": Op(top_logprobs, APPROXIMATE),
    "rms_norm": Op(rms_norm, APPROXIMATE),
    "silu_mul": Op(silu_mul, APPROXIMATE),
    "output_gate": Op(output_gate, APPROXIMATE),
    "embedding": Op(embedding),
    "gather_output_rows": Op(gather_output_rows),
    "prepare_batch": Op(prepare_batch),
    "ngram_propose": Op(ngram_propose),
}
