# SPDX-License-Identifier: Apache-2.0
"""`linear` on cold weights: the four matrices of a Qwen3-0.6B layer, and its LM head.

A call multiplies all four matrices of a layer; calls rotate over layers of at least 512 MiB, so
that every weight comes from memory. Bytes are those of the weights; torch multiplies the same
weights. One matrix of a small model, which stays in cache, shows the overhead of a call. On a GPU
the layer is that of an 8B model, and the elementwise ops of a layer are timed as well.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from specops.dense import (
    PackedWeight,
    embedding,
    linear,
    linear_workspace_size,
    pack_weight,
    rms_norm,
    silu_mul,
)
from torch import Tensor

from bench.common import Bench, Figure
from bench.cuda import Call, CudaBench, bandwidth_figure, time_figure
from bench.limits import add_share, instructions

COLD_BYTES = 512 << 20
LAYER = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
HEAD = ((151936, 1024),)
SMALL = (1024, 256)


def run_linear(bench: Bench) -> None:
    """Measure `linear` by number of rows M, against the read bandwidth, M=1 and torch.

    A fused gate and up projection and a small weight that stays in cache are measured as well.
    """
    for dtype, name, row_counts in (
        (torch.bfloat16, "bf16", (1, 2, 3, 4, 5, 8, 64, 256)),
        (torch.float32, "fp32", (1, 2, 5, 8)),
    ):
        _matrices(bench, f"linear.{name}.layer", LAYER, dtype, row_counts)
    _matrices(bench, "linear.bf16.head", HEAD, torch.bfloat16, (1, 5, 8))
    _gate_up(bench)
    _cached(bench)


def _gate_up(bench: Bench) -> None:
    """Time gate, up and activation of a layer in one call, and in two calls."""
    outputs, inputs = LAYER[2]
    copies = -(-COLD_BYTES // (2 * outputs * inputs))
    plain = [torch.randn(outputs, inputs).to(torch.bfloat16) * 0.02 for _ in range(copies)]
    weights = {
        "one call": [pack_weight(weight, activation="silu") for weight in plain],
        "two calls": [pack_weight(weight) for weight in plain],
    }
    for rows in (1, 5, 64):
        x = torch.randn(rows, inputs).to(torch.bfloat16)
        calls = {name: _in_turn(_gated(x, packed, outputs)) for name, packed in weights.items()}
        with torch.inference_mode():
            timing = bench.alternate(calls, rounds=7, window_s=0.1)
        bench.add(
            Figure(
                f"linear.bf16.gate_up.m{rows}",
                f"linear with gate_up, {inputs} to {outputs}, M={rows}, cold weights",
                timing.median("one call") * 1e6,
                "us",
                "linear, then silu_mul",
                timing.median("two calls") * 1e6,
                timing.ratio("two calls", "one call"),
                "ratio >= 0.97",
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s("one call"),
            )
        )


def _gated(x: Tensor, weights: list[PackedWeight], outputs: int) -> list[Call]:
    """Return one call per weight that computes silu(gate) * up: fused, or linear plus silu_mul."""
    apart = x.new_empty(x.shape[0], outputs)
    out = x.new_empty(x.shape[0], outputs // 2)
    multiply = _linear(x.shape[0], weights)

    def call(weight: PackedWeight) -> None:
        if weight.activation:
            multiply(x, weight, out=out)
        else:
            silu_mul(multiply(x, weight, out=apart), out=out)

    return [partial(call, weight) for weight in weights]


def _in_turn(calls: list[Call]) -> Callable[[], None]:
    turns = cycle(calls)

    def call() -> None:
        next(turns)()

    return call


def _cached(bench: Bench) -> None:
    """Time one call on weights of 512 KiB, including the allocation of its output."""
    weight = torch.randn(SMALL).to(torch.bfloat16) * 0.02
    packed = pack_weight(weight)
    for rows in (1, 5):
        x = torch.randn(rows, SMALL[1]).to(torch.bfloat16)
        with torch.inference_mode():
            timing = bench.alternate(
                {"ours": partial(linear, x, packed), "torch": partial(F.linear, x, weight)}
            )
        bench.add(
            Figure(
                f"linear.bf16.small.m{rows}",
                f"linear {SMALL[1]} to {SMALL[0]}, M={rows}, weights in cache: time of a call",
                timing.median("ours") * 1e6,
                "us",
                "torch",
                timing.median("torch") * 1e6,
                timing.ratio("torch", "ours"),
                "ratio >= 1",
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s(),
            )
        )


def _matrices(
    bench: Bench,
    prefix: str,
    shapes: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    row_counts: tuple[int, ...],
) -> None:
    element = torch.empty(0, dtype=dtype).element_size()
    num_bytes = element * sum(outputs * inputs for outputs, inputs in shapes)
    copies = -(-COLD_BYTES // num_bytes)
    plain = [[torch.randn(shape).to(dtype) * 0.02 for shape in shapes] for _ in range(copies)]
    packed = [[pack_weight(weight) for weight in layer] for layer in plain]
    cases: dict[str, Callable[[], object]] = {}
    for rows in row_counts:
        inputs = [torch.randn(rows, shape[1]).to(dtype) for shape in shapes]
        cases[f"m{rows}"] = _ours(packed, inputs)
        cases[f"torch m{rows}"] = _torch(plain, inputs)
    with torch.inference_mode():
        timing = bench.alternate(cases, rounds=7, window_s=0.1)
    in_bf16 = dtype == torch.bfloat16
    for rows in row_counts:
        case, peer = f"m{rows}", f"torch m{rows}"
        flops = 2 * rows * num_bytes / element
        limit = {True: "ratio >= 0.9" if rows <= 5 else "ratio >= 0.8"}.get(in_bf16 and rows <= 8)
        if limit:
            add_share(
                bench,
                f"{prefix}.m{rows}",
                f"{prefix}, M={rows}, cold weights: share of read bandwidth",
                timing,
                case,
                num_bytes,
                instructions(bench, "bf16", num_bytes / 2, rows),
                bar=limit,
            )
        bench.add(
            Figure(
                f"{prefix}.m{rows}.vs_torch",
                f"{prefix}, M={rows}, cold weights: times faster than torch F.linear",
                flops * 1e-9 / timing.median(case),
                "GFLOP/s",
                "torch",
                flops * 1e-9 / timing.median(peer),
                timing.ratio(peer, case),
                "ratio >= 0.9" if in_bf16 and rows >= 64 else None,
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s(case, peer),
            )
        )
    # In fp32, torch takes 1.5 to 3 times as long with more rows than one; ours must stay far below.
    bench.add(
        Figure(
            f"{prefix}.m5_over_m1",
            f"{prefix}: time at M=5 over M=1 (the peer's value is torch's ratio)",
            timing.median("m5") * 1e6,
            "us",
            "torch M=5/M=1",
            timing.ratio("torch m5", "torch m1"),
            timing.ratio("m5", "m1"),
            "ratio <= 1.1" if in_bf16 else "ratio <= 1.2",
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s("m1", "m5"),
        )
    )


def _ours(packed: list[list[PackedWeight]], inputs: list[Tensor]) -> Callable[[], None]:
    layers = cycle(packed)
    outs = [
        torch.empty(x.shape[0], weight.num_outputs, dtype=x.dtype)
        for x, weight in zip(inputs, packed[0], strict=True)
    ]

    def call() -> None:
        for x, weight, out in zip(inputs, next(layers), outs, strict=True):
            linear(x, weight, out=out)

    return call


def _torch(plain: list[list[Tensor]], inputs: list[Tensor]) -> Callable[[], None]:
    layers = cycle(plain)

    def call() -> None:
        for x, weight in zip(inputs, next(layers), strict=True):
            F.linear(x, weight)

    return call


# Shapes on a GPU: the layer and the head of Llama 3.1 8B

CUDA_LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
CUDA_HEAD = ((128256, 4096),)
# Row counts that cover all forms of the kernel: streamed weights, and tiles of three sizes.
CUDA_ROWS = (1, 2, 4, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def run_linear_cuda(bench: CudaBench) -> None:
    """Measure the fraction of the read bandwidth at M rows, and torch's matmul in turn."""
    _cuda_matrices(bench, "layer", CUDA_LAYER, CUDA_ROWS)
    _cuda_matrices(bench, "head", CUDA_HEAD, (1, 5, 8, 64, 512, 1280))
    _cuda_matrices(bench, "small", (SMALL,), (1, 5, 8))
    _cuda_gate_up(bench)


def _cuda_matrices(
    bench: CudaBench, name: str, shapes: tuple[tuple[int, int], ...], row_counts: tuple[int, ...]
) -> None:
    shapes = bench.pick(shapes, tuple((a // 64 or 1, b // 64 or 1) for a, b in shapes))
    num_bytes = 2 * sum(outputs * inputs for outputs, inputs in shapes)
    copies = range(bench.copies(num_bytes)) if name != "small" else range(1)
    plain = [[bench.randn(*shape, scale=0.02) for shape in shapes] for _ in copies]
    packed = [[pack_weight(weight) for weight in layer] for layer in plain]
    cases: dict[str, list[Call]] = {}
    for rows in row_counts:
        xs = [bench.randn(rows, inputs) for _, inputs in shapes]
        outs = [bench.randn(rows, outputs) for outputs, _ in shapes]
        cases[f"m{rows}"] = [_each(_linear(rows, layer), xs, layer, outs) for layer in packed]
        cases[f"torch m{rows}"] = [
            _each(torch.mm, xs, [weight.t() for weight in layer], outs) for layer in plain
        ]
    timings = bench.time(cases)
    for rows in row_counts:
        case, id = f"m{rows}", f"linear.{name}.m{rows}"
        what = f"linear bf16, {name}, M={rows}"
        if name != "small" and rows <= 64:
            bar = "ratio >= 0.8" if rows <= 8 else None
            text = f"{what}, cold weights: share of read bandwidth"
            bench.add(bandwidth_figure(timings, case, id, text, num_bytes, bar))
        text = f"{what}: times faster than torch.mm"
        peers = {f"torch m{rows}": "torch.mm"}
        bar = bench.goal("G9") if rows <= 16 else None
        bench.add(time_figure(timings, case, f"{id}.vs_torch", text, peers, bar))
    text = f"linear bf16, {name}: time at M=8 over M=1"
    id = f"linear.{name}.m8_over_m1"
    bench.add(time_figure(timings, "m8", id, text, over=("m1", "M=1"), bar="ratio <= 1.1"))


def _cuda_gate_up(bench: CudaBench) -> None:
    """Time gate, up and activation in one launch, and in two."""
    outputs, inputs = bench.pick(CUDA_LAYER[2], (64, 64))
    copies = range(bench.copies(2 * outputs * inputs))
    plain = [bench.randn(outputs, inputs, scale=0.02) for _ in copies]
    fused = [pack_weight(weight, activation="silu") for weight in plain]
    apart = [pack_weight(weight) for weight in plain]
    for rows in (1, 8, 64, 512, 2048):
        x = bench.randn(rows, inputs)
        cases = {"one call": _gated(x, fused, outputs), "two calls": _gated(x, apart, outputs)}
        timings = bench.time(cases)
        id, what = f"linear.gate_up.m{rows}", f"linear bf16 with gate_up, M={rows}"
        peers = {"two calls": "linear, then silu_mul"}
        bench.add(time_figure(timings, "one call", id, what, peers, "ratio >= 1"))


def _linear(rows: int, weights: list[PackedWeight]) -> Callable[..., object]:
    """Return `linear` bound to a zeroed workspace that is large enough for all of the weights."""
    floats = max(linear_workspace_size(rows, weight) for weight in weights)
    device = weights[0].data.device
    workspace = torch.zeros(floats, dtype=torch.float32, device=device) if floats else None
    return partial(linear, workspace=workspace)


def _each(op: Callable[..., object], xs: list[Tensor], weights: list, outs: list[Tensor]) -> Call:
    def call() -> None:
        for x, weight, out in zip(xs, weights, outs, strict=True):
            op(x, weight, out=out)

    return call


def run_elementwise_cuda(bench: CudaBench) -> None:
    """Time rms_norm, silu_mul and embedding: 8 rows for latency, 4,096 for bandwidth."""
    width, vocab = bench.pick((4096, 128256), (64, 256))
    weight, table = bench.randn(width), bench.randn(vocab, width)
    for rows in bench.pick((8, 4096), (2, 8)):
        sets = range(bench.copies(2 * rows * width) if rows > 8 else 1)
        xs = [bench.randn(rows, width) for _ in sets]
        residuals = [bench.randn(rows, width) for _ in sets]
        pairs = [bench.randn(rows, 2 * width) for _ in sets]
        ids = [bench.ints(torch.randint(vocab, (rows,))) for _ in sets]
        outs = [bench.randn(rows, width) for _ in sets]

        cases: dict[str, list[Call]] = {
            "rms_norm": [
                partial(rms_norm, x, weight, 1e-6, residual=residual, out=out)
                for x, residual, out in zip(xs, residuals, outs, strict=True)
            ],
            "silu_mul": [partial(silu_mul, x, out=o) for x, o in zip(pairs, outs, strict=True)],
            "embedding": [
                partial(embedding, i, table, out=o) for i, o in zip(ids, outs, strict=True)
            ],
        }
        timings = bench.time(cases)
        moved = {"rms_norm": 4, "silu_mul": 3, "embedding": 2}
        for case in cases:
            id, what = f"elementwise.{case}.rows{rows}", f"{case} bf16, {rows} rows of {width}"
            if rows <= 8:
                bench.add(time_figure(timings, case, id, what))
            else:
                num_bytes = 2 * rows * width * moved[case]
                text = f"{what}: bytes read and written, beside the read line"
                bench.add(bandwidth_figure(timings, case, id, text, num_bytes, None))
