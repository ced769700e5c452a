# SPDX-License-Identifier: Apache-2.0
"""`linear` of quantized weights, cold, against torch's products; steps of quantized models.

A call multiplies the four matrices of a Qwen3-0.6B layer; calls rotate over layers of at least 512
MiB, so that every quantized value comes from memory. Bytes are those of values and scales. torch
multiplies int8 weights with a scale per output, and int4 weights in groups; it does not quantize
inputs.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import NamedTuple

import specops
import torch
from specops.dense import PackedWeight, linear, pack_weight
from specops.quantization import QuantizedWeight, num_groups
from torch import Tensor

from bench.bench_engine import load_peers
from bench.checkpoints import qwen06
from bench.common import Bench, Figure, Peer
from bench.engine_runs import Stepper
from bench.limits import add_share, instructions

COLD_BYTES = 512 << 20
LAYER = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
ROWS = (1, 5, 8)
KV_LEN, STEPS, DRAFTS = 256, 6, 4  # tokens, steps and drafts of a model's run
NAMES = {"llama_cpp_peer": "llama.cpp", "openvino_peer": "OpenVINO"}
STEP_GOALS = {
    ("wint8", 1, "none"): "ratio >= 1.9",
    ("wint8", 1, "llama_cpp_peer"): "ratio >= 1.3",
    ("wint8", 5, "llama_cpp_peer"): "ratio >= 3",
    ("wint8", 1, "openvino_peer"): "ratio >= 1.3",
    ("wint8", 5, "openvino_peer"): "ratio >= 1.3",
    ("wint4", 1, "llama_cpp_peer"): "ratio >= 1.3",
    ("wint4", 5, "llama_cpp_peer"): "ratio >= 2.5",
    ("wint4", 1, "openvino_peer"): "ratio >= 1.3",
    ("wint4", 5, "openvino_peer"): "ratio >= 1.3",
}


class Form(NamedTuple):
    """A kind of weight, and the rounding of inputs; goals: fractions of the read bandwidth."""

    kind: str
    group: int
    activations: str
    goals: tuple[float, ...]


FORMS = (
    Form("int8", 0, "int16", (0.90, 0.85, 0.65)),
    Form("int8", 0, "int8", ()),
    Form("int4", 128, "int8", (0.85, 0.80)),
    Form("int4", 32, "int8", ()),
    Form("int4", 128, "int16", ()),
    Form("fp8", 128, "float", ()),
)


def run_quantized(bench: Bench) -> None:
    """Measure the bandwidth of a layer, the time ratio of five rows to one, and torch's kernels."""
    for form in FORMS:
        _layer(bench, form)
    if "avx2" in specops.supported_isas():
        _avx2(bench)


def _layer(bench: Bench, form: Form) -> None:
    layers = _weights(form)
    packed = [[pack_weight(one, activations=form.activations) for one in layer] for layer in layers]
    num_bytes = sum(_bytes(weight) for weight in packed[0])
    cases: dict[str, Callable[[], object]] = {}
    peer = _TORCH.get(form.kind)
    for rows in ROWS:
        inputs = [torch.randn(rows, shape[1]).to(torch.bfloat16) for shape in LAYER]
        cases[f"m{rows}"] = _ours(packed, inputs)
        if peer is not None:
            cases[f"torch m{rows}"] = peer(layers, inputs)
    with torch.inference_mode():
        timing = bench.alternate(cases, rounds=7, window_s=0.1)
    group = f"g{form.group}" if form.group else "channel"
    id = f"quantized.{form.kind}.{group}.{form.activations}"
    what = f"linear of {form.kind} codes, scales by {group}, rows as {form.activations}"
    product = "fp8" if form.kind == "fp8" else f"{form.kind} {form.activations}"
    weights = sum(outputs * inputs for outputs, inputs in LAYER)
    for i, rows in enumerate(ROWS):
        case = f"m{rows}"
        add_share(
            bench,
            f"{id}.m{rows}",
            f"{what}, M={rows}, cold weights: share of read bandwidth",
            timing,
            case,
            num_bytes,
            instructions(bench, product, weights, rows),
            bar=f"ratio >= {form.goals[i]:.2f}" if i < len(form.goals) else None,
        )
        if peer is not None:
            bench.add(
                Figure(
                    f"{id}.m{rows}.vs_torch",
                    f"{what}, M={rows}, cold weights: times faster than torch's",
                    timing.median(case) * 1e6,
                    "us",
                    "torch",
                    timing.median(f"torch {case}") * 1e6,
                    timing.ratio(f"torch {case}", case),
                    None,
                    threads=bench.num_threads,
                    read_gb_s=timing.read_gb_s(case, f"torch {case}"),
                )
            )


def _avx2(bench: Bench) -> None:
    """Measure the AVX2 kernels, for machines without AVX-512."""
    chosen = specops.get_isa()
    specops.set_isa("avx2")
    packed = [[pack_weight(one) for one in layer] for layer in _weights(FORMS[0])]
    cases = {}
    for rows in (1, 5):
        inputs = [torch.randn(rows, shape[1]).to(torch.bfloat16) for shape in LAYER]
        cases[f"m{rows}"] = _ours(packed, inputs)
    timing = bench.alternate(cases, rounds=7, window_s=0.1)
    specops.set_isa(chosen)
    bench.add(
        Figure(
            "quantized.int8.channel.int16.avx2.m5_over_m1",
            "linear of int8 codes on avx2: time at M=5 over M=1",
            timing.median("m5") * 1e6,
            "us",
            "M=1",
            timing.median("m1") * 1e6,
            timing.ratio("m5", "m1"),
            "ratio <= 1.35",
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s("m1", "m5"),
        )
    )


def _weights(form: Form) -> list[list[QuantizedWeight]]:
    """Return layers of random quantized weights that together fill COLD_BYTES."""
    bits = 4 if form.kind == "int4" else 8
    copies = -(-COLD_BYTES * 8 // sum(bits * outputs * inputs for outputs, inputs in LAYER))
    return [[_weight(form, *shape) for shape in LAYER] for _ in range(copies)]


def _weight(form: Form, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    shape = (num_outputs, num_inputs)
    if form.kind == "fp8":
        values = torch.randn(shape).to(torch.float8_e4m3fn)
    elif form.kind == "int8":
        values = torch.randint(-127, 128, shape, dtype=torch.int8)
    else:
        values = torch.randint(0, 16, shape, dtype=torch.uint8)
    blocks = -(-num_outputs // 128) if form.kind == "fp8" else num_outputs
    scales = torch.full((blocks, num_groups(num_inputs, form.group)), 1e-3)
    return QuantizedWeight(form.kind, values, scales, group=form.group)


def _bytes(weight: PackedWeight) -> int:
    scales = 0 if weight.scales is None else weight.scales.nbytes
    return weight.data.nbytes + scales


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


def _torch_int8(layers: list[list[QuantizedWeight]], inputs: list[Tensor]) -> Callable[[], None]:
    rotating = cycle(layers)
    scales = [one.scales[:, 0].to(torch.bfloat16) for one in layers[0]]

    def call() -> None:
        for x, weight, scale in zip(inputs, next(rotating), scales, strict=True):
            torch._weight_int8pack_mm(x, weight.values, scale)

    return call


def _torch_int4(layers: list[list[QuantizedWeight]], inputs: list[Tensor]) -> Callable[[], None]:
    group = layers[0][0].group
    rotating = cycle(
        [
            [torch._convert_weight_to_int4pack_for_cpu(one.values.int(), 1) for one in layer]
            for layer in layers
        ]
    )
    scales = [
        torch.stack([one.scales.T, torch.zeros_like(one.scales.T)], 2).bfloat16().contiguous()
        for one in layers[0]
    ]

    def call() -> None:
        for x, weight, scale in zip(inputs, next(rotating), scales, strict=True):
            torch._weight_int4pack_mm_for_cpu(x, weight, group, scale)

    return call


_TORCH = {"int8": _torch_int8, "int4": _torch_int4}


# Models with quantized weights


def run_qwen06_quantized(bench: Bench) -> None:
    """Time steps in the shape of Qwen3-0.6B, batch 1, against bfloat16 and quantized peers.

    llama.cpp's layers are Q8_0 or Q4_0; OpenVINO's are int8 with a scale per output, or int4 in
    groups of 128. All LM heads have 8 bits.
    """
    steppers = {
        name: Stepper(
            qwen06(),
            batch=1,
            kv_len=KV_LEN,
            drafts=DRAFTS,
            num_threads=bench.num_threads,
            quantization=name,
        )
        for name in ("none", "wint8", "wint4")
    }
    for name, kind in (("wint8", "int8"), ("wint4", "int4")):
        peers = load_peers(bench, qwen06(), tuple(NAMES), kind)
        for rows in (1, 1 + DRAFTS):
            cases: dict[str, Callable[[], float]] = {
                which: partial(steppers[which].step, STEPS, rows - 1) for which in (name, "none")
            }
            for which, peer in peers.items():
                peer.ask("prepare", batch=1, kv_len=KV_LEN, rows=rows)
                cases[which] = partial(_peer_step, peer)
            timing = bench.rounds(cases, rounds=7)
            for which in list(cases)[1:]:
                peer_name = NAMES.get(which, "own bfloat16")
                short = "bfloat16" if which == "none" else which.removesuffix("_peer")
                bench.add(
                    Figure(
                        f"qwen06_quantized.{name}.rows{rows}.vs_{short}",
                        f"Qwen3-0.6B shape in {name}, batch 1, kv {KV_LEN}, {rows} rows: a step, "
                        f"times faster than {peer_name}",
                        timing.median(name) * 1e3,
                        "ms",
                        peer_name,
                        timing.median(which) * 1e3,
                        timing.ratio(which, name),
                        STEP_GOALS.get((name, rows, which)),
                        threads=bench.num_threads,
                        read_gb_s=timing.read_gb_s(name),
                    )
                )
        for peer in peers.values():
            peer.close()


def _peer_step(peer: Peer) -> float:
    seconds: float = peer.ask("step", steps=STEPS)["seconds"]
    return seconds
