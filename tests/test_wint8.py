# SPDX-License-Identifier: Apache-2.0
"""Projections of 8 bits, made as they are loaded: which they are, how near, and their bits."""

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from mtp_checkpoints import make_mtp_model
from safetensors.torch import load_file, save_file
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.contract import contract_of
from specops.engine.errors import ModelError
from specops.engine.models import load_model, load_mtp
from test_models import Runner, random_ids
from torch import Tensor


def dequantized(weight: Tensor) -> Tensor:
    """What WINT8 makes of a matrix: the nearest of 255 multiples of each output's scale."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def test_logits_are_those_of_weights_that_were_rounded_before(tmp_path: Path) -> None:
    """Beside what rounding the weights does, what rounding activations does cannot be seen."""
    make_checkpoint(tmp_path, "Gemma3", sliding_window=24)
    ids = random_ids(60)
    whole = Runner(load_model(tmp_path)).run([ids], [[60]])[0]
    quantized = load_model(tmp_path, quantization="wint8")
    tensors = load_file(tmp_path / "model.safetensors")
    for name, one in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = dequantized(one)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    want = Runner(load_model(tmp_path)).run([ids], [[60]])[0]
    got = Runner(quantized).run([ids], [[60]])[0]
    assert torch.equal(got, Runner(quantized).run([ids], [[30], [1], [5], [24]])[0])
    of_weights = (want - whole).abs().max().item()
    assert (got - want).abs().max().item() < of_weights / 50
    assert of_weights > 0.01


def test_what_is_quantized(tmp_path: Path) -> None:
    """The projections of all layers, a module's too; nothing else."""
    make_mtp_model(tmp_path)
    model = load_model(tmp_path, quantization="wint8")
    modules = load_mtp(model, tmp_path)
    for layer in (*model.layers, *modules.layers):
        assert [weight.kind for weight in layer.weights] == ["int8"] * 4
    assert model.lm_head.kind == modules.modules[0].projection.kind == "plain"
    plain = load_model(tmp_path)
    assert {weight.kind for layer in plain.layers for weight in layer.weights} == {"plain"}
    with pytest.raises(ModelError, match="quantization must be none or wint8, got wint4"):
        load_model(tmp_path, quantization="wint4")
    with pytest.raises(ValueError, match="quantization must be none or wint8, got 'wint4'"):
        EngineConfig(quantization="wint4")


@lru_cache
def model_dir() -> str:
    return str(make_mtp_model(Path(mkdtemp())))


def completions(method: str, **options: Any) -> list[Completion]:
    drafts = None if method == "naive" else 3
    engine = Engine(
        EngineConfig(
            model=model_dir(),
            speculative_config=SpeculativeConfig(method=method, num_speculative_tokens=drafts),
            num_pages=100,
            **options,
        )
    )
    period = [5, 9, 23, 77, 101, 5, 9, 44]
    params = [
        SamplingParams(max_tokens=40, temperature=heat, seed=3, ignore_eos=True, logprobs=2)
        for heat in (0.0, 0.7, 0.0)
    ]
    results = engine.generate([period * 5, period * 5 + [3] * 20, [11]], params)
    if method != "naive":
        assert engine.stats.speculative.num_draft_tokens > 10
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_no_bit(dtype: str) -> None:
    plain = completions("naive", quantization="wint8", dtype=dtype)
    for method in ("ngram", "mtp"):
        others = completions(method, quantization="wint8", dtype=dtype)
        for one, other in zip(plain, others, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs


def test_the_contract_says_so() -> None:
    made = {
        name: contract_of(Engine(EngineConfig(model=model_dir(), quantization=name, num_pages=50)))
        for name in ("none", "wint8")
    }
    assert made["wint8"]["model"]["quantization"] == "wint8"
    assert made["none"]["digest"] != made["wint8"]["digest"]
