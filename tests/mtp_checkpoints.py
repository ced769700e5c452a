# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with MTP modules in every naming convention, and a slow reference."""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint, write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

# The names of a module's own tensors, written by hand and independent of the engine's table: {i}
# counts modules from 0, {l} decoder layers.
NAMES: dict[str, dict[str, str]] = {
    "deepseek_v3": {
        "embed_norm": "model.layers.{l}.enorm.weight",
        "hidden_norm": "model.layers.{l}.hnorm.weight",
        "projection": "model.layers.{l}.eh_proj.weight",
        "head_norm": "model.layers.{l}.shared_head.norm.weight",
        "block": "model.layers.{l}.",
    },
    "mimo": {
        "embed_norm": "model.mtp_layers.{i}.token_layernorm.weight",
        "hidden_norm": "model.mtp_layers.{i}.hidden_layernorm.weight",
        "projection": "model.mtp_layers.{i}.input_proj.weight",
        "head_norm": "model.mtp_layers.{i}.final_layernorm.weight",
        "block": "model.mtp_layers.{i}.",
    },
    "ernie4_5": {
        "embed_norm": "model.mtp_emb_norm.{i}.weight",
        "hidden_norm": "model.mtp_hidden_norm.{i}.weight",
        "projection": "model.mtp_linear_proj.{i}.weight",
        "projection_bias": "model.mtp_linear_proj.{i}.bias",
        "head_norm": "model.norm.weight",  # the target's own
        "block": "model.mtp_block.{i}.",
    },
    "qwen3_next": {
        "embed_norm": "mtp.pre_fc_norm_embedding.weight",
        "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
        "projection": "mtp.fc.weight",
        "head_norm": "mtp.norm.weight",
        "block": "mtp.layers.{i}.",
    },
    "nemotron_h": {
        "embed_norm": "mtp.layers.{i}.enorm.weight",
        "hidden_norm": "mtp.layers.{i}.hnorm.weight",
        "projection": "mtp.layers.{i}.eh_proj.weight",
        "head_norm": "mtp.layers.1.final_layernorm.weight",
        "block": "mtp.layers.",
    },
}

# The base and the config.json of a tiny checkpoint in each naming but Nemotron's, whose modules
# have layers of their own (test_experts.py).
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("Qwen3", {"tie_word_embeddings": True}),
    "mimo": ("Qwen2", {}),
    "ernie4_5": ("Llama", {}),
    "qwen3_next": ("Qwen3", {}),
}
GLM: tuple[str, dict[str, Any]] = (
    "Glm4Moe",
    {
        "first_k_dense_replace": 3,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 2,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 1,
        "partial_rotary_factor": 0.5,
    },
)


@dataclass
class Tiny:
    """A checkpoint on disk, and its contents for the slow reference."""

    directory: Path
    naming: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    base: Any  # the target in transformers


def make_mtp_checkpoint(
    directory: Path,
    naming: str,
    modules: int = 1,
    *,
    base: tuple[str, dict[str, Any]] | None = None,
    projection_bias: bool = False,
) -> Tiny:
    """Save a random fp32 target and `modules` random modules, and return both."""
    family, changes = base or BASES[naming]
    theirs = make_checkpoint(directory, family, **changes)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    config = json.loads((directory / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    offset = 1.0 if naming == "qwen3_next" else 0.0
    generator = torch.Generator().manual_seed(5)

    def random(shape: tuple[int, ...], scale: float, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(shape, generator=generator)

    names, of_target = NAMES[naming], set(tensors)
    for index in range(modules):

        def named(part: str, i: int = index) -> str:
            return names[part].format(i=i, l=layers + i)

        for part in ("embed_norm", "hidden_norm", "head_norm"):
            if named(part) not in of_target:
                tensors[named(part)] = random((hidden,), 0.1, 1.0 - offset)
        tensors[named("projection")] = random((hidden, 2 * hidden), 0.2)
        if projection_bias:
            tensors[named("projection_bias")] = random((hidden,), 0.2)
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            mean = (1.0 - offset) if "norm" in name else 0.0
            scale = 0.2 if tensors[name].dim() == 2 else 0.1
            block = named("block") + name.removeprefix("model.layers.0.")
            tensors[block] = random(tuple(tensors[name].shape), scale, mean)
    if naming == "mimo":
        config["architectures"], config["model_type"] = ["MiMoForCausalLM"], "mimo"
    if naming != "qwen3_next":
        config["num_nextn_predict_layers"] = modules
    elif modules > 1:
        config["mtp_num_hidden_layers"] = modules
    save_checkpoint(directory, config, tensors)
    return Tiny(directory, naming, config, tensors, theirs)


def make_mtp_model(directory: Path) -> Path:
    """Save a Qwen3 of two layers with an MTP module and a tokenizer, for engines."""
    base = ("Qwen3", {"num_hidden_layers": 2, "vocab_size": 257})
    make_mtp_checkpoint(directory, "deepseek_v3", base=base)
    write_tokenizer(directory, 257)
    return directory


def save_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Replace the configuration and the weights of a directory."""
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: t.clone() for name, t in tensors.items()}, directory / "model.safetensors")


class SlowModules:
    """The modules in plain torch, every row from the beginning: no cache, no tables."""

    def __init__(
        self,
        tiny: Tiny,
        *,
        recycle_normed: bool = True,
        masks_position_0: bool = False,
        chained: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.tiny = tiny
        self.dtype = dtype
        self.base = copy.deepcopy(tiny.base).to(dtype)
        self.base.set_attn_implementation("eager")  # uses ops that `RandomRounding` intercepts
        self.recycle_normed = recycle_normed
        self.masks_position_0 = masks_position_0
        self.chained = chained
        self.tensors = {name: tensor.to(dtype) for name, tensor in tiny.tensors.items()}
        self.offset = 1.0 if tiny.naming == "qwen3_next" else 0.0

    def hidden(self, token_ids: list[int]) -> Tensor:
        """Return the target's states after its final norm, from transformers."""
        with torch.no_grad():
            states: Tensor = self.base.model(torch.tensor([token_ids])).last_hidden_state[0]
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Apply the target's head."""
        tied = self.tiny.config.get("tie_word_embeddings")
        return states @ self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def _norm(self, x: Tensor, name: str, offset: float | None = None) -> Tensor:
        eps = self.tiny.config["rms_norm_eps"]
        weight = self.tensors[name] + (self.offset if offset is None else offset)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def module(self, index: int, token_ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return a module's (LM head inputs, recycled states) for all rows, each [rows, hidden]."""
        names, layers = NAMES[self.tiny.naming], self.tiny.config["num_hidden_layers"]

        def named(part: str) -> str:
            return names[part].format(i=index, l=layers + index)

        embedded = self.tensors["model.embed_tokens.weight"][torch.tensor(token_ids)]
        if self.masks_position_0:
            embedded = embedded.clone()
            embedded[0] = 0
        halves = [
            self._norm(embedded, named("embed_norm")),
            self._norm(hidden, named("hidden_norm")),
        ]
        if self.tiny.naming == "mimo":
            halves.reverse()
        x = torch.cat(halves, dim=-1) @ self.tensors[named("projection")].T
        if names.get("projection_bias") and named("projection_bias") in self.tensors:
            x = x + self.tensors[named("projection_bias")]
        x = self._block(named("block"), x)
        normed = self._norm(x, named("head_norm"))
        return normed, normed if self.recycle_normed else x

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.tensors[name + ".weight"].T
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    def _block(self, prefix: str, x: Tensor) -> Tensor:
        config = self.tiny.config
        rows, dim = len(x), config["head_dim"]
        normed = self._norm(x, prefix + "input_layernorm.weight")
        q, k, v = (
            self._linear(normed, f"{prefix}self_attn.{name}_proj").view(rows, -1, dim)
            for name in "qkv"
        )
        if prefix + "self_attn.q_norm.weight" in self.tensors:
            q = self._norm(q, prefix + "self_attn.q_norm.weight")
            k = self._norm(k, prefix + "self_attn.k_norm.weight")
        q, k = self._rotate(q), self._rotate(k)
        group = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for row in range(rows):
            for head in range(q.shape[1]):
                scores = k[: row + 1, head // group] @ q[row, head] / dim**0.5
                out[row, head] = scores.softmax(-1) @ v[: row + 1, head // group]
        x = x + self._linear(out.flatten(1), prefix + "self_attn.o_proj")
        normed = self._norm(x, prefix + "post_attention_layernorm.weight")
        gate = self._linear(normed, prefix + "mlp.gate_proj")
        up = self._linear(normed, prefix + "mlp.up_proj")
        return x + self._linear(torch.nn.functional.silu(gate) * up, prefix + "mlp.down_proj")

    def _rotate(self, x: Tensor) -> Tensor:
        """Apply RoPE at positions 0.. of [rows, heads, head_dim]."""
        rope = self.tiny.config["rope_parameters"]
        size = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        half = size // 2
        inverse = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(len(x)).float(), inverse)[:, None].to(self.dtype)
        first, second, rest = x[..., :half], x[..., half:size], x[..., size:]
        return torch.cat(
            (
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
                rest,
            ),
            dim=-1,
        )

    def text(self, token_ids: list[int], modules: int) -> list[Tensor]:
        """Return each module's LM head inputs along a text; module m has rows 0 to n - m - 1."""
        target = previous = self.hidden(token_ids)
        states = []
        for m in range(1, modules + 1):
            rows = len(token_ids) - m
            hidden = previous if self.chained else target
            state, previous = self.module(m - 1, token_ids[m:], hidden[:rows])
            states.append(state)
        return states

    def drafts(
        self, prefix: list[int], count: int, modules: int = 1
    ) -> tuple[list[int], list[Tensor]]:
        """Return the greedy drafts after a prefix: tokens, and their logits.

        The prefix ends in the token that the target has just chosen.
        """
        rows = len(prefix) - 1
        text, drafts, logits = list(prefix), [], []

        def draft(states: Tensor) -> None:
            logits.append(self.logits(states[-1]))
            drafts.append(int(logits[-1].argmax()))
            text.append(drafts[-1])

        target = recycled = self.hidden(prefix)[:rows]
        for index in range(modules):
            hidden = recycled if self.chained else target
            states, recycled = self.module(index, text[index + 1 :], hidden)
            draft(states)
        while len(drafts) < count:
            hidden = torch.cat((hidden, recycled[-1:]))
            states, recycled = self.module(modules - 1, text[modules:], hidden)
            draft(states)
        return drafts[:count], logits[:count]
