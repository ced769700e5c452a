# SPDX-License-Identifier: Apache-2.0
"""GGUF files of tiny random models, as llama.cpp's converter writes them.

Names of tensors are those of the gguf package, so that the engine's tables are not checked against
themselves.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SHARED_KV, make_checkpoint
from mtp_checkpoints import make_mtp_checkpoint
from safetensors.torch import load_file, save_file
from specops import attention
from test_experts import FAMILIES, make_experts
from tokenizers import pre_tokenizers
from torch import Tensor

gguf = pytest.importorskip("gguf")

SIZES = {"rms_norm_eps": 2.0**-20, "vocab_size": 160}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"linear_value_head_dim": 32, "linear_num_value_heads": 4}
# Factors of Falcon-H1, which the converter multiplies into the weights.
FACTORS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.25,
    "attention_in_multiplier": 4.0,
    "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 0.25,
    "ssm_out_multiplier": 0.5,
}
FACTOR_LISTS = {"ssm_multipliers": [0.5, 2.0, 4.0, 0.25, 2.0], "mlp_multipliers": [0.5, 2.0]}
UNIT_LISTS = {name: [1.0] * len(each) for name, each in FACTOR_LISTS.items()}
# Architecture -> the name of its checkpoint for make_experts or make_checkpoint, and changes.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "gemma3": (
        "Gemma3",
        {"sliding_window": 20, "sliding_window_pattern": 3, "query_pre_attn_scalar": 64},
    ),
    "gemma4": ("Gemma4", {**SHARED_KV, "vocab_size_per_layer_input": 160}),
    "mistral3": ("Mistral", {"sliding_window": None}),
    "qwen3moe": ("qwen3", {}),
    "gpt-oss": ("gpt_oss", {}),
    "deepseek2": ("deepseek_v3", {}),
    "glm4moe": ("glm4", {}),
    "ernie4_5": ("ernie4_5_dense", {"use_bias": False}),
    "ernie4_5-moe": ("ernie4_5", {}),
    "qwen3next": ("qwen3_next", LINEAR),
    "qwen35": ("qwen3_5", LINEAR),
    "qwen35moe": ("qwen3_5_experts", LINEAR),
    "granitehybrid": ("granite", {"attention_multiplier": 2.0**-5}),
    "falcon-h1": ("falcon_h1_norm", {**dict.fromkeys(FACTORS, 1.0), **UNIT_LISTS}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "layer_norm_epsilon": 2.0**-20,
        },
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
            "layer_norm_epsilon": 2.0**-20,
        },
    ),
    "kimi-linear": ("kimi_linear", {"routed_scaling_factor": 2.5}),
}
_QWEN = ("qwen3next", "qwen35", "qwen35moe")
_NEMOTRON = ("nemotron_h", "nemotron_h_moe")
_MAMBA2 = ("granitehybrid", "falcon-h1", *_NEMOTRON)
# Field of config.json -> GGUF key without the architecture's prefix.
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_experts_per_token": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_ssm": "ssm.inner_size",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "mamba_num_heads": "ssm.time_step_rank",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": "moe_latent_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}


def write(
    path: Path,
    tensors: dict[str, Any],
    architecture: str = "any",
    parts: int = 0,
    **metadata: Any,
) -> Path:
    """Write a file of these tensors, each a float tensor or (blocks, name of their type).

    Args:
        path: directory of the file.
        tensors: tensors by name. Blocks are uint8, with the bytes of a row in the last dimension.
        architecture: value of general.architecture.
        parts: number of tensors in each of several files; 0: one file.
        metadata: further key-value pairs.
    """
    writer = gguf.GGUFWriter(path / "model.gguf", architecture, split_max_tensors=parts)
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, one in tensors.items():
        data, kind = (one, "F32") if isinstance(one, Tensor) else one
        raw = data.view(torch.uint8) if kind == "BF16" else data
        writer.add_tensor(name, raw.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "model.gguf" if not parts else min(path.glob("model-00001-of-*.gguf"))


def byte_tokenizer() -> dict[str, Any]:
    """Return the metadata of a tokenizer of 160 tokens: an end token, bytes and one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:158]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<|endoftext|>", *alphabet, "ab"],
        "tokenizer.ggml.token_type": [3] + [1] * 159,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }


def make_source(source: Path, architecture: str, modules: int = 0, **changes: Any) -> None:
    """Save the random checkpoint of an architecture, perhaps with MTP modules."""
    source.mkdir()
    name, own = ARCHITECTURES[architecture]
    changes = {**SIZES, **own, **changes}
    if modules:
        naming = "qwen3_next" if architecture in _QWEN else "deepseek_v3"
        family, fields = FAMILIES[name]
        fields = {**fields, **changes}
        if architecture == "glm4moe":
            fields["first_k_dense_replace"] = 0  # a module has the parts of the first layer
        make_mtp_checkpoint(source, naming, modules, base=(family, fields))
    elif name in FAMILIES:
        make_experts(source, name, **changes)
    else:
        make_checkpoint(source, name, **changes)
    if architecture in (*_QWEN, *_MAMBA2, "kimi-linear"):
        tensors = load_file(source / "model.safetensors")
        for tensor in (one for name, one in tensors.items() if name.endswith("A_log")):
            for _ in range(5):  # until the value can be computed from its exponential
                tensor.copy_(tensor.exp().double().log())
        save_file(tensors, source / "model.safetensors")


def make_file(
    directory: Path, architecture: str, *, modules: int = 0, parts: int = 0, **changes: Any
) -> Path:
    """Write a random model as a GGUF file, and as a checkpoint in `source`."""
    source = directory / "source"
    make_source(source, architecture, modules, **changes)
    config = json.loads((source / "config.json").read_text())
    tensors = tensors_of(source, architecture, config, modules)
    metadata = metadata_of(architecture, config, modules)
    return write(directory, tensors, architecture, parts, **metadata)


def metadata_of(architecture: str, config: dict[str, Any], modules: int) -> dict[str, Any]:
    own = {key: config[name] for name, key in _KEYS.items() if config.get(name) is not None}
    rope = dict(config.get("rope_parameters") or {})
    if architecture == "gemma4":
        own = {**own, **_gemma4_metadata(config)}
        return {**{f"gemma4.{key}": value for key, value in own.items()}, **byte_tokenizer()}
    if architecture == "gemma3":
        own["attention.sliding_window_pattern"] = 3
        own["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    own["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    if rope.get("rope_type") == "yarn":
        own["rope.scaling.type"], own["rope.scaling.factor"] = "yarn", rope["factor"]
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        own["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast", 32.0)
    part = rope.get("partial_rotary_factor", 1.0)
    own["rope.dimension_count"] = int(config["head_dim"] * part)
    own["attention.value_length"] = config["head_dim"]
    if architecture in ("deepseek2", "kimi-linear"):
        latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        own["attention.head_count_kv"] = 1
        own["attention.key_length"], own["attention.value_length"] = latent + rotated, latent
        own["attention.key_length_mla"] = config["qk_nope_head_dim"] + rotated
        own["rope.dimension_count"] = rotated
        if "mscale_all_dim" in rope:
            own["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if architecture == "kimi-linear":
        own["context_length"] = config["model_max_length"]
        own["attention.head_count_kv"] = [int("full" in one) for one in config["layer_types"]]
        own["kda.head_dim"] = config["linear_head_dim"]
    if architecture == "mistral3" and "mscale_all_dim" in rope:
        own["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        own["attention.temperature_scale"] = 0.1
    if architecture in ("deepseek2", "glm4moe"):
        own["expert_gating_func"] = 2
        own["expert_weights_norm"] = config.get("norm_topk_prob", True)
    if architecture == "ernie4_5-moe":
        own["interleave_moe_layer_step"] = config.get("moe_layer_interval", 1)
        own["expert_shared_feed_forward_length"] = 7
    if architecture in _QWEN:
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        own["ssm.inner_size"] = values
        own["full_attention_interval"] = 4
        if architecture != "qwen3next":
            own["rope.dimension_sections"] = [11, 11, 10, 0]
        kinds = [kind == "linear_attention" for kind in config["layer_types"]]
        own["attention.recurrent_layers"] = kinds + [False] * modules
    if architecture == "granitehybrid":
        kinds = [kind == "full_attention" for kind in config["layer_types"]]
        own["attention.head_count_kv"] = [
            is_full * config["num_key_value_heads"] for is_full in kinds
        ]
        own["ssm.inner_size"] = config["mamba_expand"] * config["hidden_size"]
        own["rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
    if architecture == "falcon-h1":
        del own["embedding_scale"]
    if architecture in _NEMOTRON:
        own = _nemotron_metadata(architecture, config, own)
    if modules:
        own["block_count"] += modules
        own["nextn_predict_layers"] = modules
    found = {f"{architecture}.{key}": value for key, value in own.items()}
    return {**found, **byte_tokenizer()}


def _gemma4_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of Gemma 4's layers with sliding and with full attention."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    of_full = config["per_layer_config"][str(slides.index(False))]
    heads, width = config["num_key_value_heads"], config["intermediate_size"]
    of_kind = of_full.get("num_key_value_heads", heads), heads
    num_own = len(slides) - config["num_kv_shared_layers"]
    ropes, sizes = config["rope_parameters"], (config["head_dim"], of_full["head_dim"])
    own = {
        f"{key}{suffix}": size
        for suffix, size in zip(("_swa", ""), sizes, strict=True)
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    }
    if config["use_double_wide_mlp"]:
        own["feed_forward_length"] = [
            width * (1 + (layer >= num_own)) for layer in range(len(slides))
        ]
    if of_kind[0] != of_kind[1]:
        own["attention.head_count_kv"] = [of_kind[one] for one in slides]
    return {
        **own,
        "attention.sliding_window_pattern": slides,
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }


def _nemotron_metadata(
    architecture: str, config: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    """Return the metadata of Nemotron-H: the heads and widths of each layer."""
    has_experts = architecture == "nemotron_h_moe"
    kinds, width = config["layers_block_type"], config["intermediate_size"]
    if has_experts:
        width = config["moe_intermediate_size"]
        own["expert_weights_norm"] = config["norm_topk_prob"]
    else:
        own = {key: value for key, value in own.items() if not key.startswith("expert_")}
    return {
        **own,
        "block_count": len(kinds),
        "attention.head_count_kv": [
            (kind == "full_attention") * config["num_key_value_heads"] for kind in kinds
        ],
        "feed_forward_length": [(kind in ("mlp", "moe")) * width for kind in kinds],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": False,
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
    }


def tensors_of(
    source: Path, architecture: str, config: dict[str, Any], modules: int
) -> dict[str, Any]:
    """Return a model's tensors as llama.cpp's converter writes them."""
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = _num_layers(config) + modules
    # The package's maps of Qwen lack the names of MTP modules.
    maps = [gguf.get_tensor_name_map(one, layers) for one in (kind, gguf.MODEL_ARCH.GLM4_MOE)]

    def named(name: str) -> str:
        found = (one.get_name(key=name, try_suffixes=(".weight", ".bias")) for one in maps)
        return next(one for one in found if one is not None)

    found: dict[str, Any] = {}
    experts: dict[str, list[Tensor]] = {}
    stored = load_file(source / "model.safetensors")
    for name, one in stored.items():
        for new, part in _rearranged(architecture, name, one, config):
            before, is_of_expert, after = new.partition(".experts.")
            number, _, rest = after.partition(".")
            if is_of_expert and number.isdigit():
                own = experts.setdefault(f"{before}.experts.{rest}", [part] * 64)
                own[int(number)] = part
                continue
            found[new if new.startswith("blk.") else named(new)] = part.contiguous()
    count = next((config[key] for key in _KEYS if key.endswith("experts") and key in config), 0)
    for name, parts in experts.items():
        found[named(name)] = torch.stack(parts[:count])
    if architecture == "gemma4":
        part = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        size = max(one["head_dim"] for one in config["per_layer_config"].values())
        found["rope_freqs.weight"] = torch.full((size // 2,), 1e30)
        found["rope_freqs.weight"][: int(size * part) // 2] = 1.0
    if architecture == "llama":  # ratio of the angles of position 1, which are small enough
        plain, scaled = (
            attention.rope_cos_sin(2, config["head_dim"], 5e5, one)[1, config["head_dim"] // 2 :]
            for one in (None, config["rope_parameters"])
        )
        found["rope_freqs.weight"] = plain.double().asin().div(scaled.double().asin()).float()
    return found


def _num_layers(config: dict[str, Any]) -> int:
    return config.get("num_hidden_layers") or len(config["layers_block_type"])


def _rearranged(
    architecture: str, name: str, one: Tensor, config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the converter makes of one, by Hugging Face's names."""
    layers = _num_layers(config)
    if name.startswith("mtp."):
        kind = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
        parts = name.split(".", 3)
        if parts[1] == "layers":
            name = f"model.layers.{layers + int(parts[2])}.{parts[3]}"
        else:
            name = f"model.layers.{layers}.{kind.get(parts[1], 'shared_head.norm')}.{parts[2]}"
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if architecture == "gemma3" and "norm" in name:
        one = one + 1
    if architecture in ("llama", "mistral3", "granitehybrid", *_NEMOTRON) and (
        "q_proj" in name or "k_proj" in name
    ):
        heads = config[f"num_{'attention' if 'q_proj' in name else 'key_value'}_heads"]
        one = one.view(heads, 2, -1, one.shape[-1]).transpose(1, 2).reshape(one.shape)
    if name.endswith(("sinks", "layer_scalar")):
        name += ".weight"
    if architecture == "gemma4" and ".router." in name and name.endswith("scale"):
        part = "ffn_down_exps" if "per_expert" in name else "ffn_gate_inp"
        yield f"blk.{name.split('.')[2]}.{part}.scale", one
    elif architecture == "gemma4" and ".experts." in name:
        yield f"{name}.weight", one
    elif "gate_up_proj" in name or (architecture == "gpt-oss" and "down_proj" in name):
        yield from _stacked(architecture, name, one)
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", one
    elif name.endswith("kv_b_proj.weight"):
        heads = config["num_attention_heads"]
        keys, values = one.view(heads, -1, one.shape[-1]).split(
            [config["qk_nope_head_dim"], config["v_head_dim"]], 1
        )
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    elif architecture in _MAMBA2:
        yield from _mamba2(architecture, name, one, config)
    elif architecture in _QWEN:
        yield from _linear(architecture, name, one, config)
    elif architecture == "kimi-linear":
        if name.endswith("A_log"):
            one = -one.exp()
        elif "conv1d" in name:
            one = one.view(1, len(one), 1, -1)
        yield name.replace("dt_bias", "dt_proj.bias"), one
    else:
        yield name, one


def _mamba2(
    architecture: str, name: str, one: Tensor, config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of a family with Mamba-2: the vectors of heads are columns.

    Gates and ups of Granite 4 lie apart, and Falcon-H1's weights are multiplied by its factors.
    """
    if architecture == "falcon-h1":
        one = _scaled(name, one, config)
    if "input_linear" in name:
        layer = name.split(".")[2]
        kind = "exps" if "block_sparse_moe" in name else "shexp"
        for half, own in zip(("gate", "up"), one.chunk(2, -2), strict=True):
            yield f"blk.{layer}.ffn_{half}_{kind}.weight", own
        return
    if name.endswith("A_log"):
        one = -one.exp()
    if name.endswith(("A_log", ".D")):
        one = one[:, None]
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        one = one.view(config.get("mamba_n_groups") or config["n_groups"], -1)
    elif name.endswith("conv1d.weight"):
        one = one.squeeze(1)
    name = name.replace("dt_bias", "dt_proj.bias")
    if "mixer.experts." in name:
        name = name.replace("backbone.", "model.").replace("mixer.", "mlp.")
    yield name, one


def _scaled(name: str, one: Tensor, config: dict[str, Any]) -> Tensor:
    """Return a tensor of Falcon-H1 with its factors."""
    inputs, (of_gates, of_mlp) = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "down_proj.": of_mlp,
        "gate_proj.": of_gates,
        "k_proj.": config["key_multiplier"] * inputs,
        "q_proj.": inputs,
        "v_proj.": inputs,
        "o_proj.": config["attention_out_multiplier"],
        "out_proj.": config["ssm_out_multiplier"],
        "lm_head.": config["lm_head_multiplier"],
        "embed_tokens.": config["embedding_multiplier"],
    }
    if "in_proj." in name:
        inner, heads = config["mamba_d_ssm"], config["mamba_n_heads"]
        group = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = torch.tensor([inner, inner, group, group, heads])
        each = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes)
        return one * config["ssm_in_multiplier"] * each[:, None]
    return one * next((f for part, f in factors.items() if f".{part}" in f".{name}"), 1.0)


def _stacked(architecture: str, name: str, one: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split gates and ups of all experts, which alternate in gpt-oss."""
    suffix = "bias" if name.endswith("_bias") else "weight"
    base = name.removesuffix("_bias")
    if architecture == "gpt-oss" and suffix == "weight":
        one = one.transpose(1, 2)
    if "gate_up_proj" not in base:
        yield f"{base}.{suffix}", one
        return
    halves = (one[:, ::2], one[:, 1::2]) if architecture == "gpt-oss" else one.chunk(2, 1)
    for half, own in zip(("gate_proj", "up_proj"), halves, strict=True):
        yield f"{base.replace('gate_up_proj', half)}.{suffix}", own


def _linear(
    architecture: str, name: str, one: Tensor, config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of Qwen3-Next and Qwen3.5; the latter have value heads in another order."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    each, size = values // keys, keys * key_dim
    if "in_proj_qkvz" in name:
        widths = [key_dim, key_dim, each * value_dim, each * value_dim]
        q, k, v, z = one.view(keys, sum(widths), -1).split(widths, 1)
        yield name.replace("qkvz", "qkv"), torch.cat([x.flatten(0, 1) for x in (q, k, v)])
        yield name.replace("qkvz", "z"), z.flatten(0, 1)
        return
    if "conv1d" in name:
        one = one.squeeze(1)

    def tiled(part: Tensor, dim: int, width: int) -> Tensor:
        """Order value heads by their number within a key head first."""
        shape = list(part.shape)
        whole = part.view(*shape[:dim], keys, each, width, *shape[dim + 1 :])
        return whole.transpose(dim, dim + 1).reshape(shape)

    if architecture != "qwen3next" and "linear_attn." in name:
        if "in_proj_qkv." in name or "conv1d" in name:
            one = torch.cat([one[: 2 * size], tiled(one[2 * size :], 0, value_dim)])
        elif "in_proj_z." in name:
            one = tiled(one, 0, value_dim)
        elif "out_proj." in name:
            one = tiled(one, 1, value_dim)
        elif not name.endswith("norm.weight"):
            one = tiled(one, 0, 1)
    if name.endswith("A_log"):
        one = -one.exp()
    elif name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        one = one + 1
    yield name, one
