# SPDX-License-Identifier: Apache-2.0
"""The models in plain PyTorch: a Qwen3-shaped decoder and one DeepSeek-V3-style MTP module.

Their MLPs are dense, or mixtures of experts as in Qwen3-MoE.

Module and parameter names are those of the exported file, so `state_dict()` is the checkpoint. Row
i of the MTP module takes (Emb(t[i+1]), h[i]), with h[i] the target's hidden state *after* its final
norm, runs at position i and predicts t[i+2]. Embedding and LM head are the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; field names follow the Hugging Face `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02


@dataclass(frozen=True)
class MixtureConfig(ModelConfig):
    """Shape of a model with a mixture of experts for every MLP, including the MTP module's."""

    num_experts: int = 8
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 96


class RMSNorm(nn.Module):
    """RMSNorm in Qwen3's order: normalize in fp32, round to the input's type, then scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rope_cos_sin(length: int, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tables [length, head_dim] for rotate_half: the frequencies are laid out twice."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    inverse = config.rope_theta ** (-half / config.head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with a norm on every query and key head.

    Args:
        config: shape of the model.
        inputs: width of the input; None for the model's hidden size.
    """

    def __init__(self, config: ModelConfig, inputs: int | None = None) -> None:
        super().__init__()
        self.config = config
        width, head_dim = inputs or config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(
            config.num_attention_heads * head_dim, config.hidden_size, bias=False
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        head_dim, heads = self.config.head_dim, self.config.num_key_value_heads
        group = self.config.num_attention_heads // heads
        shape = (batch, length, -1, head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        if x.is_cuda or not torch.is_grad_enabled():
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # For training on a CPU the attention is written out: a step is a tenth faster under
            # torch.compile than with the fused attention, most of which is its backward pass. The
            # query heads of a group share their keys, so they are stacked into one matrix product.
            q = (q * head_dim**-0.5).reshape(batch * heads, group * length, head_dim)
            k = k.reshape(batch * heads, length, head_dim)
            scores = torch.bmm(q, k.transpose(1, 2)).view(-1, group, length, length)
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            weights = scores.float().masked_fill(future, -torch.inf).softmax(-1).to(v.dtype)
            weights = weights.view(batch * heads, group * length, length)
            y = torch.bmm(weights, v.reshape(batch * heads, length, head_dim))
            y = y.view(batch, heads * group, length, head_dim)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """SwiGLU MLP."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Experts(nn.Module):
    """A router and several MLPs; each row uses a few of them, with weights that add up to one.

    All experts are computed for every row, as one wide MLP whose parts are weighted, most of them
    by zero: at these sizes that is faster than gathering the rows of each expert.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        hidden_size, width = config.hidden_size, config.moe_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(hidden_size, width) for _ in range(config.num_experts))

    def weights(self, x: Tensor) -> Tensor:
        """Return the weight of each expert [..., experts], computed in float32 as in the engine."""
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.float(), self.gate.weight).softmax(-1)
        chosen = probabilities.topk(self.top_k, -1)
        scaled = chosen.values / chosen.values.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(-1, chosen.indices, scaled)

    def _stacked(self, name: str, dim: int) -> Tensor:
        return torch.cat([one.get_parameter(f"{name}.weight") for one in self.experts], dim)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(x).to(x.dtype)
        gated = F.silu(F.linear(x, self._stacked("gate_proj", 0)))
        gated = gated * F.linear(x, self._stacked("up_proj", 0))
        gated = gated.unflatten(-1, (len(self.experts), -1)) * weights[..., None]
        return F.linear(gated.flatten(-2), self._stacked("down_proj", 1))


class DecoderLayer(nn.Module):
    """Attention and MLP, each preceded by its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        if isinstance(config, MixtureConfig):
            self.mlp: nn.Module = Experts(config)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def normed(self, x: Tensor) -> Tensor:
        """Return the input of attention."""
        y: Tensor = self.input_layernorm(x)
        return y

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Apply what follows attention: the residual and the MLP."""
        x = x + attended
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.rest(x, self.self_attn(self.normed(x), cos, sin))


class MTPLayer(DecoderLayer):
    """A decoder layer after the projection of (embedding, hidden), with its own final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def project(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the decoder layer's input: embedding first, hidden state second."""
        x: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return x

    def head_norm(self, x: Tensor) -> Tensor:
        """Return the input of the LM head or of the next draft step."""
        y: Tensor = self.shared_head["norm"](x)
        return y

    def draft(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return normalized hidden states for the LM head (or the next draft step)."""
        return self.head_norm(self(self.project(embedded, hidden), cos, sin))


class Trunk(nn.Module):
    """Embedding, decoder layers with the MTP layer last, final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers: list[nn.Module] = [DecoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList([*layers, MTPLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Model(nn.Module):
    """The language model and its MTP module, with tied embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)

    def reset(self, seed: int) -> None:
        """Draw new weights; projections back into the residual stream start smaller."""
        generator = torch.Generator().manual_seed(seed)
        shrink = (2 * self.config.num_hidden_layers) ** -0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim < 2:
                    parameter.fill_(1.0)
                    continue
                std = self.config.initializer_range
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= shrink
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def mtp(self) -> MTPLayer:
        """Return the MTP layer."""
        layer = self.model.layers[self.config.num_hidden_layers]
        assert isinstance(layer, MTPLayer)
        return layer

    def hidden(self, token_ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the target's hidden states after the final norm."""
        x = self.model.embed_tokens(token_ids)
        for layer in self.model.layers[: self.config.num_hidden_layers]:
            x = layer(x, cos, sin)
        y: Tensor = self.model.norm(x)
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the shared LM head."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean losses in nats of target and MTP module on tokens [batch, length + 2].

        Row i of the target predicts tokens[:, i + 1]; row i of the module predicts tokens[:, i + 2]
        from the embedding of tokens[:, i + 1].
        """
        here, after, beyond = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
        hidden = self.hidden(here, cos, sin)
        loss = F.cross_entropy(self.logits(hidden).flatten(0, 1).float(), after.flatten())
        drafted = self.mtp().draft(self.model.embed_tokens(after), hidden, cos, sin)
        mtp_loss = F.cross_entropy(self.logits(drafted).flatten(0, 1).float(), beyond.flatten())
        return loss, mtp_loss
