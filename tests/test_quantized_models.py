# SPDX-License-Identifier: Apache-2.0
"""Quantization at load time: choice of kinds, accuracy and exactness."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import lasting_directory, make_checkpoint
from mtp_checkpoints import make_mtp_model
from safetensors.torch import load_file, save_file
from specops.api.errors import ModelError
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import load_model, load_mtp, loader
from specops.service.contract import contract_of
from test_models import Runner, random_ids
from torch import Tensor

# Weight kind in a dense model for each `quantization`.
KINDS = {"none": "plain", "wint8": "int8", "wint4": "int4", "mix_quant": "int8"}


def rounded(weight: Tensor, kind: str) -> Tensor:
    """Round a matrix to multiples of the scale of each output or group."""
    if kind == "wint8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round() * scale
    groups = weight.split(64 if weight.shape[1] % 128 else 128, dim=1)
    found = []
    for group in groups:
        scale = torch.maximum(group.amax(1) / 7, group.amin(1) / -8)[:, None]
        found.append((group / scale).round().clamp(-8, 7) * scale)
    return torch.cat(found, 1)


@pytest.mark.parametrize(("kind", "ratio"), [("wint8", 50), ("wint4", 8)])
def test_quantized_logits_are_close_to_those_of_rounded_weights(
    tmp_path: Path, kind: str, ratio: int
) -> None:
    """Rounding activations changes logits far less than rounding weights."""
    make_checkpoint(tmp_path, "Gemma3", sliding_window=24)
    ids = random_ids(60)
    whole = Runner(load_model(tmp_path)).run([ids], [[60]])[0]
    quantized = load_model(tmp_path, quantization=kind)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, one in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = rounded(one, kind)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    want = Runner(load_model(tmp_path)).run([ids], [[60]])[0]
    got = Runner(quantized).run([ids], [[60]])[0]
    assert torch.equal(got, Runner(quantized).run([ids], [[30], [1], [5], [24]])[0])
    of_weights = (want - whole).abs().max().item()
    assert (got - want).abs().max().item() < of_weights / ratio
    assert of_weights > 0.01


@pytest.mark.parametrize("name", KINDS)
def test_only_layer_projections_are_quantized(tmp_path: Path, name: str) -> None:
    """This includes the layers of MTP modules."""
    make_mtp_model(tmp_path)
    model = load_model(tmp_path, quantization=name)
    modules = load_mtp(model, tmp_path)
    for layer in (*model.layers, *modules.layers):
        assert [weight.kind for weight in layer.weights] == [KINDS[name]] * 4
    assert model.lm_head.kind == modules.modules[0].projection.kind == "plain"
    assert modules.lm_head is model.lm_head


def test_unknown_quantizations_are_refused() -> None:
    expected = "must be none, wint8, wint4 or mix_quant, got"
    for field in ("quantization", "quantize_head"):
        with pytest.raises(ModelError, match=f"{field} {expected} int8"):
            load_model(model_dir(), **{field: "int8"})
        with pytest.raises(ValueError, match=f"{field} {expected} 'int8'"):
            EngineConfig(**{field: "int8"})


def test_model_family_may_turn_wint4_into_mix_quant(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(loader.read_model_config(Path(model_dir())), wint4_is_mixed=True)
    monkeypatch.setattr(loader, "read_model_config", lambda _: config)
    for name, meant in (("wint4", "mix_quant"), ("wint8", "wint8"), ("none", "none")):
        assert load_model(model_dir(), quantization=name).settings.quantization == meant


def kinds_of_drafter(target: str, head: str, own: str | None, **more: Any) -> list[str]:
    """Return the weight kinds of a module's projection, layer and head ("target's" if shared)."""
    directory = model_dir()
    model = load_model(directory, quantization=target, quantize_head=head)
    assert model.lm_head.kind == KINDS[head]
    modules = load_mtp(model, directory, quantization=own, **more)
    (layer,) = {weight.kind for layer in modules.layers for weight in layer.weights}
    head = "target's" if modules.lm_head is model.lm_head else modules.lm_head.kind
    return [modules.modules[0].projection.kind, layer, head]


def test_target_head_and_drafter_are_quantized_independently(tmp_path: Path) -> None:
    assert kinds_of_drafter("none", "wint8", None) == ["plain", "plain", "target's"]
    assert kinds_of_drafter("wint8", "none", None) == ["plain", "int8", "target's"]
    assert kinds_of_drafter("none", "none", "wint8") == ["int8", "int8", "int8"]
    assert kinds_of_drafter("none", "wint8", "wint8") == ["int8", "int8", "target's"]
    assert kinds_of_drafter("wint8", "wint8", "wint4") == ["int4", "int4", "int4"]
    assert kinds_of_drafter("wint4", "wint8", None) == ["plain", "int4", "target's"]
    assert kinds_of_drafter("wint8", "wint8", "none") == ["plain", "plain", "plain"]
    map_file = tmp_path / "d2t.safetensors"
    save_file({"d2t": torch.arange(0, 60, 3)}, map_file)
    for own, kind in ((None, "plain"), ("wint8", "int8"), ("wint4", "int4")):
        assert kinds_of_drafter("none", "none", own, draft_vocab=map_file)[2] == kind


def test_reduced_head_has_rows_of_the_whole_head(tmp_path: Path) -> None:
    map_file = tmp_path / "d2t.safetensors"
    save_file({"d2t": torch.arange(0, 60, 3)}, map_file)
    model = load_model(model_dir(), dtype="float32")
    whole = load_mtp(model, model_dir(), quantization="wint4")
    reduced = load_mtp(model, model_dir(), quantization="wint4", draft_vocab=map_file)
    states = torch.randn(3, model.hidden_size)
    tokens = torch.arange(0, 80, 4)
    assert reduced.token_map is not None and reduced.token_map.tolist() == tokens.tolist()
    assert torch.equal(reduced.logits(states), whole.logits(states)[:, tokens])


def test_drafter_quantization_cannot_be_overridden_per_request() -> None:
    with pytest.raises(ValueError, match="quantization must be one of none, wint8, wint4"):
        SpeculativeConfig.from_dict({"method": "mtp", "quantization": "int8"})
    config = SpeculativeConfig.from_dict({"method": "mtp", "quantization": "wint8"})
    assert config.options["mtp"].quantization == "wint8"
    with pytest.raises(ValueError, match="quantization can only be set by the server"):
        config.override({"quantization": "none"})


@lru_cache
def model_dir() -> str:
    return str(make_mtp_model(lasting_directory()))


def completions(
    method: str, drafting: dict[str, Any] | None = None, **options: Any
) -> list[Completion]:
    drafts = None if method == "naive" else 3
    drafting = {"num_speculative_tokens": drafts, **(drafting or {})}
    engine = Engine(
        EngineConfig(
            model=model_dir(),
            speculative_config=SpeculativeConfig.from_dict({"method": method, **drafting}),
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


@pytest.mark.fast(
    "wint8-wint8-auto-float32",
    "none-wint4-int8-bfloat16",
    "wint8-none-fp8_e4m3-bfloat16",
    "wint4-none-auto-bfloat16",
    "wint4-wint8-int8-float32",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("head", ["none", "wint8", "wint4"])
@pytest.mark.parametrize("kind", ["none", "wint8", "wint4"])
def test_speculation_changes_no_bit(kind: str, head: str, kv_cache_dtype: str, dtype: str) -> None:
    """Compare every kind of drafter weights."""
    target = {"quantization": kind, "quantize_head": head}
    options = {**target, "kv_cache_dtype": kv_cache_dtype, "dtype": dtype}
    plain = completions("naive", **options)
    for method, drafting in (
        ("ngram", {}),
        ("mtp", {}),
        ("mtp", {"quantization": "wint8"}),
        ("mtp", {"quantization": "wint4"}),
    ):
        others = completions(method, drafting, **options)
        for one, other in zip(plain, others, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs


def test_contract_reports_quantization_of_target_and_head() -> None:
    """The drafter's weights change no bit, so the contract omits them."""

    def made(**options: Any) -> dict[str, Any]:
        return contract_of(Engine(EngineConfig(model=model_dir(), num_pages=50, **options)))

    drafts = SpeculativeConfig.from_dict({"method": "mtp", "quantization": "wint8"})
    found = [made(), made(quantization="wint8"), made(quantize_head="wint8")]
    assert [one["model"]["quantization"] for one in found] == ["none", "wint8", "none"]
    assert [one["model"]["quantize_head"] for one in found] == ["none", "none", "wint8"]
    assert len({one["digest"] for one in found}) == 3
    assert made(speculative_config=drafts) == found[0]
