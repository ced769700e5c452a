# SPDX-License-Identifier: Apache-2.0
"""Families with mixtures of experts against Hugging Face's code, and rows against themselves."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import specops
import torch
from checkpoints import make_checkpoint
from conftest import every_isa
from rounding import assert_error_at_most, distance, rounding_errors
from specops.engine.models import load_model
from specops.engine.models.blocks.experts import ExpertsConfig
from specops.engine.models.config import ModelConfig
from specops.engine.models.families import read_model_config
from specops.engine.models.loader import build
from specops.engine.models.weights import Checkpoint
from test_models import Runner, random_ids
from torch import Tensor

EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 3}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
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
}


def make_experts(directory: Path, family: str, **changes: Any) -> Any:
    """Saves a tiny random model whose routers have biases that matter; returns it."""
    kind, own = FAMILIES[family]
    theirs = make_checkpoint(directory, kind, **{**own, **changes})
    with torch.no_grad():
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) / 4)
    theirs.save_pretrained(directory)
    return theirs


def exact_and_allowed(theirs: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits in float64, and the error that rounding to float32 makes of them."""
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
    assert exact.std().item() > 0.5  # the comparison is about something


def routed(**changes: Any) -> Callable[[ExpertsConfig], ExpertsConfig]:
    return lambda one: replace(one, routing=replace(one.routing, **changes))


# By family: what goes wrong if a rule of its routing is left out.
FAULTS: list[tuple[str, Callable[[ExpertsConfig], ExpertsConfig]]] = [
    ("qwen3", routed(min_sum=None)),
    ("qwen3", routed(top_k=2)),
    ("qwen3_steps", routed(min_sum=0.0)),
    ("qwen3", routed(scoring="sigmoid")),
    ("glm4", routed(scale=1.0)),
    ("glm4", routed(bias=None)),
    ("glm4", routed(scoring="softmax")),
    ("glm4", lambda one: replace(one, shared=None)),
    ("ernie4_5", routed(bias=None)),
    ("ernie4_5", routed(min_sum=None)),
    ("ernie4_5", lambda one: replace(one, shared=None)),
    ("deepseek_v3", routed(num_groups=1, top_k_groups=1)),
    ("deepseek_v3", routed(top_k_groups=3)),
    ("deepseek_v3", routed(scale=1.0)),
    ("deepseek_v3_yarn", routed(min_sum=1e-20)),
]


@pytest.mark.parametrize(
    "family,fault", FAULTS, ids=[f"{family}-{i}" for i, (family, _) in enumerate(FAULTS)]
)
def test_a_rule_left_out_is_noticed(
    tmp_path: Path, family: str, fault: Callable[[ExpertsConfig], ExpertsConfig]
) -> None:
    theirs = make_experts(tmp_path, family)
    ids = random_ids(40)
    exact, allowed = exact_and_allowed(theirs, ids)
    config: ModelConfig = read_model_config(tmp_path)
    layers = [
        replace(layer, mlp=fault(layer.mlp)) if isinstance(layer.mlp, ExpertsConfig) else layer
        for layer in config.layers
    ]
    assert tuple(layers) != config.layers
    with ExitStack() as stack:
        source = Checkpoint(tmp_path, torch.float32, torch.device("cpu"), stack)
        wrong = build(replace(config, layers=tuple(layers)), source, torch.float32, 256)
    logits = Runner(wrong).run([ids], [[40]])[0]
    with pytest.raises(AssertionError, match="max error"):
        assert_error_at_most(distance(logits, exact), allowed)


@pytest.mark.parametrize("quantization", ["none", "wint8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["ernie4_5", "deepseek_v3"])
@pytest.mark.corners("*-ernie4_5-*", "*-deepseek_v3-bfloat16-none")
def test_a_row_has_the_same_bits_however_it_is_computed(
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
