# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts op, from routing to the weighted sum, against the bytes that it reads.

Sizes are those of Qwen3-30B-A3B: 128 experts of width 768, eight per row. Random rows choose
experts independently, so five rows read about 35 experts; real neighboring tokens share more. The
second shape is DeepSeek-V3's, with the maximum number of its 256 experts that five rows can need.
Calls rotate over rows with different experts, so that no cache keeps weights. torch's case computes
like transformers with bf16 weights: expert by expert, gathering the expert's rows and adding the
results to the sum.

Then steps of one request run on two layers of the first shape with attention and a small head,
against llama.cpp and against the time to read the expected bytes. Finally, the engine's
start-up measurement of this model is compared: seconds of steps by rows, from which adaptive
verification decides how many drafts to verify.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F
from specops import moe
from specops.dense import PackedWeight, pack_weight
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.quantization import quantize_weight
from torch import Tensor

from bench.bench_engine import load_peers, step_figures
from bench.checkpoints import qwen30
from bench.common import Bench, Figure
from bench.engine_runs import Stepper
from bench.limits import add_share, instructions


@dataclass(frozen=True)
class Shape:
    """Shape of a mixture."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    width: int
    rows: tuple[int, ...]


SHAPES = (
    Shape("Qwen3-30B-A3B", 128, 8, 2048, 768, (1, 5, 16)),
    Shape("DeepSeek-V3", 40, 8, 7168, 2048, (5,)),
)
TURNS = 6  # number of different sets of rows
STEP_ROWS = (1, 5, 16)
STEPS_OF_CASE = 20
KV_LEN = 256
STEPS = (2, 5, 16, 64)  # numbers of rows of the steps that an engine measures at start-up
# Name -> kind and group of the weights.
KINDS = {"bf16": ("plain", 0), "int8": ("int8", 0), "int4": ("int4", 128)}
PRODUCTS = {"bf16": "bf16", "int8": "int8 int16", "int4": "int4 int8"}  # bench/limits.py


@dataclass
class Weights:
    """Weights of all experts."""

    gate_up: PackedWeight
    down: PackedWeight
    bytes_of_expert: int


@dataclass
class Rows:
    """Input rows, and their router logits."""

    x: Tensor
    logits: Tensor


def run_moe(bench: Bench) -> None:
    """Time each kind of weights at several numbers of rows; compare bfloat16 with torch."""
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)

        def matrices(
            outputs: int, inputs: int, shape: Shape = shape, generator: torch.Generator = generator
        ) -> list[Tensor]:
            std = inputs**-0.5
            return [
                torch.empty(outputs, inputs, dtype=torch.bfloat16).normal_(
                    std=std, generator=generator
                )
                for _ in range(shape.num_experts)
            ]

        gate_up = matrices(2 * shape.width, shape.hidden)
        down = matrices(shape.hidden, shape.width)
        for name, (kind, group) in KINDS.items():
            weights = _packed(gate_up, down, kind, group)
            for rows in shape.rows:
                _run(bench, shape, name, weights, rows, gate_up, down)
    _run_table(bench)
    _run_step(bench)


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
    shape: Shape,
    kind: str,
    weights: Weights,
    rows: int,
    gate_up: list[Tensor],
    down: list[Tensor],
) -> None:
    generator = torch.Generator().manual_seed(rows)
    turns = [
        Rows(
            torch.randn(rows, shape.hidden, generator=generator).bfloat16(),
            torch.randn(rows, shape.num_experts, generator=generator),
        )
        for _ in range(TURNS)
    ]
    cases = {"ours": _ours(shape, weights, turns)}
    if kind == "bf16":
        cases["torch"] = _torch(shape, gate_up, down, turns)
    with torch.inference_mode():
        timing = bench.alternate(cases, rounds=7, window_s=0.2)
    chosen = [len(moe.moe_route(one.logits, shape.top_k)[0].unique()) for one in turns]
    distinct = sum(chosen) / len(chosen)
    num_bytes = distinct * weights.bytes_of_expert
    what = f"experts of {shape.name} in {kind}, {rows} rows, {distinct:.1f} of {shape.num_experts}"
    prefix = f"moe.{shape.name.lower()}.{kind}.m{rows}"
    numbers = distinct * 3 * shape.hidden * shape.width
    product = instructions(bench, PRODUCTS[kind], numbers, rows * shape.top_k / distinct)
    add_share(
        bench,
        f"{prefix}.rate",
        f"{what}: share of read, {num_bytes * 1e-6:.0f} MB",
        timing,
        "ours",
        num_bytes,
        product,
        bar="ratio >= 0.87",
    )
    if "torch" not in cases:
        return
    bench.add(
        Figure(
            f"{prefix}.vs_torch",
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


def _run_step(bench: Bench) -> None:
    """Time steps of one request, ours and llama.cpp's in turn."""
    checkpoint = qwen30()
    stepper = Stepper(
        checkpoint,
        batch=1,
        kv_len=KV_LEN,
        drafts=max(STEP_ROWS) - 1,
        num_threads=bench.num_threads,
    )
    bytes_read = stepper.engine._runner.parts.model.bytes_read
    peers = load_peers(bench, checkpoint, ("llama_cpp_peer",))
    for rows in STEP_ROWS:
        cases: dict[str, Callable[[], float]] = {
            "ours": lambda r=rows: stepper.step(STEPS_OF_CASE, drafts=r - 1)
        }
        for name, peer in peers.items():
            peer.ask("prepare", batch=1, kv_len=KV_LEN, rows=rows)
            cases[name] = lambda p=peer: p.ask("step", steps=STEPS_OF_CASE)["seconds"]
        step_figures(
            bench,
            bench.rounds(cases, rounds=5),
            prefix=f"moe.two_layers.rows{rows}",
            what=f"two layers of {SHAPES[0].name} in bf16, a step of {rows} rows",
            bytes_read=bytes_read(rows) + stepper.kv_len * checkpoint.kv_bytes,
            work=instructions(bench, "bf16", bytes_read(1) / 2, rows),
            bars={},
        )


def _run_table(bench: Bench) -> None:
    """Compare the engine's start-up measurements with the bytes of the distinct experts."""
    engine = Engine(
        EngineConfig(
            model=str(qwen30().path),
            num_threads=bench.num_threads,
            max_num_seqs=1,
            max_num_batched_tokens=64,
            max_model_len=256,
            num_pages=16,
            speculative_config=SpeculativeConfig(method="ngram", adaptive_verification=False),
        )
    )
    model = engine._runner.parts.model
    bytes_read = model.bytes_read
    seconds = engine._measure_steps(bytes_read)
    for rows in STEPS:
        more, expected = seconds[rows] / seconds[1], bytes_read(rows) / bytes_read(1)
        bench.add(
            Figure(
                f"moe.steps.rows{rows}",
                f"two layers of {SHAPES[0].name} in bf16, a step of {rows} rows as the engine "
                "measures it: in steps of one row",
                more,
                "x one row",
                "bytes that are read",
                expected,
                more / expected,
                threads=bench.num_threads,
            )
        )


def _ours(shape: Shape, weights: Weights, turns: Sequence[Rows]) -> Callable[[], object]:
    turn = cycle(turns)

    def call() -> Tensor:
        rows = next(turn)
        ids, scales = moe.moe_route(rows.logits, shape.top_k, min_sum=0.0)
        order = moe.moe_sort(ids, shape.num_experts)
        gated = moe.moe_linear(rows.x, weights.gate_up, order.expert_indptr, order.row_indices)
        out = moe.moe_linear(gated, weights.down, order.expert_indptr, out_dtype=torch.float32)
        return moe.moe_combine(out, order.places, scales, dtype=rows.x.dtype)

    return call


def _torch(
    shape: Shape, gate_up: list[Tensor], down: list[Tensor], turns: Sequence[Rows]
) -> Callable[[], object]:
    turn = cycle(turns)

    def call() -> Tensor:
        rows = next(turn)
        scales, ids = rows.logits.softmax(-1).topk(shape.top_k, -1)
        scales = (scales / scales.sum(-1, keepdim=True)).to(rows.x.dtype)
        out = torch.zeros_like(rows.x)
        for expert in ids.unique().tolist():
            row, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(rows.x[row], gate_up[expert]).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, row, part * scales[row, k, None])
        return out

    return call
