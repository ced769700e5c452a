# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts, from routed rows to their sum, beside the bytes of the experts it reads.

Sizes are those of Qwen3-30B-A3B: 128 experts of width 768, eight a row. Rows choose experts
independently of each other, so five rows read about 35 of them; neighbouring tokens share more.
torch's case computes as transformers does: expert by expert, its rows gathered, and added to the
sum, with bf16 weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from specops import moe
from specops.dense import PackedWeight, pack_weight
from specops.quantization import quantize_weight
from torch import Tensor

from bench.common import Bench, Figure

NUM_EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
ROWS = (1, 5, 16)
# By name: kind and group.
KINDS = {"bf16": ("plain", 0), "int8": ("int8", 0), "int4": ("int4", 128)}


@dataclass
class Weights:
    """Of all experts."""

    gate_up: PackedWeight
    down: PackedWeight
    bytes_of_expert: int


def run_moe(bench: Bench) -> None:
    """Each kind at several numbers of rows; bfloat16 beside torch."""
    generator = torch.Generator().manual_seed(0)

    def matrices(outputs: int, inputs: int) -> list[Tensor]:
        std = inputs**-0.5
        made = (torch.randn(outputs, inputs, generator=generator) for _ in range(NUM_EXPERTS))
        return [(one * std).bfloat16() for one in made]

    gate_up, down = matrices(2 * WIDTH, HIDDEN), matrices(HIDDEN, WIDTH)
    for name, (kind, group) in KINDS.items():
        weights = _packed(gate_up, down, kind, group)
        for rows in ROWS:
            _run(bench, name, weights, rows, gate_up, down)


def _packed(gate_up: list[Tensor], down: list[Tensor], kind: str, group: int) -> Weights:
    def stacked(each: list[Tensor], activation: str | None) -> PackedWeight:
        packed = (
            pack_weight(
                one if kind == "plain" else quantize_weight(one, kind=kind, group=group),
                activation=activation,
            )
            for one in each
        )
        return moe.stack_experts(packed, len(each))

    both = (stacked(gate_up, "silu"), stacked(down, None))
    tensors = [field for weight in both for field in weight if isinstance(field, Tensor)]
    return Weights(*both, sum(one.nbytes for one in tensors) // len(gate_up))


def _run(
    bench: Bench,
    kind: str,
    weights: Weights,
    rows: int,
    gate_up: list[Tensor],
    down: list[Tensor],
) -> None:
    logits = torch.randn(rows, NUM_EXPERTS, generator=torch.Generator().manual_seed(rows))
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16()
    cases = {"ours": _ours(weights, x, logits)}
    if kind == "bf16":
        cases["torch"] = _torch(gate_up, down, x, logits)
    with torch.inference_mode():
        timing = bench.alternate(cases, rounds=7, window_s=0.1)
    distinct = len(moe.moe_route(logits, TOP_K)[0].unique())
    num_bytes = distinct * weights.bytes_of_expert
    what = f"mixture of experts {kind}, {rows} rows, {distinct} of {NUM_EXPERTS} experts"
    bench.add(
        Figure(
            f"moe.{kind}.m{rows}.rate",
            f"{what}: share of read, {num_bytes * 1e-6:.0f} MB",
            num_bytes * 1e-9 / timing.median("ours"),
            "GB/s",
            "read bandwidth",
            timing.read_gb_s("ours"),
            timing.share("ours", num_bytes),
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s("ours"),
        )
    )
    if "torch" not in cases:
        return
    bench.add(
        Figure(
            f"moe.{kind}.m{rows}.vs_torch",
            f"{what}: times faster than torch, expert by expert",
            timing.median("ours") * 1e3,
            "ms",
            "torch, expert by expert",
            timing.median("torch") * 1e3,
            timing.ratio("torch", "ours"),
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s(),
        )
    )


def _ours(weights: Weights, x: Tensor, logits: Tensor) -> Callable[[], object]:
    def call() -> Tensor:
        ids, scales = moe.moe_route(logits, TOP_K, min_sum=0.0)
        order = moe.moe_sort(ids, NUM_EXPERTS)
        gated = moe.moe_linear(x, weights.gate_up, order.expert_indptr, order.row_indices)
        out = moe.moe_linear(gated, weights.down, order.expert_indptr, out_dtype=torch.float32)
        return moe.moe_combine(out, order.places, scales, dtype=x.dtype)

    return call


def _torch(
    gate_up: list[Tensor], down: list[Tensor], x: Tensor, logits: Tensor
) -> Callable[[], object]:
    def call() -> Tensor:
        scales, ids = logits.softmax(-1).topk(TOP_K, -1)
        scales = (scales / scales.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            row, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[row], gate_up[expert]).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, row, part * scales[row, k, None])
        return out

    return call
