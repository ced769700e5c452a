# SPDX-License-Identifier: Apache-2.0
"""GPU benchmarks without goals: quantized weights, experts, latents, states, prompts, long caches.

These families come after those of the goals. Shapes are those of Llama-3-8B (quantized weights),
Qwen3-30B-A3B (experts), DeepSeek-V3 (latents) and Qwen3-Next-80B (linear attention).
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from specops import linear_attention, moe
from specops.attention import (
    PagedBatch,
    PagedKv,
    append_attention,
    attention_workspace_size,
)
from specops.dense import PackedWeight, linear, linear_workspace_size, pack_weight
from specops.quantization import QuantizedWeight, num_groups
from torch import Tensor

from bench.common import Figure
from bench.cuda import Call, CudaBench, bandwidth_figure, seconds, time_figure
from bench.cuda_caches import HEAD_DIM, KV_HEADS, TOKEN_BYTES, TOKEN_BYTES_8BIT, Cache, load


class Form(NamedTuple):
    """A kind of weight, its group of inputs and the rounding of inputs."""

    kind: str
    group: int
    activations: str

    @property
    def name(self) -> str:
        """Part of a figure's id."""
        group = f"g{self.group}" if self.group else "channel"
        return f"{self.kind}.{group}.{self.activations}"


FORMS = (
    Form("int4", 128, "int8"),
    Form("int4", 32, "int8"),
    Form("int4", 128, "int16"),
    Form("int8", 0, "int16"),
    Form("int8", 0, "int8"),
    Form("fp8", 128, "float"),
)
QUANTIZED = (28672, 4096)  # gate and up of an 8B model
QUANTIZED_ROWS = (1, 5, 8, 16, 64, 512, 2048)


def _weight(
    bench: CudaBench, form: Form | None, outputs: int, inputs: int, activation: str | None = None
) -> PackedWeight:
    """Return a random packed weight; bf16 without a form."""
    if form is None:
        return pack_weight(bench.randn(outputs, inputs, scale=0.02), activation=activation)
    values = bench.randn(outputs, inputs, scale=1.0)
    if form.kind == "fp8":
        values = values.to(torch.float8_e4m3fn)
    elif form.kind == "int8":
        values = (values * 40).clamp(-127, 127).to(torch.int8)
    else:
        values = (values * 3 + 8).clamp(0, 15).to(torch.uint8)
    blocks = -(-outputs // 128) if form.kind == "fp8" else outputs
    scales = torch.full((blocks, num_groups(inputs, form.group)), 1e-3, device=bench.device)
    quantized = QuantizedWeight(form.kind, values, scales, group=form.group)
    return pack_weight(quantized, activations=form.activations, activation=activation)


def _bytes(weight: PackedWeight) -> int:
    return weight.data.nbytes + (0 if weight.scales is None else weight.scales.nbytes)


def _product(bench: CudaBench, rows: int, weights: list[PackedWeight], inputs: int) -> list[Call]:
    x, out = bench.randn(rows, inputs), bench.randn(rows, weights[0].num_outputs)
    floats = max(linear_workspace_size(rows, weight) for weight in weights)
    workspace = torch.zeros(floats, device=bench.device) if floats else None
    return [partial(linear, x, one, out=out, workspace=workspace) for one in weights]


def run_quantized_cuda(bench: CudaBench) -> None:
    """Measure `linear` of each kind of weights: share of bandwidth, and time over that of bf16."""
    outputs, inputs = bench.pick(QUANTIZED, (128, 256))
    plain = [_weight(bench, None, outputs, inputs) for _ in range(2)]
    for form in FORMS:
        first = _weight(bench, form, outputs, inputs)
        copies = bench.copies(_bytes(first)) - 1
        weights = [first, *(_weight(bench, form, outputs, inputs) for _ in range(copies))]
        for rows in bench.pick(QUANTIZED_ROWS, (1, 9, 33)):
            cases = {
                "ours": _product(bench, rows, weights, inputs),
                "bf16": _product(bench, rows, plain, inputs),
            }
            timings = bench.time(cases)
            id = f"quantized.{form.name}.m{rows}"
            what = f"linear {form.name}, {outputs} x {inputs}, M={rows}, cold weights"
            over = ("bf16", "linear bf16")
            bench.add(time_figure(timings, "ours", f"{id}.over_bf16", what, over=over))
            if rows <= 16:
                share = f"{what}: share of read bandwidth"
                bench.add(bandwidth_figure(timings, "ours", id, share, _bytes(first), None))
        del weights, cases


EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
MOE_FORMS = (None, Form("int8", 0, "int16"), Form("int4", 128, "int8"), Form("fp8", 128, "float"))
MOE_ROWS = (1, 5, 16, 64, 2048)
TURNS = 4  # sets of rows, which choose different experts


def run_moe_cuda(bench: CudaBench) -> None:
    """Measure the experts' products and sums, from sorted pairs: microseconds and bandwidth."""
    experts, hidden, width = bench.pick((EXPERTS, HIDDEN, WIDTH), (4, 256, 128))
    for form in MOE_FORMS:
        up, down = (
            moe.stack_experts((_weight(bench, form, *shape) for _ in range(experts)), experts)
            for shape in ((2 * width, hidden, "silu"), (hidden, width))
        )
        expert_bytes = (_bytes(up) + _bytes(down)) / experts
        name = form.name if form else "bf16"
        for rows in bench.pick(MOE_ROWS, (1, 9)):
            top_k = bench.pick(TOP_K, 2)
            calls, distinct = [], 0.0
            for _ in range(TURNS):
                scores = bench.randn(rows, experts, dtype=torch.float32)
                ids, scales = moe.moe_route(scores, top_k)
                distinct += len(ids.unique()) / TURNS
                calls.append(_experts(bench, up, down, ids, scales))
            timings = bench.time({"ours": calls})
            what = f"experts in {name}, {rows} rows, {distinct:.0f} of {experts} experts"
            text = f"{what}: share of read bandwidth"
            id, num_bytes = f"moe.{name}.m{rows}", distinct * expert_bytes
            bench.add(bandwidth_figure(timings, "ours", id, text, num_bytes, None))


def _experts(
    bench: CudaBench, up: PackedWeight, down: PackedWeight, ids: Tensor, scales: Tensor
) -> Call:
    """Return a call of both products, and of the sum over each row's experts."""
    rows, pairs = ids.shape[0], ids.numel()
    x, out = (bench.randn(rows, down.num_outputs) for _ in range(2))
    gated = bench.randn(pairs, up.num_outputs // 2)
    of_pairs = bench.randn(pairs, down.num_outputs, dtype=torch.float32)
    order = moe.moe_sort(ids, up.data.shape[0])

    def call() -> None:
        moe.moe_sort(ids, up.data.shape[0], order=order)
        moe.moe_linear(x, up, order.expert_indptr, order.row_indices, out=gated)
        moe.moe_linear(gated, down, order.expert_indptr, out=of_pairs)
        moe.moe_combine(of_pairs, order.places, scales, out=out)

    return call


LATENT_KEY, LATENT_VALUE, PAGE_SIZE = 576, 512, 64
LATENT_LOADS = {"b32.4k": [4096] * 32, "b1.32k": [32768], "b4.128k": [131072] * 4}


def run_latent_cuda(bench: CudaBench) -> None:
    """Measure attention over latents with 16 and 128 heads: share of bandwidth, by rows."""
    for name, lens in LATENT_LOADS.items():
        one = load(bench, name, *lens)
        num_pages = [-(-length // PAGE_SIZE) for length in one.kv_lens]
        num_bytes = 2 * LATENT_KEY * sum(one.kv_lens)
        sets, total = bench.copies(num_bytes), sum(num_pages)
        cache = bench.randn(sets * total, PAGE_SIZE, 1, LATENT_KEY)
        pages = [bench.ints(torch.arange(total) + i * total) for i in range(sets)]
        indptr = bench.ints([0, *torch.tensor(num_pages).cumsum(0).tolist()])
        lens_, batch = bench.ints(one.kv_lens), len(one.kv_lens)
        for heads in bench.pick((16, 128), (16,)):
            cases: dict[str, list[Call]] = {}
            for rows in (1, 5):
                q = bench.randn(batch * rows, heads, LATENT_KEY)
                size = attention_workspace_size(q.shape, cache.shape, total, batch, bench.device)
                workspace = torch.zeros(max(1, size), device=bench.device)
                out = bench.randn(batch * rows, heads, LATENT_VALUE)
                qo_indptr = bench.ints(torch.arange(batch + 1) * rows)
                cases[f"q{rows}"] = [
                    partial(
                        append_attention,
                        q,
                        PagedKv(cache),
                        PagedBatch(qo_indptr, indptr, part, lens_),
                        sm_scale=192**-0.5,
                        out=out,
                        workspace=workspace,
                    )
                    for part in pages
                ]
            timings = bench.time(cases)
            for case in cases:
                what = f"latent attention bf16 {name}, {heads} heads, {case[1:]} rows"
                text = f"{what}: share of read bandwidth"
                id = f"latent.{name}.h{heads}.{case}"
                bench.add(bandwidth_figure(timings, case, id, text, num_bytes, None))
        del cache, cases


KEY_HEADS, VALUE_HEADS, STATE_DIM, WINDOW = 16, 32, 128, 8
STATE_LOADS = {"b32.r1": (32, 1), "b32.r5": (32, 5), "b1.prompt": (1, 2048), "b8.prompt": (8, 2048)}


def run_linear_attention_cuda(bench: CudaBench) -> None:
    """Measure the convolution and the gated delta rule, by requests and rows of each."""
    for name, real in STATE_LOADS.items():
        batch, rows = bench.pick(real, (2, min(real[1], 9)))
        keys, values, dim = bench.pick((KEY_HEADS, VALUE_HEADS, STATE_DIM), (1, 2, 32))
        sizes = [keys * dim, keys * dim, values * dim]
        x, mixed = (bench.randn(batch * rows, sum(sizes)) for _ in range(2))
        taps = bench.randn(4, sum(sizes))
        gates = [bench.randn(batch * rows, values) for _ in range(2)]
        gates += [bench.randn(values, dtype=torch.float32) for _ in range(2)]
        inputs = bench.randn(batch, WINDOW, sum(sizes))
        states = bench.randn(batch, WINDOW, values, dim, dim, dtype=torch.float32)
        where = [
            bench.ints(torch.arange(batch)),
            bench.ints(torch.arange(batch + 1) * rows),
            bench.ints([rows + 9] * batch),
        ]
        heads = [part.unflatten(1, (-1, dim)) for part in mixed.split(sizes, 1)]
        out = bench.randn(batch * rows, values, dim)
        cases: dict[str, list[Call]] = {
            "conv": [partial(linear_attention.causal_conv1d, x, taps, inputs, *where, out=mixed)],
            "rule": [
                partial(linear_attention.gated_delta_rule, *heads, *gates, states, *where, out=out)
            ],
        }
        timings = bench.time(cases)
        for case, op in {"conv": "causal_conv1d", "rule": "gated_delta_rule"}.items():
            what = f"{op} bf16, {batch} requests of {rows} rows"
            bench.add(time_figure(timings, case, f"linear_attention.{name}.{case}", what))


PROMPTS = {"b1.8k": (1, 8192, 8192), "b1.512of32k": (1, 512, 32768), "b4.2k": (4, 2048, 2048)}
KINDS = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
GROUP = 4


def run_prefill_cuda(bench: CudaBench) -> None:
    """Measure prompts and chunks of prompts: TFLOP/s by cache type, and torch's attention."""
    for name, (batch, rows, length) in PROMPTS.items():
        one = load(bench, name, *[length] * batch)
        rows = min(rows, bench.pick(rows, 16))
        cases: dict[str, list[Call]] = {}
        for kind, dtype in KINDS.items():
            cache = Cache(bench, one, dtype=dtype)
            cases[kind] = cache.ours(*cache.queries(bench, rows, GROUP))
        cases["peer"] = [_sdpa(bench, len(one.kv_lens), rows, one.kv_lens[0])]
        timings = bench.time(cases)
        first = one.kv_lens[0] - rows
        pairs = sum(first + row + 1 for row in range(rows)) * len(one.kv_lens)
        flops = 4 * HEAD_DIM * GROUP * KV_HEADS * pairs
        for kind in KINDS:
            took = seconds(timings, kind)
            what = f"append_attention {kind} {name}, group {GROUP}, {rows} rows each"
            id = f"prefill.{name}.{kind}"
            bench.add(Figure(id, what, flops * 1e-12 / took, "TFLOP/s", us=took * 1e6))
            text = f"{what}: times faster than torch's attention in bf16"
            peers = {"peer": "torch SDPA"}
            bench.add(time_figure(timings, kind, f"{id}.vs_torch", text, peers))
        del cache, cases


def _sdpa(bench: CudaBench, batch: int, rows: int, length: int) -> Call:
    """Return a call of torch's attention on contiguous keys and values of all query heads."""
    heads = GROUP * KV_HEADS
    q = bench.randn(batch, heads, rows, HEAD_DIM)
    k, v = (bench.randn(batch, heads, length, HEAD_DIM) for _ in range(2))
    if rows == length:
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    ones = torch.ones(rows, length, dtype=torch.bool, device=bench.device)
    mask = ones.tril(length - rows)
    return partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask)


LONG = {"b1.128k": 1, "b8.128k": 8, "b1.512k": 1, "b1.1m": 1}
LENGTHS = {"128k": 1 << 17, "512k": 1 << 19, "1m": 1 << 20}
LONG_ROWS = (1, 5, 8)


def run_long_cuda(bench: CudaBench) -> None:
    """Measure contexts of 128k to 1M tokens: share of bandwidth, and time over that of one row."""
    for name, batch in LONG.items():
        one = load(bench, name, *[LENGTHS[name.split(".")[1]]] * batch)
        for kind, dtype in KINDS.items():
            cache = Cache(bench, one, dtype=dtype)
            cases = {
                f"q{rows}": cache.ours(*cache.queries(bench, rows, GROUP)) for rows in LONG_ROWS
            }
            timings = bench.time(cases)
            num_bytes = sum(one.kv_lens) * (TOKEN_BYTES if kind == "bf16" else TOKEN_BYTES_8BIT)
            for case in cases:
                what = f"append_attention {kind} {name}, group {GROUP}, {case[1:]} rows"
                id = f"long.{name}.{kind}.{case}"
                text = f"{what}: share of read bandwidth"
                bench.add(bandwidth_figure(timings, case, id, text, num_bytes, None))
            over = ("q1", "1 row")
            id, what = f"long.{name}.{kind}.q8_over_q1", f"append_attention {kind} {name}: 8 rows"
            bench.add(time_figure(timings, "q8", id, what, over=over))
            del cache, cases
