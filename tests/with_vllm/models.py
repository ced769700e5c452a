# SPDX-License-Identifier: Apache-2.0
"""Models for the tests inside vLLM: the bundled one without its MTP module, and random ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from specops.quantization import quantize_weight

ASSETS = Path(__file__).resolve().parents[2] / "python" / "specops" / "assets"
VOCAB = 4096
# Wide enough for vLLM's own kernels to give a row other bits alone than in a batch.
_HIDDEN, _INTERMEDIATE = 512, 3072
_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 3, 8, 2, 64
_EXPERTS, _EXPERT_WIDTH = 8, 1024


def write_bundled(folder: Path) -> str:
    """Write the bundled model without its MTP module, whose tensors vLLM refuses."""
    config = json.loads((ASSETS / "config.json").read_text())
    config.pop("num_nextn_predict_layers")
    module = f"model.layers.{config['num_hidden_layers']}."
    tensors = load_file(ASSETS / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    assert len(kept) < len(tensors)
    return _write(folder, config, kept)


def write_random(folder: Path, family: str, seed: int = 0) -> str:
    """Write a random model of three layers.

    Families: "llama" (untied head), "qwen2" (biases, tied head), "granite" (as llama, with
    multipliers on embeddings, residuals, scores and logits), "qwen3_moe" (experts in all layers),
    or "glm4_moe" (experts in groups, after a dense layer; shared experts, biases and multipliers).
    """
    config = _config_of(family)
    heads, kv_heads, head_dim = _HEADS, _KV_HEADS, _HEAD_DIM
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(torch.bfloat16)

    widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    tensors = {
        "model.embed_tokens.weight": random(VOCAB, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16),
    }
    if family != "qwen2":
        tensors["lm_head.weight"] = random(VOCAB, _HIDDEN, scale=_HIDDEN**-0.5)
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = 1 + random(_HIDDEN, scale=0.1)
        for kind, width in widths.items():
            tensors[f"{name}self_attn.{kind}_proj.weight"] = random(width, _HIDDEN, scale=0.06)
            if family in ("qwen2", "glm4_moe"):
                tensors[f"{name}self_attn.{kind}_proj.bias"] = random(width, scale=0.5)
        tensors[f"{name}self_attn.o_proj.weight"] = random(_HIDDEN, widths["q"], scale=0.06)
        mlps = {"mlp.": _INTERMEDIATE}
        if family.endswith("_moe") and layer >= config.get("first_k_dense_replace", 0):
            mlps = {f"mlp.experts.{expert}.": _EXPERT_WIDTH for expert in range(_EXPERTS)}
            tensors[f"{name}mlp.gate.weight"] = random(_EXPERTS, _HIDDEN, scale=0.1)
        if family == "qwen3_moe":
            for norm in ("q_norm", "k_norm"):
                tensors[f"{name}self_attn.{norm}.weight"] = 1 + random(head_dim, scale=0.1)
        elif family == "glm4_moe" and len(mlps) > 1:
            mlps["mlp.shared_experts."] = _EXPERT_WIDTH
            tensors[f"{name}mlp.gate.e_score_correction_bias"] = random(_EXPERTS).float() / 8
        for mlp, width in mlps.items():
            for kind in ("gate", "up"):
                tensors[f"{name}{mlp}{kind}_proj.weight"] = random(width, _HIDDEN, scale=0.05)
            tensors[f"{name}{mlp}down_proj.weight"] = random(_HIDDEN, width, scale=0.02)
    return _write(folder, config, tensors)


QUANTIZED = ("gptq", "awq", "int4", "int8")
_GROUP = 64
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def write_quantized(folder: Path, source: str, kind: str) -> str:
    """Write a model with the projections of another one quantized.

    Args:
        folder: created by this function.
        source: folder of a model with weights.
        kind: "gptq", "awq", or "int4" or "int8" of compressed-tensors.
    """
    config = json.loads(Path(source, "config.json").read_text())
    tensors = {}
    for name, weight in load_file(Path(source, "model.safetensors")).items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            found = _quantized(weight, kind)
            tensors |= {f"{module}.{part}": one.contiguous() for part, one in found.items()}
        else:
            tensors[name] = weight
    config["quantization_config"] = _quantization_config(kind)
    return _write(folder, config, tensors)


def _quantized(weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    if kind == "int8":
        whole = quantize_weight(weight.float(), kind="int8")
        return {"weight": whole.values, "weight_scale": whole.scales}
    one = quantize_weight(weight.float(), kind="int4", group=_GROUP)
    values, scales = one.values, one.scales.bfloat16()
    if kind == "int4":
        return {
            "weight_packed": _words(values),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
    if kind == "awq":
        columns = values.T.reshape(-1, 8)[:, _AWQ_ORDER].view(weight.shape[1], -1)
        zeros = torch.full((scales.shape[1], len(weight)), 8, dtype=torch.uint8)
        return {"qweight": _words(columns), "qzeros": _words(zeros), "scales": scales.T}
    zeros = torch.full((scales.shape[1], len(weight)), 7, dtype=torch.uint8)
    index = torch.arange(weight.shape[1], dtype=torch.int32) // _GROUP
    return {
        "qweight": _words(values).T,
        "qzeros": _words(zeros),
        "scales": scales.T,
        "g_idx": index,
    }


def _words(values: torch.Tensor) -> torch.Tensor:
    """Pack eight 4-bit values into each int32 word along the last dimension."""
    shifted = values.reshape(len(values), -1, 8).to(torch.int64) << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def _quantization_config(kind: str) -> dict[str, Any]:
    bits: dict[str, Any] = {"bits": 4, "group_size": _GROUP}
    if kind == "gptq":
        return bits | {"quant_method": "gptq", "desc_act": False, "sym": True}
    if kind == "awq":
        return bits | {"quant_method": "awq", "zero_point": True, "version": "gemm"}
    integers = {"type": "int", "symmetric": True, "dynamic": False}
    weights = integers | {"num_bits": 4, "strategy": "group", "group_size": _GROUP}
    inputs = None
    if kind == "int8":
        weights = integers | {"num_bits": 8, "strategy": "channel"}
        inputs = integers | {"num_bits": 8, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def write_config(folder: Path, family: str) -> str:
    """Write a model without weights, for vLLM's `load_format="dummy"`.

    Families: those of `write_random`; "laguna", whose model file computes gates itself; or "mamba".
    """
    return _write(folder, _config_of(family), None)


def _config_of(family: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": family == "qwen2",
        "model_type": family,
        "architectures": [f"{family.title()}ForCausalLM"],
    }
    if family == "granite":
        config |= {"embedding_multiplier": 2.0, "residual_multiplier": 0.5}
        config |= {"attention_multiplier": 0.125, "logits_scaling": 2.0}
    if family.endswith("_moe"):
        config |= {"architectures": [f"{family.title().replace('_', '')}ForCausalLM"]}
        config |= {"head_dim": _HEAD_DIM, "num_experts_per_tok": 3, "norm_topk_prob": True}
        config |= {"moe_intermediate_size": _EXPERT_WIDTH}
    if family == "qwen3_moe":
        config |= {"num_experts": _EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if family == "glm4_moe":
        config |= {"n_routed_experts": _EXPERTS, "n_shared_experts": 1, "n_group": 4}
        config |= {"topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
        config |= {"attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5}
    if family == "laguna":
        config |= {"head_dim": _HEAD_DIM, "num_experts": 0, "mlp_layer_types": ["dense"] * _LAYERS}
    return config


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in (
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        shutil.copy(ASSETS / name, folder / name)
    return str(folder)
