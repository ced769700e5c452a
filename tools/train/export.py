# SPDX-License-Identifier: Apache-2.0
"""Write and read model directories in the Hugging Face layout.

A checkpoint and the shipped model are the same thing: bf16 weights, the tokenizer, and the step
counts of both phases in the safetensors header. Any loadable checkpoint can be resumed.
"""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.train.model import MixtureConfig, Model, ModelConfig
from tools.train.tokenizer import EOS, EOS_ID

# A code model has no chat turns: messages are joined by newlines and the answer continues them.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first -%}{{ '\\n' }}{%- endif -%}"
    "{{- message['content'] -}}"
    "{%- endfor -%}"
)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json`: Qwen3 or Qwen3-MoE fields, and the number of MTP modules."""
    experts: dict[str, Any] = {}
    if isinstance(config, MixtureConfig):
        experts = {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if experts else "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        **experts,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically, so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def psf_license() -> str:
    """Return the license text that comes with this Python."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt").read_text(encoding="utf-8")
    if "PYTHON SOFTWARE FOUNDATION LICENSE" not in text:
        raise ValueError("this Python's LICENSE.txt is not the PSF license")
    return text


def save_model(
    directory: Path, model: Model, tokenizer: Tokenizer, step: int, recycle_step: int = 0
) -> None:
    """Write config, tokenizer and bf16 weights, replacing each file atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config
    _write_json(directory / "config.json", config_json(config))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID},
    )
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "bos_token": EOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        directory / "special_tokens_map.json",
        {"bos_token": EOS, "eos_token": EOS, "pad_token": EOS},
    )
    write_text(directory / "tokenizer.json", tokenizer.to_str())
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    temporary = directory / ".model.safetensors.tmp"
    steps = {"step": str(step), "recycle_step": str(recycle_step)}
    save_file(tensors, temporary, metadata={"format": "pt", **steps})
    temporary.chmod(0o644)  # safetensors restricts the file to its owner
    os.replace(temporary, directory / "model.safetensors")


def load_model(directory: Path) -> tuple[Model, Tokenizer, int]:
    """Read a directory written by `save_model`: the model in fp32, its tokenizer, its step."""
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kind = MixtureConfig if "num_experts" in fields else ModelConfig
    model = Model(kind(**{name: fields[name] for name in kind.__dataclass_fields__}))
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        step = int(file.metadata()["step"])
        state = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    model.load_state_dict(state)
    return model, Tokenizer.from_file(str(directory / "tokenizer.json")), step


def recycle_steps(directory: Path) -> int:
    """Return the number of steps of the second phase (`recycle.py`) that a directory has seen."""
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return int(file.metadata().get("recycle_step", 0))
