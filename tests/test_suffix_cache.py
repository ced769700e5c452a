# SPDX-License-Identifier: Apache-2.0
"""SuffixCache: its calls, argument errors, files and threads.

test_suffix_tree.py tests what a tree counts and drafts.
"""

import array
import base64
import os
import random
import re
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import specops
import torch
from specops import _C
from specops.suffix_tree import SuffixCache, SuffixDecodingCache, SuffixDraft
from torch import Tensor

POISON = 1_000_003


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sound(cache: SuffixCache) -> None:
    assert cache.check_integrity() == ""


def text(rng: random.Random, size: int, alphabet: int = 4) -> list[int]:
    return [rng.randrange(alphabet) for _ in range(size)]


def contents(cache: SuffixCache) -> tuple[Any, ...]:
    return (cache.running_requests, cache.cached_requests, cache.num_cached_tokens)


# ---- calls ----


def test_draft_is_what_followed_before() -> None:
    cache = SuffixCache()
    cache.start("a", [1, 2, 3, 4, 5, 9, 1, 2, 3])
    draft = cache.speculate("a", 10)
    assert draft == SuffixDraft([4, 5, 9], [-1, 0, 1], [0.5, 0.5, 0.5], 1.5, 3)
    assert type(draft) is SuffixDraft and draft.token_ids is draft[0]
    assert cache.speculate("a", 2).token_ids == [4, 5]
    assert cache.speculate("a", 0) == SuffixDraft([], [], [], 0.0, 0)
    cache.extend("a", [7])
    assert cache.speculate("a", 10) == SuffixDraft([], [], [], 0.0, 0)


def test_drafts_come_from_responses_of_other_requests_but_not_their_prompts() -> None:
    cache = SuffixCache()
    cache.start("a", [1, 2, 3])
    cache.extend("a", [4, 5, 6])
    cache.start("b", [9, 4, 5])
    assert cache.speculate("b", 4).token_ids == [6]
    cache.stop("a")
    assert cache.speculate("b", 4).token_ids == [6]
    cache.extend("b", [1])
    assert cache.speculate("b", 4).token_ids == []
    assert cache.count([1, 2]) == 0 and cache.count([4, 5]) == 1
    assert cache.count([4, 5], "b") == 1 and cache.count([9, 4], "b") == 1


def test_own_tree_wins_if_scores_are_equal() -> None:
    cache = SuffixCache(max_spec_factor=1.0)
    cache.start("other", [])
    cache.extend("other", [1, 2, 8, 8, 1, 2])
    cache.start("a", [1, 2, 7, 7, 1, 2])
    assert cache.speculate("a", 2).token_ids == [7, 7]
    # In the shared tree 2 of 5 continuations agree, which beats 1 of 3 in the request's own tree.
    cache.start("b", [1, 7, 1, 6, 1])
    cache.extend("other", [1, 5, 1, 5, 1, 4])
    assert cache.speculate("b", 2).token_ids == [5]


def test_draft_tree_lists_the_likeliest_first() -> None:
    cache = SuffixCache(max_spec_factor=4.0)
    cache.start("a", [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2])
    draft = cache.speculate("a", 8, use_tree=True, min_token_prob=0.2, max_spec_factor=1.5)
    assert draft.match_len == 2 and draft.token_ids[:2] == [3, 4]
    assert draft.parents[:2] == [-1, -1]
    assert draft.probs == sorted(draft.probs, reverse=True)
    assert draft.score == pytest.approx(sum(draft.probs))
    path = cache.speculate("a", 8, min_token_prob=0.3)
    assert path.parents == list(range(-1, len(path.parents) - 1))


def test_parameters_of_a_call_override_those_of_the_cache() -> None:
    cache = SuffixCache(max_spec_factor=1.0, min_token_prob=0.6)
    cache.start("a", [1, 2, 3, 4, 5, 1, 9, 1])
    assert cache.speculate("a", 4).token_ids == []  # 2 and 9 have a probability of a third
    assert cache.speculate("a", 4, min_token_prob=0.3).token_ids == [9]
    assert cache.speculate("a", 4, min_token_prob=0.3, max_spec_factor=2.0).token_ids == [9, 1]
    assert cache.speculate("a", 4, min_token_prob=0.3, max_spec_factor=0).token_ids == []


def test_caller_may_pass_a_context() -> None:
    cache = SuffixCache(max_tree_depth=4)
    cache.start("a", [1, 2, 3, 4, 5, 6])
    assert cache.speculate("a", 2, context=[2, 3]).token_ids == [4, 5]
    assert cache.speculate("a", 2, context=[]).token_ids == []
    assert cache.speculate("a", 1, context=[8] * 99 + [5]).token_ids == [6]
    cache.extend("a", [1, 2, 3])
    assert cache.speculate("a", 2, context=ints(6, 1, 2, 3)) == cache.speculate("a", 2)


def test_reading_on_extends_drafts_beyond_the_tree() -> None:
    prompt = [*range(20), 0, 1, 2, 3]
    for read_on, want in ((True, [4, 5, 6, 7]), (False, [4, 5])):
        cache = SuffixCache(max_tree_depth=4, max_spec_factor=2.0, read_on=read_on)
        cache.start("a", prompt)
        assert cache.speculate("a", 4).token_ids[: len(want)] == want[: len(want)]
        assert (len(cache.speculate("a", 4).token_ids) == 4) is read_on


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        lambda ids: np.array(ids, np.int32),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: array.array("i", ids),
        lambda ids: memoryview(np.array(ids, np.int32)),
        lambda ids: [np.int64(value) for value in ids],
        lambda ids: np.frombuffer(np.array(ids, np.int32).tobytes(), np.int32),  # read-only
    ],
)
@pytest.mark.parametrize("size", [0, 1, 2, 300])
def test_tokens_may_be_lists_arrays_or_tensors(kind: Any, size: int) -> None:
    ids = [i % 7 for i in range(size)]
    cache = SuffixCache()
    cache.start("a", kind(ids))
    cache.extend("a", kind(ids))
    assert cache.num_cached_tokens == size
    assert cache.speculate("a", 4) == cache.speculate("a", 4, context=kind((ids + ids)[-64:]))
    cache.add(kind(ids))
    assert cache.num_cached_tokens == 2 * size
    if size:
        assert cache.count(kind(ids[:1])) > 0
    sound(cache)


@pytest.mark.parametrize("request_id", ["a", 7, (1, "x"), b"b", 2.5, frozenset({1})])
def test_request_ids_may_be_any_hashable(request_id: Any) -> None:
    cache = SuffixCache()
    cache.start(request_id, [1, 2])
    cache.extend(request_id, [3])
    assert cache.running_requests == [request_id] == cache.cached_requests
    cache.stop(request_id)
    assert cache.running_requests == [] and cache.cached_requests == [request_id]
    cache.evict(request_id)
    assert cache.cached_requests == [] and cache.num_cached_tokens == 0


def test_request_numbers_are_never_reused() -> None:
    cache = SuffixCache(max_cached_requests=0)
    seen = set()
    for _ in range(50):
        number = cache.start("a", [1])
        assert number not in seen and number >= 0
        seen.add(number)
        cache.stop("a")


def test_reused_id_drops_its_old_response() -> None:
    cache = SuffixCache()
    for tokens in ([1, 2, 3], [4, 5], [6]):
        cache.start("a", [])
        cache.extend("a", tokens)
        cache.start("b", [])
        cache.stop("a")
        assert cache.num_cached_tokens == len(tokens) and cache.count(tokens) == 1
        cache.stop("b")
    assert sorted(map(str, cache.cached_requests)) == ["a", "b"]
    cache.add([7, 7], "a")
    assert cache.count([6]) == 0 and cache.count([7]) == 2
    sound(cache)


def test_evicted_running_request_keeps_its_own_tree() -> None:
    cache = SuffixCache()
    cache.start("a", [1, 2, 3, 1])
    cache.extend("a", [2])
    cache.evict("a")
    cache.extend("a", [3, 1, 2])
    assert cache.num_cached_tokens == 0 and cache.cached_requests == []
    assert cache.running_requests == ["a"]
    assert cache.speculate("a", 2).token_ids == [3, 1]
    with pytest.raises(ValueError, match=r"evict: request_id must be that of a cached response"):
        cache.evict("a")
    assert not cache.discard("a")
    cache.stop("a")
    assert cache.running_requests == []


def test_response_is_discarded_once() -> None:
    cache = SuffixCache(max_cached_requests=2)
    cache.start("a", [1, 2])
    cache.stop("a")
    assert cache.discard("a") and not cache.discard("a")
    for name in ("b", "c", "d"):  # the budget evicts the first
        cache.start(name, [1])
        cache.extend(name, [5])
        cache.stop(name)
    assert [cache.discard(name) for name in ("b", "c", "d")] == [False, True, True]
    assert cache.cached_requests == [] and cache.num_cached_tokens == 0
    sound(cache)
    sound(cache)


def test_memory_for_ids_is_bounded() -> None:
    cache = SuffixCache(max_cached_requests=4)
    for i in range(1000):
        cache.start(i, [1])
        cache.stop(i)
    assert cache.cached_requests == [996, 997, 998, 999]
    with pytest.raises(ValueError, match="must be that of a running request, got 5"):
        cache.extend(5, [1])


def test_documented_example_runs() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "ops.md").read_text()
    section = text.split("## Drafts from a suffix cache")[1]
    code = "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    assert code.count("assert") >= 4
    exec(compile(code, "docs/ops.md", "exec"), {})


# ---- budgets ----


def test_requests_are_evicted_in_the_order_they_started() -> None:
    cache = SuffixCache(max_cached_requests=2)
    for name in "abc":
        cache.start(name, [])
        cache.extend(name, [ord(name)])
    assert cache.cached_requests == ["b", "c"] and cache.running_requests == ["a", "b", "c"]
    cache.extend("a", [1, 2])  # continues in its own tree only
    assert cache.num_cached_tokens == 2
    cache.stop("b")
    cache.add([1], None)
    assert cache.cached_requests == ["c", None]
    sound(cache)


def test_budget_of_tokens_is_respected() -> None:
    cache = SuffixCache(max_cached_tokens=10)
    for name in "abcd":
        cache.start(name, [0] * 50)
        cache.extend(name, [1, 2, 3, 4])
        assert cache.num_cached_tokens <= 10
    assert cache.cached_requests == ["c", "d"]
    cache.start("long", [])
    cache.extend("long", [1] * 11)  # longer than the budget: evicted with all before it
    assert cache.cached_requests == [] and cache.num_cached_tokens == 0
    assert cache.speculate("long", 4).token_ids == [1] * 4
    cache.start("e", [])
    cache.extend("e", [5])
    cache.reclaim()
    assert cache.cached_requests == ["e"] and cache.count([1]) == 0
    sound(cache)


def test_budget_of_bytes_is_respected() -> None:
    rng = random.Random(1)
    cache = SuffixCache(max_cached_bytes=1 << 20, background_tokens=-1)
    most = 0
    for i in range(60):
        cache.start(i, [])
        cache.extend(i, text(rng, 2000, alphabet=300))
        cache.stop(i)
        most = max(most, cache.num_cached_tokens)
    assert 5_000 < most < 60_000
    assert cache.cached_requests == list(range(60 - len(cache.cached_requests), 60))
    assert cache.num_bytes < 2 * (1 << 20)
    sound(cache)


@pytest.mark.parametrize("budget", ["max_cached_requests", "max_cached_tokens", "max_cached_bytes"])
def test_budget_of_0_disables_the_shared_tree(budget: str, tmp_path: Path) -> None:
    cache = SuffixCache(**{budget: 0})
    cache.start("a", [1, 2, 1])
    cache.extend("a", [2])
    assert cache.speculate("a", 2).token_ids == [1, 2]
    assert cache.cached_requests == [] and cache.num_cached_tokens == 0 == cache.count([1])
    assert cache.num_bytes == 0 == cache.reclaim()
    for call in (lambda: cache.add([1]), lambda: cache.save(tmp_path / "x")):
        with pytest.raises(ValueError, match=r"a budget is 0, so that there is no shared tree"):
            call()
    with pytest.raises(ValueError, match=r"SuffixCache.load: a budget is 0"):
        cache.load(tmp_path / "x")
    cache.stop("a")
    sound(cache)


def test_evicted_tokens_are_freed_little_by_little() -> None:
    rng = random.Random(2)
    cache = SuffixCache(max_cached_requests=1)
    cache.start("a", [])
    cache.extend("a", [9] * 100)
    cache.stop("a")
    cache.start("b", [])
    assert cache.num_cached_tokens == 0 and cache.count([9]) == 100
    left = 100
    while left > 0:
        cache.extend("b", text(rng, 3))
        left = max(0, left - 6)
        assert cache.count([9]) == left
    assert cache.reclaim() == 0
    sound(cache)


# ---- a step of a batch ----


def run_step(
    cache: SuffixCache,
    numbers: list[int],
    new: list[list[int]],
    limits: list[int],
    k: int,
    **more: Any,
) -> dict[str, Any]:
    """Run a step over poisoned, strided rows with canaries around them."""
    batch, width = len(numbers), max([len(row) for row in new], default=0) + 1
    tokens = torch.full((batch + 1, width + 3), -1, dtype=torch.int32)
    for b, row in enumerate(new):
        tokens[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
    out: dict[str, Tensor] = {
        "draft_token_ids": torch.full((batch + 1, k + 2), POISON, dtype=torch.int32),
        "parents": torch.full((batch + 1, k + 3), POISON, dtype=torch.int32),
        "probs": torch.full((batch + 1, k + 4), 7.0),
    }
    given = more.get("num_given_drafts")
    if given is not None:
        for b, drafts in enumerate(more.pop("given")):
            out["draft_token_ids"][b, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
    flat = {
        "scores": torch.full((batch,), 7.0),
        "match_lens": torch.full((batch,), POISON, dtype=torch.int32),
    }
    drafts, counts = cache.step(
        torch.tensor(numbers, dtype=torch.int64),
        tokens[:batch, :width],
        torch.tensor([len(row) for row in new], dtype=torch.int32),
        torch.tensor(limits, dtype=torch.int32),
        **{name: value[:batch, :k] for name, value in out.items()},
        **flat,
        **more,
    )
    for name, value in out.items():
        want = 7.0 if name == "probs" else POISON
        assert bool((value[batch] == want).all()) and bool((value[:, k:] == want).all()), name
    rows = {name: value[:batch, :k].tolist() for name, value in out.items()}
    return {**rows, **{n: v.tolist() for n, v in flat.items()}, "counts": counts.tolist()}


@pytest.mark.parametrize("use_tree", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_step_equals_extend_and_speculate_row_by_row(use_tree: bool, threads: int) -> None:
    specops.set_num_threads(threads)
    rng = random.Random(5)
    k = 6
    together, apart = (
        SuffixCache(max_tree_depth=8, max_spec_factor=2.0, max_cached_tokens=90) for _ in "12"
    )
    numbers = {}
    found = 0
    for step in range(60):
        for cache in (together, apart):
            if step % 10 == 0:
                for name in range(step, step + 9):
                    numbers[cache, name] = cache.start(name, text(random.Random(name), 12))
            if step % 10 == 9:
                for name in cache.running_requests:
                    cache.stop(name)
        names: list[Any] = list(together.running_requests)
        rng.shuffle(names)
        for idle in range(0, len(names), 4):
            names[idle] = None
        new = [text(rng, rng.randrange(4)) for _ in names]
        limits = [rng.randrange(9) for _ in names]
        rows = run_step(
            together,
            [-1 if name is None else numbers[together, name] for name in names],
            new,
            limits,
            k,
            use_tree=use_tree,
        )
        # A batch appends all rows before it evicts, so each row is appended in one piece here, too.
        for name, tokens in zip(names, new, strict=True):
            if name is not None:
                apart.extend(name, tokens)
        together.reclaim()
        apart.reclaim()
        assert contents(together) == contents(apart)
        if step % 3:
            continue
        again = run_step(
            together,
            [-1 if name is None else numbers[together, name] for name in names],
            [[] for _ in names],
            limits,
            k,
            use_tree=use_tree,
        )
        for b, name in enumerate(names):
            want = SuffixDraft([], [], [], 0.0, 0)
            if name is not None:
                want = apart.speculate(name, min(limits[b], k), use_tree=use_tree)
            n = len(want.token_ids)
            found += n
            assert again["counts"][b] == n
            assert again["draft_token_ids"][b] == want.token_ids + [-1] * (k - n)
            assert again["parents"][b] == want.parents + [-2] * (k - n)
            assert again["probs"][b] == want.probs + [0.0] * (k - n)
            assert again["scores"][b] == want.score and again["match_lens"][b] == want.match_len
        assert len(rows["counts"]) == len(names)
    assert found > 100
    sound(together)


@pytest.mark.parametrize("threads", [1, 3])
def test_drafts_of_a_step_see_all_rows_it_appends(threads: int) -> None:
    specops.set_num_threads(threads)
    cache = SuffixCache(min_token_prob=0.0)
    numbers = [cache.start(i, [100 + i]) for i in range(40)]
    cache.start("seen", [])
    cache.extend("seen", [1, 2, 3])
    # The last row alone has the second occurrence, which decides for all rows.
    new = [[5, 1] for _ in numbers[:-2]] + [[1, 4, 1, 4, 1], [1]]
    rows = run_step(cache, numbers, new, [1] * 40, 1)
    assert rows["draft_token_ids"] == [[4]] * 40


def test_step_continues_given_drafts() -> None:
    cache = SuffixCache(max_spec_factor=4.0)
    cache.start("other", [])
    cache.extend("other", [1, 2, 3, 4, 5, 6])
    numbers = [cache.start(i, [9]) for i in range(4)]
    rows = run_step(
        cache,
        [numbers[0], numbers[1], -1, numbers[2], numbers[3]],
        [[1], [2], [], [8], [1, 2]],
        [5, 5, 5, 5, 1],
        5,
        num_given_drafts=ints(2, 0, 3, 2, 5),
        given=[[2, 3], [], [7, 7, 7], [7, 7], [3, 4, 5, 6, 7]],
    )
    assert rows["draft_token_ids"] == [
        [2, 3, 4, 5, 6],
        [3, 4, 5, 6, -1],
        [7, 7, 7, -1, -1],
        [7, 7, -1, -1, -1],
        [3, 4, 5, 6, 7],
    ]
    assert rows["counts"] == [3, 4, 0, 0, 0]
    assert rows["parents"][0] == [
        POISON,
        POISON,
        1,
        2,
        3,
    ]  # those of given drafts are not touched
    assert rows["parents"][1] == [-1, 0, 1, 2, -2]
    assert rows["parents"][3] == [POISON, POISON, -2, -2, -2]
    assert rows["match_lens"] == [3, 1, 0, 0, 0]
    assert rows["probs"][0] == [7.0, 7.0, 1.0, 1.0, 1.0]


def test_step_works_with_required_arguments_only() -> None:
    cache = SuffixCache()
    number = cache.start("a", [1, 2, 3, 1])
    drafts = torch.empty(1, 4, dtype=torch.int32)
    got, counts = cache.step(
        torch.tensor([number]), ints(2).view(1, 1), ints(1), ints(4), draft_token_ids=drafts
    )
    assert got is drafts and drafts.tolist() == [[3, 1, -1, -1]] and counts.tolist() == [2]


@pytest.mark.parametrize("batch,w,k", [(0, 0, 0), (0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_empty_steps_are_supported(batch: int, w: int, k: int) -> None:
    cache = SuffixCache()
    numbers = [cache.start(i, [1, 2, 1]) for i in range(batch)]
    drafts, counts = cache.step(
        torch.tensor(numbers, dtype=torch.int64),
        torch.zeros(batch, w, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        torch.full((batch,), 3, dtype=torch.int32),
        draft_token_ids=torch.full((batch, k), 5, dtype=torch.int32),
    )
    assert counts.tolist() == [min(k, 1)] * batch
    assert drafts.shape == (batch, k)


@pytest.mark.parametrize("threads", [2, 4])
def test_thread_count_changes_no_draft(threads: int) -> None:
    def run(count: int) -> list[Any]:
        specops.set_num_threads(count)
        rng = random.Random(11)
        cache = SuffixCache(max_tree_depth=16, max_cached_tokens=1500)
        numbers = [cache.start(i, text(rng, 30)) for i in range(64)]
        out = []
        for _ in range(12):
            new = [text(rng, rng.randrange(1, 5)) for _ in numbers]
            out.append(run_step(cache, numbers, new, [8] * 64, 8))
        sound(cache)
        return [out, contents(cache)]

    assert run(1) == run(threads)


# ---- invalid arguments ----


def filled() -> SuffixCache:
    cache = SuffixCache()
    cache.start("run", [1, 2, 3])
    cache.extend("run", [4])
    cache.start("old", [1])
    cache.extend("old", [5, 6])
    cache.stop("old")
    return cache


WRONG_OPTIONS = [
    ({"max_tree_depth": 0}, "max_tree_depth must be an int in 1 .. 32767, got 0"),
    ({"max_tree_depth": -3}, "max_tree_depth must be an int in 1 .. 32767, got -3"),
    ({"max_tree_depth": 32768}, "max_tree_depth must be an int in 1 .. 32767, got 32768"),
    ({"max_tree_depth": 10**30}, "max_tree_depth must be an int in 1 .. 32767, got 1000"),
    ({"max_tree_depth": 2.0}, "max_tree_depth must be an int in 1 .. 32767, got 2.0"),
    ({"max_tree_depth": True}, "max_tree_depth must be an int in 1 .. 32767, got True"),
    ({"max_cached_requests": -2}, "max_cached_requests must be an int of at least -1, got -2"),
    ({"max_cached_tokens": -2}, "max_cached_tokens must be an int of at least -1, got -2"),
    ({"max_cached_bytes": -5}, "max_cached_bytes must be an int of at least -1, got -5"),
    ({"max_cached_bytes": None}, "max_cached_bytes must be an int of at least -1, got None"),
    ({"max_spec_factor": -0.5}, "max_spec_factor must be a finite number of at least 0, got -0.5"),
    (
        {"max_spec_factor": float("nan")},
        "max_spec_factor must be a finite number of at least 0, got nan",
    ),
    (
        {"max_spec_factor": float("inf")},
        "max_spec_factor must be a finite number of at least 0, got inf",
    ),
    ({"max_spec_factor": "1"}, "max_spec_factor must be a finite number of at least 0, got '1'"),
    ({"min_token_prob": 1.5}, "min_token_prob must be a number in 0 .. 1, got 1.5"),
    ({"min_token_prob": -0.1}, "min_token_prob must be a number in 0 .. 1, got -0.1"),
    ({"read_on": 1}, "read_on must be a bool, got 1"),
    ({"background_tokens": 0}, "background_tokens must be -1, or at least 1, got 0"),
    ({"background_tokens": -2}, "background_tokens must be an int of at least -1, got -2"),
]


@pytest.mark.parametrize("options,message", WRONG_OPTIONS, ids=str)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"SuffixCache: {message}")):
        SuffixCache(**options)


LIST = "must be a list of ints, or a contiguous int32 [n] array or tensor"
WRONG_TOKENS: list[tuple[Any, str]] = [
    ([1, -2], r"\[1\] must be an int32 of at least 0, got -2"),
    ([1, 2**31], r"\[1\] must be an int32 of at least 0, got 2147483648"),
    ([1, 2**70], r"\[1\] must be an int32 of at least 0, got 1180591620717411303424"),
    ([1.0], r"\[0\] must be an int32 of at least 0, got 1.0"),
    (["1"], r"\[0\] must be an int32 of at least 0, got '1'"),
    ([True], r"\[0\] must be an int32 of at least 0, got True"),
    (None, f"{LIST}, got None"),
    (7, f"{LIST}, got 7"),
    ("12", f"{LIST}, got '12'"),
    ({1, 2}, f"{LIST}, got set"),
    (b"1234", f"{LIST}, got bytes"),
    (range(3), f"{LIST}, got range"),
    (np.array([1, -2], np.int32), r"\[1\] must be at least 0, got -2"),
    (np.array([1, 2]), f"{LIST}, got numpy.ndarray int64"),
    (np.array([1, 2], np.uint32), f"{LIST}, got numpy.ndarray uint32"),
    (np.array([1, 2], np.float32), f"{LIST}, got numpy.ndarray float32"),
    (np.array([1, 2], ">i4"), f"{LIST}, got numpy.ndarray >i4"),
    (np.zeros((2, 2), np.int32), f"{LIST}, got numpy.ndarray int32.* of 2 dimensions"),
    (np.array(3, np.int32), f"{LIST}, got numpy.ndarray int32.* of 0 dimensions"),
    (np.zeros(8, np.int32)[::2], f"{LIST}, got numpy.ndarray int32.* with strides"),
    (torch.tensor([1, -2], dtype=torch.int32), r"\[1\] must be at least 0, got -2"),
    (torch.tensor([1, 2]), r"must be int32 \[n=2\], got int64 \[2\]"),
    (torch.zeros(2, 2, dtype=torch.int32), r"must be int32 \[n\], got int32 \[2, 2\]"),
    (torch.zeros(4, dtype=torch.int32)[::2], r"must be contiguous, got strides \[2\]"),
    (torch.zeros(2, dtype=torch.int32, device="meta"), f"{LIST}, got Tensor"),
]


def as_pattern(message: str) -> str:
    return message.replace(LIST, re.escape(LIST))


@pytest.mark.parametrize("tokens,message", WRONG_TOKENS, ids=str)
def test_invalid_tokens_are_refused(tokens: Any, message: str) -> None:
    cache = filled()
    before = contents(cache)
    message = as_pattern(message)
    calls = {
        r"start: prompt": lambda: cache.start("new", tokens),
        r"extend: token_ids": lambda: cache.extend("run", tokens),
        r"add: token_ids": lambda: cache.add(tokens, "new"),
        r"count: token_ids": lambda: cache.count(tokens),
    }
    if tokens is not None:
        calls["speculate: context"] = lambda: cache.speculate("run", 3, context=tokens)
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^SuffixCache\.{name} ?{message}"):
            call()
    assert contents(cache) == before and cache.count([4], "run") == 1
    sound(cache)


@pytest.mark.parametrize("request_id", ["no", "old", 3, ("a", "b")])
def test_unknown_ids_are_refused(request_id: Any) -> None:
    cache = filled()
    before = contents(cache)
    running = "that of a running request"
    calls = {
        "extend": lambda: cache.extend(request_id, [1]),
        "speculate": lambda: cache.speculate(request_id, 1),
        "stop": lambda: cache.stop(request_id),
        "count": lambda: cache.count([1], request_id),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call()
        want = f"SuffixCache.{name}: request_id must be {running}, got {request_id!r}"
        assert str(caught.value) == want
    with pytest.raises(ValueError, match=r"evict: request_id must be that of a cached"):
        cache.evict("no")
    assert not cache.discard("no")
    assert contents(cache) == before


@pytest.mark.parametrize("request_id", [[1], {}, ([],)])
def test_unhashable_ids_are_refused(request_id: Any) -> None:
    cache = filled()
    for call in (
        lambda: cache.start(request_id, [1]),
        lambda: cache.extend(request_id, [1]),
        lambda: cache.speculate(request_id, 1),
        lambda: cache.stop(request_id),
        lambda: cache.evict(request_id),
        lambda: cache.discard(request_id),
        lambda: cache.add([1], request_id),
    ):
        with pytest.raises(ValueError, match="request_id must be hashable, got"):
            call()


def test_running_id_cannot_be_started_again() -> None:
    cache = filled()
    before = contents(cache)
    for call in (lambda: cache.start("run", [9]), lambda: cache.add([9], "run")):
        with pytest.raises(ValueError, match="must be that of no running request, got 'run'"):
            call()
    assert contents(cache) == before and cache.count([4], "run") == 1
    with pytest.raises(ValueError, match="request_id must be hashable and not None"):
        cache.start(None, [1])


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"max_draft_tokens": -1}, "max_draft_tokens must be an int in 0 .. 65536, got -1"),
        ({"max_draft_tokens": 65537}, "max_draft_tokens must be an int in 0 .. 65536, got 65537"),
        ({"max_draft_tokens": 1.0}, "max_draft_tokens must be an int in 0 .. 65536, got 1.0"),
        ({"use_tree": 1}, "use_tree must be a bool, got 1"),
        ({"max_spec_factor": -1}, "max_spec_factor must be a finite number of at least 0, got -1"),
        ({"min_token_prob": 2}, "min_token_prob must be a number in 0 .. 1, got 2"),
        ({"min_token_prob": "x"}, "min_token_prob must be a number in 0 .. 1, got 'x'"),
    ],
)
def test_invalid_arguments_of_speculate_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"SuffixCache.speculate: {message}")):
        filled().speculate("run", **{"max_draft_tokens": 4, **arguments})


def good_step(cache: SuffixCache) -> dict[str, Any]:
    number = cache.start("step", [1, 2, 3])
    return {
        "requests": torch.tensor([number, -1]),
        "new_token_ids": ints(1, 2, 5, 5).view(2, 2),
        "num_new_tokens": ints(2, 0),
        "max_draft_tokens": ints(3, 3),
        "draft_token_ids": torch.full((2, 4), POISON, dtype=torch.int32),
        "num_draft_tokens": ints(POISON, POISON),
        "num_given_drafts": ints(0, 0),
        "parents": torch.full((2, 4), POISON, dtype=torch.int32),
        "probs": torch.full((2, 4), 7.0),
        "scores": torch.full((2,), 7.0),
        "match_lens": ints(POISON, POISON),
    }


NEEDED = ("requests", "new_token_ids", "num_new_tokens", "max_draft_tokens", "draft_token_ids")


@pytest.mark.parametrize("argument", good_step(SuffixCache()))
@pytest.mark.parametrize("fault", ["dtype", "shape", "ndim", "layout", "list", "none"])
def test_invalid_tensors_of_step_are_refused(argument: str, fault: str) -> None:
    cache = filled()
    arguments = good_step(cache)
    good = arguments[argument]
    if fault == "dtype":
        arguments[argument] = good.to(torch.float64)
    elif fault == "shape":
        # it sets the batch, so the next argument is the one that differs
        if argument == "requests":
            pytest.skip("`requests` sets the batch")
        arguments[argument] = torch.cat([good, good])
    elif fault == "ndim":
        arguments[argument] = good.unsqueeze(0)
    elif fault == "layout":
        wide = good.repeat_interleave(2, dim=good.dim() - 1)
        arguments[argument] = wide[..., ::2]
    elif fault == "list":
        arguments[argument] = good.tolist()
    elif argument in NEEDED:
        arguments[argument] = None
    else:
        arguments[argument] = None
        cache.step(**arguments)
        return
    before = contents(cache)
    untouched = {n: v.clone() for n, v in arguments.items() if isinstance(v, Tensor)}
    with pytest.raises(ValueError, match=rf"^SuffixCache\.step: {argument} must be"):
        cache.step(**arguments)
    assert contents(cache) == before and cache.count([1], "step") == 1
    assert all(torch.equal(arguments[name], value) for name, value in untouched.items())


@pytest.mark.parametrize(
    "argument,value,message",
    [
        ("num_new_tokens", ints(3, 0), r"num_new_tokens\[0\] must be in 0 .. w = 2, got 3"),
        ("num_new_tokens", ints(-1, 0), r"num_new_tokens\[0\] must be in 0 .. w = 2, got -1"),
        ("max_draft_tokens", ints(-1, 0), r"max_draft_tokens\[0\] must be at least 0, got -1"),
        ("num_given_drafts", ints(0, 5), r"num_given_drafts\[1\] must be in 0 .. k = 4, got 5"),
        ("num_given_drafts", ints(-1, 0), r"num_given_drafts\[0\] must be in 0 .. k = 4, got -1"),
        (
            "new_token_ids",
            ints(1, -2, 3, 4).view(2, 2),
            r"new_token_ids\[0\]\[1\] must be at least 0, got -2",
        ),
    ],
)
def test_invalid_values_of_step_are_refused(argument: str, value: Tensor, message: str) -> None:
    cache = filled()
    arguments = {**good_step(cache), argument: value}
    before = contents(cache)
    with pytest.raises(ValueError, match=rf"^SuffixCache\.step: {message}"):
        cache.step(**arguments)
    assert contents(cache) == before and cache.count([1], "step") == 1
    assert bool((arguments["draft_token_ids"] == POISON).all())


def test_invalid_requests_of_step_are_refused() -> None:
    cache = filled()
    arguments = good_step(cache)
    number = int(arguments["requests"][0])
    before = contents(cache)
    for requests, row in (([number, number], 1), ([-2, -1], 0), ([number, number + 1], 1)):
        arguments["requests"] = torch.tensor(requests)
        with pytest.raises(
            ValueError, match=rf"^SuffixCache\.step: requests\[{row}\] must be -1 or"
        ):
            cache.step(**arguments)
    assert contents(cache) == before and cache.count([1], "step") == 1
    cache.stop("step")
    arguments["requests"] = torch.tensor([number, -1])
    with pytest.raises(ValueError, match=r"requests\[0\] must be -1 or the number of a running"):
        cache.step(**arguments)


def test_step_may_be_repeated_after_an_error() -> None:
    cache = filled()
    arguments = good_step(cache)
    number = int(arguments["requests"][0])
    with pytest.raises(ValueError, match="no other row"):
        cache.step(**{**arguments, "requests": torch.tensor([number, number])})
    cache.step(**arguments)
    assert cache.count([1, 2], "step") == 2


def test_given_drafts_must_be_tokens() -> None:
    cache = filled()
    arguments = good_step(cache)
    arguments["draft_token_ids"][0, 0] = -1
    arguments["num_given_drafts"] = ints(1, 0)
    with pytest.raises(ValueError, match=r"draft_token_ids\[0\]\[0\] must be at least 0, got -1"):
        cache.step(**arguments)


def test_compiled_class_checks_its_arguments() -> None:
    empty = _C.SuffixCache.__new__(_C.SuffixCache)
    with pytest.raises((TypeError, ValueError)):
        empty.extend("a", [1])
    with pytest.raises(TypeError, match="7 arguments"):
        SuffixCache()._cache.speculate("a", 1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        _C.SuffixCache.extend(3, "a", [1])  # type: ignore[arg-type]


# ---- the file ----


def corpus(seed: int = 3, **options: Any) -> SuffixCache:
    rng = random.Random(seed)
    cache = SuffixCache(**{"max_tree_depth": 12, **options})
    for i in range(20):
        cache.start(i, [])
        cache.extend(i, text(rng, rng.randrange(60)))
        if i % 3:
            cache.stop(i)
    cache.evict(4)
    return cache


def drafts_of(cache: SuffixCache) -> list[Any]:
    rng = random.Random(8)
    cache.start("probe", [])
    out = []
    for _ in range(200):
        context = text(rng, 9)
        for use_tree in (False, True):
            out.append(cache.speculate("probe", 8, context=context, use_tree=use_tree))
        out.append(cache.count(context[:4]))
    cache.stop("probe")
    cache.evict("probe")
    return out


def test_loaded_cache_drafts_like_the_saved_one(tmp_path: Path) -> None:
    cache = corpus()
    path = tmp_path / "cache"
    cache.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    for name in (path, str(path), bytes(path)):
        again = SuffixCache(max_tree_depth=12)
        again.load(name)
        assert again.num_cached_tokens == cache.num_cached_tokens
        assert again.cached_requests == [None] * len(cache.cached_requests)
        assert again.running_requests == []
        assert drafts_of(again) == drafts_of(cache)
        sound(again)
        again.reclaim()
    # A loaded cache is an ordinary cache: new requests are younger, and budgets evict the oldest.
    again.start("new", [])
    again.extend("new", [0, 1, 2])
    again.save(path)
    third = SuffixCache(max_tree_depth=12, max_cached_requests=1)
    third.load(path)
    assert third.num_cached_tokens == 3 == third.count([0]) * 3
    sound(third)


def test_saving_does_not_change_the_cache(tmp_path: Path) -> None:
    cache = corpus()
    before = contents(cache), drafts_of(cache)
    cache.save(tmp_path / "one")
    cache.save(tmp_path / "two")
    assert (contents(cache), drafts_of(cache)) == before
    cache.extend(0, [1, 2, 3])
    sound(cache)


def test_label_of_a_file_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for label in ("", "a vocabulary: größer\n" * 1000):
        corpus().save(path, label=label)
        assert SuffixCache.read_label(path) == label
        again = SuffixCache(max_tree_depth=12)
        again.load(path)
        assert again.num_cached_requests == corpus().num_cached_requests > 0
    with pytest.raises(OSError, match="gone"):
        SuffixCache.read_label(tmp_path / "gone")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"^SuffixCache\.read_label: the file '.*/x' is cut short"):
        SuffixCache.read_label(path)


def test_empty_cache_can_be_saved(tmp_path: Path) -> None:
    SuffixCache().save(tmp_path / "x")
    cache = SuffixCache()
    cache.load(tmp_path / "x")
    assert contents(cache) == ([], [], 0)
    sound(cache)


def test_loading_into_a_smaller_budget_drops_the_oldest(tmp_path: Path) -> None:
    cache = SuffixCache(max_tree_depth=12)
    for i in range(10):
        cache.add([i] * 10)
    cache.save(tmp_path / "x")
    small = SuffixCache(max_tree_depth=12, max_cached_tokens=35)
    small.load(tmp_path / "x")
    assert small.num_cached_tokens == 30 and small.count([6]) == 0 and small.count([7]) == 10
    assert small.reclaim() == 0
    sound(small)


def refused(path: Path, match: str, **options: Any) -> None:
    cache = SuffixCache(**{"max_tree_depth": 12, **options})
    with pytest.raises(ValueError, match=rf"^SuffixCache\.load: the file '.*' {match}"):
        cache.load(path)
    assert contents(cache) == ([], [], 0)
    sound(cache)
    cache.add([1, 2, 3])
    assert cache.count([1, 2]) == 1


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    corpus().save(path)
    whole = path.read_bytes()
    rng = random.Random(1)
    cuts = {*range(0, 200, 3), len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(40))}
    for size in sorted(cuts):
        path.write_bytes(whole[:size])
        refused(path, "is cut short" if size >= 24 else "was not written by")
    path.write_bytes(whole + b"x")
    refused(path, "is damaged: something follows its end")


def test_files_with_any_changed_bit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    corpus().save(path)
    whole = path.read_bytes()
    rng = random.Random(2)
    places = {*range(0, 150), *(rng.randrange(len(whole)) for _ in range(150))}
    for place in sorted(places | {len(whole) - 1 - i for i in range(16)}):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        refused(path, r"(is damaged|is cut short|was not written by|has format|holds a tree|was)")


def test_files_with_exchanged_pieces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    cache = SuffixCache(max_tree_depth=12)
    rng = random.Random(4)
    cache.add(text(rng, 600_000, alphabet=50))
    cache.save(path)
    whole = bytearray(path.read_bytes())
    assert len(whole) > 2 << 20
    one, two = slice(1000, 1064), slice(1000 + (1 << 20), 1064 + (1 << 20))
    assert whole[one] != whole[two]
    whole[one], whole[two] = whole[two], whole[one]
    path.write_bytes(whole)
    refused(path, "is damaged: a checksum does not hold")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"")
    refused(path, r"was not written by SuffixCache\.save")
    path.write_bytes(b"PK\3\4" + bytes(1000))
    refused(path, r"was not written by SuffixCache\.save")
    corpus().save(path)
    whole = bytearray(path.read_bytes())
    whole[16] += 1
    path.write_bytes(whole)
    refused(path, "has format 3, and format 2 is the latest that this version reads")
    whole[16] -= 1
    whole[20:24] = whole[20:24][::-1]
    path.write_bytes(whole)
    refused(path, "was written by a machine of other byte order")
    corpus().save(path)
    refused(path, "holds a tree of depth 12, and this cache's is 13", max_tree_depth=13)


def test_errors_of_the_system_are_passed_on(tmp_path: Path) -> None:
    cache = corpus()
    with pytest.raises(FileNotFoundError) as caught:
        SuffixCache().load(tmp_path / "nothing")
    assert caught.value.filename == str(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        SuffixCache().load(tmp_path)
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "no" / "folder")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        cache.save(tmp_path / "folder")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder"]
    for wrong in (None, 3, ["x"]):
        with pytest.raises(TypeError):
            cache.load(wrong)  # type: ignore[arg-type]
    sound(cache)


# A file of format 1 with `add([1, 2, 3])` and `add([1, 2, 4])`, of max_tree_depth 4.
FIRST_FORMAT = (
    b"c-rk&U1%It6h1RMGrK$czq3j9FZ&;pCQ&1{>Pk@(MQy1fn2KGfir(336%!1i#Awq}@vUw^)Ic8grM7R$gVnr9ON$"
    b"^BRD5yzB7N~i5w1cgHQ0LYojc=XOky5<Q1A@reBZtIoO93IJ3n`3+I)U$dZse-TD$$?8vqgjC;?dtfGvlfc;LCY%"
    b"d?A9FO#I`y6^la@9z3`c}@{+Szt)u?9t}o#}3^1jB%FE68)zpn?HSZY3e(FoP!$dTv*<l{~}>EO^e$0caA*#=){#"
    b"%o7Ei<b%Q`j+>8I-9F#n9^Bx~3)+=KIC)b|5^y!al=fUUi%<H6*{QY8M_I`h4_K|}Zk4s{2oSNsvge%pF&YK4TI="
    b"|M|SC0Xl4V~l2<oeBxHT8Sy^2<|~&uxhBytnon!?ERC*S!cI-_PgU_IXfazc~CuFrg(8Xvsus1&G{INT8(>g{VX$"
    b"L9{9fkucGhLL_2pB#Ig{gCvfcK%PWRnIV!!G)ShMCOs#$R+#jfI_Wbb#4xqCMzSZBR+RVUSReXnB#(VD5+E6V6_y"
    b"k}Uc@~8n2*honGFK)nQT_VSeqGUyd5WHoGBsV?JGbkOF>dKlca`PM=hc@PzO-$*jrpS=&~V~?Q+?$%UC^znKF}Rv"
    b"MuM_Rcz<U2v(5hbsNt9D`NlmATlkW4x_#*#;3pd`iisvAbh-j*PZv{Z~Xq3e?}I>2en%>`FnGr_{{od>u#X-p}v9"
    b"|W$&qPf1K~ZSo>)BhsEYK$@8sde)P2cUOG7MUQ`}YLll^4Nsu}$&F`}+1K%k9REKiast;JzhE=Is)w)%wS=pjh9i"
    b"Tl0^==BT(I8i(LB>K*s?soHI^@eV!dMh?B^qNa4#hG}FqVWuiKZA!L%Nq5jAhs;&)f@ooc3*;gPVI3>YgqZi?A}p"
    b"VReRs-_#=NXg5m%VdVu57j|>-n+BF?4UJlZBUXKorb?<#!7*1eMXIuf#;Of6ri0N(BaB5cu$x&d(im&S@gBR%Vw5"
    b"IWD+%fRM-MKP?R;s_d#JG?vuz%iVB~gd_%>WotBkALuo^=au2uhpq~1Z{PkS|;r7CY~ki|+k4MDC<!<_0+sL}|ha"
    b"mZI_VnXun|4yW$+Sn06bDR9@yw4;1PwYk|;-9mXAJcn;pSq3TUBd63E$a5?%WZKV-ujwiUTqt{y{O~t9JGUc<Nu-"
    b"W%CiE$Y!<F9kFI{8{q<Y{-eZdFX~<#+j(N^Jtmn9U*0DX__Ka7=*m%#0rw<kGeBC*RC?XGQ-w<sU=lDPLd7}ICiH"
    b"k4Ep8wZdp1dsXchA}F%=^K>!oKF@AEa$7wE"
)


def test_file_of_format_1_has_no_named_scope(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(zlib.decompress(base64.b85decode(FIRST_FORMAT)))
    assert SuffixCache.read_label(path) == "old"
    cache = SuffixCache(max_tree_depth=4)
    cache.load(path)
    assert cache.num_cached_requests == 2 and cache.num_common_requests == 0
    cache.start("same", [1, 2])
    cache.start("other", [1, 2], scope="other")
    assert cache.speculate("same", 4).token_ids == [4]
    assert cache.speculate("other", 4).token_ids == []
    sound(cache)


def test_saved_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch(mode=0o644)
    before = os.umask(0)
    try:
        corpus().save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


# ---- scopes ----


def test_no_draft_comes_from_another_scope(tmp_path: Path) -> None:
    cache = SuffixCache(max_tree_depth=8)
    said = {"": 10, "a": 20, "b": 30}
    for scope, token in said.items():
        cache.start(("first", scope), [1], scope=scope)
        cache.extend(("first", scope), [2, 3, token, token + 1])
        cache.stop(("first", scope))
    cache.add([2, 3, 40, 41], scope=None)
    cache.add([7, 8, 50], scope="a")
    path = tmp_path / "x"
    cache.save(path)
    loaded = SuffixCache(max_tree_depth=8)
    loaded.load(path)
    for one in (cache, loaded):
        assert one.num_scopes == 3 and one.num_common_requests == 1
        for scope in (*said, "new"):
            one.start(("second", scope), [2, 3], scope=scope)
            own = said.get(scope)
            tree = one.speculate(("second", scope), 4, use_tree=True).token_ids
            assert set(tree) == ({40, 41} if own is None else {own, own + 1}), (
                "its own scope must come first"
            )
            longer = one.speculate(("second", scope), 4, context=[2, 3, 40]).token_ids
            assert longer == [41], "all scopes must share the common tree"
            found = one.speculate(("second", scope), 4, context=[7, 8]).token_ids
            assert found == ([50] if scope == "a" else [])
        rows = [one.start(("row", scope), [1, 2], scope=scope) for scope in said]
        drafts = torch.full((3, 2), -1, dtype=torch.int32)
        one.step(
            torch.tensor(rows),
            ints(3, 3, 3).view(3, 1),
            ints(1, 1, 1),
            ints(2, 2, 2),
            draft_token_ids=drafts,
        )
        assert drafts[:, 0].tolist() == list(said.values())
        sound(one)


def test_budgets_apply_to_all_scopes_together() -> None:
    """The oldest response of any scope is evicted, and scopes without responses are removed."""
    cache = SuffixCache(max_tree_depth=4, max_cached_requests=3)
    for number in range(40):
        cache.start(number, [1], scope=f"scope {number}")
        cache.extend(number, [2, 3, number])
        cache.stop(number)
        assert cache.cached_requests == list(range(max(number - 2, 0), number + 1))
        assert cache.num_scopes == 1 + min(number + 1, 3)
        sound(cache)
    cache = SuffixCache(max_tree_depth=4, max_cached_tokens=100)
    for number in range(40):
        cache.start(number, [1], scope=f"scope {number % 7}")
        cache.extend(number, list(range(10)))
        cache.stop(number)
        assert cache.num_cached_tokens == min(10 * (number + 1), 100)
        sound(cache)


def test_memory_of_many_scopes_is_bounded() -> None:
    budget = 1 << 20
    cache = SuffixCache(max_tree_depth=16, max_cached_bytes=budget)
    rng = random.Random(5)
    most = 0
    for number in range(60):
        scope = f"scope {number}" if number % 2 else "busy"
        tokens = text(rng, 4000 if number % 3 else 20_000, 50)
        cache.start(number, [1], scope=scope)
        cache.extend(number, tokens)
        cache.stop(number)
        most = max(most, cache.num_bytes)
        assert cache.num_cached_requests < 40
    sound(cache)
    assert most < 4 * budget and cache.num_scopes < 40
    for number in cache.cached_requests:
        cache.evict(number)
    cache.reclaim()
    assert cache.num_scopes == 1
    sound(cache)


def test_scopes_must_be_strings() -> None:
    cache = SuffixCache()
    with pytest.raises(ValueError, match=r"^SuffixCache\.start: scope must be a str, got 3"):
        cache.start(1, [1], scope=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^SuffixCache\.add: scope must be a str, or None, got 3"):
        cache.add([1], scope=3)  # type: ignore[arg-type]
    assert cache.running_requests == cache.cached_requests == []


def test_loading_requires_an_empty_cache(tmp_path: Path) -> None:
    cache = corpus()
    cache.save(tmp_path / "x")
    before = contents(cache)
    with pytest.raises(ValueError, match="must have nothing in its shared tree, got 19 requests"):
        cache.load(tmp_path / "x")
    assert contents(cache) == before


# ---- prompts built in the background, threads ----


def test_prompts_built_in_the_background_give_the_same_drafts() -> None:
    rng = random.Random(6)
    plain, cache = SuffixCache(background_tokens=-1), SuffixCache(background_tokens=1)
    prompts = [text(rng, size) for size in (5000, 20_000, 1, 300)]
    for c in (plain, cache):
        for i, prompt in enumerate(prompts):
            c.start(i, prompt)
            c.extend(i, [1, 2, 3])
    for i in range(len(prompts)):
        cache.speculate(i, 8)  # uses the part that is built already
        cache.extend(i, [0])
        plain.extend(i, [0])
    cache.wait()
    for i in range(len(prompts)):
        assert cache.speculate(i, 8) == plain.speculate(i, 8)
        assert cache.count([1, 2, 3], i) == plain.count([1, 2, 3], i)
    sound(cache)


def test_request_may_stop_while_its_prompt_is_built() -> None:
    prompt = np.arange(300_000, dtype=np.int32) % 977
    cache = SuffixCache(background_tokens=1)
    for i in range(6):
        cache.start(i, prompt)
        cache.extend(i, [1, 2])
        if i != 2:
            cache.stop(i)
    cache.start(9, [1, 2, 3, 1, 2])
    cache.wait()
    assert cache.speculate(9, 1).token_ids == [3]
    assert cache.count(prompt[:20], 2) > 0
    assert cache.running_requests == [2, 9]
    sound(cache)


def test_count_waits_for_its_prompt() -> None:
    cache = SuffixCache(background_tokens=1)
    cache.start("a", np.full(100_000, 3, np.int32))
    assert cache.count([3], "a") == 100_000


def test_cache_may_be_deleted_while_a_prompt_is_built() -> None:
    for size in (10, 100_000, 400_000):
        cache = SuffixCache(background_tokens=1)
        for i in range(3):
            cache.start(i, np.arange(size, dtype=np.int32))
        del cache


def test_steps_may_run_while_prompts_are_built() -> None:
    cache = SuffixCache(background_tokens=1)
    numbers = [cache.start(i, np.arange(50_000, dtype=np.int32)) for i in range(3)]
    for _ in range(5):
        run_step(cache, numbers, [[7, 8]] * 3, [4] * 3, 4)
    cache.wait()
    assert [cache.count([7, 8], i) for i in range(3)] == [6, 6, 6]
    sound(cache)


def test_many_threads_may_use_a_cache() -> None:
    cache = SuffixCache(max_tree_depth=8, max_cached_tokens=3000, background_tokens=500)
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for turn in range(25):
                name = (seed, turn)
                number = cache.start(name, text(rng, rng.choice([10, 700])))
                for _ in range(10):
                    cache.extend(name, text(rng, 70))
                    cache.speculate(name, 8)
                    run_step(cache, [number], [[1, 2]], [4], 4)
                    assert cache.num_cached_tokens <= 3000
                cache.stop(name)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    cache.wait()
    sound(cache)
    assert cache.running_requests == []


def test_threads_may_compete_for_an_id_or_slot() -> None:
    """Slots change owners while the interpreter's lock is released."""
    cache = SuffixCache(max_tree_depth=4, max_cached_requests=3)
    tokens = np.arange(300, dtype=np.int32) % 11
    faults: list[BaseException] = []

    def start_and_stop(seed: int) -> None:
        for turn in range(200):
            try:
                cache.start("shared", tokens)
            except ValueError as fault:
                if "that of no running request" not in str(fault):
                    faults.append(fault)
                continue
            try:
                cache.extend("shared", tokens)
                cache.stop("shared")
                name = (seed, turn)
                cache.start(name, tokens)
                cache.extend(name, [1])
                cache.stop(name)
            except BaseException as fault:
                faults.append(fault)

    def add(seed: int) -> None:
        for _ in range(300):
            try:
                cache.add(tokens, seed)
            except BaseException as fault:
                faults.append(fault)

    work = [start_and_stop, start_and_stop, add, add]
    threads = [threading.Thread(target=run, args=(seed,)) for seed, run in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert cache.running_requests == []
    sound(cache)


# ---- the compatible class ----


@pytest.fixture
def compatible() -> Iterator[SuffixDecodingCache]:
    cache = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=3)
    assert (cache.max_tree_depth, cache.max_cached_requests) == (24, 3)
    yield cache


def test_compatible_class_supports_the_calls_of_vllm(compatible: SuffixDecodingCache) -> None:
    cache = compatible
    history = np.array([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 0, 0], np.int32)
    cache.start_request("a", history[:7])
    assert "a" in cache.active_requests and "a" in cache.cached_requests
    cache.add_active_response("a", [1, 2])
    cache.add_active_response("a", history[9:10])
    draft = cache.speculate(
        "a", history[:10], max_spec_tokens=5, max_spec_factor=1.0, min_token_prob=0.1
    )
    assert draft.token_ids == [4, 5, 6] and draft.match_len == 3 and draft.score == 1.5
    assert draft.parents == [-1, 0, 1] and draft.probs == [0.5] * 3
    assert cache.speculate("a", history[:10], max_spec_offset=1.0).token_ids == [4, 5, 6, 7]
    assert cache.speculate("a", history[:10], max_spec_offset=-2.0).token_ids == [4]
    assert cache.speculate("a", history[:10], max_spec_offset=-9.0).token_ids == []
    assert cache.speculate("a", [9, 2], use_tree_spec=True).token_ids == [3]
    cache.stop_request("a")
    assert cache.active_requests == [] and cache.cached_requests == ["a"]
    cache.start_request("b", [0])
    assert cache.speculate("b", [0, 1]).token_ids == [2]
    cache.evict_cached_response("a")
    assert cache.speculate("b", [0, 1]).token_ids == []
    for name in "cde":
        cache.start_request(name, [1])
    assert cache.cached_requests == ["c", "d", "e"]


def test_errors_of_the_compatible_class_use_its_own_names(compatible: SuffixDecodingCache) -> None:
    compatible.start_request("a", [1])
    wide = np.zeros((2, 2), np.int32)
    for message, call in {
        "start_request: req_id must": lambda: compatible.start_request("a", [1]),
        "start_request: prompt_token_ids must": lambda: compatible.start_request("c", wide),
        "stop_request: req_id must": lambda: compatible.stop_request("b"),
        "add_active_response: req_id must": lambda: compatible.add_active_response("b", [1]),
        "add_active_response: token_ids must": lambda: compatible.add_active_response("a", wide),
        "evict_cached_response: req_id must": lambda: compatible.evict_cached_response("b"),
        "speculate: req_id must": lambda: compatible.speculate("b", [1]),
        "speculate: context must": lambda: compatible.speculate("a", wide),
        "speculate: max_spec_tokens must": lambda: compatible.speculate("a", [1], -1),
        "speculate: use_tree_spec must": lambda: compatible.speculate("a", [1], use_tree_spec=1),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(ValueError, match=rf"^SuffixDecodingCache\.{message} .*, got "):
            call()
    with pytest.raises(ValueError, match=r"^SuffixDecodingCache: max_tree_depth must be"):
        SuffixDecodingCache(max_tree_depth=0)
