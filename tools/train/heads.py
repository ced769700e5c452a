# SPDX-License-Identifier: Apache-2.0
"""Draft heads in plain PyTorch for the bundled model, for every method of the engine.

A draft model also counts as a head here, although it reads nothing from its target.

All heads draft chains along a given text. The chain of start s is what an engine drafts when token
s + 1 is the newest one: the target's states of rows 0 to s exist, and draft k predicts token s + 1
+ k. Parameter names are those of published files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tools.train.chains import Branches, heads_of, keys_values
from tools.train.export import config_json
from tools.train.model import Attention, DecoderLayer, Model, ModelConfig, RMSNorm, Trunk, rotate

HEADS = ("eagle", "eagle3", "dflash", "dspark", "hydra", "medusa", "draft_model")


@dataclass(frozen=True)
class Target:
    """Result of a frozen model's pass over texts.

    Attributes:
        model: the frozen model.
        tokens: [texts, length].
        left: output states of each layer, [texts, length, hidden_size].
        states: states after the final norm, same shape.
        logits: [texts, length, vocab_size].
        cos, sin: RoPE tables of at least `length` rows.
    """

    model: Model
    tokens: Tensor
    left: list[Tensor]
    states: Tensor
    logits: Tensor
    cos: Tensor
    sin: Tensor

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the target's embedding of tokens."""
        out: Tensor = self.model.model.embed_tokens(tokens)
        return out

    def joined(self, layers: tuple[int, ...]) -> Tensor:
        """Return the states of several layers, concatenated."""
        return torch.cat([self.left[layer] for layer in layers], dim=-1)


@torch.no_grad()
def run_target(model: Model, tokens: Tensor, cos: Tensor, sin: Tensor) -> Target:
    """Run the target over texts."""
    length, x, left = tokens.shape[1], model.model.embed_tokens(tokens), []
    for layer in model.model.layers[: model.config.num_hidden_layers]:
        x = layer(x, cos[:length], sin[:length])
        left.append(x)
    states = model.model.norm(x)
    return Target(model, tokens, left, states, model.logits(states), cos, sin)


def decoder_fields(config: ModelConfig, num_layers: int) -> dict[str, Any]:
    """Return the config.json fields of a head's decoder layers."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


class Head(nn.Module):
    """A draft head.

    Attributes:
        depth: drafts per chain.
        file: file name under which its tensors are published.
    """

    depth: int
    file = "model.safetensors"

    def chains(self, target: Target, starts: Tensor) -> Iterator[Tensor]:
        """Yield the logits of draft 1, 2, .. of chains, [texts, chains, vocab_size].

        Args:
            target: its pass over the texts.
            starts: [chains]; start + depth + 1 is below the length.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors, by their names in published files."""
        return dict(self.state_dict())

    def fields(self) -> dict[str, Any]:
        """Return the head's config.json."""
        raise NotImplementedError


class EagleLayer(DecoderLayer):
    """A decoder layer whose attention reads the concatenation of an embedding and a state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def normed(self, x: Tensor) -> Tensor:
        """Return the input of attention."""
        embedded, state = x.chunk(2, dim=-1)
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), dim=-1)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Apply what follows attention; the residual is the state."""
        return super().rest(x.chunk(2, dim=-1)[1], attended)


class Eagle3Head(Head):
    """EAGLE-3's head, which shares the target's embedding and LM head.

    It is initialized from the matching parts of the target's MTP module, which reads the last
    layer.
    """

    def __init__(self, model: Model, depth: int = 5) -> None:
        super().__init__()
        config, width = model.config, model.config.hidden_size
        self.config, self.depth = config, depth
        self.aux_layers = tuple(range(1, config.num_hidden_layers, 2))
        self.fc = nn.Linear(len(self.aux_layers) * width, width, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        module = model.mtp()
        with torch.no_grad():
            own = self.midlayer.state_dict()
            for name, value in module.state_dict().items():
                if name in own and own[name].shape == value.shape:
                    own[name].copy_(value)
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(module.self_attn, name).weight * module.input_layernorm.weight
                own[f"self_attn.{name}.weight"].copy_(weight @ module.eh_proj.weight)
            own["input_layernorm.weight"].copy_(module.enorm.weight)
            own["hidden_norm.weight"].copy_(module.hnorm.weight * model.model.norm.weight)
            self.fc.weight.zero_()
            self.fc.weight[:, -width:].fill_diagonal_(1)
            self.norm.weight.copy_(module.shared_head["norm"].weight)

    def chains(self, target: Target, starts: Tensor) -> Iterator[Tensor]:
        """Yield logits as `Head.chains` does; later drafts read the head's own states."""
        tokens = target.tokens
        states = self.fc(target.joined(self.aux_layers)[:, :-1])
        pairs = torch.cat((target.embedded(tokens[:, 1:]), states), dim=-1)
        branches = Branches([self.midlayer], pairs, target.cos, target.sin, starts)
        state = branches.out[:, starts]
        yield target.model.logits(self.norm(state))
        for draft in range(2, self.depth + 1):
            pairs = torch.cat((target.embedded(tokens[:, starts + draft]), state), dim=-1)
            state = branches.step(pairs)
            yield target.model.logits(self.norm(state))

    def fields(self) -> dict[str, Any]:
        """Return the head's config.json. The layers are named by the states that enter them."""
        entered = [layer + 1 for layer in self.aux_layers]
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **decoder_fields(self.config, 1),
            "draft_vocab_size": self.config.vocab_size,
            "eagle_aux_hidden_state_layer_ids": entered,
        }


class UnnormedLayer(DecoderLayer):
    """A decoder layer without a norm before its attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        del self.input_layernorm

    def normed(self, x: Tensor) -> Tensor:
        """Return the input of attention."""
        return x


class EagleHead(Head):
    """EAGLE-1's head, which shares the target's embedding and LM head.

    It is initialized from the matching parts of the target's MTP module, without its norms.
    """

    def __init__(self, model: Model, depth: int = 5) -> None:
        super().__init__()
        config, width = model.config, model.config.hidden_size
        self.config, self.depth = config, depth
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([UnnormedLayer(config)])
        module = model.mtp()
        with torch.no_grad():
            own = self.layers[0].state_dict()
            for name, value in module.state_dict().items():
                if name in own:
                    own[name].copy_(value)
            # Norms divide each row by its RMS; this uses the RMS over all rows.
            lengths = (
                model.model.embed_tokens.weight.square().mean().sqrt(),
                model.model.norm.weight.square().mean().sqrt(),
            )
            self.fc.weight.copy_(module.eh_proj.weight)
            for half, norm, length in zip(
                self.fc.weight.chunk(2, dim=1), (module.enorm, module.hnorm), lengths, strict=True
            ):
                half.mul_(norm.weight / length)

    def chains(self, target: Target, starts: Tensor) -> Iterator[Tensor]:
        """Yield logits as `Head.chains` does; later drafts read the head's own states."""
        tokens = target.tokens
        x = self._projected(target, tokens[:, 1:], target.states[:, :-1])
        branches = Branches(list(self.layers), x, target.cos, target.sin, starts)
        state = branches.out[:, starts]
        yield target.model.logits(state)
        for draft in range(2, self.depth + 1):
            state = branches.step(self._projected(target, tokens[:, starts + draft], state))
            yield target.model.logits(state)

    def _projected(self, target: Target, tokens: Tensor, states: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.cat((target.embedded(tokens), states), dim=-1))
        return out

    def fields(self) -> dict[str, Any]:
        """Return the head's config.json, in the layout of its authors."""
        return {"architectures": ["LlamaForCausalLM"], **decoder_fields(self.config, 1)}


class ResidualHead(nn.Module):
    """LM head on x + silu(W x + b). If x has several states, the first term is projected."""

    def __init__(self, model: Model, num_inputs: int, has_bias: bool) -> None:
        super().__init__()
        width = model.config.hidden_size
        self.linear = nn.Linear(num_inputs * width, width)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)
        self.res_connection = nn.Linear(num_inputs * width, width) if num_inputs > 1 else None
        if self.res_connection is not None:
            nn.init.zeros_(self.res_connection.weight)
            nn.init.zeros_(self.res_connection.bias)
            with torch.no_grad():
                self.res_connection.weight[:, :width].fill_diagonal_(1)
        self.lm_head = nn.Linear(width, model.config.vocab_size, bias=has_bias)
        with torch.no_grad():
            self.lm_head.weight.copy_(model.model.embed_tokens.weight)
            if has_bias:
                self.lm_head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        inner = nn.functional.silu(self.linear(x))
        out: Tensor = self.lm_head(
            (x if self.res_connection is None else self.res_connection(x)) + inner
        )
        return out


class ResidualHeads(Head):
    """Heads of Medusa and Hydra, one per draft.

    Args:
        model: the target.
        depth: number of heads.
        reads_tokens: whether heads also read the newest token and the earlier drafts (Hydra).
    """

    def __init__(self, model: Model, depth: int, *, reads_tokens: bool) -> None:
        super().__init__()
        self.depth, self.reads_tokens = depth, reads_tokens
        self.file = "hydra_lm_head.safetensors" if reads_tokens else "medusa_lm_head.safetensors"
        self.heads = nn.ModuleList(
            ResidualHead(model, 2 + head if reads_tokens else 1, reads_tokens)
            for head in range(depth)
        )

    def chains(self, target: Target, starts: Tensor) -> Iterator[Tensor]:
        """Yield logits as `Head.chains`; all drafts read the newest token's source state."""
        x = target.states[:, starts]
        for draft, head in enumerate(self.heads):
            if self.reads_tokens:
                token = target.embedded(target.tokens[:, starts + 1 + draft])
                x = torch.cat((x, token), dim=-1)
            yield head(x)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the authors' names."""
        named = {}
        for name, tensor in self.state_dict().items():
            _, head, part, kind = name.split(".")
            if part == "lm_head":
                whole = f"hydra_lm_head.{head}" if self.reads_tokens else f"{head}.1"
            else:
                whole = f"{'hydra_mlp.' if self.reads_tokens else ''}{head}.0.{part}"
            named[f"{whole}.{kind}"] = tensor
        return named

    def fields(self) -> dict[str, Any]:
        """Return the config.json of the heads."""
        if self.reads_tokens:
            return {
                "hydra_num_heads": self.depth,
                "hydra_num_layers": 1,
                "hydra_head_arch": "mlp",
                "grounded_heads": True,
            }
        return {"medusa_num_heads": self.depth, "medusa_num_layers": 1}


class BlockHead(Head):
    """DFlash's head, which shares the target's embedding and LM head.

    The newest token and the mask tokens after it attend to the context, which is made of the
    target's states, and to each other. The mask at a draft's position drafts it.
    """

    mask_token_id = 1  # a token that is rare in texts

    def __init__(self, model: Model, depth: int = 5, num_layers: int = 1) -> None:
        super().__init__()
        config, width = model.config, model.config.hidden_size
        self.config, self.depth = config, depth
        self.aux_layers = (config.num_hidden_layers // 2 - 1, config.num_hidden_layers - 1)
        self.fc = nn.Linear(len(self.aux_layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        with torch.no_grad():
            last = model.model.layers[config.num_hidden_layers - num_layers :]
            for layer, other in zip(self.layers, last, strict=False):
                layer.load_state_dict(other.state_dict(), strict=False)
            self.norm.weight.copy_(model.model.norm.weight)

    def chains(self, target: Target, starts: Tensor) -> Iterator[Tensor]:
        """Yield logits as `Head.chains`: one pass drafts all."""
        texts, rows, width = len(target.tokens), 1 + self.depth, self.config.hidden_size
        given = self.hidden_norm(self.fc(target.joined(self.aux_layers)))
        tokens = target.tokens[:, starts + 1, None]
        tokens = torch.cat(
            (tokens, torch.full_like(tokens, self.mask_token_id).expand(-1, -1, self.depth)), -1
        )
        x = target.embedded(tokens).flatten(1, 2)
        positions = (starts[:, None] + 1 + torch.arange(rows, device=starts.device)).flatten()
        unseen = torch.arange(given.shape[1], device=starts.device) > starts[:, None]
        unseen = unseen.repeat_interleave(rows, dim=0)
        for layer in self.layers:
            x = layer.rest(
                x, self._attend(layer, layer.normed(x), given, positions, unseen, target)
            )
        logits = target.model.logits(self.norm(x.view(texts, -1, rows, width)[:, :, 1:]))
        yield from logits.unbind(2)

    def _attend(
        self,
        layer: DecoderLayer,
        normed: Tensor,
        given: Tensor,
        positions: Tensor,
        unseen: Tensor,
        target: Target,
    ) -> Tensor:
        attention, dim = layer.self_attn, self.config.head_dim
        texts, rows, heads = len(normed), 1 + self.depth, self.config.num_key_value_heads
        cos, sin, length = target.cos[positions], target.sin[positions], given.shape[1]
        q = rotate(attention.q_norm(heads_of(attention.q_proj(normed), dim)), cos, sin) * dim**-0.5
        q = q.view(texts, heads, -1, len(positions), dim)
        text_k, text_v = keys_values(layer, given, target.cos[:length], target.sin[:length])
        own_k, own_v = keys_values(layer, normed, cos, sin)
        own_k, own_v = (one.view(texts, heads, 1, -1, rows, dim) for one in (own_k, own_v))
        scores = (q.flatten(2, 3) @ text_k.transpose(2, 3)).view(*q.shape[:4], length).float()
        blocks = q.view(texts, heads, -1, len(positions) // rows, rows, dim)
        own_scores = (blocks @ own_k.transpose(-1, -2)).view(*q.shape[:4], rows).float()
        scores = torch.cat((scores.masked_fill(unseen, -torch.inf), own_scores), dim=-1)
        on_text, on_own = scores.softmax(-1).to(text_v.dtype).split([length, rows], dim=-1)
        y = (on_text.flatten(2, 3) @ text_v).view(q.shape)
        y = y + (on_own.reshape(*blocks.shape[:5], rows) @ own_v).view(q.shape)
        out: Tensor = attention.o_proj(
            y.flatten(1, 2).transpose(1, 2).reshape(texts, len(positions), -1)
        )
        return out

    def fields(self) -> dict[str, Any]:
        """Return the head's config.json, in the layout of DFlash's authors."""
        return {
            "architectures": ["DFlashDraftModel"],
            **decoder_fields(self.config, len(self.layers)),
            "block_size": 1 + self.depth,
            "num_target_layers": self.config.num_hidden_layers,
            "dflash_config": {
                "target_layer_ids": list(self.aux_layers),
                "mask_token_id": self.mask_token_id,
            },
        }


class MarkovHead(BlockHead):
    """DSpark's head: a bias that depends on the previous token is added to each draft's logits.

    Each mask token drafts the token at its own position, as in DFlash, so training may start from a
    DFlash head.
    """

    def __init__(self, model: Model, depth: int = 5, rank: int = 32) -> None:
        super().__init__(model, depth)
        self.rank, size = rank, model.config.vocab_size
        self.markov_head = nn.ModuleDict(
            {"markov_w1": nn.Embedding(size, rank), "markov_w2": nn.Linear(rank, size, bias=False)}
        )
        nn.init.zeros_(self.markov_head["markov_w2"].weight)

    def chains(self, target: Target, starts: Tensor) -> Iterator[Tensor]:
        """Yield logits as `Head.chains`: one pass, and then a lookup of each previous token."""
        before, behind = self.markov_head["markov_w1"], self.markov_head["markov_w2"]
        for draft, logits in enumerate(super().chains(target, starts)):
            yield logits + behind(before(target.tokens[:, starts + 1 + draft]))

    def fields(self) -> dict[str, Any]:
        """Return the head's config.json."""
        own = {"markov_rank": self.rank, "sample_from_anchor": False}
        return {**super().fields(), "architectures": ["DSparkDraftModel"], **own}


class DraftModel(Head):
    """A small model that reads nothing from the target and decodes ahead of it.

    It is initialized from the target's embedding and the attention of its first and last layer.
    """

    def __init__(self, model: Model, depth: int = 5) -> None:
        super().__init__()
        config = model.config
        self.depth = depth
        self.config = replace(config, num_hidden_layers=2, intermediate_size=config.hidden_size)
        self.model = Trunk(self.config)
        del self.model.layers[-1]  # the MTP module
        own, whole = self.model, model.model
        last = config.num_hidden_layers - 1
        with torch.no_grad():
            own.embed_tokens.weight.copy_(whole.embed_tokens.weight)
            own.norm.weight.copy_(whole.norm.weight)
            for layer, other in zip(own.layers, (0, last), strict=True):
                layer.self_attn.load_state_dict(whole.layers[other].self_attn.state_dict())

    def chains(self, target: Target, starts: Tensor) -> Iterator[Tensor]:
        """Yield logits as `Head.chains`; each draft is the next-token prediction of one row."""
        length = target.tokens.shape[1]
        x = self.model.embed_tokens(target.tokens)
        for layer in self.model.layers:
            x = layer(x, target.cos[:length], target.sin[:length])
        logits = nn.functional.linear(self.model.norm(x), self.model.embed_tokens.weight)
        for draft in range(1, self.depth + 1):
            yield logits[:, starts + draft]

    def fields(self) -> dict[str, Any]:
        """Return the head's config.json."""
        return {**config_json(self.config), "num_nextn_predict_layers": 0}


def new_head(name: str, model: Model) -> Head:
    """Create an untrained head of `HEADS`."""
    if name == "draft_model":
        return DraftModel(model)
    if name == "eagle":
        return EagleHead(model)
    if name == "eagle3":
        return Eagle3Head(model)
    if name == "dflash":
        return BlockHead(model)
    if name == "dspark":
        return MarkovHead(model)
    return ResidualHeads(model, 4, reads_tokens=name == "hydra")
