# SPDX-License-Identifier: Apache-2.0
"""Draft heads for the bundled model in vLLM's layouts: trained ones and random ones."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CONFIG: dict[str, Any] = json.loads((GOLDEN / "eagle3" / "config.json").read_text())
NUM_HEADS = 4  # for Medusa


def write_head(folder: Path, method: str) -> str:
    """Write a head and return its folder.

    Args:
        folder: created by this function.
        method: "eagle3" and "dflash" are trained; "eagle", "peagle" and "medusa" are random; for
            "dspark" only the configuration is written.
    """
    config, tensors = {
        "eagle3": _eagle3,
        "dflash": _dflash,
        "eagle": _eagle,
        "peagle": _peagle,
        "medusa": _medusa,
        "dspark": _dspark,
    }[method]()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _golden(method: str, **more: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((GOLDEN / method / "config.json").read_text())
    return config | {"model_type": "qwen3"} | more, load_file(GOLDEN / method / "model.safetensors")


def _eagle3() -> tuple[dict[str, Any], dict[str, Tensor]]:
    # The head's attention has norms of q and k, as in vLLM's class for Qwen3.
    return _golden("eagle3", architectures=["Eagle3Qwen3ForCausalLM"])


def _dflash() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return _golden("dflash")


def _dspark() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, _ = _golden("dflash")
    return config | json.loads((GOLDEN / "dspark" / "config.json").read_text()), {}


def _peagle() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return EAGLE-3's head with a random state for its masks."""
    config, tensors = _eagle3()
    tensors["mask_hidden"] = _random(1, 3 * CONFIG["hidden_size"])
    return config | {"ptd_token_id": 1}, tensors


def _eagle() -> tuple[dict[str, Any], dict[str, Tensor]]:
    hidden, intermediate = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    widths = {"q": heads * 64, "k": kv_heads * 64, "v": kv_heads * 64}
    tensors = {
        f"layers.0.self_attn.{name}_proj.weight": _random(width, hidden)
        for name, width in widths.items()
    }
    tensors |= {
        "fc.weight": _random(hidden, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": _random(hidden, widths["q"]),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "layers.0.mlp.gate_proj.weight": _random(intermediate, hidden),
        "layers.0.mlp.up_proj.weight": _random(intermediate, hidden),
        "layers.0.mlp.down_proj.weight": _random(hidden, intermediate),
    }
    config = {name: value for name, value in CONFIG.items() if name != "eagle_config"}
    return config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, tensors


def _medusa() -> tuple[dict[str, Any], dict[str, Tensor]]:
    hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    tensors = {}
    for head in range(NUM_HEADS):
        tensors[f"blocks.{head}.layers.0.weight"] = _random(hidden, hidden)
        tensors[f"lm_heads.{head}.weight"] = _random(vocab, hidden)
    config = {"hidden_size": hidden, "vocab_size": vocab, "num_heads": NUM_HEADS}
    return config | {"model_type": "medusa", "num_hidden_layers": 1}, tensors


def _random(*shape: int) -> Tensor:
    """Return random weights, the same in every call with the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (shape[-1] ** -0.5 * torch.randn(*shape, generator=generator)).bfloat16()
