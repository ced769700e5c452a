# SPDX-License-Identifier: Apache-2.0
"""Damaged configuration files load, or are refused in one sentence that names the file."""

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import eagle_oracle
import pytest
import torch
from checkpoints import BASE, lasting_directory, write_tokenizer
from safetensors.torch import save_file
from specops.api.errors import ModelError
from specops.checkpoints.directory import open_checkpoint
from specops.engine import EngineConfig
from specops.engine.machine import tokenizer_of
from specops.engine.models import Transformer, load_model
from specops.engine.models.dflash import load_dflash
from specops.engine.models.eagle.first import load_eagle
from specops.engine.models.eagle.loader import load_eagle3
from specops.engine.models.residual_heads import load_hydra, load_medusa

# Small values for the fields of all families; each family reads some of them.
FIELDS: dict[str, Any] = {
    **BASE,
    "hidden_size": 64,
    "dtype": "float32",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "sliding_window": 32,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "partial_rotary_factor": 1.0,
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "moe_num_experts": 2},
    **{"num_experts_per_tok": 1, "moe_k": 1, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [0], "norm_topk_prob": True},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1},
    **{"moe_num_shared_experts": 1, "moe_norm_min": 1e-12, "use_bias": False},
    **{"shared_expert_intermediate_size": 32, "scoring_func": "sigmoid"},
}
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64},
    **{"v_head_dim": 64, "rope_interleave": True},
}
LINEAR: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64},
    **{"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4},
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2},
    **{"mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False},
    **{"embedding_multiplier": 12, "logits_scaling": 6, "residual_multiplier": 0.22},
    **{"attention_multiplier": 0.0078125, "position_embedding_type": "nope"},
    **{"shared_intermediate_size": 48, "time_step_limit": [0.0, float("inf")]},
    "layer_types": ["mamba", "mamba", "attention"],
}
FALCON: dict[str, Any] = {
    **{"mamba_d_ssm": 64, "mamba_d_head": 16, "key_multiplier": 0.5, "lm_head_multiplier": 0.1},
    **{"mamba_rms_norm": False, "mamba_norm_before_gate": False, "mlp_multipliers": [0.5, 0.25]},
    **{"ssm_multipliers": [0.5, 0.25, 0.1, 0.5, 0.3], "ssm_in_multiplier": 1.25},
    **{"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9, "ssm_out_multiplier": 0.2},
    **{"projectors_bias": False, "attn_layer_indices": None},
}
NEMOTRON: dict[str, Any] = {
    **{"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2},
    **{"conv_kernel": 4, "use_conv_bias": True, "hybrid_override_pattern": "M-*E"},
    **{"moe_shared_expert_intermediate_size": 32, "layer_norm_epsilon": 1e-5},
    **{"mlp_hidden_act": "relu2", "sliding_window": None, "num_hidden_layers": 4},
    "moe_latent_size": 32,
}
KIMI: dict[str, Any] = {
    **{"mla_use_nope": True, "num_experts_per_token": 1, "num_shared_experts": 1},
    **{"num_expert_group": 1, "moe_renormalize": True, "model_max_length": 256},
    **{"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
    "linear_attn_config": {
        **{"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 2, "head_dim": 32},
        "short_conv_kernel_size": 4,
    },
}
GEMMA: dict[str, Any] = {
    **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4: dict[str, Any] = {
    **{"global_head_dim": 128, "num_global_key_value_heads": 1, "num_kv_shared_layers": 1},
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 1 << 20},
    **{"attention_k_eq_v": True, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4_EXPERTS: dict[str, Any] = {
    **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48},
    "per_layer_config": {"2": {"head_dim": 128}},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": FIELDS,
    "MistralForCausalLM": FIELDS,
    "Qwen2ForCausalLM": FIELDS,
    "Qwen3ForCausalLM": FIELDS,
    "MiMoForCausalLM": FIELDS,
    "Qwen3MoeForCausalLM": FIELDS | EXPERTS,
    "DeepseekV3ForCausalLM": FIELDS | EXPERTS | LATENT,
    "Glm4MoeForCausalLM": FIELDS | EXPERTS,
    "Ernie4_5ForCausalLM": FIELDS | {"use_bias": False},
    "Ernie4_5_MoeForCausalLM": FIELDS | EXPERTS,
    "GptOssForCausalLM": FIELDS | EXPERTS,
    "Qwen3NextForCausalLM": FIELDS | EXPERTS | LINEAR,
    "Qwen3_5ForConditionalGeneration": {"text_config": FIELDS | LINEAR},
    "Qwen3_5MoeForCausalLM": FIELDS | EXPERTS | LINEAR,
    "GraniteMoeHybridForCausalLM": FIELDS | EXPERTS | MAMBA,
    "FalconH1ForCausalLM": FIELDS | {**MAMBA, "layer_types": None} | FALCON,
    "NemotronHForCausalLM": FIELDS | EXPERTS | NEMOTRON,
    "KimiLinearForCausalLM": FIELDS | EXPERTS | LATENT | KIMI,
    "Gemma3ForCausalLM": {key: one for key, one in FIELDS.items() if key != "hidden_act"} | GEMMA,
    "Gemma3ForConditionalGeneration": {"text_config": {"hidden_size": 64, **GEMMA}},
    "Gemma4ForCausalLM": FIELDS | GEMMA4,
    "Gemma4ForConditionalGeneration": {"text_config": FIELDS | GEMMA4 | GEMMA4_EXPERTS},
}
QUANTIZED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"format": "pack-quantized", "weights": {"num_bits": 4}}},
    "sparsity_config": {"format": "dense"},
    "transform_config": {},
    "group_size": 128,
    "weight_block_size": [128, 128],
    "checkpoint_format": "gptq",
    "packing_format": "auto_round:auto_gptq",
    "quant_algo": "FP8",
}
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    10**30,
    -(10**30),
    0.0,
    -0.5,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "7",
    "\u0000",
    "full_attention",
    "auto",
    [],
    [[]],
    [None],
    [1, "a"],
    {},
    {"a": {}},
    {"rope_type": []},
    {"type": {"a": 1}},
    ["sliding_attention"] * 3,
    [{}],
    "x" * 5000,
    {"factor": "a", "rope_type": "yarn"},
    {"rope_type": "llama3"},
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Iterate over the paths of all fields of an object, including nested ones."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        children = enumerate(value)
    for key, one in children:
        yield from paths_of(one, (*path, key))


def damaged(config: Any, generator: random.Random) -> bytes:
    """Return a JSON file with one to three changed or missing fields, or a truncated text."""
    config = copy.deepcopy(config)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        places = list(paths_of(config))
        if not places:
            break
        *above, last = generator.choice(places)
        parent = config
        for key in above:
            parent = parent[key]
        if generator.random() < 0.25:
            del parent[last]
        else:
            parent[last] = copy.deepcopy(generator.choice(ODD))
    data = json.dumps(config).encode()
    kind = generator.random()
    if kind < 0.03:
        return data[: generator.randrange(len(data) + 1)]
    if kind < 0.05:
        return json.dumps(generator.choice(ODD)).encode()
    if kind < 0.06:
        return data.replace(b'"', b"\xff", 1)
    if kind < 0.065:
        return b'{"a":' * 100_000
    return data


@lru_cache
def tiny_model() -> Path:
    """Create a small Qwen3 model with a tokenizer and return its directory."""
    directory = lasting_directory()
    width, heads, inner = BASE["hidden_size"], 64 * BASE["num_attention_heads"], 96
    kv = 64 * BASE["num_key_value_heads"]
    tensors = {"model.embed_tokens.weight": (160, width), "model.norm.weight": (width,)}
    tensors["lm_head.weight"] = (160, width)
    for index in range(BASE["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for name, shape in {
            "self_attn.q_proj": (heads, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, heads),
            "self_attn.q_norm": (64,),
            "self_attn.k_norm": (64,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }.items():
            tensors[f"{layer}{name}.weight"] = shape
    save_file(
        {name: torch.ones(shape) for name, shape in tensors.items()},
        directory / "model.safetensors",
    )
    config = {**BASE, "architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


@lru_cache
def target() -> Transformer:
    """Return a target with the sizes of the heads."""
    directory = lasting_directory()
    config = {**BASE, "architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    config |= {"num_hidden_layers": eagle_oracle.LAYERS, "vocab_size": eagle_oracle.VOCAB}
    (directory / "config.json").write_text(json.dumps(config))
    model = load_model(directory, load_format="dummy")
    model.settings = dataclasses.replace(model.settings, load_format="auto")
    return model


def link_files(directory: Path, source: Path) -> None:
    """Link the files of one directory into another."""
    for file in source.iterdir():
        if not (directory / file.name).exists():
            (directory / file.name).symlink_to(file)


def load_family_config(directory: Path, generator: random.Random) -> None:
    """Load a damaged config.json of any family, without weights."""
    architecture = generator.choice(list(FAMILIES))
    config = {"architectures": [architecture], **FAMILIES[architecture]}
    (directory / "config.json").write_bytes(damaged(config, generator))
    with pytest.raises(ModelError) as refusal:
        load_model(directory)
    if "no model.safetensors" not in str(refusal.value):  # the error of an undamaged configuration
        raise refusal.value


def load_model_config(directory: Path, generator: random.Random) -> None:
    """Load a model with weights and a damaged config.json or quantization config."""
    config = json.loads((tiny_model() / "config.json").read_text())
    config["quantization_config"] = QUANTIZED
    name = "quantize_config.json" if generator.random() < 0.2 else "config.json"
    config = config if name == "config.json" else QUANTIZED
    (directory / name).write_bytes(damaged(config, generator))
    link_files(directory, tiny_model())
    load_model(directory)


def load_weight_files(directory: Path, generator: random.Random) -> None:
    """Open a checkpoint with a damaged weight index or ModelOpt file."""
    names = ["model.safetensors.index.json", "hf_quant_config.json"]
    which = generator.randrange(2)
    index = {"metadata": {"total_size": 1}, "weight_map": {"a.weight": "model.safetensors"}}
    own = (index, {"producer": {"name": "modelopt"}, "quantization": QUANTIZED})[which]
    (directory / names[which]).write_bytes(damaged(own, generator))
    link_files(directory, tiny_model())
    open_checkpoint(directory)


def load_tokenizer_files(directory: Path, generator: random.Random) -> None:
    """Load a tokenizer with a damaged file."""
    tokens = {"eos_token": "<|endoftext|>", "pad_token": {"content": "<|endoftext|>"}}
    files: dict[str, Any] = {
        "tokenizer_config.json": {**tokens, "chat_template": "{{ messages }}", "add_bos_token": 1},
        "special_tokens_map.json": tokens,
        "generation_config.json": {"eos_token_id": [0, 1], "bos_token_id": 0, "temperature": 0.5},
        "tokenizer.json": json.loads((tiny_model() / "tokenizer.json").read_text()),
    }
    name = generator.choice(list(files))
    (directory / name).write_bytes(damaged(files[name], generator))
    link_files(directory, tiny_model())
    tokenizer_of(EngineConfig(model=str(directory)))


def load_head_config(directory: Path, generator: random.Random) -> None:
    """Load a draft head with a damaged config.json."""
    head = eagle_oracle.Head()
    layout = generator.choice(("official", "specforge", "modelopt", "speculators"))
    eagle_oracle.write(directory, head, layout)
    config = json.loads((directory / "config.json").read_text())
    config |= {"norm_output": False, "logit_scale": 1, "mask_token_id": 1}
    more: dict[str, Any] = {
        **{"block_size": 4, "num_target_layers": 6, "causal": False, "markov_rank": 0},
        **{"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 8},
        **{"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2, 3]}},
        **{"hydra_head_arch": "mlp", "grounded_heads": True, "truncated_vocab_size": 160},
    }
    load: Callable[..., Any] = generator.choice(
        (load_eagle3, load_eagle3, load_eagle3, load_dflash, load_medusa, load_hydra, load_eagle)
    )
    config |= {} if load is load_eagle3 else more
    (directory / "config.json").write_bytes(damaged(config, generator))
    options: dict[str, Any] = {"target_directory": directory}
    if load in (load_medusa, load_hydra):
        options = {}
    elif load is load_eagle:
        options["num_slots"] = 1
    load(target(), directory, **options)


KINDS = (
    load_family_config,
    load_family_config,
    load_family_config,
    load_model_config,
    load_weight_files,
    load_tokenizer_files,
    load_head_config,
)


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.slow)], ids=str
)
def test_damaged_configurations_are_refused_by_name(tmp_path: Path, seeds: range) -> None:
    refused = 0
    for seed in seeds:
        directory = tmp_path / str(seed)
        directory.mkdir()
        generator = random.Random(seed)
        read = generator.choice(KINDS)
        try:
            read(directory, generator)
        except ModelError as error:
            message = str(error)
            assert str(directory) in message, f"seed {seed}: {message}"
            assert "\n" not in message and len(message) < 1000, f"seed {seed}: {message}"
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {read.__name__}: {error!r}") from error
    assert len(seeds) > refused > len(seeds) // 3
