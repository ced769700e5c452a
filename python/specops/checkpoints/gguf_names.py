# SPDX-License-Identifier: Apache-2.0
"""Names of GGUF's tensors, and tensors that llama.cpp's converter rearranges, by architecture.

Source: github.com/ggml-org/llama.cpp (gguf-py/gguf/constants.py, conversion/).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specops.checkpoints.errors import ModelError
from specops.checkpoints.fused import fused, rows_of
from specops.quantization import QuantizedWeight, dequantize_weight

Weight = Tensor | QuantizedWeight

# GGUF's names of tensors outside the layers -> Hugging Face's.
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
# Those of an architecture that differ.
_NEMOTRON_NAMES = {
    "token_embd.weight": "model.embeddings.weight",
    "output_norm.weight": "model.norm_f.weight",
}
_OWN_NAMES = {
    "falcon-h1": {"output_norm.weight": "model.final_layernorm.weight"},
    "nemotron_h": _NEMOTRON_NAMES,
    "nemotron_h_moe": _NEMOTRON_NAMES,
}
# GGUF's names of a layer's modules -> Hugging Face's. Weights and biases have the same suffix.
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    # MTP modules. Those of all architectures get the names of DeepSeek-V3's.
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_LINEAR = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MAMBA2 = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_out": "out_proj"}


def _within(prefix: str, modules: Mapping[str, str]) -> dict[str, str]:
    """Return these modules with a prefix before their Hugging Face names."""
    return {stored: prefix + name for stored, name in modules.items()}


_GRANITE = {
    **_within("mamba.", _MAMBA2),
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_FALCON = {
    **_within("mamba.", _MAMBA2),
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_NEMOTRON = {
    "attn_norm": "norm",
    **_within("mixer.", _MAMBA2),
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_KIMI = {
    **_LATENT,
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
    "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
}
_GEMMA4 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
# Names of an architecture's modules that differ from the common ones, or that others do not have.
_OWN_MODULES = {
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma4": _GEMMA4,
    "gpt-oss": {"ffn_gate_inp": "mlp.router"},
    "deepseek2": _LATENT,
    "qwen3next": _LINEAR,
    "qwen35": _LINEAR,
    "qwen35moe": _LINEAR,
    "granitehybrid": _GRANITE,
    "falcon-h1": _FALCON,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "kimi-linear": _KIMI,
}
# Prefixes of the names of experts that differ from the common one.
_EXPERTS_NAMES = {
    "granitehybrid": "block_sparse_moe.experts.",
    "nemotron_h_moe": "mixer.experts.",
    "gemma4": "experts.",
    "kimi-linear": "block_sparse_moe.experts.",
}
# Names of a layer's tensors whose suffix differs, too.
_TENSORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_ERNIE_BIAS = "mlp.moe_statics.e_score_correction_bias"
# Projections of experts in a tensor that holds all experts, and their names in Kimi-Linear.
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_KIMI_EXPERTS = {
    "ffn_gate_exps": ("w1",),
    "ffn_up_exps": ("w3",),
    "ffn_down_exps": ("w2",),
}


def model_name(architecture: str, name: str) -> str | None:
    """Return Hugging Face's name of a tensor outside the layers; None if the name is unknown.

    Args:
        architecture: the file's general.architecture.
        name: GGUF's name of the tensor.
    """
    return _OWN_NAMES.get(architecture, {}).get(name, _NAMES.get(name))


def layer_name(architecture: str, name: str) -> str | None:
    """Return Hugging Face's name of a layer's tensor; None if the name is unknown.

    Args:
        architecture: the file's general.architecture.
        name: GGUF's name of the tensor, without `blk.N.`.
    """
    if name in _TENSORS:
        return _TENSORS[name]
    module, _, suffix = name.rpartition(".")
    own = _OWN_MODULES.get(architecture, {}).get(module, _MODULES.get(module))
    return None if own is None or suffix not in ("weight", "bias") else f"{own}.{suffix}"


def experts_name(architecture: str) -> str:
    """Return the prefix of experts in Hugging Face's names of a layer's tensors."""
    return _EXPERTS_NAMES.get(architecture, "mlp.experts.")


def projections_of_experts(architecture: str) -> Mapping[str, tuple[str, ...]]:
    """Return Hugging Face's names of the projections in each of GGUF's tensors of all experts."""
    return _KIMI_EXPERTS if architecture == "kimi-linear" else _EXPERTS


class Layout(NamedTuple):
    """A tensor that the converter rearranged.

    Attributes:
        parts: GGUF's names of the tensors that form it, without `blk.N.`.
        restore: function that forms the tensor from these.
    """

    parts: tuple[str, ...]
    restore: Callable[..., Weight]


def layouts(metadata: Mapping[str, Any]) -> dict[str, Layout]:
    """Return the layouts of an architecture's rearranged tensors, by Hugging Face's names.

    Args:
        metadata: key-value pairs of the file.

    Raises:
        ModelError: a key that a layout depends on is missing or invalid.
    """
    architecture = metadata.get("general.architecture")

    def count(key: str) -> int:
        value = metadata.get(f"{architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{architecture}.{key} must be an integer of at least 1, got {value}")
        return value

    if architecture in ("llama", "mistral3"):
        heads = count("attention.head_count")
        is_alone = f"{architecture}.attention.head_count_kv" not in metadata
        return _pairs(heads, heads if is_alone else count("attention.head_count_kv"))
    if architecture == "ernie4_5-moe":
        return {_ERNIE_BIAS: Layout(("exp_probs_b.bias",), _one_row)}
    if architecture in ("deepseek2", "kimi-linear"):
        restore = partial(_expansion, heads=count("attention.head_count"))
        parts = ("attn_k_b.weight", "attn_v_b.weight")
        latent = {"self_attn.kv_b_proj.weight": Layout(parts, restore)}
        return latent if architecture == "deepseek2" else {**latent, **_DELTA_ATTENTION}
    if architecture in ("qwen3next", "qwen35", "qwen35moe"):
        linear = _LinearHeads(
            count("ssm.group_count"),
            count("ssm.time_step_rank"),
            count("ssm.state_size"),
            count("ssm.inner_size") // count("ssm.time_step_rank"),
        )
        return linear.of_next() if architecture == "qwen3next" else linear.of_3_5()
    if architecture == "falcon-h1":
        return {**_mamba2("mamba."), "pre_ff_layernorm.weight": Layout(("ffn_norm",), _unchanged)}
    if architecture not in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
        return {}
    # Their queries and keys are interleaved, even if they have no positions.
    heads, each = count("attention.head_count"), metadata.get(f"{architecture}.{_KEY_HEADS}")
    key_heads = max([0, *each]) if isinstance(each, list) else 0
    if architecture == "granitehybrid":
        kind = "_shexp" if metadata.get("granitehybrid.expert_count") else ""
        return {**_pairs(heads, key_heads), **_mamba2("mamba."), **_of_granite(kind)}
    bias = {"mixer.gate.e_score_correction_bias": Layout(("exp_probs_b.bias",), _unchanged)}
    return {**_pairs(heads, key_heads, "mixer."), **_mamba2("mixer."), **bias}


_KEY_HEADS = "attention.head_count_kv"


def _unchanged(tensor: Tensor) -> Tensor:
    """Return a tensor that only has another name."""
    return tensor


def _of_granite(kind: str) -> dict[str, Layout]:
    """Return the layout of Granite 4's shared MLP; `kind` ends the names of its modules."""
    parts = f"ffn_gate{kind}.weight", f"ffn_up{kind}.weight"
    return {
        "shared_mlp.input_linear.weight": Layout(parts, lambda *both: fused(list(both), parts)),
    }


def _mamba2(prefix: str) -> dict[str, Layout]:
    """Return the layouts of Mamba-2 blocks whose names begin with `prefix`."""
    return {
        f"{prefix}A_log": Layout(("ssm_a",), lambda one: _logarithm(one).flatten()),
        f"{prefix}D": Layout(("ssm_d",), torch.flatten),
        f"{prefix}dt_bias": Layout(("ssm_dt.bias",), torch.flatten),
        f"{prefix}norm.weight": Layout(("ssm_norm.weight",), torch.flatten),
        f"{prefix}conv1d.weight": Layout(("ssm_conv1d.weight",), lambda one: one[:, None]),
    }


def _pairs(heads: int, key_heads: int, prefix: str = "self_attn.") -> dict[str, Layout]:
    """Return the layouts of queries and keys whose RoPE rows are interleaved.

    Elements i and i + half of a head are neighbors in the file. Hugging Face models expect all
    first elements of the pairs, then all second ones.

    Args:
        heads: heads of queries.
        key_heads: heads of keys; 0: no layer has keys.
        prefix: start of the names of attention blocks.
    """
    if not key_heads:
        return {}
    return {
        f"{prefix}{part}_proj.{suffix}": Layout(
            (f"attn_{part}.{suffix}",), partial(_unpaired, heads=own)
        )
        for part, own in (("q", heads), ("k", key_heads))
        for suffix in ("weight", "bias")
    }


def _unpaired(weight: Weight, heads: int) -> Weight:
    """Convert interleaved RoPE rows to two halves per head."""
    rows = len(weight) if isinstance(weight, Tensor) else len(weight.values)
    if rows % (2 * heads):
        raise ModelError(f"must have rows of {heads} heads, got {rows}")
    return rows_of(weight, torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten())


def _one_row(vector: Tensor) -> Tensor:
    """Return a vector as a matrix of one row."""
    return vector.view(1, -1)


def _expansion(keys: Weight, values: Weight, heads: int) -> Tensor:
    """Join each head's transposed matrix of keys and matrix of values to kv_b_proj.

    The result is dequantized to float32: the two matrices have groups in different directions.
    """
    by_head = [one.reshape(heads, -1, one.shape[-1]) for one in map(_floats, (keys, values))]
    return torch.cat((by_head[0].transpose(1, 2), by_head[1]), 1).flatten(0, 1)


def _reordered(weight: Weight, order: Tensor) -> Weight:
    """Return a weight with all its rows in another order."""
    rows = len(weight) if isinstance(weight, Tensor) else len(weight.values)
    if rows != len(order):
        raise ModelError(f"must have {len(order)} rows, got {rows}")
    return rows_of(weight, order)


def _floats(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantize_weight(weight)


class _LinearHeads(NamedTuple):
    """Heads of linear attention: their numbers, and their elements."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    def of_next(self) -> dict[str, Layout]:
        """Return the layouts of Qwen3-Next: q, k, v and z of each key head follow each other."""
        return {
            **_COMMON_OF_LINEAR,
            "linear_attn.in_proj_qkvz.weight": Layout(
                ("attn_qkv.weight", "attn_gate.weight"), self._interleaved
            ),
        }

    def of_3_5(self) -> dict[str, Layout]:
        """Return the layouts of Qwen3.5.

        The file first lists the first value head of each key head, then the second ones. Hugging
        Face models list all value heads of a key head in a row.
        """
        return {
            **_COMMON_OF_LINEAR,
            "linear_attn.A_log": Layout(("ssm_a",), lambda one: self._heads(_logarithm(one))),
            "linear_attn.dt_bias": Layout(("ssm_dt.bias",), self._heads),
            "linear_attn.conv1d.weight": Layout(
                ("ssm_conv1d.weight",), lambda one: self._channels(one)[:, None]
            ),
            "linear_attn.in_proj_qkv.weight": Layout(("attn_qkv.weight",), self._channels),
            "linear_attn.in_proj_z.weight": Layout(("attn_gate.weight",), self._values),
            "linear_attn.in_proj_b.weight": Layout(("ssm_beta.weight",), self._heads),
            "linear_attn.in_proj_a.weight": Layout(("ssm_alpha.weight",), self._heads),
            "linear_attn.out_proj.weight": Layout(("ssm_out.weight",), self._columns),
        }

    def _places(self, width: int) -> Tensor:
        """Return the places in the file of all value heads' rows, `width` of each."""
        heads = torch.arange(self.values).view(-1, self.keys).t().flatten()
        return (heads[:, None] * width + torch.arange(width)).flatten()

    def _heads(self, weight: Weight) -> Weight:
        return _reordered(weight, self._places(1))

    def _values(self, weight: Weight) -> Weight:
        return _reordered(weight, self._places(self.value_dim))

    def _channels(self, weight: Weight) -> Any:
        size = 2 * self.keys * self.key_dim
        places = self._places(self.value_dim)
        return _reordered(weight, torch.cat((torch.arange(size), size + places)))

    def _interleaved(self, qkv: Weight, z: Weight) -> Weight:
        values, size = self.values * self.value_dim, self.keys * self.key_dim
        places = torch.arange(2 * size + 2 * values)
        by_head = [
            one.view(self.keys, -1) for one in torch.split(places, [size, size, values, values])
        ]
        return _reordered(
            fused([qkv, z], ("attn_qkv", "attn_gate")), torch.cat(by_head, 1).flatten()
        )

    def _columns(self, weight: Weight) -> Weight:
        """Return a weight with the inputs of value heads in Hugging Face's order."""
        order = self._places(self.value_dim)
        columns = weight.shape if isinstance(weight, Tensor) else weight.values.shape
        if columns[1] != len(order):
            raise ModelError(f"must have {len(order)} columns, got {columns[1]}")
        if isinstance(weight, Tensor):
            return weight[:, order]
        if self.value_dim % weight.group:
            raise ModelError(
                f"is quantized in groups of {weight.group}, which must divide the {self.value_dim} "
                "elements of a head"
            )
        groups = order[:: weight.group] // weight.group
        return weight._replace(
            values=weight.values[:, order],
            scales=weight.scales[:, groups],
            offsets=None if weight.offsets is None else weight.offsets[:, groups],
        )


def _logarithm(decay: Tensor) -> Tensor:
    """Return A_log of -exp(A_log), rounded to float32."""
    if not bool((decay <= 0).all()):
        raise ModelError("is stored as -exp(A_log), which must not be positive")
    return decay.double().neg().log().float()


# Layouts of Kimi-Linear.
_DELTA_ATTENTION = {
    "self_attn.A_log": Layout(("ssm_a",), lambda one: _logarithm(one).view(1, 1, -1, 1)),
    "self_attn.dt_bias": Layout(("ssm_dt.bias",), _unchanged),
    "block_sparse_moe.gate.e_score_correction_bias": Layout(("exp_probs_b.bias",), _unchanged),
    **{
        f"self_attn.{part}_conv1d.weight": Layout(
            (f"ssm_conv1d_{part}.weight",), lambda one: one.view(-1, 1, one.shape[-1])
        )
        for part in "qkv"
    },
}
_COMMON_OF_LINEAR = {
    "linear_attn.A_log": Layout(("ssm_a",), _logarithm),
    "linear_attn.conv1d.weight": Layout(("ssm_conv1d.weight",), lambda one: one[:, None]),
    "mlp.shared_expert_gate.weight": Layout(("ffn_gate_inp_shexp.weight",), _one_row),
}
