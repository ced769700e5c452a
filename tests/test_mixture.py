# SPDX-License-Identifier: Apache-2.0
"""The bundled model as a mixture of experts: equal in transformers and with speculation."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from specops import moe
from specops.engine import (
    Completion,
    Engine,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
    step_costs,
)
from test_assets import ASSETS, TEXT
from torch import Tensor

from tools.train import mixture
from tools.train.export import load_model
from tools.train.mixture import fit, share_out, split, write_mixture
from tools.train.mixture_card import DRAFTS, measure
from tools.train.model import MixtureConfig, Model, ModelConfig, rope_cos_sin
from tools.train.train import Recipe, train

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "bench" / "prompts"


def prompts(kind: str, count: int) -> list[str]:
    return [one["text"] for one in json.loads((PROMPTS / f"{kind}.json").read_text())[:count]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_mixture(path := tmp_path_factory.mktemp("mixture"))
    return path


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ASSETS / "metrics.json").read_text())["mixture"]
    return found


def tiny(**changes: int) -> tuple[Model, MixtureConfig]:
    """Return a dense model, and the configuration of a mixture of the same neurons."""
    shape = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 32}
    model = Model(ModelConfig(**shape))
    model.reset(3)
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(5 if one.ndim == 2 else 1)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, **changes}
    return model, MixtureConfig(**shape, **experts)


def logits_of(model: Model, tokens: Tensor) -> Tensor:
    cos, sin = rope_cos_sin(tokens.shape[1], model.config, tokens.device)
    with torch.no_grad():
        return model.logits(model.hidden(tokens, cos, sin))


def test_neurons_that_are_strong_together_share_an_expert() -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = torch.randint(0, 3, (200,), generator=generator)  # kind of each row
    own = torch.arange(12) % 3  # kind of each neuron
    strengths = (kinds[:, None] == own).float() + 0.1 * torch.rand(200, 12, generator=generator)
    shared = share_out(strengths, 3)
    assert {tuple(sorted(one)) for one in shared.tolist()} == {
        tuple(range(first, 12, 3)) for first in range(3)
    }


def test_mixture_of_all_experts_is_the_dense_model() -> None:
    model, config = tiny(num_experts_per_tok=4)
    tokens = torch.randint(0, 97, (4, 24), generator=torch.Generator().manual_seed(4))
    parts = fit(model, tokens, config)
    for router in (name for name in parts if name.endswith("router")):
        parts[router] = parts[router] * 0  # so that all experts have the same weight
    mixed = split(model, parts, config)
    torch.testing.assert_close(logits_of(mixed, tokens), logits_of(model, tokens))


def test_routers_choose_the_experts_with_large_outputs() -> None:
    """The opposite choice has larger errors."""
    model, config = tiny()
    tokens = torch.randint(0, 97, (8, 64), generator=torch.Generator().manual_seed(4))
    parts = fit(model, tokens, config)
    dense = logits_of(model, tokens)
    errors = []
    for change in (1, -1):  # the routers' choice, and the opposite one
        changed = {
            name: value * (change if name.endswith("router") else 1)
            for name, value in parts.items()
        }
        errors.append((logits_of(split(model, changed, config), tokens) - dense).std().item())
    assert errors[0] < 0.8 * errors[1]


def test_mixture_can_be_trained_further(tmp_path: Path) -> None:
    """Routers learn, and so do all experts."""
    model, config = tiny()
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 97, 400).astype(np.uint16) for _ in range(4)]
    texts = torch.from_numpy(np.stack(documents).astype(np.int64))
    mixed = split(model, fit(model, texts[:, :64], config), config)
    before = {name: value.clone() for name, value in mixed.state_dict().items()}
    recipe = Recipe(steps=2, batch_tokens=256, length=32, long_length=32)
    probe = texts[:, :34]
    log = tmp_path / "train.jsonl"
    device = torch.device("cpu")
    train(mixed, documents, probe, recipe, 0, device, log, lambda _: None, compile_model=False)
    for name, value in mixed.state_dict().items():
        assert value.isfinite().all() and (value != before[name]).any(), name


def test_mixture_of_another_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mixture, "_digest", lambda: "another")
    with pytest.raises(ValueError, match="was made for another model"):
        write_mixture(tmp_path)


def test_transformers_gives_the_same_logits(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peer, notes = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert type(peer).__name__ == "Qwen3MoeForCausalLM"
    assert not notes["missing_keys"] and not notes["mismatched_keys"]
    model, tokenizer, _ = load_model(directory)
    tokens = torch.tensor([[0, *tokenizer.encode(TEXT).ids]])
    with torch.no_grad():
        theirs = peer(tokens).logits
    mine = logits_of(model, tokens)
    torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=1e-3)
    loss = torch.nn.functional.cross_entropy(mine[0, :-1], tokens[0, 1:]).item()
    assert loss < 3.5  # chance would be 8.3


CASES: list[dict[str, Any]] = [
    {"method": "mtp", "num_speculative_tokens": 3},
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 6},
    {"method": "mtp+suffix", "num_speculative_tokens": 6},
]


def generate(directory: Path, speculative: dict[str, Any], temperature: float) -> list[Completion]:
    engine = Engine(
        EngineConfig(
            model=str(directory),
            device="cpu",
            max_num_seqs=4,
            max_num_batched_tokens=96,
            num_pages=80,
            speculative_config=SpeculativeConfig.from_dict(speculative),
        )
    )
    texts = [*prompts("completions", 3), *prompts("edits", 2)]
    params = [
        SamplingParams(
            max_tokens=32, temperature=temperature, seed=seed, ignore_eos=True, logprobs=2
        )
        for seed in range(len(texts))
    ]
    return engine.generate(texts, params)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_bit(directory: Path, temperature: float) -> None:
    """Token ids and logprobs are equal for every method, with some drafts right and some wrong."""
    run = partial(generate, directory, temperature=temperature)
    plain = [(one.token_ids, one.logprobs) for one in run({"method": "naive"})]
    for case in CASES:
        done = run(case)
        assert [(one.token_ids, one.logprobs) for one in done] == plain, case
        stats = [one.stats for one in done]
        accepted = sum(one.num_accepted_tokens for one in stats)
        assert 0 < accepted < sum(one.num_draft_tokens for one in stats), case


def test_acceptance_is_that_of_the_model_card(directory: Path, metrics: dict[str, Any]) -> None:
    """The test uses fewer prompts than the card. `measure` compares texts with plain decoding."""
    runs = measure(directory, {"edits": prompts("edits", 4)}, 128)
    card = {one["method"]: one for one in metrics["mixture"]["runs"] if one["text"] == "edits"}
    assert [one["method"] for one in runs] == ["mtp", "ngram", "suffix"]
    for one in runs:
        accepted = one["accepted_by_position"]
        assert accepted == sorted(accepted, reverse=True) and len(accepted) == DRAFTS
        assert one["tokens_per_step"] == pytest.approx(
            card[one["method"]]["tokens_per_step"], rel=0.25
        )


def test_model_card_has_the_measured_figures(metrics: dict[str, Any]) -> None:
    card = (ASSETS / "README.md").read_text(encoding="utf-8")
    for name in ("dense", "mixture"):
        assert f"{metrics[name]['library']['nats_per_token']:.3f}" in card
        for run in metrics[name]["runs"]:
            row = " | ".join(f"{value:.3f}" for value in run["accepted_by_position"])
            assert f"{row} | {run['tokens_per_step']:.2f} |" in card
    assert f"{metrics['routing']['distinct'][-1]:.2f}" in card
    # Worse than the dense model, but not by much.
    loss = [metrics[name]["library"]["nats_per_token"] for name in ("dense", "mixture")]
    assert loss[0] < loss[1] < loss[0] + 0.6


def test_measured_steps_read_the_experts_of_different_rows(
    directory: Path, metrics: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If rows were equal, the costs of drafts would not include the experts that drafts read."""
    monkeypatch.setattr(step_costs, "_FACTOR", math.inf)  # no step is too long
    engine = Engine(
        EngineConfig(
            model=str(directory),
            device="cpu",
            max_num_seqs=1,
            max_num_batched_tokens=8,
            speculative_config=SpeculativeConfig(method="ngram", adaptive_verification=False),
        )
    )
    distinct: dict[int, list[int]] = {}
    sort = moe.moe_sort

    def counted(ids: Tensor, *arguments: Any, **options: Any) -> Any:
        distinct.setdefault(len(ids), []).append(len(ids.unique()))
        return sort(ids, *arguments, **options)

    model = engine._runner.parts.model
    with mock.patch.object(moe, "moe_sort", counted):
        engine._measure_steps(model.bytes_read)
    expected = dict(zip(metrics["routing"]["rows"], metrics["routing"]["distinct"], strict=True))
    for rows in (1, 2, 4, 8):
        found = sum(distinct[rows]) / len(distinct[rows])
        assert found == pytest.approx(expected[rows], rel=0.15), rows
