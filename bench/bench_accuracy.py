# SPDX-License-Identifier: Apache-2.0
"""Accuracy of quantized models against float32: KL divergence, and the most likely token.

The texts are the benchmarks' prompts. Models: the bundled one; Gemma 3 270M if `make gemma` has
fetched it, and SmolLM2 135M Instruct if `make chat` has. Weights are quantized at load time;
everything else runs in bfloat16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from specops import dense
from specops.api.tokenizer import Tokenizer
from specops.checkpoints.gguf_directory import gguf_directory
from specops.dense import PackedWeight
from specops.engine.models.families import read_model_config
from specops.engine.models.loader import build
from specops.engine.models.weights import Checkpoint, WeightSettings
from specops.quantization import QuantizedWeight, dequantize_weight, quantize_weight
from torch import Tensor

from bench.checkpoints import BUNDLED
from bench.common import Bench, Figure
from bench.recorded_logits import one_step, prompts

TEXTS = 12
TOKENS = 160  # tokens per text
FP8_BLOCK = 128  # inputs and outputs
_CACHE = Path.home() / ".cache" / "specops"
GEMMA = _CACHE / "gemma" / "gemma-3-270m-q4_k_m.gguf"
SMOLLM2 = _CACHE / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Rounding:
    """Quantization of a model's projections, activations and LM head.

    Attributes:
        name: name in the figures.
        kind: "int8", "int4" or "fp8"; "file": the quantization of the file; None: not quantized.
        group: number of inputs that share a scale; 0: all inputs.
        activations: quantization of the inputs; None: the kind's default.
        head: the head's kind, as in `quantize_head`.
    """

    name: str
    kind: str | None = None
    group: int = 0
    activations: str | None = None
    head: str | None = None


ROUNDINGS = (
    Rounding("bfloat16"),
    Rounding("file", "file"),
    Rounding("fp8", "fp8", 128),
    Rounding("wint8", "int8"),
    Rounding("wint8.rows_int8", "int8", activations="int8"),
    Rounding("wint8.head", "int8", head="int8"),
    Rounding("wint4", "int4", 128),
    Rounding("wint4.rows_int16", "int4", 128, activations="int16"),
    Rounding("wint4.group32", "int4", 32),
    Rounding("wint4.by_output", "int4"),
    Rounding("wint4.head", "int4", 128, head="int4"),
)


class _Rounded(Checkpoint):
    """Checkpoint that quantizes the weights of another checkpoint as a `Rounding` specifies."""

    def __init__(self, directory: Path, rounding: Rounding, dtype: torch.dtype) -> None:
        settings = WeightSettings(
            dtype=dtype,
            device=torch.device("cpu"),
            quantization="layers",
            quantize_head="head",
        )
        super().__init__(directory, settings)
        own = rounding.kind, rounding.group, rounding.activations
        head = rounding.head, 128 if rounding.head == "int4" else 0, None
        self._of = {"layers": own, "head": head}

    def _rounded(
        self, weight: Tensor | QuantizedWeight, quantization: str, inputs: range | None
    ) -> Tensor | QuantizedWeight:
        return weight  # `_packed` quantizes it

    def _packed(
        self, weight: Tensor | QuantizedWeight, quantization: str, activation: str | None
    ) -> PackedWeight:
        kind, group, rows = self._of[quantization]
        if kind == "file":
            return dense.pack_weight(weight, activation=activation)
        if isinstance(weight, QuantizedWeight):  # dequantize it to the model's dtype
            weight = dequantize_weight(weight, self.dtype)
        if kind is None:
            return dense.pack_weight(weight, activation=activation)
        values = _fp8(weight) if kind == "fp8" else quantize_weight(weight, kind=kind, group=group)
        return dense.pack_weight(values, activation=activation, activations=rows)


def _fp8(weight: Tensor) -> QuantizedWeight:
    """Quantize with a scale per block of 128 x 128; the block's maximum maps to fp8's maximum."""
    below, right = (-size % FP8_BLOCK for size in weight.shape)
    padded = torch.nn.functional.pad(weight.float(), (0, right, 0, below))
    tiles = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scales = tiles.abs().amax((1, 3)).clamp_min(1e-30) / torch.finfo(torch.float8_e4m3fn).max
    values = (tiles / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    values = values[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn)
    return QuantizedWeight("fp8", values.contiguous(), scales, group=FP8_BLOCK)


def run_accuracy(bench: Bench) -> None:
    """Compare each rounding of the weights with the float32 model, at all text positions."""
    models = {"bundled": BUNDLED}
    files = {"gemma": GEMMA, "smollm2": SMOLLM2}
    models |= {name: gguf_directory(file) for name, file in files.items() if file.is_file()}
    for name, directory in models.items():
        tokenizer = Tokenizer.from_dir(directory)
        texts = [ids[:TOKENS] for ids in islice(prompts(tokenizer), TEXTS)]
        exact = list(_log_probs(directory, ROUNDINGS[0], torch.float32, texts))
        for rounding in ROUNDINGS:
            found = _log_probs(directory, rounding, torch.bfloat16, texts)
            _add(bench, f"accuracy.{name}.{rounding.name}", exact, found)


@torch.no_grad()
def _log_probs(
    directory: Path, rounding: Rounding, dtype: torch.dtype, texts: list[list[int]]
) -> Iterator[Tensor]:
    """Yield the log probabilities [tokens, vocabulary] of each text."""
    source = _Rounded(directory, rounding, dtype)
    model = build(read_model_config(directory), source, dtype, TOKENS)
    kinds = {weight.kind for layer in model.layers for weight in layer.weights}
    if rounding.kind != "file" and kinds != {rounding.kind or "plain"}:
        raise RuntimeError(f"{rounding.name}: weights are {', '.join(sorted(kinds))}")
    model.reserve(max(map(len, texts)))
    for ids in texts:
        yield one_step(model, ids).log_softmax(1)


def _add(bench: Bench, prefix: str, exact: list[Tensor], found: Iterator[Tensor]) -> None:
    divergence, same, rows = 0.0, 0, 0
    for want, got in zip(exact, found, strict=True):
        divergence += (want.exp() * (want - got)).sum().item()
        same += int((want.argmax(1) == got.argmax(1)).sum())
        rows += len(want)
    for name, what, value, unit in (
        ("kl", "mean divergence from float32", divergence / rows, "nats"),
        ("top1", "the same likeliest token as float32", 100 * same / rows, "%"),
    ):
        bench.add(Figure(f"{prefix}.{name}", f"{prefix}: {what}", value, unit, threads=None))
