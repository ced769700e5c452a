# SPDX-License-Identifier: Apache-2.0
"""Families with mixtures of experts match Hugging Face's code, and rows are batch-invariant."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import simt
import specops
import torch
import torch.nn.functional as F
from checkpoints import (
    EXPERTS_BESIDE_MLP,
    lasting_directory,
    make_checkpoint,
    write_config,
    write_tokenizer,
)
from fake_gpu import OP_MODULES, FakeGpu
from mtp_checkpoints import (
    NAMES,
    SlowModules,
    Tiny,
    make_mtp_checkpoint,
    save_checkpoint,
)
from rounding import assert_error_at_most, distance, rounding_errors
from safetensors.torch import load_file, save_file
from shared_fixtures import every_isa
from specops import moe
from specops.api.errors import ModelError
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import load_model, load_mtp
from specops.engine.models.blocks.attention import AttentionConfig
from specops.engine.models.blocks.block import Rope, bytes_of
from specops.engine.models.blocks.experts import Experts, ExpertsConfig
from specops.engine.models.blocks.latent_attention import LatentAttentionConfig
from specops.engine.models.blocks.latent_experts import LatentExpertsConfig
from specops.engine.models.blocks.layer import LayerConfig
from specops.engine.models.blocks.mamba2 import Mamba2Config
from specops.engine.models.blocks.mlp import DenseMlpConfig
from specops.engine.models.blocks.parallel_mixing import ParallelConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families import read_model_config
from specops.engine.models.loader import build
from specops.engine.models.weights import Checkpoint, WeightSettings
from test_models import Runner, random_ids
from test_mtp_models import target_states, text_states
from torch import Tensor

EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 3}
LATENT: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
}
LINEAR: dict[str, Any] = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", {**EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3_steps": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    ),
    "glm4": (
        "Glm4Moe",
        {
            **EXPERTS,
            "n_routed_experts": 8,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "ernie4_5_dense": ("Ernie4_5", {"use_bias": True}),
    "ernie4_5": (
        "Ernie4_5_Moe",
        {"moe_intermediate_size": 48, "moe_k": 3, "moe_num_experts": 8},
    ),
    "ernie4_5_steps": (
        "Ernie4_5_Moe",
        {
            "moe_intermediate_size": 48,
            "moe_k": 2,
            "moe_num_experts": 5,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**EXPERTS, **LATENT, "n_routed_experts": 16, "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        {
            **EXPERTS,
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_experts_per_tok": 3,
            "num_local_experts": 8,
            "sliding_window": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
}


FAMILIES["qwen3_next"] = ("Qwen3Next", LINEAR)
FAMILIES["qwen3_next_dense"] = (
    "Qwen3Next",
    {
        **LINEAR,
        "layer_types": None,  # every fourth layer has attention
        "num_hidden_layers": 5,
        "mlp_only_layers": [0, 1, 2, 3],
        "attention_bias": True,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
    },
)

# Like Qwen3-Next, but the projections of linear attention have other names.
FAMILIES["qwen3_5"] = ("Qwen3_5", {**LINEAR, "linear_num_value_heads": 6})
FAMILIES["qwen3_5_experts"] = ("Qwen3_5Moe", LINEAR)

GRANITE: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
    "position_embedding_type": "nope",
    "embedding_multiplier": 3,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.03,
    "tie_word_embeddings": True,
}
FAMILIES["granite"] = ("GraniteMoeHybrid", GRANITE)
FAMILIES["granite_dense"] = (
    "GraniteMoeHybrid",
    {
        **GRANITE,
        "num_local_experts": 0,
        "mamba_n_groups": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": "auto",
        "mamba_d_conv": 3,
        "mamba_conv_bias": False,
        "position_embedding_type": "rope",
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
)

NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "chunk_size": 16,
    "time_step_min": 1e-30,  # transformers limits time steps from below, except in decoding
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
}
FAMILIES["nemotron_h"] = ("NemotronH", NEMOTRON)
KIMI: dict[str, Any] = {
    **LATENT,
    "num_hidden_layers": 4,
    "q_lora_rank": None,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "moe_renormalize": True,
    "moe_intermediate_size": 48,
    "model_max_length": 256,
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
}
FAMILIES["kimi_linear"] = ("KimiLinear", KIMI)
FAMILIES["nemotron_h_latent"] = (
    "NemotronH",
    {**NEMOTRON, "moe_latent_size": 32, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
)
FALCON: dict[str, Any] = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.75,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 0.5],
    "mlp_multipliers": [0.7, 1.3],
}
FAMILIES["falcon_h1"] = ("FalconH1", FALCON)
FAMILIES["gemma4_experts"] = ("Gemma4", EXPERTS_BESIDE_MLP)
FAMILIES["falcon_h1_norm"] = (
    "FalconH1",
    {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
)


def recurrent_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-2 row by row, as `mamba2_chunk_scan` of transformers does by chunks."""
    b, c = (one.repeat_interleave(x.shape[2] // b.shape[2], 2)[..., None, :] for one in (b, c))
    steps = F.softplus(dt + options["dt_bias"])[..., None, None]
    state, outs = torch.zeros_like(x[:, 0, ..., None] * b[:, 0]), []
    for row in range(x.shape[1]):
        value, step = x[:, row, ..., None], steps[:, row]
        state = torch.exp(step * a[:, None, None]) * state + step * value * b[:, row]
        outs.append((state * c[:, row]).sum(-1) + options["D"][:, None] * x[:, row])
    return torch.stack(outs, 1), state


@pytest.fixture(autouse=True)
def _recurrent_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute states row by row: chunks hide sums from `RandomRounding`, or need float32."""
    for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        theirs = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
        rule = theirs.torch_recurrent_gated_delta_rule
        monkeypatch.setattr(theirs, "torch_chunk_gated_delta_rule", rule)
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    rule = theirs.recurrent_kimi_delta_attention
    monkeypatch.setattr(theirs, "chunk_kimi_delta_attention", rule)
    for name in ("granitemoehybrid", "nemotron_h", "falcon_h1"):
        theirs = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
        monkeypatch.setattr(theirs, "mamba2_chunk_scan", recurrent_scan)


def make_experts(directory: Path, family: str, **changes: Any) -> Any:
    """Save and return a tiny random model, in which router biases, clamps and sinks matter."""
    kind, own = FAMILIES[family]
    theirs = make_checkpoint(directory, kind, **{**own, **changes})
    with torch.no_grad():
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) / 4)
        for name, parameter in theirs.named_parameters():
            if name.endswith(("sinks", "mamba.D", "mixer.D")):
                parameter.normal_()
            elif name.endswith("conv1d.weight"):
                parameter.mul_(5)
            elif kind == "GptOss" and name.endswith("gate_up_proj"):
                parameter.mul_(4)
    theirs.save_pretrained(directory)
    if kind == "KimiLinear":
        rename_dense_mlps(directory)
    return theirs


def rename_dense_mlps(directory: Path) -> None:
    """Give dense MLPs their published names; transformers 5.23 names them like experts."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for part in ("gate_proj", "up_proj", "down_proj"):
        old = f"model.layers.0.block_sparse_moe.{part}.weight"
        tensors[f"model.layers.0.mlp.{part}.weight"] = tensors.pop(old)
    save_file(tensors, file)


def exact_and_allowed(theirs: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return logits in float64, and the error that float32 rounding may cause."""
    theirs.set_attn_implementation("eager")
    theirs.set_experts_implementation("eager")

    def logits(dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            return theirs.to(dtype)(torch.tensor([ids])).logits[0]

    (allowed,) = rounding_errors(lambda: [logits(torch.float32)], [exact := logits(torch.float64)])
    return exact, allowed


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    theirs = make_experts(tmp_path, family)
    ours = load_model(tmp_path)
    ids = random_ids(60)
    exact, allowed = exact_and_allowed(theirs, ids)
    for _ in every_isa():
        whole = Runner(ours).run([ids], [[60]])[0]
        assert_error_at_most(distance(whole, exact), allowed)
        assert (whole - exact).abs().max().item() < 2e-5 * exact.abs().max().item()
        chunked = Runner(ours, page_size=32, shuffle=True).run([ids], [[30], [1], [5], [24]])[0]
        assert torch.equal(whole, chunked)
    assert exact.std().item() > 0.5  # the logits must vary


Fault = Callable[[LayerConfig], LayerConfig]


def with_experts(
    layer: LayerConfig, change: Callable[[ExpertsConfig], ExpertsConfig]
) -> LayerConfig:
    """Return a layer with changed experts; other layers stay as they are."""
    mlp = layer.mlp
    if isinstance(mlp, LatentExpertsConfig):
        return replace(layer, mlp=replace(mlp, experts=change(mlp.experts)))
    return replace(layer, mlp=change(mlp)) if isinstance(mlp, ExpertsConfig) else layer


def experts(**changes: Any) -> Fault:
    return lambda layer: with_experts(layer, lambda one: replace(one, **changes))


def routed(**changes: Any) -> Fault:
    def change(one: ExpertsConfig) -> ExpertsConfig:
        return replace(one, routing=replace(one.routing, **changes))

    return lambda layer: with_experts(layer, change)


def attention(**changes: Any) -> Fault:
    def fault(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.attention, AttentionConfig):
            return layer
        return replace(layer, attention=replace(layer.attention, **changes))

    return fault


def mamba(**changes: Any) -> Fault:
    return lambda layer: (
        replace(layer, attention=replace(layer.attention, **changes))
        if isinstance(layer.attention, Mamba2Config)
        else layer
    )


def latent(**changes: Any) -> Fault:
    return lambda layer: (
        replace(layer, attention=replace(layer.attention, **changes))
        if isinstance(layer.attention, LatentAttentionConfig)
        else layer
    )


def parallel(**changes: Any) -> Fault:
    def fault(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.attention, ParallelConfig)
        return replace(layer, attention=replace(layer.attention, **changes))

    return fault


def unscaled_inputs(layer: LayerConfig) -> LayerConfig:
    """Leave out the factors on the inputs of Mamba-2."""
    assert isinstance(layer.attention, ParallelConfig)
    return parallel(mamba=replace(layer.attention.mamba, scales=None))(layer)


def unscaled_gates(layer: LayerConfig) -> LayerConfig:
    """Leave out the factor on the gates of the MLP."""
    assert isinstance(layer.mlp, DenseMlpConfig)
    return replace(layer, mlp=replace(layer.mlp, gate_scale=1.0))


def unscaled_branches(layer: LayerConfig) -> LayerConfig:
    """Add the outputs of branches unscaled."""
    return replace(layer, branch_scale=1.0)


def fully_rotated(layer: LayerConfig) -> LayerConfig:
    """Apply RoPE to whole heads."""
    if not isinstance(layer.attention, AttentionConfig):
        return layer
    return attention(rope=replace(layer.attention.rope, dim=64))(layer)


def truncated_yarn(layer: LayerConfig) -> LayerConfig:
    """Truncate YaRN's bounds to integers."""
    assert isinstance(layer.attention, AttentionConfig)
    rope = layer.attention.rope
    return attention(rope=replace(rope, scaling={**(rope.scaling or {}), "truncate": True}))(layer)


# Faults by family, each of which leaves out a rule of its layers.
FAULTS: list[tuple[str, Fault]] = [
    ("qwen3", routed(min_sum=None)),
    ("qwen3", routed(top_k=2)),
    ("qwen3_steps", routed(min_sum=0.0)),
    ("qwen3", routed(scoring="sigmoid")),
    ("glm4", routed(scale=1.0)),
    ("glm4", routed(bias=None)),
    ("glm4", routed(scoring="softmax")),
    ("glm4", experts(shared=None)),
    ("ernie4_5", routed(bias=None)),
    ("ernie4_5", routed(min_sum=None)),
    ("ernie4_5", experts(shared=None)),
    ("deepseek_v3", routed(num_groups=1, top_k_groups=1)),
    ("deepseek_v3", routed(top_k_groups=3)),
    ("deepseek_v3", routed(scale=1.0)),
    ("deepseek_v3_yarn", routed(min_sum=1e-20)),
    ("qwen3_next", experts(shared_gate_name=None)),
    ("qwen3_next", routed(min_sum=None)),
    ("qwen3_next", experts(shared=None)),
    ("qwen3_next", attention(qk_norm=False)),
    ("qwen3_next", fully_rotated),
    ("granite", routed(min_sum=None)),
    ("granite", experts(shared=None)),
    ("granite", unscaled_branches),
    ("granite", attention(rope=Rope(theta=10000.0, scaling=None, dim=64))),
    ("granite", attention(sm_scale=0.125)),
    ("granite", mamba(has_conv_bias=False)),
    ("falcon_h1", parallel(mamba_scale=1.0)),
    ("falcon_h1", parallel(attention_scale=1.0)),
    ("falcon_h1", unscaled_inputs),
    ("falcon_h1", unscaled_gates),
    ("nemotron_h", routed(bias=None)),
    ("nemotron_h", routed(scale=1.0)),
    ("nemotron_h", experts(shared=None)),
    ("nemotron_h", mamba(has_conv_bias=False)),
    ("nemotron_h", attention(rope=Rope(theta=10000.0, scaling=None, dim=64))),
    ("kimi_linear", routed(bias=None)),
    ("kimi_linear", routed(min_sum=None)),
    ("kimi_linear", routed(scale=1.0)),
    ("kimi_linear", experts(shared=None)),
    ("kimi_linear", experts(projections=("w3", "w1", "w2"))),
    ("kimi_linear", latent(rope=Rope(theta=10000.0, scaling=None, dim=64))),
    ("kimi_linear", latent(sm_scale=64**-0.5)),
    ("nemotron_h_latent", routed(bias=None)),
    ("nemotron_h_latent", routed(num_groups=1, top_k_groups=1)),
    ("nemotron_h_latent", routed(min_sum=1e-20)),
    ("gpt_oss", routed(min_sum=None)),
    ("gpt_oss", routed(scoring="sigmoid")),
    ("gpt_oss", experts(activation="silu")),
    ("gpt_oss", experts(has_bias=False)),
    ("gpt_oss", attention(has_sinks=False)),
    ("gpt_oss", attention(sliding_window=None)),
    ("gpt_oss", attention(sliding_window=16)),
    ("gpt_oss", truncated_yarn),
]


@pytest.mark.parametrize(
    "family,fault", FAULTS, ids=[f"{family}-{i}" for i, (family, _) in enumerate(FAULTS)]
)
@pytest.mark.slow
def test_missing_rules_are_detected(tmp_path: Path, family: str, fault: Fault) -> None:
    theirs = make_experts(tmp_path, family)
    ids = random_ids(40)
    exact, allowed = exact_and_allowed(theirs, ids)
    config: ModelConfig = read_model_config(tmp_path)
    layers = tuple(fault(layer) for layer in config.layers)
    assert layers != config.layers
    settings = WeightSettings(dtype=torch.float32, device=torch.device("cpu"))
    source = Checkpoint(tmp_path, settings)
    wrong = build(replace(config, layers=layers), source, torch.float32, 256)
    logits = Runner(wrong).run([ids], [[40]])[0]
    with pytest.raises(AssertionError, match="max error"):
        assert_error_at_most(distance(logits, exact), allowed)


@pytest.mark.parametrize("quantization", ["none", "wint8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "family",
    [
        "ernie4_5",
        "deepseek_v3",
        "gpt_oss",
        "qwen3_next",
        "granite",
        "nemotron_h",
        "nemotron_h_latent",
        "kimi_linear",
        "gemma4_experts",
    ],
)
@pytest.mark.fast(
    "*-ernie4_5-*",
    "*-deepseek_v3-bfloat16-none",
    "*-gpt_oss-bfloat16-none",
    "*-qwen3_next-bfloat16-none",
    "*-granite-bfloat16-none",
    "*-kimi_linear-bfloat16-none",
)
@pytest.mark.pairwise
def test_rows_do_not_depend_on_batch_chunks_or_threads(
    tmp_path: Path, isa: str, family: str, dtype: str, quantization: str
) -> None:
    make_experts(tmp_path, family)
    model = load_model(tmp_path, dtype=dtype, quantization=quantization)
    ids = random_ids(60)
    alone = Runner(model).run([ids], [[50]] + [[1]] * 10)[0]
    assert torch.equal(alone, Runner(model).run([ids], [[45], [5], [5], [5]])[0])
    others = [random_ids(60) for _ in range(15)]
    batch = Runner(model, page_size=64, shuffle=True).run(
        [*others[:3], ids, *others[3:]], [[40, 7, 33, 35] + [20] * 12, [0, 3, 0, 25] + [5] * 12]
    )[3]
    assert torch.equal(alone, batch)
    for threads in (1, 2, 3):
        specops.set_num_threads(threads)
        assert torch.equal(alone, Runner(model).run([ids], [[37], [23]])[0])


@pytest.mark.parametrize("family", ["qwen3", "glm4"])
def test_stacked_experts_are_supported(tmp_path: Path, family: str) -> None:
    """The bits equal those of separate experts."""
    make_experts(tmp_path, family)
    ids = random_ids(20)
    apart = Runner(load_model(tmp_path)).run([ids], [[20]])[0]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for prefix in {name.rpartition(".experts.")[0] for name in tensors if ".experts." in name}:
        for whole, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ())):
            each = [
                torch.cat(
                    [tensors.pop(f"{prefix}.experts.{e}.{one}.weight") for one in parts or [whole]]
                )
                for e in range(8)
            ]
            tensors[f"{prefix}.experts.{whole}"] = torch.stack(each)
    save_file(tensors, file)
    assert torch.equal(Runner(load_model(tmp_path)).run([ids], [[20]])[0], apart)


def mxfp4_checkpoint(directory: Path) -> None:
    """Write gpt-oss in its published format, with experts in MXFP4."""
    make_experts(directory, "gpt_oss", vocab_size=257)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        generator = torch.Generator().manual_seed(len(name))
        made: dict[str, Any] = {"dtype": torch.uint8, "generator": generator}
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), **made)
        tensors[f"{name}_scales"] = torch.randint(118, 122, shape, **made)
    tensors["lm_head.weight"][40] *= 30  # one of two tokens is likely, so texts repeat
    tensors["lm_head.weight"][41] = -tensors["lm_head.weight"][40]
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    published = {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "swiglu_limit": 7.0,
        "experts_per_token": config["num_experts_per_tok"],
        "initial_context_length": 64,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    }
    (directory / "config.json").write_text(json.dumps({**config, **published}))
    save_file(tensors, file)
    write_tokenizer(directory, 257)


def test_published_gpt_oss_format_is_supported(tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    layers = load_model(tmp_path).layers
    assert all(isinstance(one.mlp, Experts) and one.mlp.gate_up.kind == "int4" for one in layers)
    assert [one.attention.sliding_window for one in layers] == [16, None, 16]
    plain, drafted = (completions(str(tmp_path), method) for method in ("naive", "ngram"))
    for one, other in zip(plain, drafted, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


@pytest.mark.parametrize("rows", [1, 4, 30])
def test_expected_bytes_read_match_random_routing(tmp_path: Path, rows: int) -> None:
    make_experts(tmp_path, "deepseek_v3")
    model = load_model(tmp_path)
    block = model.layers[-1].mlp
    assert isinstance(block, Experts)
    logits = torch.randn(400 * rows, 16, generator=torch.Generator().manual_seed(1))
    drawn = moe.moe_route(logits, 3)[0].view(400, -1)
    distinct = sum(len(one.unique()) for one in drawn) / 400
    own = bytes_of(block.gate_up) + bytes_of(block.down.shards[0])
    assert (
        model.layers[0].bytes_read(rows) == model.layers[0].bytes_read(1) > 0
    )  # the layer is dense
    read = (block.bytes_read(rows) - block.bytes_read(0)) / own
    assert read == pytest.approx(distinct / 16, rel=0.01)


def test_unsupported_clamps_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["GptOssForCausalLM"], swiglu_limit=5.0)
    with pytest.raises(ModelError, match=r"swiglu_limit must be 7\.0, got 5\.0"):
        read_model_config(tmp_path)


# config.json of Kimi-Linear-48B-A3B-Instruct, as published.
PUBLISHED_KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [one for one in range(1, 27) if one % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def kimi_config(directory: Path, **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({**PUBLISHED_KIMI, **changes}))
    return read_model_config(directory)


def test_published_kimi_linear_fields_equal_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    published = kimi_config(tmp_path)
    kinds = [layer.attention.kind for layer in published.layers]
    latent = {3, 7, 11, 15, 19, 23, 26}
    assert {i for i, kind in enumerate(kinds) if kind == "multi-head latent attention"} == latent
    assert isinstance(published.layers[0].mlp, DenseMlpConfig)
    fields = {key: one for key, one in PUBLISHED_KIMI.items() if not key.startswith("rope_")}
    theirs = transformers.KimiLinearConfig(**fields).to_dict()
    for name in ("linear_attn_config", "first_k_dense_replace"):
        theirs.pop(name)
    config = {**theirs, "architectures": PUBLISHED_KIMI["architectures"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path) == published


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"kda_layers": [*range(1, 28)]}, "full_attn_layers must hold .* got 4"),
        ({"kda_layers": [0, 1]}, "kda_layers must hold numbers of layers from 1 to 27, .* got 0"),
        ({"kda_layers": [1, 2]}, "got neither for layer 3"),
        ({"kda_layers": [*range(1, 28)], "full_attn_layers": []}, "at least one layer"),
        ({"gate_lower_bound": -5.0}, r"linear_attn_config\.gate_lower_bound must be None"),
        ({"use_full_rank_gate": True}, r"linear_attn_config\.use_full_rank_gate must be False"),
    ],
)
def test_invalid_linear_attention_of_kimi_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    linear = {**PUBLISHED_KIMI["linear_attn_config"], **changes}
    with pytest.raises(ModelError, match=words):
        kimi_config(tmp_path, linear_attn_config=linear)


@pytest.mark.parametrize(
    "changes",
    [
        {"mla_use_nope": False},
        {"mla_use_output_gate": True},
        {"attn_res_block_size": 2},
        {"moe_router_activation_func": "softmax"},
        {"mlp_layer_types": ["dense"]},
    ],
)
def test_unsupported_kimi_models_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ModelError, match=f"{name} must "):
        kimi_config(tmp_path, **changes)


# MTP modules

# Naming scheme, and a base whose first layer is like the MTP modules.
MTP_BASES: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    ("deepseek_v3", ("Glm4Moe", {**FAMILIES["glm4"][1], "first_k_dense_replace": 0})),
    ("deepseek_v3", ("DeepseekV3", {**FAMILIES["deepseek_v3"][1], "first_k_dense_replace": 0})),
    ("ernie4_5", FAMILIES["ernie4_5"]),
    ("ernie4_5", FAMILIES["ernie4_5_dense"]),
    ("qwen3_next", FAMILIES["qwen3_next"]),
]


class ModulesOfTransformers(SlowModules):
    """Modules whose decoder layer is transformers' code of the base."""

    def __init__(self, tiny: Tiny, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(tiny, dtype=dtype)
        self.base.set_experts_implementation("eager")

    def _block(self, prefix: str, x: Tensor) -> Tensor:
        layer = copy.deepcopy(self.base.model.layers[0])
        for name, own in [*layer.named_parameters(), *layer.named_buffers()]:
            parts = name.split(".")
            if parts[:2] == ["mlp", "experts"]:
                halves = {"gate_up_proj": ("gate_proj", "up_proj")}.get(parts[2], (parts[2],))
                each = [
                    torch.cat([self.tensors[f"{prefix}mlp.experts.{e}.{h}.weight"] for h in halves])
                    for e in range(len(own))
                ]
                own.data.copy_(torch.stack(each))
            else:
                own.data.copy_(self.tensors[prefix + name])
        places = torch.arange(len(x))
        mask = torch.where(places[:, None] < places, -torch.inf, 0.0).to(self.dtype)
        with torch.no_grad():
            angles = self.base.model.rotary_emb(x[None], places[None])
            out = layer(x[None], attention_mask=mask[None, None], position_embeddings=angles)
        return out[0].view(len(x), -1)


def check_modules(directory: Path, slow: SlowModules, float32: SlowModules, count: int) -> None:
    """Compare the logits of modules with a reference in float64 and in float32."""
    model = load_model(directory)
    modules = load_mtp(model, directory)
    ids = random_ids(40)
    exact = [slow.logits(states) for states in slow.text(ids, count)]
    allowed = rounding_errors(
        lambda: [float32.logits(states) for states in float32.text(ids, count)], exact
    )
    for _ in every_isa():
        states = target_states(model, ids)
        whole = text_states(modules, states, ids, [40])
        chunked = text_states(modules, states, ids, [17, 1, 1, 5, 16])
        assert all(torch.equal(one, other) for one, other in zip(whole, chunked, strict=True))
        for ours, truth, error in zip(whole, exact, allowed, strict=True):
            assert_error_at_most(distance(modules.logits(ours), truth), error)
            assert truth.std().item() > 0.5


@pytest.mark.parametrize("naming,base", MTP_BASES, ids=[base[0] for _, base in MTP_BASES])
def test_mtp_modules_equal_transformers(
    tmp_path: Path, naming: str, base: tuple[str, dict[str, Any]]
) -> None:
    tiny = make_mtp_checkpoint(tmp_path, naming, 2, base=base)
    slow, float32 = ModulesOfTransformers(tiny), ModulesOfTransformers(tiny, torch.float32)
    check_modules(tmp_path, slow, float32, 2)


NEMOTRONS = ("nemotron_h", "nemotron_h_latent")


def make_nemotron_mtp(directory: Path, family: str, **changes: Any) -> tuple[Tiny, Any]:
    """Save a tiny Nemotron with an MTP module; return it, and the module's layers."""
    blocks = ["full_attention", "moe"]
    layers = make_experts(directory, family, layers_block_type=blocks, **changes)
    layers.model.norm_f = torch.nn.Identity()
    own = load_file(directory / "model.safetensors")
    base = make_experts(directory, family, **changes)
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1}
    tensors, hidden = load_file(directory / "model.safetensors"), config["hidden_size"]
    tensors |= {
        name.replace("backbone", "mtp", 1): tensor
        for name, tensor in own.items()
        if name.startswith("backbone.layers.")
    }
    names = NAMES["nemotron_h"]
    for part in ("embed_norm", "hidden_norm", "head_norm"):
        tensors[names[part].format(i=0)] = 1 + 0.1 * torch.randn(hidden)
    tensors[names["projection"].format(i=0)] = 0.2 * torch.randn(hidden, 2 * hidden)
    save_checkpoint(directory, config, tensors)
    renamed = {"model.embed_tokens.weight": tensors["backbone.embeddings.weight"]}
    own_names = {
        "rms_norm_eps": config["layer_norm_epsilon"],
        "num_hidden_layers": len(config["layers_block_type"]),
    }
    return Tiny(directory, "nemotron_h", config | own_names, tensors | renamed, base), layers


class NemotronModules(SlowModules):
    """A Nemotron module whose layers are transformers' code."""

    def __init__(self, tiny: Tiny, layers: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(tiny, dtype=dtype)
        self.layers = copy.deepcopy(layers).to(dtype)
        for model in (self.base, self.layers):
            model.set_attn_implementation("eager")
            model.set_experts_implementation("eager")

    def _block(self, prefix: str, x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.layers.model(inputs_embeds=x[None]).last_hidden_state[0]
        return out


@pytest.mark.parametrize("family", NEMOTRONS)
def test_mtp_modules_of_nemotron_equal_transformers(tmp_path: Path, family: str) -> None:
    """A module's attention and experts are two layers of the checkpoint."""
    tiny, layers = make_nemotron_mtp(tmp_path, family)
    slow, float32 = (
        NemotronModules(tiny, layers, dtype) for dtype in (torch.float64, torch.float32)
    )
    check_modules(tmp_path, slow, float32, 1)


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"mtp.layers.2.eh_proj.weight": "mtp.layers.0.eh_proj.weight"},
            "num_nextn_predict_layers is 1, but the checkpoint holds the tensors of 2 MTP modules",
        ),
        (
            {"mtp.layers.2.norm.weight": "mtp.layers.1.norm.weight"},
            r"tensor mtp.layers.2.norm.weight is not used by the MTP module",
        ),
    ],
)
def test_other_mtp_modules_of_nemotron_are_refused(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    tiny, _ = make_nemotron_mtp(tmp_path, "nemotron_h")
    copies = {name: tiny.tensors[one] for name, one in changes.items()}
    save_checkpoint(tmp_path, tiny.config, tiny.tensors | copies)
    model = load_model(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_mtp(model, tmp_path)


# engines


@lru_cache
def engine_directory(family: str) -> str:
    """Write a tiny model with a tokenizer, and with an MTP module if its family has one."""
    directory = lasting_directory()
    if family in NEMOTRONS:
        make_nemotron_mtp(directory, family, vocab_size=257)
    elif family in FAMILIES:
        make_experts(directory, family, vocab_size=257)
    else:
        naming, base = next(one for one in MTP_BASES if one[1][0] == family)
        changes = {"vocab_size": 257, "num_hidden_layers": 2, **base[1]}
        make_mtp_checkpoint(directory, naming, base=(base[0], changes))
    write_tokenizer(directory, 257)
    return str(directory)


def completions(directory: str, method: str, **options: Any) -> list[Completion]:
    drafts = None if method == "naive" else 3
    # Random models rarely repeat more than one token.
    own = SpeculativeConfig.from_dict(
        {"method": method, "num_speculative_tokens": drafts, "min_ngram_size": 1}
    )
    engine = Engine(
        EngineConfig(
            model=directory,
            speculative_config=own,
            num_pages=100,
            **options,
        )
    )
    period = [5, 9, 23, 77, 101, 5, 9, 44]
    params = [
        SamplingParams(max_tokens=30, temperature=heat, seed=3, ignore_eos=True, logprobs=2)
        for heat in (0.0, 0.7, 0.0)
    ]
    results = engine.generate([period * 5, period * 5 + [3] * 20, [11]], params)
    if method != "naive":
        assert engine.stats.speculative.num_draft_tokens > 5
    return results


@pytest.mark.parametrize("options", [{}, {"quantization": "wint4", "kv_cache_dtype": "int8"}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "gpt_oss",
        "granite",
        "nemotron_h",
        "nemotron_h_latent",
        "Glm4Moe",
        "DeepseekV3",
        "Ernie4_5_Moe",
        "Qwen3Next",
    ],
)
@pytest.mark.fast("*-bfloat16-options0", "Ernie4_5_Moe-*-options1", "Glm4Moe-*-options1")
def test_speculation_changes_no_bit(family: str, dtype: str, options: dict[str, Any]) -> None:
    if family == "DeepseekV3":
        options = {name: one for name, one in options.items() if name != "kv_cache_dtype"}
    directory = engine_directory(family)
    plain = completions(directory, "naive", dtype=dtype, **options)
    has_module = family not in FAMILIES or family in NEMOTRONS
    for method in ("ngram", "mtp") if has_module else ("ngram",):
        for one, other in zip(
            plain, completions(directory, method, dtype=dtype, **options), strict=True
        ):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs


def test_ernie_wint4_quantizes_only_experts_to_4_bits() -> None:
    """As in FastDeploy, Ernie's dense projections have 8 bits; other families have 4 in both."""
    kinds = {}
    for family in ("Ernie4_5_Moe", "Glm4Moe"):
        layer = load_model(engine_directory(family), quantization="wint4").layers[-1]
        assert isinstance(layer.mlp, Experts)
        dense = {one.kind for one in (*layer.attention.weights, *layer.mlp.weights)}
        kinds[family] = (layer.mlp.gate_up.kind, layer.mlp.down.shards[0].kind, dense)
    assert kinds == {
        "Ernie4_5_Moe": ("int4", "int4", {"int8"}),
        "Glm4Moe": ("int4", "int4", {"int4"}),
    }


@pytest.mark.parametrize(
    "family,drafting,captures,more",
    [
        ("Ernie4_5_Moe", "mtp", True, {}),
        ("Ernie4_5_Moe", "mtp", False, {}),
        ("gpt_oss", "ngram", True, {}),
        ("gpt_oss", "ngram", True, {"exact_across_tp": 2, "enable_expert_parallel": True}),
        ("Qwen3Next", "mtp", True, {}),
        ("granite", "ngram", True, {}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_graphs_with_experts_change_no_bit(
    family: str,
    drafting: str,
    captures: bool,
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA kernels route without the host, so a replay uses the experts of its own rows."""
    module = simt.load()
    module.set_schedule("in_order", 0)
    module.set_landing("late")
    for op_module in OP_MODULES:
        monkeypatch.setattr(op_module, "_C", module)

    def generated(device: FakeGpu, method: str) -> list[tuple[list[int], Any]]:
        monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
        drafts = None if method == "naive" else 2
        engine = Engine(
            EngineConfig(
                model=engine_directory(family),
                dtype="bfloat16",
                speculative_config=SpeculativeConfig(method=method, num_speculative_tokens=drafts),
                num_pages=20,
                max_model_len=64,
                **more,
            )
        )
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
        done = engine.generate([[5, 9, 5, 9, 5], [11, 3]], [params] * 2)
        return [(one.token_ids, one.logprobs) for one in done]

    plain = generated(FakeGpu(captures=False), "naive")
    device = FakeGpu(captures=captures, poison=0xFF)
    assert generated(device, drafting) == plain
    assert ("replay" in device.log) == captures
