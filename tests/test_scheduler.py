# SPDX-License-Identifier: Apache-2.0
"""The scheduler without a model: steps are made up, and memory says what a row came from."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pages import check_pages
from specops.api.config import EngineConfig
from specops.engine import SamplingParams, SpeculativeConfig
from specops.engine.machine import free_rows_of
from specops.engine.memory.kv_cache import DraftKv, PagePool
from specops.engine.models import CacheRoom, KeptStates
from specops.engine.plan import Part, Plan
from specops.engine.request import Request
from specops.engine.scheduling.scheduler import Scheduler
from specops.engine.sharing.prefixes import PrefixFinder

Tokens = tuple[int, ...]


@dataclass
class Row:
    """A slot of a page: what its keys and values were computed from."""

    model: Tokens | None = None  # all tokens up to and with its own
    drafts: Tokens | None = None  # the tokens behind it that modules drafted from


def make_request(
    arrival: int,
    tokens: Sequence[int],
    method: str,
    max_tokens: int,
    *,
    lookahead: int = 0,
    **own: Any,
) -> Request:
    request = Request(
        request_id=f"r{arrival}",
        arrival=arrival,
        params=SamplingParams(max_tokens=max_tokens),
        speculative=SpeculativeConfig.from_dict({"method": method, **own}),
        seed=0,
        choice_index=0,
        prompt_len=len(tokens),
        max_len=len(tokens) + max_tokens,
        token_ids=list(tokens),
        stream=None,  # type: ignore[arg-type]
    )
    if method == "mtp":
        request.draft_kv = DraftKv(method, lookahead, request.draft_stages[method])
    return request


def check_entries(states: KeptStates, num_kept: int) -> None:
    """Fails if an entry is lost, or two things at once."""
    waiting = [own.waiting[1] for own in states._running.values() if own.waiting is not None]
    entries = [*states._free, *states._entry_of.values(), *waiting]
    assert sorted(entries) == list(range(num_kept)), "an entry is lost, or has two owners"


class States:
    """States as a model keeps them: of a position, the text up to it."""

    def __init__(self, room: CacheRoom) -> None:
        self.room = room
        Texts = list[tuple[int, ...] | None]
        self.slots: list[Texts] = [[None] * (room.num_drafts + 1) for _ in range(room.num_slots)]
        self.kept: Texts = [None] * room.num_kept
        self.num_loads = self.num_kept = 0

    def of_slot(self, slot: int, num_tokens: int) -> tuple[int, ...] | None:
        return self.slots[slot][(num_tokens - 1) % len(self.slots[slot])]

    def keep_states(self, slot: int, num_tokens: int, entry: int) -> None:
        self.kept[entry] = text = self.of_slot(slot, num_tokens)
        assert text is not None and len(text) == num_tokens, "it is another position's"
        self.num_kept += 1

    def load_states(self, entry: int, num_tokens: int, slot: int) -> None:
        window = self.slots[slot]
        window[:] = [None] * len(window)
        window[(num_tokens - 1) % len(window)] = self.kept[entry]
        self.num_loads += 1


class World:
    """An engine's loop with random drafts, acceptance, rests of drafters, endings and aborts."""

    def __init__(
        self,
        seed: int,
        lookahead: int,
        *,
        num_pages: int = 24,
        caching: bool = True,
        k: int = 5,
        num_kept: int = 0,
        has_states: bool = True,
        drafter_has_states: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.lookahead, self.size, self.k = lookahead, 4, k
        self.pool = PagePool(num_pages, self.size, enable_prefix_caching=caching)
        self.leaf = 2 * self.size
        self.room = room = CacheRoom(num_pages, 4, 6, k, num_kept)
        self.states = States(room) if num_kept and has_states else None
        # Of its window, what the drafter makes up takes the last places.
        self.drafter_states = None
        if drafter_has_states:
            self.drafter_states = States(room._replace(num_drafts=2 * k))
        drafters = {} if self.drafter_states is None else {"mtp": self.drafter_states}
        self.scheduler = Scheduler(
            self.pool,
            EngineConfig(max_num_seqs=6, max_num_batched_tokens=24),
            KeptStates(self.pool, room, cast(Any, self.states), cast(Any, drafters)),
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
        # Prompts that share beginnings, some of them longer than what a request may still write.
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
        self.plans.append([(p.request_id, p.num_rows, p.num_drafts, p.emits) for p in plan])
        for request in self.scheduler.waiting:
            assert not (request.num_computed or request.num_final_draft_kv or request.pages)
        assert len(scheduled.stopped) <= 6
        self.num_preemptions += len(scheduled.stopped)
        for part in plan:
            self._check(part)
        for part in plan:
            self._execute(part)
        check_pages(self.pool)
        check_entries(self.scheduler.states, self.room.num_kept)

    def live(self, num_steps: int) -> None:
        """So many steps in which requests come and go, and those that the last ones need."""
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
            wanted = self.rng.randrange(self.k + 1) if request.draft_kv else 0
            request.num_drafts = max(min(wanted, request.draft_room, room), 0)
            room -= request.num_drafts

    def _check_slots(self, plan: Plan) -> None:
        """Who lost and who got a slot, told in order, leaves each slot with one request."""
        for request_id, slot in plan.stopped:
            assert self.slots.pop(slot).request_id == request_id
        for request_id, slot in plan.started:
            request = self.scheduler.at[slot]
            assert request.request_id == request_id
            assert request.slot not in self.slots
            self.slots[request.slot] = request
            assert request.num_final_draft_kv == request.num_computed
            self.num_hits[request.speculative.method] += request.num_computed
        assert {slot: one for slot, one in self.slots.items() if one.slot == slot} == {
            request.slot: request for request in self.scheduler.running
        }
        assert self.scheduler.at == self.slots

    def _check_prefixes(self, plan: Plan) -> None:
        """What is said to be shared is there, in the same pages; and nothing else is shared."""
        requests = [self.slots[part.slot] for part in plan.parts]
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
        """All that the request's step reads is there, and there is room for what it writes."""
        request = self.slots[part.slot]
        tokens = tuple(request.token_ids)
        assert part.pages is request.pages and part.num_tokens == len(tokens)
        given = tokens[part.begin : part.begin + part.num_rows - part.num_drafts]
        assert part.begin == request.num_computed and tuple(part.token_ids) == given
        for position in range(request.num_computed):
            assert self._row(request, position).model == tokens[: position + 1]
        needed = self.scheduler.num_pages_for(request.num_computed + part.num_rows)
        assert len(request.pages) >= needed
        if request.draft_kv is None:
            return
        for position in range(request.num_final_draft_kv):
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
        assert self.pool._refs[page] == 1 and page not in self.pool._place_of, "it is shared"
        return self.memory[page][position % self.size]

    def _execute(self, part: Part) -> None:
        request, rng = self.slots[part.slot], self.rng
        begin, known = request.num_computed, part.num_rows - part.num_drafts
        accepted = rng.randint(0, part.num_drafts)
        tokens = tuple(request.token_ids[: begin + known])
        drafts = tuple(rng.randrange(2) for _ in range(part.num_drafts))
        if begin and self.states is not None:
            assert self.states.of_slot(part.slot, begin) == tokens[:begin], "states are others'"
        for row in range(part.num_rows):
            text = (tokens + drafts)[: begin + row + 1]
            self._write(request, begin + row).model = text
            if self.states is not None:
                self.states.slots[part.slot][(begin + row) % len(self.states.slots[0])] = text
        request.num_computed += known + accepted
        if part.emits:
            request.token_ids += [*drafts[:accepted], rng.randrange(2)]
        if request.draft_kv is not None and rng.random() < 0.7:  # else the drafter has a rest
            self._draft(request)
        self.scheduler.register_full_pages(request, part)
        if len(request.token_ids) >= request.max_len or rng.random() < 0.02:
            self._finish(request)

    def _draft(self, request: Request) -> None:
        """Writes what the modules know, and behind it what they make up."""
        tokens = tuple(request.token_ids)
        final = min(request.num_computed, len(tokens) - self.lookahead)
        for position in range(request.num_final_draft_kv, len(request.pages) * self.size):
            row = self._write(request, position)
            row.drafts = None
            if position < final:
                row.drafts = tokens[position + 1 : position + 1 + self.lookahead]
        self._draft_states(request, tokens, final)
        request.num_final_draft_kv = max(final, request.num_final_draft_kv)

    def _draft_states(self, request: Request, tokens: Tokens, final: int) -> None:
        """Goes on from the state of what was final; so many rows behind that are made up."""
        if self.drafter_states is None:
            return
        begin, window = request.num_final_draft_kv, self.drafter_states.slots[request.slot]
        if begin:
            found = self.drafter_states.of_slot(request.slot, begin)
            assert found == tokens[:begin], "states are others'"
        for position in range(begin, final + self.k):
            is_final = position < final
            window[position % len(window)] = tokens[: position + 1] if is_final else None


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_rows_are_those_of_the_tokens(lookahead: int) -> None:
    hits, preemptions, spare, saved = {"naive": 0, "mtp": 0}, 0, 0, 0
    for seed in range(8):
        world = World(seed, lookahead)
        world.live(400)
        preemptions += world.num_preemptions
        spare += world.num_spare
        saved += world.num_saved_tokens
        hits = {method: count + world.num_hits[method] for method, count in hits.items()}
    assert preemptions > 100 and hits["naive"] > 1000 and saved > 1000
    assert (hits["mtp"] > 1000) == (spare > 1000) == bool(lookahead)


@pytest.mark.parametrize("num_kept", [1, 4, 24])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_states_are_those_of_the_tokens(lookahead: int, num_kept: int) -> None:
    """Kept, evicted and found, whoever is preempted, ends or rejects drafts in between."""
    num_hits = num_preemptions = num_loads = 0
    for seed in range(3):
        world = World(seed, lookahead, num_kept=num_kept, k=5 + 2 * seed)
        world.live(300)
        assert world.states is not None and world.states.num_kept > 2 * num_kept
        num_loads += world.states.num_loads
        num_preemptions += world.num_preemptions
        num_hits += sum(world.num_hits.values())
    assert num_preemptions > 30 and num_loads > 30 * (num_kept > 1) and num_hits >= 4 * num_loads


@pytest.mark.parametrize("has_states", [True, False], ids=["of both", "of the drafter"])
@pytest.mark.parametrize("num_kept", [1, 4, 24])
def test_states_of_drafters_are_those_of_the_tokens(num_kept: int, has_states: bool) -> None:
    """Beside the target's or without, and of requests with drafts alone; also behind rests."""
    num_kepts = num_preemptions = num_loads = 0
    for seed in range(3):
        settings = {"num_kept": num_kept, "has_states": has_states, "k": 3 + 2 * seed}
        world = World(seed, 0, drafter_has_states=True, **settings)
        world.live(300)
        assert world.drafter_states is not None
        num_kepts += world.drafter_states.num_kept
        num_loads += world.drafter_states.num_loads
        num_preemptions += world.num_preemptions
    assert num_kepts > 6 * num_kept and num_preemptions > 30
    assert num_loads > 10 * (num_kept > 1)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_nobody_is_preempted_for_rows_behind_the_text(lookahead: int) -> None:
    """The plans are those of a world in which no module drafts on from its own drafts."""
    plans, spare = [], []
    for seed in range(4):
        for reserves in (True, False):
            world = World(seed, lookahead, caching=False, k=9)
            if not reserves:
                world.scheduler.reserve_behind = lambda *_: None  # type: ignore[method-assign]
                world._check = lambda part: None  # type: ignore[method-assign]
            for _ in range(300):
                if len(world.scheduler.waiting) < 4 and world.rng.random() < 0.5:
                    world.arrive()
                world.step()
            assert world.num_preemptions > 20
            plans.append(world.plans)
            spare.append(world.num_spare)
        assert plans[-1] == plans[-2] and spare[-2] > spare[-1] == 0


def test_a_request_alone_may_fill_the_pool() -> None:
    """Its spare pages end with its text: there is room for all of it, and for no more."""
    world = World(0, 1, num_pages=6, k=12)
    request = make_request(0, [1] * 5, "mtp", 19, lookahead=1, num_speculative_tokens=12)
    world.scheduler.waiting.append(request)
    world.rng.random = lambda: 0.5  # type: ignore[method-assign]
    while world.scheduler.running or world.scheduler.waiting:
        world.step()
        assert len(request.pages) <= 6
    assert len(request.token_ids) == 24 and world.num_preemptions == 0


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_pages_are_registered_when_what_follows_them_is_known(lookahead: int) -> None:
    pool = PagePool(16, 4, enable_prefix_caching=True)
    scheduler = Scheduler(pool, EngineConfig(max_num_seqs=2, max_num_batched_tokens=64))
    own = {"num_speculative_tokens": 2, "lookahead": lookahead}

    def start(request: Request) -> None:
        scheduler.waiting.append(request)
        scheduler.schedule()

    first = make_request(0, range(8), "mtp", 8, **own)
    start(first)
    first.num_computed = 8
    for length in range(9, 13):
        first.token_ids.append(length)
        first.num_computed = length - 1
        scheduler.register_full_pages(first, scheduler.part(first, 1, emits=True))
        assert first.num_registered_pages == 0  # the drafter had a rest
    first.num_final_draft_kv = min(first.num_computed, len(first.token_ids) - lookahead)
    scheduler.register_full_pages(first, scheduler.part(first, 1, emits=True))
    assert first.num_registered_pages == 2
    # With all that follows, with less, and by a request that does not care.
    for count, hits in ((lookahead, 8), (lookahead - 1, 4)):
        second = make_request(1, first.token_ids[: 8 + count], "mtp", 8, **own)
        start(second)
        assert second.num_computed == second.num_final_draft_kv == hits
        scheduler.finish(second)
    plain = make_request(1, [*first.token_ids[:8], 99], "naive", 8)
    start(plain)
    assert plain.num_computed == 8
    scheduler.finish(plain)


# ---- shares ----


def owned(arrival: int, *owners: str, tokens: int = 3, max_tokens: int = 12) -> Request:
    request = make_request(arrival, [1] * tokens, "naive", max_tokens)
    request.owners = owners
    return request


def slots(num_slots: int, num_pages: int = 200) -> Scheduler:
    pool = PagePool(num_pages, 4, enable_prefix_caching=False)
    return Scheduler(pool, EngineConfig(max_num_seqs=num_slots, max_num_batched_tokens=64))


def run(scheduler: Scheduler, steps: int) -> int:
    """Steps in which every planned request emits a token; returns how many lost their slots."""
    num_preemptions = 0
    for _ in range(steps):
        plan = scheduler.schedule()
        num_preemptions += len(plan.stopped)
        for part in plan.parts:
            request = scheduler.at[part.slot]
            request.num_computed += part.num_rows
            if part.emits:
                request.token_ids.append(1)
            if len(request.token_ids) == request.max_len:
                scheduler.finish(request)
    return num_preemptions


def owners_of(scheduler: Scheduler) -> list[tuple[str, ...]]:
    return sorted(request.owners for request in scheduler.running)


def test_calls_get_equal_shares() -> None:
    scheduler = slots(6)
    scheduler.waiting += [owned(i, "", "many") for i in range(20)]
    run(scheduler, 1)
    assert owners_of(scheduler) == [("", "many")] * 6
    scheduler.waiting += [owned(20 + i, "", f"one {i}") for i in range(3)]
    run(scheduler, 1)  # at once, and not when one of the many is done
    assert owners_of(scheduler) == [("", "many")] * 3 + [("", f"one {i}") for i in range(3)]
    scheduler.waiting += [owned(23 + i, "", "few") for i in range(4)]
    run(scheduler, 1)
    assert owners_of(scheduler).count(("", "few")) == 1  # 2, 1, 1, 1 and 1
    assert run(scheduler, 5) == 0, "nobody takes turns"
    run(scheduler, 200)
    assert not scheduler.running and not scheduler.waiting


def test_clients_get_equal_shares_whatever_their_calls() -> None:
    scheduler = slots(8)
    scheduler.waiting += [owned(i, "a", f"call {i}") for i in range(20)]
    run(scheduler, 1)
    scheduler.waiting += [owned(20 + i, "b", "call") for i in range(20)]
    run(scheduler, 1)
    assert [owners[0] for owners in owners_of(scheduler)] == ["a"] * 4 + ["b"] * 4
    # Within a client its calls are equal, too, though another client has as much.
    scheduler.waiting.append(owned(40, "b", "another"))
    run(scheduler, 1)
    assert owners_of(scheduler)[4:] == [("b", "another"), *[("b", "call")] * 3]


def test_who_has_most_gives_pages() -> None:
    """One call holds the pages; another one's only request is neither starved nor driven out."""
    scheduler = slots(32, num_pages=16)
    scheduler.waiting += [owned(i, "", "many", tokens=7, max_tokens=20) for i in range(8)]
    run(scheduler, 2)
    held = [request for request in scheduler.running if request.owners == ("", "many")]
    assert len(held) > 4
    newcomer = owned(8, "", "one", tokens=7, max_tokens=20)
    scheduler.waiting.append(newcomer)
    run(scheduler, 22)
    assert len(newcomer.token_ids) == newcomer.max_len and not newcomer.was_preempted
    run(scheduler, 400)
    assert not scheduler.running and not scheduler.waiting


def test_without_owners_the_first_to_come_is_the_first_served() -> None:
    scheduler = slots(2)
    requests = [owned(i) for i in range(6)]
    scheduler.waiting += requests
    order = []
    while scheduler.waiting or scheduler.running:
        assert run(scheduler, 1) == 0
        order += [r.arrival for r in scheduler.running if r.arrival not in order]
    assert order == list(range(6))


@pytest.mark.parametrize(
    ("kind", "rows", "told"), [("cpu", 512, ""), ("cpu", 1024, "128"), ("cuda", 1024, "")]
)
def test_the_log_says_where_prompts_get_fewer_rows(
    kind: str, rows: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The default asks for nothing by name."""
    device: Any = SimpleNamespace(device=torch.device(kind))
    with caplog.at_level("INFO"):
        free_rows_of(EngineConfig(max_num_batched_tokens=rows), device)
    wanted = f"of the {rows} rows of a step (max_num_batched_tokens) prompts get {told}"
    assert caplog.messages == [wanted] * bool(told)
