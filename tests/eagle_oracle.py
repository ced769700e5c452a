# SPDX-License-Identifier: Apache-2.0
"""Tiny EAGLE-3 heads in published layouts, and a slow float64 reference of their drafts.

The reference follows the method's description and uses no code of the engine: it recomputes all
rows for every draft.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS, VOCAB, WIDTH, HEADS, KV_HEADS, DIM, MLP = 6, 160, 64, 4, 2, 64, 96
THETA, EPS = 10000.0, 1e-5


@dataclass
class Head:
    """A head, independent of its layout.

    Attributes:
        entered: target layers whose input states the head reads.
        tensors: weights by their names in the official layout.
        num_layers: decoder layers of the head.
        width: width of its states.
        mask: mask token of P-EAGLE; None if the head drafts token by token.
    """

    entered: tuple[int, ...] = (2, 3, 3)
    num_layers: int = 1
    width: int = WIDTH
    draft_vocab: int = 40
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask: int | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * (2 / shape[-1]) ** 0.5

        def norm(width: int) -> Tensor:
            return 1 + 0.2 * torch.randn(width, generator=generator)

        width, joined = self.width, WIDTH * len(self.entered)
        made = {"embed_tokens.weight": matrix(VOCAB, width) * 4, "fc.weight": matrix(width, joined)}
        for index in range(self.num_layers):
            prefix, inputs = f"layers.{index}.", width if index else 2 * width
            made |= {
                f"{prefix}input_layernorm.weight": norm(width),
                f"{prefix}self_attn.q_proj.weight": matrix(HEADS * DIM, inputs),
                f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * DIM, inputs),
                f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * DIM, inputs),
                f"{prefix}self_attn.o_proj.weight": matrix(width, HEADS * DIM),
                f"{prefix}post_attention_layernorm.weight": norm(width),
                f"{prefix}mlp.gate_proj.weight": matrix(MLP, width),
                f"{prefix}mlp.up_proj.weight": matrix(MLP, width),
                f"{prefix}mlp.down_proj.weight": matrix(width, MLP),
            }
        made["layers.0.hidden_norm.weight"] = norm(width)
        made["norm.weight"] = norm(width)
        made["lm_head.weight"] = matrix(self.draft_vocab, width)
        if self.norm_before_fc:
            made["input_norm.weight"] = norm(joined)
        if self.fc_norm:
            made |= {f"fc_norm.{i}.weight": norm(WIDTH) for i in range(len(self.entered))}
        if self.mask is not None:
            made["mask_hidden"] = 2 * torch.randn(1, 1, joined, generator=generator)
        tokens = torch.randperm(VOCAB, generator=generator)[: self.draft_vocab].sort().values
        made["d2t"] = tokens - torch.arange(self.draft_vocab)
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, tokens, True)
        self.tensors = made

    @property
    def layer_config(self) -> dict[str, Any]:
        """The config.json fields of the decoder layer."""
        return {
            "hidden_size": self.width,
            "intermediate_size": MLP,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
        }

    @property
    def flags(self) -> dict[str, Any]:
        """The optional parts of the head, as config.json flags."""
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return {name: True for name in names if getattr(self, name)}


_OUTSIDE = ("d2t", "t2d", "lm_head.weight", "mask_hidden")


def write(directory: Path, head: Head, layout: str, **changes: Any) -> None:
    """Write a head in a layout: "official", "specforge", "modelopt", "speculators" or "pickled"."""
    tensors = dict(head.tensors)
    config: dict[str, Any] = {**head.layer_config, "draft_vocab_size": head.draft_vocab}
    config |= {"target_hidden_size": WIDTH, **head.flags}
    if layout in ("official", "pickled"):
        # This layout has the class and the number of layers of the target.
        config |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40}
        tensors = {
            name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()
        }
    elif layout in ("specforge", "modelopt"):
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        # SpecForge counts layers by their output states, if its list begins with 1.
        left = layout == "specforge" and head.entered[0] == 2
        ids = {"eagle_aux_hidden_state_layer_ids": [one - left for one in head.entered]}
        config["eagle_config"] = {"use_aux_hidden_state": True, **ids}
        if layout == "modelopt":
            config["eagle_config"] |= {
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
            }
        tensors = {
            name if name in _OUTSIDE else f"model.{name}": tensor
            for name, tensor in tensors.items()
        }
    else:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "transformer_layer_config": {**head.layer_config, "model_type": "llama"},
            "draft_vocab_size": head.draft_vocab,
            "target_hidden_size": WIDTH,
            "eagle_aux_hidden_state_layer_ids": list(head.entered),
            **head.flags,
        }
    if head.mask is not None:
        kinds = {"speculators": ("mask_token_id", "peagle")}
        field, kind = kinds.get(layout, ("ptd_token_id", None))
        config |= {field: head.mask} | ({"speculators_model_type": kind} if kind else {})
    config |= changes
    (directory / "config.json").write_text(json.dumps(config))
    if layout == "pickled":
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")


def drafts(
    base: Any, head: Head, text: Sequence[int], count: int, *, shift: int = 0, mistake: str = ""
) -> list[int]:
    """Return the most likely drafts after a text, one by one.

    Args:
        base: the target in transformers, in float64.
        head: the head.
        text: token ids.
        count: number of drafts.
        shift: offset of the layers' indices, to show that the right layers are read.
        mistake: "token", "state" or "place": a planted error in P-EAGLE's masks, to show that the
            masks are compared.
    """
    with torch.no_grad():
        found = base(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    tensors = {name: one.double() for name, one in head.tensors.items()}
    states = [found[index + shift][0].double() for index in head.entered]
    hidden = list(_projected(head, tensors, torch.cat(states, -1))[: len(text) - 1])
    tokens = list(text[1:])
    if head.mask is not None:
        mask_input = tensors["mask_hidden"][0] * (mistake != "state")
        hidden += list(_projected(head, tensors, mask_input)) * (count - 1)
        masks = [head.mask - (mistake == "token")] * (count - 1)
        places = torch.arange(len(hidden))
        places[len(tokens) :] += mistake == "place"
        out, _ = _rows(head, tensors, tokens + masks, torch.stack(hidden), places)
        best = (out[len(tokens) - 1 :] @ tensors["lm_head.weight"].T).argmax(1).tolist()
        return [one + int(head.tensors["d2t"][one]) for one in best]
    drafted: list[int] = []
    for _ in range(count):
        out, recycled = _rows(head, tensors, tokens, torch.stack(hidden))
        best = int((tensors["lm_head.weight"] @ out[-1]).argmax())
        drafted.append(best + int(head.tensors["d2t"][best]))
        tokens.append(drafted[-1])
        hidden.append(recycled[-1])
    return drafted


def _projected(head: Head, tensors: dict[str, Tensor], joined: Tensor) -> Tensor:
    """Return the states of several layers as the input of a row."""
    if head.fc_norm:
        parts = joined.chunk(len(head.entered), -1)
        parts = [norm(one, tensors[f"fc_norm.{i}.weight"]) for i, one in enumerate(parts)]
        joined = torch.cat(parts, -1)
    if head.norm_before_fc:
        joined = norm(joined, tensors["input_norm.weight"])
    return joined @ tensors["fc.weight"].T


def _rows(
    head: Head,
    tensors: dict[str, Tensor],
    tokens: Sequence[int],
    hidden: Tensor,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    embedded = tensors["embed_tokens.weight"][torch.tensor(list(tokens))]
    normed = norm(hidden, tensors["layers.0.hidden_norm.weight"])
    residual = normed if head.norm_before_residual else hidden
    for index in range(head.num_layers):
        prefix = f"layers.{index}."
        own = {
            name.removeprefix(prefix): one
            for name, one in tensors.items()
            if name.startswith(prefix)
        }
        attention_input = norm(residual if index else embedded, own["input_layernorm.weight"])
        attention_input = attention_input if index else torch.cat([attention_input, normed], -1)
        residual = residual + attention(own, attention_input, places)
        x = norm(residual, own["post_attention_layernorm.weight"])
        gate, up = (x @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        residual = residual + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    out = norm(residual, tensors["norm.weight"])
    return out, out if head.norm_output else residual


def attention(own: dict[str, Tensor], x: Tensor, places: Tensor | None = None) -> Tensor:
    """Apply causal attention to rows at `places`, or at positions 0, 1, .."""
    q, k, v = (
        (x @ own[f"self_attn.{name}_proj.weight"].T + own.get(f"self_attn.{name}_proj.bias", 0))
        .view(len(x), -1, DIM)
        .transpose(0, 1)
        for name in "qkv"
    )
    places = torch.arange(len(x)) if places is None else places
    q, k = _rotated(q, places), _rotated(k, places)
    k, v = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (k, v))
    scores = q @ k.transpose(1, 2) / DIM**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
    return attended @ own["self_attn.o_proj.weight"].T


def _rotated(x: Tensor, places: Tensor) -> Tensor:
    angles = torch.outer(
        places.double(),
        THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM),
    )
    first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Apply RMSNorm."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
