# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters for tests: written in PEFT's format, and merged into the weights of a model."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
LINEAR_ATTENTION = (
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
)
MAMBA = ("in_proj", "out_proj")
DELTA_ATTENTION = ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj")
OTHER_MLPS = ("input_linear", "output_linear", "fc1_latent_proj", "fc2_latent_proj")
# Projections of all families, except those of experts.
EVERY = ATTENTION + MLP + LATENT_ATTENTION + LINEAR_ATTENTION + MAMBA + DELTA_ATTENTION + OTHER_MLPS
# Names in checkpoints, which adapters have too, and names of modules of transformers 5.
_RENAMED = {
    "backbone.": "model.",
    "block_sparse_moe.shared_experts": "mlp.shared_experts",
    "self_attn.f_": "self_attn.forget_gate.f_",
}


def write_adapter(
    directory: Path,
    model: Path,
    seed: int,
    *,
    modules: Iterable[str] = (*ATTENTION, *MLP),
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
    prefix: str = "base_model.model.",
    experts: bool = False,
    **config: Any,
) -> Path:
    """Write a random adapter for all layers of a checkpoint, or for their experts."""
    directory.mkdir()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    num_layers = json.loads((model / "config.json").read_text()).get("num_hidden_layers", math.inf)
    for name, weight in load_file(model / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        part = module.rpartition(".")[2]
        layer = re.search(r"layers\.(\d+)\.", module)
        is_module = suffix == "weight" and part in modules and layer is not None
        is_module = is_module and weight.dim() == 2 and bool(experts) == (".experts." in module)
        if is_module and int(layer[1]) < num_layers:  # later ones are MTP modules
            own = fields.get("rank_pattern", {}).get(part, rank)
            outputs, inputs = weight.shape
            for factor, shape in (("A", (own, inputs)), ("B", (outputs, own))):
                values = torch.randn(shape, generator=generator) * (0.1 if factor == "A" else 0.3)
                tensors[f"{prefix}{module}.lora_{factor}.weight"] = values.to(dtype)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge(model: Any, adapter: Path) -> None:
    """Add scale * B A to the weights of a transformers model, in its own dtype."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name in [one for one in tensors if ".lora_A." in one]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            part = module.rpartition(".")[2]
            rank = config.get("rank_pattern", {}).get(part, config["r"])
            alpha = config.get("alpha_pattern", {}).get(part, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            for saved, own in _RENAMED.items():
                module = module.replace(saved, own)
            weight = model.get_submodule(module).weight
            b, a = tensors[name.replace("lora_A", "lora_B")], tensors[name]
            weight += scale * (b.to(weight.dtype) @ a.to(weight.dtype))
