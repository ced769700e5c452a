# SPDX-License-Identifier: Apache-2.0
"""A draft model with linear attention: every draft equals its own decoding, bit for bit.

The logits of each draft are compared with those of the draft model alone over the same text in one
pass, after rejected drafts, preemption and prefix-cache hits. Planted bugs must be detected.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import lasting_directory, make_checkpoint, write_tokenizer
from draft_lengths import RandomLengths
from safetensors.torch import load_file, save_file
from specops import linear_attention
from specops.engine import Engine, EngineConfig, SpeculativeConfig
from specops.engine.drafters.draft_model import DraftModelDrafter
from specops.engine.drafters.recurrent import RecurrentStep
from specops.engine.machine import capacity_of
from specops.engine.models import KvCache, PrefixStates, load_model
from test_lossless import bits
from test_models import Runner
from test_qwen3_next import CACHES, conversations, directory, plain, run_all, texts
from test_scheduler import check_entries
from torch import Tensor

DRAFTS = 4


@cache
def similar() -> Path:
    """Create a copy of the target with noise, whose drafts are often accepted."""
    found = lasting_directory()
    for file in Path(directory()).iterdir():
        shutil.copy(file, found)
    file, generator = found / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensors[name] = (tensor.float() + 0.05 * noise).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return found


@cache
def dense() -> str:
    """Create a target without recurrent states, with the same vocabulary."""
    found = lasting_directory()
    make_checkpoint(found, "Qwen3", vocab_size=257)
    write_tokenizer(found, 257)
    return str(found)


def make(model: str | Path | None, *, target: str = "", **options: Any) -> Engine:
    own = {"method": "draft_model", "model": str(model), "num_speculative_tokens": DRAFTS}
    own |= options.pop("own", {})
    speculative = SpeculativeConfig() if model is None else SpeculativeConfig.from_dict(own)
    return Engine(
        EngineConfig(
            model=target or directory(),
            speculative_config=speculative,
            **{"num_pages": 100, "max_num_seqs": 8, "max_model_len": 128, **options},
        )
    )


class Drafts:
    """Record of the text before each draft of an engine, and of the draft's logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[tuple[int, ...], Tensor]] = []
        choose = RecurrentStep._choose

        def choosing(
            part: RecurrentStep, target: Any, indices: Any, hidden: Tensor, **which: int
        ) -> None:
            last_rows = indices.last_rows.tolist()
            choose(part, target, indices, hidden, **which)
            logits = part._drafter.arrays.choice_view(len(last_rows)).logits
            for request, row in enumerate(last_rows):
                if row < 0:
                    continue
                slot = int(part.rows.drafting_slots[request])
                text = target.token_ids[slot, : target.lens[slot]].tolist()
                text += target.draft_token_ids[slot, : which["step"]].tolist()
                self.found.append((tuple(text), logits[request].clone()))

        monkeypatch.setattr(RecurrentStep, "_choose", choosing)

    def num_wrong(self, model: str | Path) -> int:
        """Return how many drafts have other logits than the model computes from the text."""
        found = sorted(self.found, key=lambda one: one[0])
        runner, wrong = Runner(load_model(model)), 0
        whole, rows = tuple[int, ...](), torch.empty(0)
        for text, logits in reversed(found):  # a prefix of a text comes after the text
            if text != whole[: len(text)]:
                whole = text
                (rows,) = runner.run([list(text)], [[len(text)]])
            wrong += not torch.equal(logits, rows[len(text) - 1])
        assert len(found) > 15
        return wrong


LIMITS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "preempted": {"num_pages": 12, "max_num_seqs": 6},
    "without a prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.fast("chunks", "preempted")
def test_drafts_equal_the_draft_models_own_decoding(
    limits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps draft nothing; the tokens equal plain decoding."""
    drafts = Drafts(monkeypatch)
    engine = RandomLengths().decide_for(make(similar(), **LIMITS[limits]))
    done = engine.generate(*texts(20))
    assert list(map(bits, done)) == list(map(bits, plain(20)))
    spec = engine.stats.speculative
    assert 0.1 * spec.num_draft_tokens < spec.num_accepted_tokens < spec.num_draft_tokens
    assert (engine.stats.num_preemptions > 0) == (limits == "preempted")
    assert engine.num_free_pages == engine.num_pages and not engine._drafting.num_failures
    assert drafts.num_wrong(similar()) == 0


def converse(
    cache: str, monkeypatch: pytest.MonkeyPatch, *, target: str = "", count: int = 30
) -> tuple[Engine, int]:
    """Run requests that continue one another; return the engine and the number of wrong drafts."""
    options = dict(CACHES[cache])
    num_prefix_states, talk = options.pop("num_prefix_states", 100), conversations(count)
    sizes = [load_model(one).kv_bytes_per_slot(0) for one in (similar(), target or directory())]
    options["state_cache_bytes"] = num_prefix_states * sum(sizes)
    drafts = Drafts(monkeypatch)
    engine = RandomLengths().decide_for(make(similar(), target=target, **options))
    assert engine._runner.parts.cache.capacity.num_prefix_states == num_prefix_states
    done = run_all(engine, talk)
    if not target:
        assert list(map(bits, done)) == list(map(bits, talk.done))
    assert engine.num_free_pages == engine.num_pages and not engine._drafting.num_failures
    check_entries(engine._scheduler.states, num_prefix_states)
    return engine, drafts.num_wrong(similar())


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.fast("few kept", "few pages")
def test_drafts_continue_cached_prefixes(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, num_wrong = converse(cache, monkeypatch)
    assert num_wrong == 0
    assert engine.stats.prefix_cache_hits > 0.05 * engine.stats.prefix_cache_queries > 0


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_drafts_of_300_requests_continue_cached_prefixes(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converse(cache, monkeypatch, count=300)[1] == 0


def test_cached_prefix_ends_where_the_draft_model_has_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests without drafts still use every cached page."""
    engine, num_wrong = converse("few kept", monkeypatch, target=dense())
    assert num_wrong == 0 and engine.stats.prefix_cache_hits > 0
    for num_cached in (0, 48):
        naive = {"speculative_config": {"method": "naive"}}
        (done,) = engine.generate([[9] * 50], texts(1)[1], **naive)
        assert done.num_cached_tokens == num_cached


def test_states_after_a_long_pause_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the pause, the drafter runs only the last tokens, and starts from zero states."""
    engine = make(similar(), max_num_batched_tokens=64, max_model_len=256)
    params = replace(texts(1)[1][0], max_tokens=190)
    name = engine.add_request(list(range(1, 41)), params)
    (request,) = engine._requests.values()
    while engine.has_unfinished():
        request.drafts.limit = DRAFTS * (not 60 <= len(request.token_ids) < 210)
        engine.step()
    drafts = Drafts(monkeypatch)
    prompt = [*range(1, 41), *engine.completion(name).token_ids]
    (done,) = engine.generate([prompt], replace(params, max_tokens=24))
    assert 0 < done.num_cached_tokens < 64 and drafts.num_wrong(similar()) == 0


def plant_late_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a row continues from the state of the token before the last."""
    real = linear_attention.gated_delta_rule

    def wrong(*args: Tensor, **options: Any) -> Tensor:
        *_, states, slots, qo_indptr, kv_lens = args
        window, lens = states.shape[1], qo_indptr.diff().tolist()
        of_drafter = window > DRAFTS + 1
        for slot, count, end in zip(slots.tolist(), lens, kv_lens.tolist(), strict=True):
            if of_drafter and count and end - count > 1:
                begin = end - count
                states[slot, (begin - 1) % window] = states[slot, (begin - 2) % window]
        return real(*args, **options)

    monkeypatch.setattr(linear_attention, "gated_delta_rule", wrong)


def plant_window(num_behind: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that plants a bug: slots keep too few positions."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = DraftModelDrafter.__init__

        def wrong(self: DraftModelDrafter, *args: Any) -> None:
            real(self, *args)
            self._num_behind = num_behind

        monkeypatch.setattr(DraftModelDrafter, "__init__", wrong)

    return plant


def plant_missing_draft_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug: the draft model's states of a prefix are not loaded."""
    real = KvCache.load_states

    def wrong(self: KvCache, *place: int) -> None:
        if self.capacity.num_drafts == DRAFTS:
            real(self, *place)

    monkeypatch.setattr(KvCache, "load_states", wrong)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a state one token late": plant_late_states,
    "too few positions for drafts": plant_window(DRAFTS - 1),
    "too few positions for prefixes": plant_window(DRAFTS),
    "states of prefixes are not loaded": plant_missing_draft_states,
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.slow
def test_planted_bugs_are_detected(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only drafts show the bugs, since no token depends on them."""
    BUGS[bug](monkeypatch)
    assert converse("all kept", monkeypatch)[1] > 0


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "too early"])
def test_prefix_states_wait_for_the_drafter(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter pauses while the target ends a page, and has no states there."""
    keep = PrefixStates.keep
    if not waits:

        def keep_early(self: PrefixStates, *place: Any) -> None:
            slot, pages, known, num_computed, _, begin, rows = place
            keep(self, slot, pages, known, num_computed, num_computed, begin, rows)

        monkeypatch.setattr(PrefixStates, "keep", keep_early)
    engine, drafts = make(similar()), Drafts(monkeypatch)
    params = replace(texts(1)[1][0], max_tokens=20)
    name = engine.add_request(list(range(1, 41)), params)
    while engine.has_unfinished():
        for request in engine._requests.values():
            request.drafts.limit = DRAFTS * (not 43 <= len(request.token_ids) < 52)
        engine.step()
    prompt = [*range(1, 41), *engine.completion(name).token_ids]
    (done,) = engine.generate([prompt], params)
    assert done.num_cached_tokens == (32 if waits else 48)
    assert (drafts.num_wrong(similar()) == 0) == waits


@pytest.mark.parametrize("target", ["states", "dense"])
def test_target_as_draft_model_is_always_accepted(target: str) -> None:
    """This holds for sampled tokens, too: both models use the same random numbers."""
    model = directory() if target == "states" else dense()
    prompts, params = texts(8)
    engine = make(model, target=model, max_num_batched_tokens=24)
    expected = make(None, target=model, enable_prefix_caching=False).generate(prompts, params)
    assert list(map(bits, engine.generate(prompts, params))) == list(map(bits, expected))
    spec = engine.stats.speculative
    assert spec.num_accepted_tokens == spec.num_draft_tokens > 100


def test_slots_have_memory_for_the_configured_drafts() -> None:
    """A request with more drafts is refused; memory of states is reserved before pages."""
    engine = make(similar(), target=dense())
    prompts, params = texts(1)
    with pytest.raises(ValueError, match=r"num_model_steps must be at most 4, .*, got 5"):
        engine.add_request(prompts[0], params[0], speculative_config={"num_speculative_tokens": 5})
    model, drafter = load_model(similar()), engine.drafters["draft_model"]
    per_slot, per_prefix = model.kv_bytes_per_slot(2 * DRAFTS), model.kv_bytes_per_slot(0)
    assert drafter.kv_bytes == (model.kv_bytes_per_token(), per_slot, per_prefix)
    capacity = engine._runner.parts.cache.capacity
    assert drafter.states is not None
    on_pages = capacity.num_pages * capacity.page_size * model.kv_bytes_per_token()
    assert sum(one.nbytes for one in drafter.states.tensors) == (
        on_pages + capacity.num_slots * per_slot + capacity.num_prefix_states * per_prefix
    )
    target: Any = load_model(dense(), max_model_len=128)
    config = replace(engine.config, state_cache_bytes=3 * per_prefix, num_pages=None)
    free = 8 * per_slot + 3 * per_prefix
    page = 16 * (target.kv_bytes_per_token() + model.kv_bytes_per_token())
    device: Any = SimpleNamespace(device=torch.device("cpu"), free_bytes=lambda: free + 10 * page)
    assert capacity_of(config, device, target, drafter.kv_bytes) == (10, 16, 8, DRAFTS, 3)
    without = make(similar(), enable_prefix_caching=False).drafters["draft_model"]
    assert without.kv_bytes.per_slot == model.kv_bytes_per_slot(DRAFTS)
