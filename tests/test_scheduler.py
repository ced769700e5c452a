# SPDX-License-Identifier: Apache-2.0
"""The scheduler without a model: steps are simulated, and each cache row records its source."""

import random
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pages import check_pages
from specops.api.config import EngineConfig
from specops.engine import SamplingParams, SpeculativeConfig
from specops.engine.machine import free_rows_of
from specops.engine.memory.kv_cache import DraftKv, PagePool
from specops.engine.models import CacheCapacity, PrefixStates
from specops.engine.plan import Part, Plan
from specops.engine.request import DraftState, Request
from specops.engine.scheduling.scheduler import Scheduler
from specops.engine.sharing.prefixes import PrefixFinder

Tokens = tuple[int, ...]


@dataclass
class Row:
    """Cache slot of a page: the tokens from which its keys and values were computed."""

    model: Tokens | None = None  # all tokens up to and including the row's token
    drafts: Tokens | None = None  # the later tokens that modules drafted from


def make_request(
    arrival: int,
    tokens: Sequence[int],
    method: str,
    max_tokens: int,
    *,
    lookahead: int = 0,
    **own: Any,
) -> Request:
    speculative = SpeculativeConfig.from_dict({"method": method, **own})
    request = Request(
        request_id=f"r{arrival}",
        arrival=arrival,
        params=SamplingParams(max_tokens=max_tokens),
        speculative=speculative,
        seed=0,
        choice_index=0,
        prompt_len=len(tokens),
        max_len=len(tokens) + max_tokens,
        token_ids=list(tokens),
        stream=None,  # type: ignore[arg-type]
        drafts=DraftState.of(speculative),
    )
    if method == "mtp":
        request.drafts.kv = DraftKv(method, lookahead, request.drafts.stages[method])
    return request


def test_facts_of_a_request_never_change() -> None:
    request = make_request(0, [1], "naive", 1)
    for one in fields(Request):
        with pytest.raises(FrozenInstanceError):
            setattr(request, one.name, getattr(request, one.name))


def check_entries(states: PrefixStates, num_prefix_states: int) -> None:
    """Fail if an entry is lost or has two owners."""
    waiting = [own.waiting[1] for own in states._running.values() if own.waiting is not None]
    entries = [*states._free, *states._entry_of.values(), *waiting]
    assert sorted(entries) == list(range(num_prefix_states)), "an entry is lost, or has two owners"


class States:
    """States of a model: each position holds the text up to it."""

    def __init__(self, capacity: CacheCapacity) -> None:
        self.capacity = capacity
        Texts = list[tuple[int, ...] | None]
        self.slots: list[Texts] = [
            [None] * (capacity.num_drafts + 1) for _ in range(capacity.num_slots)
        ]
        self.prefix_states: Texts = [None] * capacity.num_prefix_states
        self.num_loads = self.num_keeps = 0

    def of_slot(self, slot: int, num_tokens: int) -> tuple[int, ...] | None:
        return self.slots[slot][(num_tokens - 1) % len(self.slots[slot])]

    def keep_states(self, slot: int, num_tokens: int, entry: int) -> None:
        self.prefix_states[entry] = text = self.of_slot(slot, num_tokens)
        assert text is not None and len(text) == num_tokens, "states of another position"
        self.num_keeps += 1

    def load_states(self, entry: int, num_tokens: int, slot: int) -> None:
        window = self.slots[slot]
        window[:] = [None] * len(window)
        window[(num_tokens - 1) % len(window)] = self.prefix_states[entry]
        self.num_loads += 1


class Simulation:
    """Engine loop with random drafts, acceptance, drafter pauses, completions and aborts."""

    def __init__(
        self,
        seed: int,
        lookahead: int,
        *,
        num_pages: int = 24,
        caching: bool = True,
        k: int = 5,
        num_prefix_states: int = 0,
        has_states: bool = True,
        drafter_has_states: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.lookahead, self.size, self.k = lookahead, 4, k
        self.pool = PagePool(num_pages, self.size, enable_prefix_caching=caching)
        self.leaf = 2 * self.size
        self.capacity = capacity = CacheCapacity(num_pages, 4, 6, k, num_prefix_states)
        self.states = States(capacity) if num_prefix_states and has_states else None
        # The drafter's own drafts take the last places of its window.
        self.drafter_states = None
        if drafter_has_states:
            self.drafter_states = States(capacity._replace(num_drafts=2 * k))
        drafters = {} if self.drafter_states is None else {"mtp": self.drafter_states}
        self.scheduler = Scheduler(
            self.pool,
            EngineConfig(max_num_seqs=6, max_num_batched_tokens=24),
            PrefixStates(self.pool, capacity, cast(Any, self.states), cast(Any, drafters)),
            prefix_finder=PrefixFinder(self.pool, leaf_tokens=self.leaf),
        )
        self.memory = [[Row() for _ in range(self.size)] for _ in range(num_pages)]
        self.num_hits = {"naive": 0, "mtp": 0}
        self.num_spare = self.num_preemptions = 0
        self.num_saved_tokens = 0
        self.plans: list[list[tuple[str, int, int, bool]]] = []
        self.slots: dict[int, Request] = {}
        self._arrivals = 0

    def arrive(self) -> None:
        has_drafter = self.lookahead or self.drafter_states
        method = self.rng.choice(["naive", "mtp"]) if has_drafter else "naive"
        own = {"num_speculative_tokens": self.k, "lookahead": self.lookahead}
        own = own if method == "mtp" else {}
        # Prompts share beginnings. Some are longer than what a request may still write.
        tokens = [1] * self.rng.randrange(1, 20) + [self.rng.randrange(2) for _ in range(3)]
        request = make_request(
            self._arrivals, tokens, method, self.rng.randrange(1, 96 - len(tokens)), **own
        )
        self._arrivals += 1
        self.scheduler.waiting.append(request)

    def step(self) -> None:
        self._choose_drafts(*self.scheduler.decoding())
        scheduled = self.scheduler.schedule()
        self._check_slots(scheduled)
        self._check_prefixes(scheduled)
        plan = scheduled.parts
        self.plans.append([(p.request.request_id, p.num_rows, p.num_drafts, p.emits) for p in plan])
        for request in self.scheduler.waiting:
            assert not (request.num_computed or request.drafts.num_final_kv or request.pages)
        assert len(scheduled.stopped) <= 6
        self.num_preemptions += len(scheduled.stopped)
        for part in plan:
            self._check(part)
        for part in plan:
            self._execute(part)
        check_pages(self.pool)
        check_entries(self.scheduler.states, self.capacity.num_prefix_states)

    def live(self, num_steps: int) -> None:
        """Run steps in which requests come and go, then drain the rest."""
        for _ in range(num_steps):
            if len(self.scheduler.waiting) < 4 and self.rng.random() < 0.5:
                self.arrive()
            if self.rng.random() < 0.03:
                self.abort()
            self.step()
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
        assert self.pool.num_available == self.pool.num_pages

    def abort(self) -> None:
        if self.scheduler.running:
            self._finish(self.rng.choice(self.scheduler.running))

    def _choose_drafts(self, requests: Sequence[Request], room: int) -> None:
        for request in requests:
            expected = self.rng.randrange(self.k + 1) if request.drafts.kv else 0
            request.drafts.num_selected = max(min(expected, request.draft_room, room), 0)
            room -= request.drafts.num_selected

    def _check_slots(self, plan: Plan) -> None:
        """Check that stops and then starts leave each slot with one request."""
        for request, slot in plan.stopped:
            assert self.slots.pop(slot) is request
        for request in plan.started:
            assert self.scheduler.at[request.slot] is request
            assert request.slot not in self.slots
            self.slots[request.slot] = request
            assert request.drafts.num_final_kv == request.num_computed
            self.num_hits[request.speculative.method] += request.num_computed
        assert {slot: one for slot, one in self.slots.items() if one.slot == slot} == {
            request.slot: request for request in self.scheduler.running
        }
        assert self.scheduler.at == self.slots

    def _check_prefixes(self, plan: Plan) -> None:
        """Check that reported shared prefixes are in the same pages and that none is missing."""
        requests = [part.request for part in plan.parts]
        claimed: set[tuple[int, ...]] = set()
        if plan.prefixes is not None:
            self.num_saved_tokens += plan.prefixes.num_saved_tokens
            for leaders, lens in zip(plan.prefixes.leaders, plan.prefixes.lens, strict=True):
                for place, (leader, tokens) in enumerate(zip(leaders, lens, strict=True)):
                    mine, its = requests[place], requests[leader]
                    assert tokens <= min(mine.num_computed, its.num_computed)
                    pages = mine.pages[: tokens // self.size]
                    assert pages == its.pages[: tokens // self.size]
                    for end in range(self.leaf, tokens + 1, self.leaf) if place != leader else ():
                        claimed.add((place, end))
        starts: set[bytes] = set()
        for place, request in enumerate(requests):
            for end in range(self.leaf, request.num_computed + 1, self.leaf):
                start = request.pages[: end // self.size].tobytes()
                assert (start in starts) == ((place, end) in claimed)
                starts.add(start)

    def _finish(self, request: Request) -> None:
        del self.slots[request.slot]
        self.scheduler.finish(request)

    def _row(self, request: Request, position: int) -> Row:
        return self.memory[request.pages[position // self.size]][position % self.size]

    def _check(self, part: Part) -> None:
        """Check that all that the step reads is present and that its writes fit."""
        request = part.request
        assert self.slots[request.slot] is request
        tokens = tuple(request.token_ids)
        assert part.begin == request.num_computed
        assert part.begin + part.num_rows - part.num_drafts <= len(tokens)
        for position in range(request.num_computed):
            assert self._row(request, position).model == tokens[: position + 1]
        needed = self.scheduler.num_pages_for(request.num_computed + part.num_rows)
        assert len(request.pages) >= needed
        if request.drafts.kv is None:
            return
        for position in range(request.drafts.num_final_kv):
            following = tokens[position + 1 : position + 1 + self.lookahead]
            assert self._row(request, position).drafts == following
        if part.emits:
            last = request.num_computed + part.num_rows + max(part.draft_limit - self.lookahead, 0)
            room = len(request.pages) * self.size
            assert room >= min(last, request.max_len) or self.pool.num_available == 0
            assert len(request.pages) <= self.scheduler.num_pages_for(request.max_len)
            self.num_spare += len(request.pages) - needed

    def _write(self, request: Request, position: int) -> Row:
        page = request.pages[position // self.size]
        assert self.pool._refs[page] == 1 and page not in self.pool._place_of, "the page is shared"
        return self.memory[page][position % self.size]

    def _execute(self, part: Part) -> None:
        request, rng = part.request, self.rng
        begin, known = request.num_computed, part.num_rows - part.num_drafts
        accepted = rng.randint(0, part.num_drafts)
        tokens = tuple(request.token_ids[: begin + known])
        drafts = tuple(rng.randrange(2) for _ in range(part.num_drafts))
        if begin and self.states is not None:
            assert self.states.of_slot(request.slot, begin) == tokens[:begin], (
                "states of another text"
            )
        for row in range(part.num_rows):
            text = (tokens + drafts)[: begin + row + 1]
            self._write(request, begin + row).model = text
            if self.states is not None:
                self.states.slots[request.slot][(begin + row) % len(self.states.slots[0])] = text
        request.placement.num_computed += known + accepted
        if part.emits:
            request.token_ids.extend([*drafts[:accepted], rng.randrange(2)])
        if request.drafts.kv is not None and rng.random() < 0.7:  # otherwise the drafter pauses
            self._draft(request)
        self.scheduler.register_full_pages(part)
        if len(request.token_ids) >= request.max_len or rng.random() < 0.02:
            self._finish(request)

    def _draft(self, request: Request) -> None:
        """Write the rows of known tokens, then the rows of drafts."""
        tokens = tuple(request.token_ids)
        final = min(request.num_computed, len(tokens) - self.lookahead)
        for position in range(request.drafts.num_final_kv, len(request.pages) * self.size):
            row = self._write(request, position)
            row.drafts = None
            if position < final:
                row.drafts = tokens[position + 1 : position + 1 + self.lookahead]
        self._draft_states(request, tokens, final)
        request.drafts.num_final_kv = max(final, request.drafts.num_final_kv)

    def _draft_states(self, request: Request, tokens: Tokens, final: int) -> None:
        """Continue from the last final state, then make up k rows."""
        if self.drafter_states is None:
            return
        begin, window = request.drafts.num_final_kv, self.drafter_states.slots[request.slot]
        if begin:
            found = self.drafter_states.of_slot(request.slot, begin)
            assert found == tokens[:begin], "states of another text"
        for position in range(begin, final + self.k):
            is_final = position < final
            window[position % len(window)] = tokens[: position + 1] if is_final else None


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_cache_rows_match_the_tokens(lookahead: int) -> None:
    hits, preemptions, spare, saved = {"naive": 0, "mtp": 0}, 0, 0, 0
    for seed in range(8):
        sim = Simulation(seed, lookahead)
        sim.live(400)
        preemptions += sim.num_preemptions
        spare += sim.num_spare
        saved += sim.num_saved_tokens
        hits = {method: count + sim.num_hits[method] for method, count in hits.items()}
    assert preemptions > 100 and hits["naive"] > 1000 and saved > 1000
    assert (hits["mtp"] > 1000) == (spare > 1000) == bool(lookahead)


@pytest.mark.parametrize("num_prefix_states", [1, 4, 24])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_states_match_the_tokens(lookahead: int, num_prefix_states: int) -> None:
    """States are kept, evicted and found while requests are preempted, end and reject drafts."""
    num_hits = num_preemptions = num_loads = 0
    for seed in range(3):
        sim = Simulation(seed, lookahead, num_prefix_states=num_prefix_states, k=5 + 2 * seed)
        sim.live(300)
        assert sim.states is not None and sim.states.num_keeps > 2 * num_prefix_states
        num_loads += sim.states.num_loads
        num_preemptions += sim.num_preemptions
        num_hits += sum(sim.num_hits.values())
    assert (
        num_preemptions > 30
        and num_loads > 30 * (num_prefix_states > 1)
        and num_hits >= 4 * num_loads
    )


@pytest.mark.parametrize("has_states", [True, False], ids=["both", "drafter only"])
@pytest.mark.parametrize("num_prefix_states", [1, 4, 24])
def test_drafter_states_match_the_tokens(num_prefix_states: int, has_states: bool) -> None:
    """The target may have states as well; requests pause drafting, or never draft."""
    num_keeps = num_preemptions = num_loads = 0
    for seed in range(3):
        settings = {
            "num_prefix_states": num_prefix_states,
            "has_states": has_states,
            "k": 3 + 2 * seed,
        }
        sim = Simulation(seed, 0, drafter_has_states=True, **settings)
        sim.live(300)
        assert sim.drafter_states is not None
        num_keeps += sim.drafter_states.num_keeps
        num_loads += sim.drafter_states.num_loads
        num_preemptions += sim.num_preemptions
    assert num_keeps > 6 * num_prefix_states and num_preemptions > 30
    assert num_loads > 10 * (num_prefix_states > 1)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_no_request_is_preempted_for_spare_draft_rows(lookahead: int) -> None:
    """Plans equal those of a simulation whose modules do not draft from their own drafts."""
    plans, spare = [], []
    for seed in range(4):
        for reserves in (True, False):
            sim = Simulation(seed, lookahead, caching=False, k=9)
            if not reserves:
                sim.scheduler.reserve_behind = lambda *_: None  # type: ignore[method-assign]
                sim._check = lambda part: None  # type: ignore[method-assign]
            for _ in range(300):
                if len(sim.scheduler.waiting) < 4 and sim.rng.random() < 0.5:
                    sim.arrive()
                sim.step()
            assert sim.num_preemptions > 20
            plans.append(sim.plans)
            spare.append(sim.num_spare)
        assert plans[-1] == plans[-2] and spare[-2] > spare[-1] == 0


def test_single_request_may_fill_the_pool() -> None:
    """Pages are reserved up to the end of the request's text and no further."""
    sim = Simulation(0, 1, num_pages=6, k=12)
    request = make_request(0, [1] * 5, "mtp", 19, lookahead=1, num_speculative_tokens=12)
    sim.scheduler.waiting.append(request)
    sim.rng.random = lambda: 0.5  # type: ignore[method-assign]
    while sim.scheduler.running or sim.scheduler.waiting:
        sim.step()
        assert len(request.pages) <= 6
    assert len(request.token_ids) == 24 and sim.num_preemptions == 0


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_pages_are_registered_once_the_tokens_after_them_are_known(lookahead: int) -> None:
    pool = PagePool(16, 4, enable_prefix_caching=True)
    scheduler = Scheduler(pool, EngineConfig(max_num_seqs=2, max_num_batched_tokens=64))
    own = {"num_speculative_tokens": 2, "lookahead": lookahead}

    def start(request: Request) -> None:
        scheduler.waiting.append(request)
        scheduler.schedule()

    first = make_request(0, range(8), "mtp", 8, **own)
    start(first)
    first.placement.num_computed = 8
    for length in range(9, 13):
        first.token_ids.append(length)
        first.placement.num_computed = length - 1
        scheduler.register_full_pages(Part(first, first.num_computed, 1, 0, emits=True))
        assert first.placement.num_registered_pages == 0  # the drafter paused
    first.drafts.num_final_kv = min(first.num_computed, len(first.token_ids) - lookahead)
    scheduler.register_full_pages(Part(first, first.num_computed, 1, 0, emits=True))
    assert first.placement.num_registered_pages == 2
    # Match with all tokens that follow, with fewer, and for a request without drafts.
    for count, hits in ((lookahead, 8), (lookahead - 1, 4)):
        second = make_request(1, first.token_ids[: 8 + count], "mtp", 8, **own)
        start(second)
        assert second.num_computed == second.drafts.num_final_kv == hits
        scheduler.finish(second)
    plain = make_request(1, [*first.token_ids[:8], 99], "naive", 8)
    start(plain)
    assert plain.num_computed == 8
    scheduler.finish(plain)


# ---- fair scheduling ----


def owned(arrival: int, *owners: str, tokens: int = 3, max_tokens: int = 12) -> Request:
    return replace(make_request(arrival, [1] * tokens, "naive", max_tokens), owners=owners)


def slots(num_slots: int, num_pages: int = 200) -> Scheduler:
    pool = PagePool(num_pages, 4, enable_prefix_caching=False)
    return Scheduler(pool, EngineConfig(max_num_seqs=num_slots, max_num_batched_tokens=64))


def run(scheduler: Scheduler, steps: int) -> int:
    """Run steps in which every planned request emits a token. Return the number of preemptions."""
    num_preemptions = 0
    for _ in range(steps):
        plan = scheduler.schedule()
        num_preemptions += len(plan.stopped)
        for part in plan.parts:
            request = part.request
            request.placement.num_computed += part.num_rows
            if part.emits:
                request.token_ids.append(1)
            if len(request.token_ids) == request.max_len:
                scheduler.finish(request)
    return num_preemptions


def owners_of(scheduler: Scheduler) -> list[tuple[str, ...]]:
    return sorted(request.owners for request in scheduler.running)


def test_calls_get_equal_numbers_of_slots() -> None:
    scheduler = slots(6)
    scheduler.waiting += [owned(i, "", "many") for i in range(20)]
    run(scheduler, 1)
    assert owners_of(scheduler) == [("", "many")] * 6
    scheduler.waiting += [owned(20 + i, "", f"one {i}") for i in range(3)]
    run(scheduler, 1)  # it starts at once, before any of the many ends
    assert owners_of(scheduler) == [("", "many")] * 3 + [("", f"one {i}") for i in range(3)]
    scheduler.waiting += [owned(23 + i, "", "few") for i in range(4)]
    run(scheduler, 1)
    assert owners_of(scheduler).count(("", "few")) == 1  # slots: 2, 1, 1, 1 and 1
    assert run(scheduler, 5) == 0, "a request lost its slot although slots are equally divided"
    run(scheduler, 200)
    assert not scheduler.running and not scheduler.waiting


def test_clients_get_equal_numbers_of_slots_whatever_their_calls() -> None:
    scheduler = slots(8)
    scheduler.waiting += [owned(i, "a", f"call {i}") for i in range(20)]
    run(scheduler, 1)
    scheduler.waiting += [owned(20 + i, "b", "call") for i in range(20)]
    run(scheduler, 1)
    assert [owners[0] for owners in owners_of(scheduler)] == ["a"] * 4 + ["b"] * 4
    # The calls of one client are equal, too, although another client holds as many slots.
    scheduler.waiting.append(owned(40, "b", "another"))
    run(scheduler, 1)
    assert owners_of(scheduler)[4:] == [("b", "another"), *[("b", "call")] * 3]


def test_call_with_most_pages_releases_them() -> None:
    """One call holds the pages. Another call's only request is neither starved nor preempted."""
    scheduler = slots(32, num_pages=16)
    scheduler.waiting += [owned(i, "", "many", tokens=7, max_tokens=20) for i in range(8)]
    run(scheduler, 2)
    held = [request for request in scheduler.running if request.owners == ("", "many")]
    assert len(held) > 4
    newcomer = owned(8, "", "one", tokens=7, max_tokens=20)
    scheduler.waiting.append(newcomer)
    run(scheduler, 22)
    assert len(newcomer.token_ids) == newcomer.max_len and not newcomer.placement.was_preempted
    run(scheduler, 400)
    assert not scheduler.running and not scheduler.waiting


def test_without_owners_requests_run_in_order_of_arrival() -> None:
    scheduler = slots(2)
    requests = [owned(i) for i in range(6)]
    scheduler.waiting += requests
    order = []
    while scheduler.waiting or scheduler.running:
        assert run(scheduler, 1) == 0
        order += [r.arrival for r in scheduler.running if r.arrival not in order]
    assert order == list(range(6))


@pytest.mark.parametrize(
    ("kind", "rows", "limit"), [("cpu", 512, ""), ("cpu", 1024, "128"), ("cuda", 1024, "")]
)
def test_log_reports_reduced_prompt_rows(
    kind: str, rows: int, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The default configuration logs nothing."""
    device: Any = SimpleNamespace(device=torch.device(kind))
    with caplog.at_level("INFO"):
        free_rows_of(EngineConfig(max_num_batched_tokens=rows), device)
    expected = f"prompts get {limit} of the {rows} rows of a step (max_num_batched_tokens)"
    assert caplog.messages == [expected] * bool(limit)
