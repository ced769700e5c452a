# SPDX-License-Identifier: Apache-2.0
"""Adaptive verification in the engine: costs are measured once, and no token depends on them."""

import json
from pathlib import Path
from typing import Any

import pytest
import specops
from checkpoints import write_tokenizer
from mtp_checkpoints import make_mtp_checkpoint
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.cost_table import STEP, CostTable
from test_lossless import bits

METHODS: list[dict[str, Any]] = [
    {"method": "ngram", "min_ngram_size": 1},
    {"method": "suffix"},
    {"method": "mtp"},
    {"method": "mtp", "mtp_strategy": "with_ngram"},
    {"method": "mtp", "mtp_strategy": "with_suffix", "num_model_steps": 2},
]
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9] * 12, list(range(1, 40)), [3, 4]]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=t, seed=5, ignore_eos=True, logprobs=2)
    for t in (0.0, 0.0, 0.9, 0.3)
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_mtp_checkpoint(directory, "deepseek_v3", 1)
    write_tokenizer(directory)
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specops" / "costs"


def make(model_dir: Path, own: dict[str, Any], **config: Any) -> Engine:
    own = {"num_speculative_tokens": 4, **own} if own["method"] != "naive" else own
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "device": "cpu", **config}
    return Engine(
        EngineConfig(
            model=str(model_dir),
            dtype="float32",
            speculative_config=SpeculativeConfig(**own),
            **config,
        )
    )


@pytest.mark.parametrize("own", METHODS, ids=lambda own: "-".join(map(str, own.values())))
def test_measuring_leaves_nothing_and_changes_no_token(
    model_dir: Path, cache: Path, own: dict[str, Any]
) -> None:
    expected = make(model_dir, {"method": "naive"}).generate(PROMPTS, PARAMS)
    assert not cache.exists()  # who does not select drafts measures nothing
    engine = make(model_dir, {**own, "adaptive_verification": True})
    assert engine.num_free_pages == engine.num_pages
    assert engine.num_running == engine.num_waiting == 0
    assert engine.stats.num_steps == 0 and engine._drafting.width == 0
    suffixes = engine.drafters["suffix"].cache  # type: ignore[attr-defined]
    assert suffixes.num_cached_requests == 0 and suffixes.running_requests == []
    # Costs of a machine on which every draft pays, one on which none does, and the measured ones.
    measured = engine._drafting._selector._costs  # type: ignore[union-attr]
    name = "+".join(name for name, _ in engine.config.speculative_config.draft_stages)
    for row, drafter in ((1e-9, 1e-9), (1.0, 5.0), (None, None)):
        if row is not None:
            steps = {(STEP, rows, n): 1.0 + row * rows for n in (1, 4) for rows in (n, 5 * n)}
            costs = {**steps, (name, 1, 1): drafter, (name, 4, 4): drafter}
            engine._drafting.use_costs(CostTable(costs))
        else:
            assert measured is not None
            engine._drafting.use_costs(measured)
        before = engine.stats.speculative.num_draft_tokens, engine.stats.num_suspended_steps
        done = engine.generate(PROMPTS, PARAMS)
        assert list(map(bits, done)) == list(map(bits, expected))
        drafts = engine.stats.speculative.num_draft_tokens - before[0]
        suspended = engine.stats.num_suspended_steps - before[1]
        if row == 1e-9:
            assert drafts > 20 and suspended == 0
        elif row == 1.0:
            assert suspended > drafts
    assert engine.num_free_pages == engine.num_pages


def test_costs_are_measured_once(
    model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"method": "ngram", "adaptive_verification": True}
    first = make(model_dir, own)._drafting._selector
    (file,) = cache.iterdir()
    table = json.loads(file.read_text())
    assert {(name, rows, n) for name, rows, n, _ in table} >= {("", 1, 1), ("", 4, 4)}
    assert {name for name, *_ in table} == {"", "ngram"}

    def measure(*_: Any, **__: Any) -> CostTable:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(CostTable, "measure", measure)
        second = make(model_dir, own)._drafting._selector
        assert first is not None and second is not None
        assert first._costs is not None and second._costs is not None
        assert first._costs.seconds == second._costs.seconds
    make(model_dir, own, calibrate=True)
    assert list(cache.iterdir()) == [file] and json.loads(file.read_text()) != table
    monkeypatch.setattr(CostTable, "measure", measure)
    threads = {"num_threads": specops.get_num_threads() + 1}
    for changes in ({"calibrate": True}, {"page_size": 32}, threads):
        with pytest.raises(AssertionError, match="measured again"):
            make(model_dir, own, **changes)


def test_a_request_may_turn_it_off_but_not_on(model_dir: Path) -> None:
    engine = make(model_dir, {"method": "ngram"})
    with pytest.raises(ValueError, match="adaptive_verification needs an engine that knows"):
        engine.add_request([1, 2], PARAMS[0], speculative_config={"adaptive_verification": True})
    engine = make(model_dir, {"method": "ngram", "adaptive_verification": True})
    engine.generate(PROMPTS, PARAMS, speculative_config={"adaptive_verification": False})
    assert engine._drafting._states == {} and engine.stats.num_suspended_steps == 0
    # Fixed and selected drafts, and none, in the same steps; other strategies keep all drafts.
    expected = make(model_dir, {"method": "naive"}).generate(PROMPTS, PARAMS)
    kinds: list[Any] = [None, {"method": "naive"}, {"adaptive_verification": False}, None]
    names = [
        engine.add_request(prompt, params, speculative_config=kind)
        for prompt, params, kind in zip(PROMPTS, PARAMS, kinds, strict=True)
    ]
    while engine.has_unfinished():
        engine.step()
    assert [bits(engine.completion(name)) for name in names] == list(map(bits, expected))
    assert engine._drafting._states == {}
    own = {"verify_strategy": "rejection"}
    engine.generate(PROMPTS, PARAMS, speculative_config=own)
    assert engine._drafting._states == {}
