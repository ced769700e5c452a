# SPDX-License-Identifier: Apache-2.0
"""MTP drafts of the engine equal the oracle's at every step, including the bits of their logits.

Logits are compared because drafts hide errors: on a random model, a wrong row of the cache seldom
changes the likeliest token, but it changes every logit. Every known mistake is planted in the
engine's drafter, and the comparison must notice it.
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
# Drafts of a random model are wrong. This policy accepts some, in varying numbers.
SOME = {"accept_policy": "synthetic", "synthetic_acceptance_rates": (0.8, 0.65, 0.5, 0.4)}


@dataclass(frozen=True)
class Made:
    """The drafts that a step made for a request."""

    prefix: list[int]
    drafts: list[int]
    logits: Tensor  # [drafts, draft vocabulary]
    requested: int
    begin: int  # first position that the modules attend to


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Record every draft that modules make from now on."""
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
            requested = 0 if slot < 0 else int(self.max_draft_tokens[slot])
            # Other drafters may extend these afterwards.
            count = min(requested, int(target.num_draft_tokens[slot]))
            if requested:
                made.append(
                    Made(
                        target.token_ids[slot, : target.lens[slot]].tolist(),
                        target.draft_token_ids[slot, :count].tolist(),
                        torch.stack([one[row] for one in passes[:count]]),
                        requested,
                        0 if skipped is None else int(skipped[row]),
                    )
                )

    monkeypatch.setattr(MtpModules, "logits", watched_logits)
    monkeypatch.setattr(RecurrentStep, "launch", watched_launch)
    return made


# Function from the logits of drafts, and the number of tokens before them, to the drafts.
Choice = Callable[[Tensor, int], Tensor]


def likeliest(logits: Tensor, known: int) -> Tensor:
    return logits.argmax(-1)


class Oracle:
    """Oracle of the drafts of docs/mtp.md, with its own copy of the weights."""

    def __init__(self, directory: Path | None, **config: Any) -> None:
        where = EngineConfig(model=None if directory is None else str(directory)).model_dir
        self.model = load_model(where, dtype="float32")
        self.modules = load_mtp(self.model, where, **config)

    def check(self, made: Sequence[Made], *, draw: Choice = likeliest, short: bool = False) -> None:
        """Compare the drafts of every step.

        Args:
            made: Drafts of the engine.
            draw: Function that chooses drafts from their logits.
            short: Whether there may be fewer drafts than requested.
        """
        assert made
        for one in made:
            assert len(one.drafts) == one.requested or short
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
    """Return an engine with MTP; changes go to EngineConfig or SpeculativeConfig."""
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
            speculative_config=SpeculativeConfig.from_dict(
                {"method": "mtp", "num_speculative_tokens": k, **speculative}
            ),
            **config,
        )
    )


def run(
    engine: Engine, prompts: Sequence[list[int]], tokens: int = 24, **how: Any
) -> list[Completion]:
    """Return the completions of prompts that run side by side."""
    how = {"temperature": 0.0, "seed": 1, **how}
    return engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, **how))


def random_ids(length: int) -> list[int]:
    return torch.randint(1, 160, (length,)).tolist()


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda count: f"{count}_modules")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny checkpoint with `request.param` modules."""
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


def check_coverage(
    made: Sequence[Made], done: Sequence[Completion], has_others: bool = False
) -> None:
    """Check that drafts follow emitted tokens, and that some of the verified ones are accepted."""
    texts = [[*one.prompt_token_ids, *one.token_ids] for one in done]
    for one in made:
        assert any(text[: len(one.prefix)] == one.prefix for text in texts)
    verified = sum(one.stats.num_draft_tokens for one in done)
    if not has_others:
        assert len(made) >= sum(one.stats.num_drafts for one in done)
        assert sum(len(one.drafts) for one in made) >= verified
    accepted = sum(one.stats.num_accepted_tokens for one in done)
    assert 0 < accepted < verified


@pytest.mark.parametrize("rows", [6, 13, 512])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.pairwise
def test_drafts_in_chunks_and_batches_equal_the_oracle(
    served: Path, made: list[Made], rows: int, k: int
) -> None:
    prompts = [random_ids(length) for length in (1, 17, 50, 33, 2)]
    engine = engine_of(served, k=k, max_num_batched_tokens=rows, **SOME)
    done = run(engine, prompts)
    check_coverage(made, done)
    Oracle(served).check(made)


def drawn(strategy: str, temperature: float, seed: int) -> Choice:
    """Return a function that draws drafts; `target_match` uses the uniforms of the target."""

    def draw(logits: Tensor, known: int) -> Tensor:
        count = len(logits)
        has_own_uniforms = strategy != "target_match"
        return sampling.sample(
            logits,
            torch.arange(known, known + count, dtype=torch.int32),
            purpose=Purpose.DRAFT if has_own_uniforms else Purpose.TARGET,
            anchors=torch.full((count,), (known + 1) * (strategy == "block"), dtype=torch.int32),
            sampling=sampling.SamplingTensors(
                temperature=torch.full((count,), temperature), seeds=torch.full((count,), seed)
            ),
        )

    return draw


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_the_bundled_model_equal_the_oracle(made: list[Made], temperature: float) -> None:
    engine = engine_of(None, max_num_batched_tokens=29)
    texts = ("import os\n\n\ndef main(", "class Stack:\n    def __init__(self", "for i in range(")
    prompts = [engine.tokenizer.encode(text) for text in texts]
    done = run(engine, prompts, temperature=temperature, seed=1)
    check_coverage(made, done)
    Oracle(None).check(made, draw=drawn("target_match", 0.8, 1) if temperature else likeliest)


def test_drawn_drafts_equal_the_oracle(served: Path, made: list[Made]) -> None:
    """Some strategies draw drafts at random, others do not; requests of all of them share steps."""
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
        check_coverage(of_request, [engine.completion(name)])
        is_drawn = strategy != "greedy" and temperature > 0
        draw = drawn(strategy, temperature, 9) if is_drawn else likeliest
        Oracle(served).check(of_request, draw=draw)
        unlikely = any(one.drafts != one.logits.argmax(-1).tolist() for one in of_request)
        assert unlikely == is_drawn


def test_drafts_at_the_end_of_the_context_equal_the_oracle(served: Path, made: list[Made]) -> None:
    engine = engine_of(served, max_model_len=70, **SOME)
    run(engine, [random_ids(50), random_ids(61)], tokens=None)
    assert min(one.requested for one in made) < DRAFTS  # fewer tokens can be emitted near the end
    Oracle(served).check(made)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_drafts_after_shared_prefixes_equal_the_oracle(
    served: Path, made: list[Made], order: list[int]
) -> None:
    """Prompts diverge inside a page, at its end, and right behind its end."""
    base = random_ids(64)
    prompts = [[*base[:48], 7, 8, 9], [*base[:49], 11, 12], [*base[:40], *random_ids(30)]]
    engine = engine_of(served, max_num_batched_tokens=13, **SOME)
    done = []
    for _ in range(2):
        for index in order:
            done += run(engine, [prompts[index]], 20)
    done += run(engine, [*prompts, [*done[0].prompt_token_ids, *done[0].token_ids, 5]], 20)
    check_coverage(made, done)
    hits = [one.num_cached_tokens for one in done]
    assert hits[0] == 0 and all(hits[3:]) and engine.stats.prefix_cache_hits == sum(hits)
    Oracle(served).check(made)


def test_drafts_on_pages_of_other_methods_equal_the_oracle(served: Path, made: list[Made]) -> None:
    """Methods run one prompt one after another, then side by side in every step."""
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
    check_coverage(made, done, has_others=True)
    Oracle(served).check(made)


def test_drafts_after_preemption_equal_the_oracle(served: Path, made: list[Made]) -> None:
    engine = engine_of(served, num_pages=11, max_model_len=128, max_num_batched_tokens=13, **SOME)
    done = run(engine, [random_ids(length) for length in (50, 33, 20)], 50)
    assert engine.stats.num_preemptions > 0
    check_coverage(made, done)
    Oracle(served).check(made, short=True)
    assert any(len(one.drafts) == DRAFTS for one in made)


@pytest.mark.parametrize("span", [3, 40, 70])
@pytest.mark.fast("*40*")
def test_drafts_after_pauses_equal_the_oracle(served: Path, made: list[Made], span: int) -> None:
    """Requests alternate between `span` tokens with drafts and `span` tokens without."""

    class Pauses(Lengths):
        def limit(self, request: Request) -> int:
            return 0 if len(request.token_ids) // span % 2 == 1 else super().limit(request)

    # More requests than can catch up in one step.
    engine = engine_of(served, max_num_batched_tokens=13, max_num_seqs=6, **SOME)
    Pauses().decide_for(engine)
    done = run(engine, [random_ids(5 * index + 1) for index in range(6)], 150)
    # Reuse the pages that they left in the prefix cache.
    again = [[*one.prompt_token_ids, *one.token_ids[:70]] for one in done[3:]]
    done += run(engine, again, 20)
    check_coverage(made, done)
    assert engine.stats.prefix_cache_hits > 0
    for one in done[: 6 if span > CATCH_UP else None]:  # drafting resumes after every pause
        text = [*one.prompt_token_ids, *one.token_ids]
        assert max(len(m.prefix) for m in made if m.prefix == text[: len(m.prefix)]) > 80
    # Modules start anew after long pauses.
    assert any(one.begin for one in made) == (span > CATCH_UP)
    Oracle(served).check(made)


@pytest.mark.parametrize("method", ["mtp+ngram", "mtp+suffix"])
def test_drafts_of_hybrids_equal_the_oracle(served: Path, made: list[Made], method: str) -> None:
    engine = engine_of(
        served, k=6, num_model_steps=2, method=method, max_num_batched_tokens=13, **SOME
    )
    done = run(engine, [random_ids(10) * 3, random_ids(10)], 40)
    check_coverage(made, done, has_others=True)
    assert {one.requested for one in made} <= {1, 2}
    Oracle(served).check(made)


def test_drafts_of_a_reduced_vocabulary_equal_the_oracle(
    served: Path, made: list[Made], tmp_path: Path
) -> None:
    retained = torch.arange(1, 160, 3)
    path = str(tmp_path / "vocabulary.safetensors")
    save_file({"d2t": retained - torch.arange(len(retained))}, path)
    engine = engine_of(served, draft_vocab=path, max_num_batched_tokens=13, **SOME)
    check_coverage(made, run(engine, [random_ids(20), random_ids(3)]))
    Oracle(served, draft_vocab=path).check(made)


Plant = Callable[[pytest.MonkeyPatch], None]
LONGEST = 51  # tokens of the longest prompt below
ROWS, TOKENS = 0, 1  # arguments of `dense.mtp_input`


def exercise(directory: Path, naive_first: bool) -> None:
    """Run chunks, batches, accepted and rejected drafts, and cached prefixes."""
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
    """Plant another convention of the modules."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = MtpModules.__init__

        def init(self: MtpModules, target: Any, convention: Any, *rest: Any, **more: Any) -> None:
            changed = dataclasses.replace(convention, **changes)
            original(self, target, changed, *rest, **more)

        monkeypatch.setattr(MtpModules, "__init__", init)

    return plant


def inputs(change: Callable[[list[Any], dict[str, Any]], None]) -> Plant:
    """Plant a change to the arguments of `dense.mtp_input`."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = dense.mtp_input

        def mtp_input(*args: Any, **named: Any) -> Tensor:
            arguments = list(args)
            change(arguments, named)
            return original(*arguments, **named)

        monkeypatch.setattr(dense, "mtp_input", mtp_input)

    return plant


def ids_not_shifted(arguments: list[Any], named: dict[str, Any]) -> None:
    tokens = arguments[TOKENS]
    arguments[TOKENS] = tokens._replace(token_ids=tokens.token_ids.roll(1, dims=1))


def ids_shifted_twice(arguments: list[Any], named: dict[str, Any]) -> None:
    tokens = arguments[TOKENS]
    arguments[TOKENS] = tokens._replace(token_ids=tokens.token_ids.roll(-1, dims=1))


def states_shifted(arguments: list[Any], named: dict[str, Any]) -> None:
    rows, sources = arguments[ROWS], arguments[ROWS].source_rows.clone()
    same = rows.row_to_request[1:] == rows.row_to_request[:-1]
    sources[:-1][same] = rows.source_rows[1:][same]
    arguments[ROWS] = rows._replace(source_rows=sources)


def states_late(arguments: list[Any], named: dict[str, Any]) -> None:
    rows, sources = arguments[ROWS], arguments[ROWS].source_rows.clone()
    same = rows.row_to_request[1:] == rows.row_to_request[:-1]
    sources[1:][same] = rows.source_rows[:-1][same]
    arguments[ROWS] = rows._replace(source_rows=sources)


def chunk_tail_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put another token behind a chunk that does not end the prompt."""
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
    """Plant a change to the rows that modules run right behind the target's."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = batching.prepare_draft_batch

        def prepare_draft_batch(*args: Any, **named: Any) -> DraftIndices:
            indices = original(*args, **named)
            change(indices)
            return indices

        monkeypatch.setattr(batching, "prepare_draft_batch", prepare_draft_batch)

    return plant


def accepted_not_run_again(indices: DraftIndices) -> None:
    """Leave in the cache what drafting wrote for accepted drafts."""
    for row in range(int(indices.qo_indptr[-1]) - 1):
        is_last = indices.row_to_request[row] != indices.row_to_request[row + 1]
        if not is_last and indices.positions[row] >= LONGEST:
            indices.cache_slots[row] = -1


def rejected_stay(indices: DraftIndices) -> None:
    """Make the row behind the last one visible, if the page has one."""
    behind = (indices.kv_lens > LONGEST) & (indices.kv_lens % 16 != 0)
    indices.kv_lens += behind.int()


def nothing_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave in the cache what later modules computed from drafts."""
    original = batching.prepare_draft_batch

    def prepare_draft_batch(*args: Any, **named: Any) -> DraftIndices:
        return original(*args, **{**named, "redraft_lens": None})

    monkeypatch.setattr(batching, "prepare_draft_batch", prepare_draft_batch)


def states_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "keep_hidden_rows", lambda *args: None)


def recycled_elsewhere(by: int) -> Plant:
    """Rotate rows that read the modules' own states for another position."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        prepare, advance = batching.prepare_draft_batch, batching.advance_draft_batch
        forward, rope = MtpModules.forward, attention.rope_append_kv
        is_recycled = is_inside = False

        def prepare_draft_batch(*args: Any, **named: Any) -> DraftIndices:
            nonlocal is_recycled
            is_recycled = False
            return prepare(*args, **named)

        def advance_draft_batch(*args: Any, **named: Any) -> None:
            nonlocal is_recycled
            is_recycled = named.get("out") is not None
            advance(*args, **named)

        def inside(self: MtpModules, *args: Any) -> MtpOutput:
            nonlocal is_inside
            is_inside = True
            output = forward(self, *args)
            is_inside = False
            return output

        def rope_append_kv(*args: Any, **named: Any) -> Any:
            arguments = list(args)
            if is_inside and is_recycled:
                arguments[5] = arguments[5] + by  # positions
            return rope(*arguments, **named)

        monkeypatch.setattr(batching, "prepare_draft_batch", prepare_draft_batch)
        monkeypatch.setattr(batching, "advance_draft_batch", advance_draft_batch)
        monkeypatch.setattr(MtpModules, "forward", inside)
        monkeypatch.setattr(attention, "rope_append_kv", rope_append_kv)

    return plant


def prefix_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Match any page of the prefix, with or without draft KV."""
    original = PagePool.match_prefix
    monkeypatch.setattr(
        PagePool,
        "match_prefix",
        lambda self, token_ids, most, draft_kv, salt: original(self, token_ids, most, None, salt),
    )


def plain_block_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identify pages by their own tokens alone."""
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
    "states not retained": states_not_kept,
}


def check_planted(directory: Path, name: str | None) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if name is not None:
            PLANTS_OF_SEVERAL[name](monkeypatch)
        made = watch(monkeypatch)
        exercise(directory, naive_first=name in (None, "prefix without drafts"))
    Oracle(directory).check(made)


def test_engine_without_planted_mistakes_equals_the_oracle(
    one_module: Path, three_modules: Path
) -> None:
    check_planted(one_module, None)
    check_planted(three_modules, None)


@pytest.mark.parametrize("name", PLANTS)
def test_every_mistake_in_the_engine_is_noticed(one_module: Path, name: str) -> None:
    with pytest.raises(AssertionError, match=NOTICED):
        check_planted(one_module, name)


@pytest.mark.parametrize("name", PLANTS_OF_SEVERAL)
def test_every_mistake_with_three_modules_is_noticed(three_modules: Path, name: str) -> None:
    with pytest.raises(AssertionError, match=NOTICED):
        check_planted(three_modules, name)
