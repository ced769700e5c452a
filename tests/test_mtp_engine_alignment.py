# SPDX-License-Identifier: Apache-2.0
"""The engine's MTP drafts, to the bit of their logits, against the oracle's at every step.

Logits show what drafts hide: on a random model a wrong row of the cache seldom changes which token
is the likeliest, but no logit stays as it was. Every known mistake is planted in the engine's
drafter, and the comparison must notice it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_tokenizer
from draft_lengths import Lengths
from mtp_checkpoints import make_mtp_checkpoint
from mtp_oracle import oracle_drafts
from safetensors.torch import save_file
from specops import attention, batching, dense, sampling
from specops.batching import DraftIndices
from specops.engine import Completion, Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters.base import TargetStep
from specops.engine.drafters.recurrent import CATCH_UP, RecurrentStep
from specops.engine.memory.kv_cache import PagePool
from specops.engine.models import MtpModules, MtpOutput, load_model, load_mtp
from specops.engine.request import Request
from specops.sampling import Purpose
from torch import Tensor

DRAFTS = 4
NOTICED = "not the logits of docs/mtp.md"
# Of a random model no draft is right: so that some are kept, and not always as many.
SOME = {"accept_policy": "synthetic", "synthetic_acceptance_rates": (0.8, 0.65, 0.5, 0.4)}


@dataclass(frozen=True)
class Made:
    """The drafts that a step made for a request."""

    prefix: list[int]
    drafts: list[int]
    logits: Tensor  # [drafts, draft vocabulary]
    wanted: int
    begin: int  # what the modules see nothing before


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Notes every draft that modules make from now on."""
    made: list[Made] = []
    passes: list[Tensor] = []
    logits, launch = MtpModules.logits, RecurrentStep.launch

    def watched_logits(self: MtpModules, hidden: Tensor, **how: Any) -> Tensor:
        passes.append(logits(self, hidden, **how).clone())
        return passes[-1]

    def watched_launch(self: RecurrentStep, target: TargetStep) -> None:
        passes.clear()
        launch(self, target)
        skipped = self.num_skipped
        for row, slot in enumerate(self.rows.drafting_slots.tolist()):
            wanted = 0 if slot < 0 else int(self.max_draft_tokens[slot])
            # Other drafters continue these afterwards.
            count = min(wanted, int(target.num_draft_tokens[slot]))
            if wanted:
                made.append(
                    Made(
                        target.token_ids[slot, : target.lens[slot]].tolist(),
                        target.draft_token_ids[slot, :count].tolist(),
                        torch.stack([one[row] for one in passes[:count]]),
                        wanted,
                        0 if skipped is None else int(skipped[row]),
                    )
                )

    monkeypatch.setattr(MtpModules, "logits", watched_logits)
    monkeypatch.setattr(RecurrentStep, "launch", watched_launch)
    return made


# From logits of drafts, and how many tokens stand before them, to their tokens.
Choice = Callable[[Tensor, int], Tensor]


def likeliest(logits: Tensor, known: int) -> Tensor:
    return logits.argmax(-1)


class Oracle:
    """What the drafts of docs/mtp.md are, on weights of its own."""

    def __init__(self, directory: Path | None, **config: Any) -> None:
        where = EngineConfig(model=None if directory is None else str(directory)).model_dir
        self.model = load_model(where, dtype="float32")
        self.modules = load_mtp(self.model, where, **config)

    def check(self, made: Sequence[Made], *, draw: Choice = likeliest, short: bool = False) -> None:
        """Compares every step's drafts.

        Args:
            made: by the engine.
            draw: how drafts are taken from their logits.
            short: there may be fewer of them than were wanted.
        """
        assert made
        for one in made:
            assert len(one.drafts) == one.wanted or short
            if not one.drafts:
                continue
            expected = oracle_drafts(
                self.model,
                self.modules,
                one.prefix,
                len(one.drafts),
                begin=one.begin,
                choose=lambda number, _, drafts=one.drafts: drafts[number],
            )
            assert torch.equal(one.logits, expected.logits), NOTICED
            tokens = draw(expected.logits, len(one.prefix))
            if self.modules.token_map is not None:
                tokens = self.modules.token_map[tokens]
            assert one.drafts == tokens.tolist()


def engine_of(directory: Path | None, *, k: int = DRAFTS, **changes: Any) -> Engine:
    """An engine that drafts with modules; changes go to its configuration, or the drafts'."""
    changes.setdefault("max_num_seqs", 3)
    own = {one.name for one in dataclasses.fields(EngineConfig)}
    config = {name: value for name, value in changes.items() if name in own}
    speculative = {name: value for name, value in changes.items() if name not in own}
    return Engine(
        EngineConfig(
            model=None if directory is None else str(directory),
            dtype="float32",
            device="cpu",
            seed=5,
            num_threads=1,
            speculative_config=SpeculativeConfig(
                **{"method": "mtp", "num_speculative_tokens": k, **speculative}
            ),
            **config,
        )
    )


def run(
    engine: Engine, prompts: Sequence[list[int]], tokens: int = 24, **how: Any
) -> list[Completion]:
    """Completions of prompts that run side by side."""
    how = {"temperature": 0.0, "seed": 1, **how}
    return engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, **how))


def random_ids(length: int) -> list[int]:
    return torch.randint(1, 160, (length,)).tolist()


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda count: f"{count}_modules")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with so many modules."""
    return checkpoint(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def one_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, 1)


@pytest.fixture(scope="module")
def three_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, 3)


def checkpoint(factory: pytest.TempPathFactory, count: int) -> Path:
    directory = factory.mktemp(f"modules_{count}")
    make_mtp_checkpoint(directory, "deepseek_v3", count)
    write_tokenizer(directory)
    return directory


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    return watch(monkeypatch)


def assert_is_about_something(
    made: Sequence[Made], done: Sequence[Completion], has_others: bool = False
) -> None:
    """Drafts are made behind what was emitted; what was verified is among them; some are kept."""
    texts = [[*one.prompt_token_ids, *one.token_ids] for one in done]
    for one in made:
        assert any(text[: len(one.prefix)] == one.prefix for text in texts)
    verified = sum(one.stats.num_draft_tokens for one in done)
    if not has_others:
        assert len(made) >= sum(one.stats.num_drafts for one in done)
        assert sum(len(one.drafts) for one in made) >= verified
    kept = sum(one.stats.num_accepted_tokens for one in done)
    assert 0 < kept < verified


@pytest.mark.parametrize("rows", [6, 13, 512])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.pairwise
def test_chunks_and_batches(served: Path, made: list[Made], rows: int, k: int) -> None:
    prompts = [random_ids(length) for length in (1, 17, 50, 33, 2)]
    engine = engine_of(served, k=k, max_num_batched_tokens=rows, **SOME)
    done = run(engine, prompts)
    assert_is_about_something(made, done)
    Oracle(served).check(made)


def drawn(strategy: str, temperature: float, seed: int) -> Choice:
    """The draws that belong to the positions of drafts: with the numbers of the target's own."""

    def draw(logits: Tensor, known: int) -> Tensor:
        count = len(logits)
        has_own_numbers = strategy != "target_match"
        return sampling.sample(
            logits,
            torch.arange(known, known + count, dtype=torch.int32),
            purpose=Purpose.DRAFT if has_own_numbers else Purpose.TARGET,
            anchors=torch.full((count,), (known + 1) * (strategy == "block"), dtype=torch.int32),
            sampling=sampling.SamplingTensors(
                temperature=torch.full((count,), temperature), seeds=torch.full((count,), seed)
            ),
        )

    return draw


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_bundled_model(made: list[Made], temperature: float) -> None:
    engine = engine_of(None, max_num_batched_tokens=29)
    texts = ("import os\n\n\ndef main(", "class Stack:\n    def __init__(self", "for i in range(")
    prompts = [engine.tokenizer.encode(text) for text in texts]
    done = run(engine, prompts, temperature=temperature, seed=1)
    assert_is_about_something(made, done)
    Oracle(None).check(made, draw=drawn("target_match", 0.8, 1) if temperature else likeliest)


def test_drawn_drafts(served: Path, made: list[Made]) -> None:
    """Drafts are drawn where verification is by draws; requests of all kinds share steps."""
    engine = engine_of(served, max_num_batched_tokens=13, max_num_seqs=5, **SOME)
    kinds = [("target_match", 2.0), ("target_match", 0.0), ("greedy", 2.0)]
    kinds += [("rejection", 2.0), ("block", 1.0)]
    prompts = [random_ids(3 + 4 * index) for index in range(len(kinds))]
    names = []
    for prompt, (strategy, temperature) in zip(prompts, kinds, strict=True):
        params = SamplingParams(temperature=temperature, seed=9, max_tokens=40, ignore_eos=True)
        own = {"verify_strategy": strategy}
        if strategy in ("rejection", "block"):
            own["accept_policy"] = "normal"
        names.append(engine.add_request(prompt, params, speculative_config=own))
    while engine.has_unfinished():
        engine.step()
    for name, prompt, (strategy, temperature) in zip(names, prompts, kinds, strict=True):
        of_request = [one for one in made if one.prefix[: len(prompt)] == prompt]
        assert_is_about_something(of_request, [engine.completion(name)])
        is_drawn = strategy != "greedy" and temperature > 0
        draw = drawn(strategy, temperature, 9) if is_drawn else likeliest
        Oracle(served).check(of_request, draw=draw)
        unlikely = any(one.drafts != one.logits.argmax(-1).tolist() for one in of_request)
        assert unlikely == is_drawn


def test_the_end_of_the_context(served: Path, made: list[Made]) -> None:
    engine = engine_of(served, max_model_len=70, **SOME)
    run(engine, [random_ids(50), random_ids(61)], tokens=None)
    assert min(one.wanted for one in made) < DRAFTS  # as near the end no more can be emitted
    Oracle(served).check(made)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_shared_prefixes(served: Path, made: list[Made], order: list[int]) -> None:
    """Prompts that go on differently inside a page, at its end, and right behind its end."""
    base = random_ids(64)
    prompts = [[*base[:48], 7, 8, 9], [*base[:49], 11, 12], [*base[:40], *random_ids(30)]]
    engine = engine_of(served, max_num_batched_tokens=13, **SOME)
    done = []
    for _ in range(2):
        for index in order:
            done += run(engine, [prompts[index]], 20)
    done += run(engine, [*prompts, [*done[0].prompt_token_ids, *done[0].token_ids, 5]], 20)
    assert_is_about_something(made, done)
    hits = [one.num_cached_tokens for one in done]
    assert hits[0] == 0 and all(hits[3:]) and engine.stats.prefix_cache_hits == sum(hits)
    Oracle(served).check(made)


def test_pages_of_other_methods(served: Path, made: list[Made]) -> None:
    """Methods take turns with one prompt, then stand side by side in every step."""
    engine = engine_of(served, max_num_batched_tokens=13, **SOME)
    prompt = random_ids(50)
    others = [{"method": "naive", "accept_policy": "normal"}, {"method": "ngram"}, None]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    done = []
    for config in (*others, *others[::-1]):
        done += engine.generate([prompt], params, speculative_config=config)
    names = [
        engine.add_request(text, params, speculative_config=config)
        for text, config in zip([prompt, prompt, prompt], others, strict=True)
    ]
    while engine.has_unfinished():
        engine.step()
    done += [engine.completion(name) for name in names]
    assert_is_about_something(made, done, has_others=True)
    Oracle(served).check(made)


def test_preemption(served: Path, made: list[Made]) -> None:
    engine = engine_of(served, num_pages=11, max_model_len=128, max_num_batched_tokens=13, **SOME)
    done = run(engine, [random_ids(length) for length in (50, 33, 20)], 50)
    assert engine.stats.num_preemptions > 0
    assert_is_about_something(made, done)
    Oracle(served).check(made, short=True)
    assert any(len(one.drafts) == DRAFTS for one in made)


@pytest.mark.parametrize("span", [3, 40, 70])
@pytest.mark.fast("*40*", ci=("*",))
def test_drafters_that_rest(served: Path, made: list[Made], span: int) -> None:
    """Requests that for so many tokens want no drafts, for as many do, and so on."""

    class Rests(Lengths):
        def limit(self, request: Request) -> int:
            return 0 if len(request.token_ids) // span % 2 == 1 else super().limit(request)

    # More of them at once than can catch up in one step.
    engine = engine_of(served, max_num_batched_tokens=13, max_num_seqs=6, **SOME)
    Rests().decide_for(engine)
    done = run(engine, [random_ids(5 * index + 1) for index in range(6)], 150)
    # What they left in the prefix cache, resting or not.
    again = [[*one.prompt_token_ids, *one.token_ids[:70]] for one in done[3:]]
    done += run(engine, again, 20)
    assert_is_about_something(made, done)
    assert engine.stats.prefix_cache_hits > 0
    for one in done[: 6 if span > CATCH_UP else None]:  # after every rest they go on
        text = [*one.prompt_token_ids, *one.token_ids]
        assert max(len(m.prefix) for m in made if m.prefix == text[: len(m.prefix)]) > 80
    assert any(one.begin for one in made) == (span > CATCH_UP)  # after long ones they begin anew
    Oracle(served).check(made)


@pytest.mark.parametrize("strategy", ["with_ngram", "with_suffix"])
def test_hybrids(served: Path, made: list[Made], strategy: str) -> None:
    engine = engine_of(
        served, k=6, num_model_steps=2, mtp_strategy=strategy, max_num_batched_tokens=13, **SOME
    )
    done = run(engine, [random_ids(10) * 3, random_ids(10)], 40)
    assert_is_about_something(made, done, has_others=True)
    assert {one.wanted for one in made} <= {1, 2}
    Oracle(served).check(made)


def test_a_reduced_draft_vocabulary(served: Path, made: list[Made], tmp_path: Path) -> None:
    kept = torch.arange(1, 160, 3)
    path = str(tmp_path / "vocabulary.safetensors")
    save_file({"d2t": kept - torch.arange(len(kept))}, path)
    engine = engine_of(served, draft_vocab=path, max_num_batched_tokens=13, **SOME)
    assert_is_about_something(made, run(engine, [random_ids(20), random_ids(3)]))
    Oracle(served, draft_vocab=path).check(made)


Plant = Callable[[pytest.MonkeyPatch], None]
LONGEST = 51  # of the prompts below
REQUESTS, SOURCES, TOKENS = 0, 2, 4  # arguments of `dense.mtp_input`


def exercise(directory: Path, naive_first: bool) -> None:
    """Chunks, batches, kept and rejected drafts, prefixes that are there already."""
    engine = engine_of(directory, max_num_batched_tokens=13, **SOME)
    torch.manual_seed(3)
    base = random_ids(48)
    if naive_first:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        plain = {"method": "naive", "accept_policy": "normal"}
        engine.generate([[*base, 5, 6, 7]], params, speculative_config=plain)
    run(engine, [[*base, 7, 8, 9], random_ids(17), random_ids(2)])
    run(engine, [[*base, 11, 12], [*base[:32], 3, 4, 5]])


def convention(**changes: bool) -> Plant:
    """Modules that are fed by another convention."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = MtpModules.__init__

        def init(self: MtpModules, target: Any, convention: Any, *rest: Any, **more: Any) -> None:
            changed = dataclasses.replace(convention, **changes)
            original(self, target, changed, *rest, **more)

        monkeypatch.setattr(MtpModules, "__init__", init)

    return plant


def inputs(change: Callable[[list[Any], dict[str, Any]], None]) -> Plant:
    """A change to the arguments of `dense.mtp_input`."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = dense.mtp_input

        def mtp_input(*given: Any, **named: Any) -> Tensor:
            arguments = list(given)
            change(arguments, named)
            return original(*arguments, **named)

        monkeypatch.setattr(dense, "mtp_input", mtp_input)

    return plant


def ids_not_shifted(arguments: list[Any], named: dict[str, Any]) -> None:
    arguments[TOKENS] = arguments[TOKENS].roll(1, dims=1)


def ids_shifted_twice(arguments: list[Any], named: dict[str, Any]) -> None:
    arguments[TOKENS] = arguments[TOKENS].roll(-1, dims=1)


def states_shifted(arguments: list[Any], named: dict[str, Any]) -> None:
    requests, sources = arguments[REQUESTS], arguments[SOURCES].clone()
    same = requests[1:] == requests[:-1]
    sources[:-1][same] = arguments[SOURCES][1:][same]
    arguments[SOURCES] = sources


def states_late(arguments: list[Any], named: dict[str, Any]) -> None:
    requests, sources = arguments[REQUESTS], arguments[SOURCES].clone()
    same = requests[1:] == requests[:-1]
    sources[1:][same] = arguments[SOURCES][:-1][same]
    arguments[SOURCES] = sources


def chunk_tail_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that does not end the prompt has the token that was sampled there behind it."""
    original = RecurrentStep.launch

    def launch(self: RecurrentStep, target: TargetStep) -> None:
        token_ids = target.token_ids.clone()
        for slot, end in zip(target.slots.tolist(), target.kv_lens.tolist(), strict=True):
            if slot >= 0 and end < target.lens[slot] - 1 - DRAFTS:
                target.token_ids[slot, end] = (token_ids[slot, end] + 1) % 160
        original(self, target)
        target.token_ids.copy_(token_ids)

    monkeypatch.setattr(RecurrentStep, "launch", launch)


def first_pass(change: Callable[[DraftIndices], None], **arguments: Any) -> Plant:
    """A change to the rows that the modules run right behind the target's."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = batching.prepare_draft_batch

        def prepare_draft_batch(*given: Any, **named: Any) -> DraftIndices:
            indices = original(*given, **named)
            change(indices)
            return indices

        monkeypatch.setattr(batching, "prepare_draft_batch", prepare_draft_batch)

    return plant


def accepted_not_run_again(indices: DraftIndices) -> None:
    """Rows of accepted drafts leave in the cache what drafting has put there."""
    for row in range(int(indices.qo_indptr[-1]) - 1):
        is_last = indices.row_to_request[row] != indices.row_to_request[row + 1]
        if not is_last and indices.positions[row] >= LONGEST:
            indices.cache_slots[row] = -1


def rejected_stay(indices: DraftIndices) -> None:
    """The row behind those that are there is seen, too, where there is one."""
    behind = (indices.kv_lens > LONGEST) & (indices.kv_lens % 16 != 0)
    indices.kv_lens += behind.int()


def nothing_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What later modules took from drafts stays as it was."""
    original = batching.prepare_draft_batch

    def prepare_draft_batch(*given: Any, **named: Any) -> DraftIndices:
        arguments = list(given)
        arguments[3] = torch.zeros_like(arguments[3])
        return original(*arguments, **named)

    monkeypatch.setattr(batching, "prepare_draft_batch", prepare_draft_batch)


def states_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "keep_hidden_rows", lambda *given: None)


def recycled_elsewhere(by: int) -> Plant:
    """Rows that read the modules' own states are rotated for another position."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        prepare, advance = batching.prepare_draft_batch, batching.advance_draft_batch
        forward, rope = MtpModules.forward, attention.rope_append_kv
        is_recycled = is_inside = False

        def prepare_draft_batch(*given: Any, **named: Any) -> DraftIndices:
            nonlocal is_recycled
            is_recycled = False
            return prepare(*given, **named)

        def advance_draft_batch(*given: Any, **named: Any) -> None:
            nonlocal is_recycled
            is_recycled = named.get("out") is not None
            advance(*given, **named)

        def inside(self: MtpModules, *given: Any) -> MtpOutput:
            nonlocal is_inside
            is_inside = True
            output = forward(self, *given)
            is_inside = False
            return output

        def rope_append_kv(*given: Any, **named: Any) -> Any:
            arguments = list(given)
            if is_inside and is_recycled:
                arguments[6] = arguments[6] + by
            return rope(*arguments, **named)

        monkeypatch.setattr(batching, "prepare_draft_batch", prepare_draft_batch)
        monkeypatch.setattr(batching, "advance_draft_batch", advance_draft_batch)
        monkeypatch.setattr(MtpModules, "forward", inside)
        monkeypatch.setattr(attention, "rope_append_kv", rope_append_kv)

    return plant


def prefix_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any page of the prefix will do, with draft KV or without."""
    original = PagePool.match_prefix
    monkeypatch.setattr(
        PagePool,
        "match_prefix",
        lambda self, token_ids, most, draft_kv, salt: original(self, token_ids, most, None, salt),
    )


def plain_block_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are known by their own tokens alone."""
    prefix_without_drafts(monkeypatch)
    original = PagePool.register
    monkeypatch.setattr(
        PagePool,
        "register",
        lambda self, page, parent, token_ids, key, salt: original(
            self, page, parent, token_ids, None, salt
        ),
    )


PLANTS: dict[str, Plant] = {
    "ids not shifted": inputs(ids_not_shifted),
    "ids shifted twice": inputs(ids_shifted_twice),
    "states shifted": inputs(states_shifted),
    "states late": inputs(states_late),
    "halves swapped": convention(hidden_first=True),
    "position 0 masked": convention(masks_position_0=True),
    "recycled un-normed": convention(recycle_normed=False),
    "recycled too far": recycled_elsewhere(1),
    "recycled stay": recycled_elsewhere(-1),
    "chunk tail sampled": chunk_tail_sampled,
    "accepted not run again": first_pass(accepted_not_run_again),
    "rejected stay": first_pass(rejected_stay),
    "plain block key": plain_block_key,
    "prefix without drafts": prefix_without_drafts,
}
PLANTS_OF_SEVERAL: dict[str, Plant] = {
    **PLANTS,
    "unchained": convention(chained=False),
    "nothing run again": nothing_run_again,
    "states not kept": states_not_kept,
}


def check_planted(directory: Path, name: str | None, plants: dict[str, Plant]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if name is not None:
            plants[name](monkeypatch)
        made = watch(monkeypatch)
        exercise(directory, naive_first=name in (None, "prefix without drafts"))
    Oracle(directory).check(made)


def test_what_is_planted_is_what_goes_wrong(one_module: Path, three_modules: Path) -> None:
    check_planted(one_module, None, PLANTS)
    check_planted(three_modules, None, PLANTS)


@pytest.mark.parametrize("name", PLANTS)
def test_every_mistake_in_the_engine_is_noticed(one_module: Path, name: str) -> None:
    with pytest.raises(AssertionError, match=NOTICED):
        check_planted(one_module, name, PLANTS)


@pytest.mark.parametrize("name", PLANTS_OF_SEVERAL)
def test_every_mistake_with_three_modules_is_noticed(three_modules: Path, name: str) -> None:
    with pytest.raises(AssertionError, match=NOTICED):
        check_planted(three_modules, name, PLANTS_OF_SEVERAL)
