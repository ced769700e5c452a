# SPDX-License-Identifier: Apache-2.0
"""Model blocks: mixed layers, noncausal rows, keys of other states, and latent attention."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from rounding import assert_error_at_most, distance, rounding_errors
from shared_fixtures import every_isa
from specops.engine.models import KvCache, LayerBatch, Transformer
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import Rope
from specops.engine.models.blocks.latent_attention import LatentAttentionConfig
from specops.engine.models.blocks.layer import LayerConfig, LayerNames
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.loader import build
from specops.engine.models.weights import RandomWeights, WeightSettings
from test_models import Runner, random_ids
from test_mtp_models import step_of
from torch import Tensor
from torch.nn.functional import gelu, silu

CPU = torch.device("cpu")
NAMES = LayerNames(attention_norm="after_attention", output_norm="after_mlp")


def attention(qo: int, kv: int, dim: int, theta: float, window: int | None) -> AttentionConfig:
    return AttentionConfig(
        num_qo_heads=qo,
        num_kv_heads=kv,
        head_dim=dim,
        sm_scale=0.3 / dim**0.5,
        rope=Rope(theta=theta, scaling=None, dim=dim // 2 if window else dim),
        sliding_window=window,
        qk_norm=window is None,
    )


LAYERS = (
    LayerConfig(attention=attention(4, 2, 64, 1e4, 12), mlp=DenseMlpConfig(width=96)),
    LayerConfig(
        attention=attention(2, 1, 128, 1e3, None),
        mlp=DenseMlpConfig(width=33, activation="gelu_tanh"),
        names=NAMES,
    ),
    LayerConfig(attention=attention(8, 8, 64, 1e4, None), mlp=DenseMlpConfig(width=160)),
)
CONFIG = ModelConfig(
    architecture="none",
    vocab_size=160,
    hidden_size=80,
    layers=LAYERS,
    rms_norm_eps=1e-6,
    max_model_len=256,
    tie_word_embeddings=False,
    dtype="float32",
    embedding_scale=3.0,
)

SETTINGS = WeightSettings(dtype=torch.float32, device=CPU)


class Weights(RandomWeights):
    """Random weights, including those of norms."""

    def norm(self, name: str, width: int) -> Tensor:
        return 1 + self._load(name, (width,))


def new_model(layers: tuple[LayerConfig, ...] = LAYERS) -> Transformer:
    weights = Weights(SETTINGS)
    return build(replace(CONFIG, layers=layers), weights, torch.float32, CONFIG.max_model_len)


class TorchModel:
    """Reference of the model in plain torch."""

    def __init__(self, dtype: torch.dtype, config: ModelConfig = CONFIG) -> None:
        self.weights, self.dtype = Weights(SETTINGS), dtype
        self.config = config

    def linear(self, x: Tensor, name: str, outputs: int) -> Tensor:
        return x @ self.weights.tensor(f"{name}.weight", outputs, x.shape[-1]).to(self.dtype).T

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights.norm(f"{name}.weight", x.shape[-1]).to(self.dtype)
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def heads(
        self, x: Tensor, prefix: str, name: str, num_heads: int, of: AttentionConfig
    ) -> Tensor:
        """Return the queries or keys of rows from position 0: [rows, heads, head_dim]."""
        x = self.linear(x, f"{prefix}{name}_proj", num_heads * of.head_dim)
        x = x.view(len(x), num_heads, of.head_dim)
        if of.qk_norm:
            x = self.norm(x, f"{prefix}{name}_norm")
        half = of.rope.dim // 2
        inverse = 1 / of.rope.theta ** (torch.arange(half).float() / half)
        angles = (torch.arange(len(x)).float()[:, None] * inverse)[:, None].to(self.dtype)
        one, two, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        rotated = (
            one * angles.cos() - two * angles.sin(),
            two * angles.cos() + one * angles.sin(),
        )
        return torch.cat((*rotated, rest), -1)

    def attended(self, x: Tensor, keys_of: Tensor, prefix: str, of: AttentionConfig) -> Tensor:
        """Return the attention output of rows `x` over rows `keys_of`."""
        q = self.heads(x, prefix, "q", of.num_qo_heads, of)
        k = self.heads(keys_of, prefix, "k", of.num_kv_heads, of)
        v = self.linear(keys_of, f"{prefix}v_proj", of.num_kv_heads * of.head_dim)
        v = v.view(len(v), of.num_kv_heads, of.head_dim)
        k, v = (one.repeat_interleave(of.num_qo_heads // of.num_kv_heads, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * of.sm_scale
        distances = torch.arange(len(q))[:, None] - torch.arange(len(k))
        hidden = (distances < 0) & self.is_causal
        if of.sliding_window is not None:
            hidden |= distances >= of.sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return self.linear(out, f"{prefix}o_proj", x.shape[1])

    is_causal = True

    def layer(self, x: Tensor, index: int) -> Tensor:
        of, prefix = self.config.layers[index], f"model.layers.{index}."
        names = of.names
        normed = self.norm(x, prefix + names.input_norm)
        branch = self.attended(normed, normed, prefix + names.attention, of.attention)
        if names.attention_norm:
            branch = self.norm(branch, prefix + names.attention_norm)
        x = x + branch
        normed = self.norm(x, prefix + names.mlp_norm)
        assert isinstance(of.mlp, DenseMlpConfig)
        gate = self.linear(normed, f"{prefix}mlp.gate_proj", of.mlp.width)
        gate = silu(gate) if of.mlp.activation == "silu" else gelu(gate, approximate="tanh")
        up = self.linear(normed, f"{prefix}mlp.up_proj", of.mlp.width)
        branch = self.linear(gate * up, f"{prefix}mlp.down_proj", x.shape[1])
        return x + (self.norm(branch, prefix + names.output_norm) if names.output_norm else branch)

    def logits(self, ids: list[int]) -> Tensor:
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        embedding = self.weights.tensor("model.embed_tokens.weight", vocab, hidden).to(self.dtype)
        x = embedding[torch.tensor(ids)] * self.config.embedding_scale
        for index in range(self.config.num_layers):
            x = self.layer(x, index)
        return self.linear(self.norm(x, "model.norm"), "lm_head", vocab)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_layers_may_have_different_configurations(order: tuple[int, ...]) -> None:
    """Heads, widths, windows, RoPE, norms and activations differ, in any order of layers."""
    config = replace(CONFIG, layers=tuple(LAYERS[index] for index in order))
    model, ids = new_model(config.layers), random_ids(70)
    exact = TorchModel(torch.float64, config).logits(ids)
    float32 = TorchModel(torch.float32, config)
    (allowed,) = rounding_errors(lambda: [float32.logits(ids)], [exact])
    for _ in every_isa():
        whole = Runner(model).run([ids], [[70]])[0]
        assert_error_at_most(distance(whole, exact), allowed)
        assert torch.equal(whole, Runner(model).run([ids], [[40], [1], [1], [5], [23]])[0])
    assert exact.std().item() > 0.5


def test_buffer_sizes_follow_the_largest_layer() -> None:
    """No size follows the first layer or the mean of all layers."""
    alone = [new_model((layer,)) for layer in LAYERS]
    whole = new_model()
    num_bytes = [model.kv_bytes_per_token() for model in alone]
    assert num_bytes == [2 * 4 * size for size in (2 * 64, 128, 8 * 64)]
    assert whole.kv_bytes_per_token() == sum(num_bytes)
    assert whole.bytes_of_whole_layers() == sum(num_bytes[1:])
    cache = whole.new_kv_cache(200, 16)
    assert sum(tensor.nbytes for tensor in cache.tensors) == 200 * 16 * sum(num_bytes)
    assert [tuple(one.k.shape[2:]) for one in cache.layers] == [(2, 64), (1, 128), (8, 64)]
    sizes = [model.workspace_size(8, 4, 200, cache) for model in alone]
    assert whole.workspace_size(8, 4, 200, cache) == max(sizes) > min(sizes)
    whole.reserve(7)
    numbers = sorted(tensor.numel() // 7 for tensor in whole.activations.tensors)
    assert numbers == sorted([80, 80, 80, 24 * 64, 8 * 64, 8 * 64, 160])


def test_noncausal_rows_see_later_positions() -> None:
    """A block drafter needs rows that see all positions of their request."""
    layer = (LAYERS[1],)
    model, ids = new_model(layer), random_ids(20)
    slow = TorchModel(torch.float64, replace(CONFIG, layers=layer))
    slow.is_causal = False
    step = replace(step_of(ids, 0), is_causal=False)
    ours = model.logits(model.forward(step, model.new_kv_cache(20, 16)))
    assert (ours - slow.logits(ids)).abs().max().item() < 1e-4
    slow.is_causal = True
    assert (ours - slow.logits(ids)).abs().max().item() > 0.1


def test_keys_and_values_may_come_from_other_states() -> None:
    """A block drafter needs keys that are computed from the target's states."""
    (layer,) = (model := new_model((LAYERS[2],))).layers
    states = torch.randn(30, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2))
    target_states, own = states[:25], states[25:]
    cache: KvCache = model.new_kv_cache(20, 16)
    rows = model.activations.first(25)
    first: LayerBatch = step_of([0] * 25, 0)
    layer.attention.append_kv(target_states, first, cache.layers[0], rows.layers[0].attention)
    batch = replace(step_of([0] * 5, 25), is_causal=False)
    views, out = model.activations.first(5).layers[0].attention, torch.empty_like(own)
    layer.attention.run(own, batch, cache.layers[0], views, out)
    slow = TorchModel(torch.float64)
    slow.is_causal = False
    of, prefix = LAYERS[2].attention, "model.layers.0.self_attn."
    exact = slow.attended(states.double(), states.double(), prefix, of)[25:]
    assert (out - exact).abs().max().item() < 1e-4
    assert exact.std().item() > 0.1


# ---- latent attention ----


def latent_model(directory: Path, **changes: Any) -> tuple[Transformer, Any]:
    """Return a DeepSeek-V3 decoder with dense layers: our model and that of transformers."""
    theirs = make_checkpoint(
        directory,
        "DeepseekV3",
        num_key_value_heads=4,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=48,
        **changes,
    )
    found = theirs.config
    attention = LatentAttentionConfig(
        num_qo_heads=4,
        q_rank=found.q_lora_rank,
        nope_dim=32,
        value_dim=48,
        sm_scale=theirs.model.layers[0].self_attn.scaling,
        rope=Rope(theta=found.rope_parameters["rope_theta"], scaling=None, dim=64),
        interleaved=found.rope_interleave,
        has_bias=found.attention_bias,
    )
    layer = LayerConfig(attention=attention, mlp=DenseMlpConfig(width=96))
    config = replace(CONFIG, hidden_size=64, layers=(layer,) * 3, embedding_scale=1.0)
    source = SETTINGS.open(directory)
    return build(config, source, torch.float32, 256), theirs


@pytest.mark.parametrize(
    "changes",
    [{"q_lora_rank": 24}, {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True}],
    ids=["ranks", "biases"],
)
def test_latent_attention_equals_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, theirs = latent_model(tmp_path, **changes)
    theirs.set_attn_implementation("eager")
    ids = random_ids(60)

    def logits(dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            return theirs.to(dtype)(torch.tensor([ids])).logits[0]

    allowed = rounding_errors(lambda: [logits(torch.float32)], [exact := logits(torch.float64)])[0]
    for _ in every_isa():
        whole = Runner(ours).run([ids], [[60]])[0]
        assert_error_at_most(distance(whole, exact), allowed)
        chunked = Runner(ours, page_size=32, shuffle=True).run([ids], [[30], [1], [5], [24]])[0]
        assert torch.equal(whole, chunked)
    assert exact.std().item() > 0.5
    assert ours.kv_bytes_per_token() == 3 * 576 * 4
