# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints in the engine: speculation changes no bit in any format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, write_tokenizer
from mtp_checkpoints import make_mtp_checkpoint
from safetensors.torch import load_file, save_file
from specops.api.errors import ModelError
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import load_model
from specops.quantization import quantize_weight
from torch import Tensor

SIZES = {"hidden_size": 128, "intermediate_size": 128}
PROMPTS = [[5, 9, 23, 77, 101, 5, 9, 44] * 4, [3, 3, 7] * 8]
PARAMS = [
    SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=60, temperature=0.8, seed=7, ignore_eos=True, logprobs=2),
]


def words_of(quantized: Tensor) -> Tensor:
    """Pack eight 4-bit values into each int32 word along the last dimension."""
    shifted = quantized.view(len(quantized), -1, 8).to(torch.int64) << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def packed(weight: Tensor) -> dict[str, Tensor]:
    """Return tensors in the pack-quantized format of compressed-tensors."""
    quantized = quantize_weight(weight, kind="int4", group=32)
    return {
        "weight_packed": words_of(quantized.values),
        "weight_scale": quantized.scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def gptq(weight: Tensor) -> dict[str, Tensor]:
    """Return tensors in GPTQ format with desc_act: inputs of a group are not neighbors."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    quantized = quantize_weight(weight[:, order], kind="int4", group=32)
    stored, index = torch.empty_like(quantized.values), torch.empty_like(order)
    stored[:, order] = quantized.values
    index[order] = torch.arange(len(order)) // 32
    zeros = torch.full((quantized.scales.shape[1], len(weight)), 7, dtype=torch.uint8)
    return {
        "qweight": words_of(stored).T.contiguous(),
        "qzeros": words_of(zeros),
        "scales": quantized.scales.T.half(),
        "g_idx": index.to(torch.int32),
    }


def fp8(weight: Tensor) -> dict[str, Tensor]:
    """Return an fp8 weight in blocks of 128 by 128, all with the same scale."""
    quantized = (weight * 64).to(torch.float8_e4m3fn)
    scales = torch.full([-(-size // 128) for size in weight.shape], 1 / 64)
    return {"weight": quantized, "weight_scale_inv": scales}


FORMATS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "pack-quantized": (packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "gptq": (gptq, {"quant_method": "gptq", "desc_act": True, "group_size": 32}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def quantize(directory: Path, kind: str) -> None:
    """Replace every projection of every layer with a format's tensors."""
    pack, _ = FORMATS[kind]
    found = {}
    for name, one in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_linear = any(part in name for part in ("_proj", "_linear"))
        if ".layers." in name and is_linear and not name.endswith("eh_proj.weight"):
            found |= {f"{module}.{suffix}": two for suffix, two in pack(one).items()}
        else:
            found[name] = one
    save_file(
        {name: one.contiguous() for name, one in found.items()}, directory / "model.safetensors"
    )


def completions(directory: Path, method: str) -> list[Completion]:
    drafts = None if method == "naive" else 2
    own = SpeculativeConfig.from_dict(
        {"method": method, "num_speculative_tokens": drafts, "min_ngram_size": 1}
    )
    engine = Engine(EngineConfig(model=str(directory), speculative_config=own, device="cpu"))
    found = engine.generate(PROMPTS, PARAMS)
    assert method == "naive" or engine.stats.speculative.num_draft_tokens > 10
    return found


def same(ones: list[Completion], others: list[Completion]) -> bool:
    pairs = list(zip(ones, others, strict=True))
    return all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs)


FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "GraniteMoeHybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", FORMATS)
def test_speculation_changes_no_bit(tmp_path: Path, kind: str, family: str) -> None:
    settings = {**SIZES, **FAMILIES[family], "quantization_config": FORMATS[kind][1]}
    make_checkpoint(tmp_path, family, **settings)
    write_tokenizer(tmp_path)
    before = completions(tmp_path, "naive")
    quantize(tmp_path, kind)
    plain = completions(tmp_path, "naive")
    assert not same(plain, before)
    assert same(plain, completions(tmp_path, "ngram"))


def test_head_that_the_file_leaves_unquantized_is_quantized_at_load(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3", **SIZES)
    quantize(tmp_path, "pack-quantized")
    model = load_model(tmp_path, quantization="wint8", quantize_head="wint8")
    assert {weight.kind for layer in model.layers for weight in layer.weights} == {"int4"}
    assert model.lm_head.kind == "int8"


def test_quantized_mtp_layers_may_have_an_unquantized_projection(tmp_path: Path) -> None:
    """The config lists neither the layers nor the projection."""
    make_mtp_checkpoint(tmp_path, "deepseek_v3", base=("Qwen3", SIZES))
    write_tokenizer(tmp_path)
    quantize(tmp_path, "pack-quantized")
    assert same(completions(tmp_path, "naive"), completions(tmp_path, "mtp"))


def test_cache_and_activation_scales_are_accepted_under_any_module(tmp_path: Path) -> None:
    """ModelOpt stores cache scales under k_proj and v_proj, other tools beside them."""
    make_checkpoint(tmp_path, "Qwen3", **SIZES)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.self_attn."
    scales = (f"{name}k_proj.k_scale", f"{name}v_proj.v_scale", f"{name}k_proj.output_scale")
    scales += (f"{name}k_scale", f"{name}q_scale", f"{name}kv_scale")
    plain = load_file(file)
    for is_quantized in (False, True):
        save_file(plain, file)
        if is_quantized:
            quantize(tmp_path, "fp8")
        save_file({**load_file(file), **{one: torch.ones(1) for one in scales}}, file)
        load_model(tmp_path)


def test_experts_with_desc_act_are_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}
    make_checkpoint(
        tmp_path, "Qwen3Moe", **SIZES, **experts, quantization_config=FORMATS["gptq"][1]
    )
    quantize(tmp_path, "gptq")
    with pytest.raises(ModelError) as refusal:
        load_model(tmp_path)
    tensor = "model.layers.0.mlp.experts.0.down_proj.g_idx"
    assert str(refusal.value).startswith(f"{tmp_path}: tensor {tensor} must be absent")
    assert "GPTQ with desc_act is not supported for experts" in str(refusal.value)


def test_unknown_layer_tensors_are_refused_except_zero_biases(tmp_path: Path) -> None:
    """Old tools wrote a bias of zeros for every module."""
    make_checkpoint(tmp_path, "Qwen3", **SIZES)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.down_proj.bias"
    save_file({**tensors, name: torch.zeros(128), "vision.weight": torch.ones(3)}, file)
    load_model(tmp_path)
    save_file({**tensors, name: torch.ones(128)}, file)
    with pytest.raises(ModelError, match=f"tensor {name} is not used by the model"):
        load_model(tmp_path)
