# SPDX-License-Identifier: Apache-2.0
"""Tiny random Hugging Face checkpoints, made with transformers."""

import atexit
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


# Small Gemma 4: the last layers have no keys and values, and each layer has embeddings.
SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 8,
    "layer_types": [
        "full_attention" if layer in "247" else "sliding_attention" for layer in "01234567"
    ],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "num_key_value_heads": 1,
    "global_head_dim": 128,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 176,
    "final_logit_softcapping": 30.0,
}
# Large Gemma 4: the values of layers with full attention are their keys.
KEYS_AS_VALUES: dict[str, Any] = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 128,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "attention_bias": True,
}
# Gemma 4 with experts beside the dense MLP.
EXPERTS_BESIDE_MLP: dict[str, Any] = {
    **KEYS_AS_VALUES,
    "attention_bias": False,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 48,
}


def lasting_directory() -> Path:
    """Create a directory that several tests share; it is deleted when the process ends."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def make_checkpoint(directory: Path, family: str, **changes: Any) -> Any:
    """Save a random fp32 model of a family ("Llama", "Qwen3", "Gemma3" ..); return it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    kind = getattr(transformers, f"{family}TextConfig", None)  # exists for multimodal families
    kind = kind or getattr(transformers, f"{family}Config")
    config = kind(**{**BASE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomize(model)
    model.save_pretrained(directory)
    return model


def randomize(model: torch.nn.Module) -> None:
    """Replace the weights by random ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The default init is so flat that wrong attention would hardly show.
            scale = 0.2 if parameter.dim() == 2 else 0.1
            # Norm weights start at the identity: 1, or 0 where they multiply with 1 + w.
            is_factor = "norm" in name or name.endswith("scale")
            offset = parameter.flatten()[0].item() if is_factor else 0.0
            parameter.copy_(offset + scale * torch.randn_like(parameter))
            if model.config.model_type.startswith("gemma4") and name.endswith("q_norm.weight"):
                parameter.mul_(0.125)  # its scores are not divided by the root of the head size
            if name.endswith("router.scale"):
                parameter.mul_(8)  # so that scores of experts differ
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # factor on the output of a layer
                buffer.copy_(0.5 + torch.rand_like(buffer))


def write_tokenizer(directory: Path, vocab_size: int = 160) -> None:
    """Save a byte-level tokenizer without merges; token 0 is the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0}
    for symbol in alphabet[: vocab_size - 1]:
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def write_config(directory: Path, **changes: Any) -> Path:
    """Write a directory for random weights: only a configuration and a tokenizer."""
    config = {**BASE, "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", **changes}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, min(config["vocab_size"], 160))
    return directory
