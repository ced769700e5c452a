# SPDX-License-Identifier: Apache-2.0
"""Warnings about drafters whose drafts are useless: in the log, the statistics and commands."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import make_mtp_model, save_checkpoint
from safetensors.torch import load_file
from specops.cli.exactness import main
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters import acceptance_watch
from specops.engine.drafters.recurrent import RecurrentDrafter, RecurrentStep

PROMPT = [5, 9, 23, 77] * 4
NOT_FINITE = "drafter mtp: its logits are NaN or infinite"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_model(tmp_path_factory.mktemp("model"))


def engine_of(directory: Path, **options: Any) -> Engine:
    own = SpeculativeConfig.from_dict({"method": "mtp", "num_speculative_tokens": 2, **options})
    return Engine(EngineConfig(model=str(directory), speculative_config=own, device="cpu"))


def poisoned(directory: Path, model_dir: Path, value: float) -> Path:
    """Copy a model with one wrong weight in its MTP module."""
    make_mtp_model(directory)
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"][3, 5] = value
    save_checkpoint(directory, json.loads((model_dir / "config.json").read_text()), tensors)
    return directory


def test_healthy_drafters_pass_their_check_without_a_trace(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    fresh = engine_of(model_dir)
    engine.check_drafters()
    assert engine.stats == fresh.stats and not engine.stats.drafter_warnings
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=1)
    (one,), (other,) = (each.generate([PROMPT], params) for each in (engine, fresh))
    assert one.logprobs == other.logprobs and engine.num_free_pages == fresh.num_free_pages
    assert engine.stats.prefix_cache_hits == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_found_at_start(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    engine = engine_of(poisoned(tmp_path, model_dir, value))
    engine.check_drafters()
    (sentence,) = engine.stats.drafter_warnings
    assert sentence.startswith(NOT_FINITE)
    assert [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING] == [
        sentence
    ]


@pytest.mark.parametrize("kind,hook", [(RecurrentStep, "launch"), (RecurrentDrafter, "problem")])
def test_drafters_that_fail_are_found_at_start(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: type, hook: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    engine = engine_of(model_dir)
    monkeypatch.setattr(kind, hook, fail)
    engine.check_drafters()
    (sentence,) = engine.stats.drafter_warnings
    expected = {
        "launch": "it failed in its first step",
        "problem": "its check failed: RuntimeError: broken",
    }
    assert expected[hook] in sentence


def test_acceptance_near_zero_is_reported_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are never right are rejected; those of the target itself are accepted."""
    monkeypatch.setattr(acceptance_watch, "_COUNTED", 20)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    good = engine_of(model_dir, method="draft_model", model=str(model_dir))
    completion = good.generate([PROMPT], params)[0]
    assert good.stats.speculative.num_accepted_tokens > 20 and not good.stats.drafter_warnings
    never = next(token for token in range(257) if token not in completion.token_ids)
    monkeypatch.setattr(
        RecurrentStep, "read", lambda step, parts, proposals: proposals.token_ids.fill(never)
    )
    bad = engine_of(model_dir)
    assert bad.generate([PROMPT], params)[0].token_ids == completion.token_ids
    assert list(bad.stats.drafter_warnings) == [
        "drafter mtp: only 0 of its first 20 drafts were accepted; its weights may belong to "
        "another model"
    ]


def test_verify_exactness_prints_warnings(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(poisoned(tmp_path, model_dir, torch.nan))
    arguments = ["--model", directory, "--method", "mtp", "--prompts", "1", "--max-tokens", "8"]
    own = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    assert main([*arguments, "--speculative-config", own, "--temperature", "0"], "x") == 0
    out = capsys.readouterr().out
    assert NOT_FINITE.replace("drafter", "Drafter", 1) in out and "No difference in" in out
