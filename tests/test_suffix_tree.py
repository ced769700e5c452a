# SPDX-License-Identifier: Apache-2.0
"""SuffixCache against a brute-force reference, after every operation of random histories."""

import os
from pathlib import Path
from typing import Any

import pytest
import specops
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from specops import reference
from specops.suffix_tree import SuffixCache

ROOT = Path(__file__).resolve().parent.parent
DEPTHS = [1, 2, 3, 4, 6, 9, 64]
MAX_TOKENS = 150  # brute force is quadratic

tokens = st.lists(st.integers(0, 2), max_size=6)


def int32(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def has_shared(machine: "Histories") -> bool:
    return 0 not in (machine.model.max_cached_requests, machine.model.max_cached_tokens)


class Histories(RuleBasedStateMachine):
    """Requests that start, write equal and different texts, stop and are evicted, in any order."""

    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        self.options: dict[str, Any] = {
            "max_tree_depth": data.draw(st.sampled_from(DEPTHS)),
            "max_cached_requests": data.draw(st.sampled_from([-1, -1, 0, 1, 2, 3])),
            "max_cached_tokens": data.draw(st.sampled_from([-1, -1, 0, 1, 9, 30])),
            "max_spec_factor": data.draw(st.sampled_from([1.0, 0.0, 0.7, 2.5, 1e30])),
            "min_token_prob": data.draw(st.sampled_from([0.1, 0.0, 0.3, 0.5, 1.0])),
            "read_on": data.draw(st.booleans()),
        }
        self.background_tokens = data.draw(st.sampled_from([-1, 5]))
        self.cache = SuffixCache(**self.options, background_tokens=self.background_tokens)
        self.model = reference.SuffixCache(**self.options)
        self.numbers: dict[str, int] = {}  # numbers of running requests, for `step`

    # ---- operations ----

    def some_request(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model.running)))

    def new_id(self, data: st.DataObject) -> str:
        """Return an id that is not running. It may be cached."""
        unused = sorted(set("abcdefghijkl") - set(self.model.running))
        return data.draw(st.sampled_from(unused))

    def some_text(self, data: st.DataObject, size: int) -> list[int]:
        """Return new tokens, or those that follow in another text after `size` tokens."""
        texts = [s.tokens for s in [*self.model.running.values(), *self.model.shared]]
        texts = [text for text in texts if len(text) > size]
        if not texts or data.draw(st.booleans()):
            return data.draw(tokens)
        return data.draw(st.sampled_from(texts))[size:][: data.draw(st.integers(1, 12))]

    @precondition(lambda self: len(self.model.running) < 8)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        request = self.new_id(data)
        prompt = self.some_text(data, 0)
        self.numbers[request] = self.cache.start(request, int32(prompt))
        self.cache.wait()
        self.model.start(request, prompt)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        request = self.some_request(data)
        new = self.some_text(data, len(self.model.running[request].tokens))
        self.cache.extend(request, new)
        self.model.extend(request, new)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), new=tokens)
    def extend_several(self, data: st.DataObject, new: list[int]) -> None:
        """Extend all running requests by the same text."""
        for request in sorted(self.model.running):
            self.cache.extend(request, new)
            self.model.extend(request, new)

    @rule(data=st.data(), use_tree=st.booleans(), num_threads=st.sampled_from([1, 2, 4]))
    def step(self, data: st.DataObject, use_tree: bool, num_threads: int) -> None:
        specops.set_num_threads(num_threads)
        requests = data.draw(st.lists(st.sampled_from([*sorted(self.model.running), None])))
        rows, seen = [], set()
        capacity = data.draw(st.integers(0, 12))
        for request in requests:
            if request is None or request in seen:
                rows.append((None, [], 0, []))
                continue
            seen.add(request)
            new = self.some_text(data, len(self.model.running[request].tokens))
            given = data.draw(tokens)[:capacity]
            rows.append((request, new, data.draw(st.integers(0, 12)), given))
        width = max([len(new) for _, new, _, _ in rows], default=0) + 1
        batch = len(rows)
        new_token_ids = torch.full((batch, width), -1, dtype=torch.int32)
        drafts = torch.full((batch + 1, capacity + 3), 77, dtype=torch.int32)
        parents, probs = torch.full_like(drafts, 77), torch.full(drafts.shape, 77.0)
        for b, (_, new, _, given) in enumerate(rows):
            new_token_ids[b, : len(new)] = int32(new)
            drafts[b, : len(given)] = int32(given)
        num_given = int32([len(given) for _, _, _, given in rows])
        scores, match_lens = torch.full((batch,), 77.0), torch.full((batch,), 77).int()
        _, num_draft_tokens = self.cache.step(
            torch.tensor([self.numbers.get(row[0], -1) for row in rows], dtype=torch.int64),
            new_token_ids,
            int32([len(new) for _, new, _, _ in rows]),
            int32([limit for _, _, limit, _ in rows]),
            draft_token_ids=drafts[:batch, :capacity],
            num_given_drafts=num_given,
            parents=parents[:batch, :capacity],
            probs=probs[:batch, :capacity],
            scores=scores,
            match_lens=match_lens,
            use_tree=use_tree,
        )
        work = [
            (request, new, min(limit, capacity - len(given)), given)
            for request, new, limit, given in rows
            if request is not None
        ]
        found = iter(self.model.step(work, use_tree=use_tree))
        for b, (request, _, _, given) in enumerate(rows):
            want = ([], [], [], 0.0, 0) if request is None else next(found)
            first, size = len(given), len(want[0])
            behind = capacity - first - size
            assert drafts[b].tolist() == [*given, *want[0], *[-1] * behind, 77, 77, 77]
            assert parents[b, first:].tolist() == [*want[1], *[-2] * behind, 77, 77, 77]
            assert probs[b, first:].tolist() == [*want[2], *[0.0] * behind, 77, 77, 77]
            assert (int(num_draft_tokens[b]), float(scores[b])) == (size, want[3])
            assert int(match_lens[b]) == want[4]
        assert bool((drafts[batch] == 77).all() and (parents[:, capacity:] == 77).all())

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        request = self.some_request(data)
        self.cache.stop(request)
        self.model.stop(request)

    @precondition(lambda self: any(len(name) == 1 for name in self.model.cached))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        known = [
            name for name in self.model.cached if len(name) == 1
        ]  # loaded responses have no id
        request = data.draw(st.sampled_from(sorted(known)))
        self.cache.evict(request)
        self.model.evict(request)

    @precondition(has_shared)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        request = self.new_id(data)
        response = self.some_text(data, 0)
        self.cache.add(response, request)
        self.model.add(response, request)

    @rule()
    def reclaim(self) -> None:
        assert self.cache.reclaim() == self.model.reclaim()

    @rule()
    def thin_out(self) -> None:
        """Stop and evict requests that have grown too long for brute force."""
        while sum(len(s.tokens) for s in self.model.running.values()) > MAX_TOKENS:
            request = next(iter(self.model.running))
            self.cache.stop(request)
            self.model.stop(request)
        for request in [name for name in self.model.cached if len(name) == 1]:
            if sum(len(s.tokens) for s in self.model.cached.values()) > MAX_TOKENS:
                self.cache.evict(request)
                self.model.evict(request)
        assert self.cache.reclaim() == self.model.reclaim()

    @precondition(has_shared)
    @rule()
    def save_and_load(self) -> None:
        """Save and load the cache: responses come back finished and in order, without requests."""
        path = Path(os.environ["SUFFIX_TREE_FILE"])
        self.cache.save(path)
        self.cache = SuffixCache(**self.options, background_tokens=self.background_tokens)
        self.cache.load(path)
        path.unlink()
        cached = self.model.cached
        self.model = reference.SuffixCache(**self.options)
        for number, sequence in enumerate(cached.values()):
            self.model.add(sequence.tokens, f"loaded {number}")

    # ---- invariants ----

    @invariant()
    def integrity(self) -> None:
        assert self.cache.check_integrity() == ""
        assert sorted(self.cache.running_requests) == sorted(self.model.running)
        cached = [None if len(name) > 1 else name for name in self.model.cached]
        assert self.cache.cached_requests == cached
        tokens = sum(len(s.tokens) for s in self.model.cached.values())
        assert self.cache.num_cached_tokens == tokens

    @invariant()
    def drafts(self) -> None:
        for i, request in enumerate(self.model.running):
            limit, use_tree = (12, i % 2 == 1)
            got = self.cache.speculate(request, limit, use_tree=use_tree)
            assert tuple(got) == self.model.speculate(request, limit, use_tree=use_tree)

    @precondition(lambda self: self.model.running)
    @rule(
        data=st.data(),
        limit=st.sampled_from([0, 1, 3, 30]),
        use_tree=st.booleans(),
        factor=st.sampled_from([None, 0.0, 1.0, 4.0]),
        min_prob=st.sampled_from([None, 0.0, 0.25, 1.0]),
    )
    def speculate(self, data: st.DataObject, limit: int, **how: Any) -> None:
        request = self.some_request(data)
        context = data.draw(st.none() | tokens)
        if context is not None:
            context = context + self.some_text(data, 0)
        names = {"factor": "max_spec_factor", "min_prob": "min_token_prob"}
        options = {names.get(name, name): value for name, value in how.items()}
        got = self.cache.speculate(request, limit, context=context, **options)
        assert tuple(got) == self.model.speculate(request, limit, context=context, **options)

    def teardown(self) -> None:
        """Count every string that occurs or has occurred, before and after `reclaim`."""
        if not hasattr(self, "model"):
            return
        texts = [s.tokens for s in [*self.model.running.values(), *self.model.shared]]
        depth = self.options["max_tree_depth"]
        strings = {
            tuple(text[i:j])
            for text in texts
            for i in range(len(text))
            for j in range(i + 1, min(i + min(depth, 12) + 1, len(text)) + 1)
        }
        for _ in range(2):
            for string in map(list, sorted(strings)):
                assert self.cache.count(string) == self.model.count(string)
                for request in self.model.running:
                    assert self.cache.count(string, request) == self.model.count(string, request)
            assert self.cache.reclaim() == self.model.reclaim()
        assert self.cache.check_integrity() == ""


@pytest.mark.parametrize(
    "examples,steps", [(120, 30), pytest.param(1000, 50, marks=pytest.mark.slow)]
)
def test_random_histories_match_the_reference(tmp_path: Path, examples: int, steps: int) -> None:
    os.environ["SUFFIX_TREE_FILE"] = str(tmp_path / "cache")
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
