# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint of Qwen3 or Llama as a GGUF file: `write_gguf.py CHECKPOINT OUT.gguf [KIND]`.

KIND is "bf16", "int8" (all matrices Q8_0) or "int4" (Q4_0, embedding and head Q8_0). For each
projection, the weights of all experts of a layer become one tensor.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
FILE_TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Return the GGUF name of a checkpoint tensor."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight"


def stored_as(name: str, kind: str) -> gguf.GGMLQuantizationType:
    """Return the type of a matrix."""
    if kind == "bf16":
        return gguf.GGMLQuantizationType.BF16
    of_layer = name.startswith("model.layers.")
    is_small = kind == "int4" and of_layer
    return gguf.GGMLQuantizationType.Q4_0 if is_small else gguf.GGMLQuantizationType.Q8_0


def in_pairs(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Reorder Llama's q and k for llama.cpp, which rotates neighbors, not halves of heads."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    projection = name.removesuffix(".weight").rpartition(".")[2]
    if config["model_type"] != "llama" or projection not in heads:
        return tensor
    halves = tensor.view(config[heads[projection]], 2, -1, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape)


def packed(tensor: torch.Tensor, number: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return a matrix as bytes of a type."""
    if number == gguf.GGMLQuantizationType.BF16:
        return tensor.bfloat16().view(torch.uint8).numpy()
    return gguf.quants.quantize(tensor.float().numpy(), number)


def main(checkpoint: Path, out: str, kind: str = "bf16") -> None:
    """Write the weights; norms become fp32, as llama.cpp requires."""
    config = json.loads((checkpoint / "config.json").read_text())
    num_experts = config.get("num_experts", 0)
    # Buffer pending tensors in a file instead of memory.
    writer = gguf.GGUFWriter(out, ARCHITECTURES[config["model_type"]], use_temp_file=True)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{FILE_TYPES[kind]}"])
    writer.add_tokenizer_model("none")
    files = [safe_open(path, "pt") for path in sorted(checkpoint.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def matrix(name: str) -> np.ndarray:
        tensor = in_pairs(name, where[name].get_tensor(name), config)
        return packed(tensor, stored_as(name, kind))

    for name in where:
        if ".experts." in name:
            continue
        tensor = where[name].get_tensor(name)
        if tensor.ndim == 1 or name.endswith("mlp.gate.weight"):  # routers are fp32 as well
            writer.add_tensor(gguf_name(name), tensor.float().numpy())
        else:
            writer.add_tensor(gguf_name(name), matrix(name), raw_dtype=stored_as(name, kind))
    for layer in range(config["num_hidden_layers"] if num_experts else 0):
        for part in ("gate", "up", "down"):
            names = [
                f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                for expert in range(num_experts)
            ]
            experts, number = np.stack([matrix(name) for name in names]), stored_as(names[0], kind)
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", experts, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
