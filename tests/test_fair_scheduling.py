# SPDX-License-Identifier: Apache-2.0
"""Fair scheduling: clients share the rows of a step, and a pause changes no bit.

Rows are counted, not seconds.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from row_costs import set_row_cost
from specops.api.config import EngineConfig
from specops.api.outputs import PromptLogprobs
from specops.engine import (
    Completion,
    Engine,
    SamplingParams,
    SpeculativeConfig,
    step_costs,
)
from specops.engine.memory.kv_cache import PagePool
from specops.engine.plan import Part, Plan
from specops.engine.request import Placement, Request
from specops.engine.scheduling.scheduler import Scheduler
from specops.engine.sharing.fair_scheduling import Demand, select_decoding
from specops.engine.sharing.row_costs import RowCosts
from test_drafter_protocol import make, plain
from test_lossless import NUM_TOKENS, bits
from test_scheduler import make_request

FREE = 4


def owned(arrival: int, *owners: str, tokens: int = 3, max_tokens: int = 500) -> Request:
    request = make_request(arrival, [1] * tokens, "naive", max_tokens)
    name = f"{owners[0] if owners else ''}-{arrival}"
    return replace(request, owners=owners, request_id=name)


def demands(*given: tuple[int, Any]) -> list[Demand]:
    """Return demands with these rows and owners, one request each."""
    return [Demand(owned(i, *who), rows) for i, (rows, who) in enumerate(given)]


def test_client_with_only_a_prompt_counts() -> None:
    many = demands(*[(1, ("a", "many"))] * 32)

    def chosen(*prompts: tuple[int, Any]) -> int | None:
        found = select_decoding(many, 512, FREE, demands(*prompts))
        return None if found is None else len(found)

    assert chosen((7, ("b", "one"))) == 7 + FREE
    assert chosen((7, ("b", "one")), (9, ("c", "one"))) == 7 + 2 * FREE
    assert chosen((300, ("b", "one"))) is None, "such a step is long in any case"
    assert chosen((7, ("a", "one"))) == 7 + FREE, "calls of a single client count, too"
    assert chosen((7, ("a", "many"))) is None
    beside = demands((1, ("b", "one")), *[(1, ("a", "many"))] * 32)
    found = select_decoding(beside, 512, FREE, demands((7, ("b", "two"))))
    assert found is not None and len(found) == 2 + FREE, (
        "a decoding client counts with its decoding rows"
    )


def rows_by(given: list[Demand], free_rows: int = FREE, level: int = 0) -> dict[str, int]:
    """Return the number of rows that each owner gets, by its name on a level."""
    chosen = select_decoding(given, 512, free_rows)
    assert chosen is not None
    rows: Counter[str] = Counter()
    for one in given:
        if one.request in chosen:
            rows[one.request.owners[level]] += one.rows
    return dict(rows)


# ---- division of rows ----


def test_single_client_gets_all_rows() -> None:
    many = [(5, ("a", "many"))] * 32
    assert select_decoding(demands(*many), 512, FREE) is None
    assert select_decoding(demands(*[(5, ())] * 32), 512, FREE) is None
    assert select_decoding([], 512, FREE) is None
    # Equal clients, and clients that fit into the free rows of a step, are not limited either.
    assert (
        select_decoding(demands(*[(5, ("a", f"call {i}")) for i in range(32)]), 512, FREE) is None
    )
    assert select_decoding(demands((1, ("a", "1")), (5, ("b", "1"))), 512, FREE) is None
    assert select_decoding(demands(*many, (1, ("a", "one"))), 512, free_rows=160) is None


def test_owners_share_as_many_rows_as_the_owner_with_the_fewest() -> None:
    many = [(5, ("a", "many"))] * 32
    assert rows_by(demands(*many, (3, ("b", "one")))) == {"a": 5, "b": 3}
    assert rows_by(demands(*many, (6, ("b", "one")))) == {"a": 10, "b": 6}
    calls = rows_by(demands(*many, (6, ("a", "one"))), level=1)
    assert calls == {"many": 10, "one": 6}, "rows must be divided among calls, too"
    three = demands(*many, (1, ("b", "one")), *[(1, ("c", "some"))] * 8)
    assert rows_by(three) == {"a": 5, "b": 1, "c": 5}  # 3 * 1 + 2 * 4 rows


def test_rows_are_divided_among_clients_and_then_calls() -> None:
    """A client's rows are divided among its calls, however many requests they have."""
    given = [(2, ("a", "many"))] * 30 + [(2, ("a", "few"))] * 2 + [(2, ("b", "one"))] * 6
    requests = demands(*given)
    # Without b, client a would have 2 * 4 + 4 rows, as many as b requests.
    assert rows_by(requests) == {"a": 12, "b": 12}
    calls = rows_by(requests, level=1)
    assert calls == {"many": 8, "few": 4, "one": 12}


def test_request_larger_than_its_share_runs_at_times() -> None:
    given = demands((1, ("b", "one")), (17, ("a", "wide")), (1, ("a", "narrow")))
    chosen = Counter[int]()
    for step in range(1, 21):
        granted = select_decoding(given, 512, FREE)
        assert granted is not None
        assert given[0].request in granted
        for request in granted:
            request.placement.last_step = step
            chosen[request.arrival] += 1
    assert chosen == {0: 20, 1: 10, 2: 10}


def test_random_requests_are_treated_fairly() -> None:
    """No step is too long, no request gets more rows than it needs, and no request starves."""
    draw, narrow = random.Random(0), 0
    for _ in range(200):
        clients = draw.randrange(1, 5)
        given = [
            Demand(
                owned(i, f"client {draw.randrange(clients)}", f"call {draw.randrange(3)}"),
                draw.choice([1, 1, 2, 5, 17, 200]),
            )
            for i in range(draw.randrange(1, 25))
        ]
        waited = Counter[int]()
        for step in range(1, 60):
            granted = select_decoding(given, 256, FREE)
            got = {
                one.request: one.rows for one in given if granted is None or one.request in granted
            }
            if granted is not None:
                narrow += 1
                owners = Counter(request.owners[0] for request in got)
                assert {one.request.owners[0] for one in given} == set(owners)
                ends = {one.request.owners for one in given}
                assert sum(got.values()) <= 256 or len(got) <= len(ends)
            for one in given:
                waited[one.request.arrival] += 1
                if one.request in got:
                    one.request.placement.last_step, waited[one.request.arrival] = step, 0
            assert max(waited.values()) <= 40
    assert narrow > 1000


# ---- steps ----


def slots(num_slots: int, free_rows: int | None = FREE, costs: RowCosts | None = None) -> Scheduler:
    pool = PagePool(2000, 4, enable_prefix_caching=False)
    config = EngineConfig(max_num_seqs=num_slots, max_num_batched_tokens=256)
    return Scheduler(pool, config, free_rows=free_rows, costs=costs)


def run(scheduler: Scheduler, steps: int, drafts: int = 0) -> list[Plan]:
    """Run steps of requests that always have `drafts` drafts, none of which is accepted."""
    plans = []
    for _ in range(steps):
        decoding, room = scheduler.decoding(lambda request: drafts)
        assert len(decoding) * drafts <= room
        for request in decoding:
            request.drafts.num_selected = drafts
        plans.append(scheduler.schedule())
        for part in plans[-1].parts:
            request = part.request
            request.placement.num_computed += part.num_rows - part.num_drafts
            if part.emits:
                request.token_ids.append(1)
            if len(request.token_ids) == request.max_len:
                scheduler.finish(request)
    return plans


def rows_of(plan: Plan, client: str) -> int:
    return sum(part.num_rows for part in plan.parts if client_of(part) == client)


def client_of(part: Part) -> str:
    return part.request.request_id.rpartition("-")[0]


@pytest.mark.parametrize("drafts", [0, 4])
def test_greedy_client_cannot_make_steps_long(drafts: int) -> None:
    """Once it decodes, a client with one request gets about half of the rows."""
    scheduler = slots(32)
    scheduler.waiting += [owned(i, "greedy", "many") for i in range(60)]
    alone = run(scheduler, 10, drafts)
    assert {rows_of(plan, "greedy") for plan in alone[1:]} == {32 * (1 + drafts)}
    assert not any(plan.paused for plan in alone)
    scheduler.waiting.append(owned(60, "normal", "one", tokens=8, max_tokens=20))
    beside = run(scheduler, 20, drafts)
    assert rows_of(beside[0], "normal") == 8
    for plan in beside[1:]:
        assert rows_of(plan, "normal") == 1 + drafts
        assert 0 < rows_of(plan, "greedy") <= 1 + drafts + FREE
        assert len(plan.paused) + len(plan.parts) == 32
    assert sum(len(plan.stopped) for plan in beside) == 1, (
        "one request must be preempted for the slot"
    )
    after = run(scheduler, 3, drafts)
    assert not after[-1].paused and rows_of(after[-1], "greedy") == 32 * (1 + drafts)


def test_paused_requests_alternate() -> None:
    scheduler = slots(32)
    scheduler.waiting += [owned(i, "greedy", "many", tokens=1) for i in range(31)]
    scheduler.waiting.append(owned(31, "normal", "one", tokens=1))
    run(scheduler, 20)
    assert len(scheduler.running) == 32
    before = {request: len(request.token_ids) for request in scheduler.running}
    run(scheduler, 62)  # five of 31 per step
    grown = [len(one.token_ids) - count for one, count in before.items()]
    assert grown.pop() == 62 and sum(grown) == 310
    assert min(grown) >= 62 // 7, "a request waited for more than seven steps"


def test_prompts_beside_other_clients_have_bounded_rows() -> None:
    scheduler = slots(4)
    scheduler.waiting.append(owned(0, "normal", "one"))
    run(scheduler, 2)
    scheduler.waiting.append(owned(1, "other", "one", tokens=300))
    plans = run(scheduler, 61)
    # The prompts take as much time as a step with only the other client's row.
    assert [rows_of(plan, "other") for plan in plans] == [1 + FREE] * 60 + [1]
    assert [rows_of(plan, "normal") for plan in plans] == [1] * 61


@pytest.mark.parametrize("drafts", [0, 4, 20])
@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize(
    "costs",
    [
        RowCosts(step=4, row=1, scored_row=0.5),
        RowCosts(step=0.3, row=0.08, scored_row=0.3),
        RowCosts(step=1000, row=1, scored_row=1),
    ],
)
def test_prompts_take_as_much_time_as_decoding_beside_them(
    drafts: int, is_scored: bool, costs: RowCosts
) -> None:
    """Prompts of another client at most double the time of a decoding client's step."""
    scheduler = slots(4, costs=costs)
    scheduler.waiting.append(owned(0, "normal", "one"))
    run(scheduler, 2)
    for i in range(1, 4):
        prompt = owned(i, "greedy", f"call {i}", tokens=900, max_tokens=1)
        scored = PromptLogprobs(prompt.token_ids, 100) if is_scored else None
        prompt = replace(prompt, prompt_logprobs=scored)
        scheduler.waiting.append(prompt)
    row = costs.row + is_scored * costs.scored_row
    rows = []
    for plan in run(scheduler, 20, drafts):
        decoding = costs.of_step(rows_of(plan, "normal"))
        rows.append(rows_of(plan, "greedy"))
        assert rows[-1] * row <= decoding + 1e-6
        assert rows[-1] * row <= 4 * FREE * costs.row
        assert rows_of(plan, "normal") == 1 + drafts, "decoding waited for a prompt"
    most = min(decoding, 4 * FREE * costs.row)
    assert min(rows) == max(rows) == int(most / row + 1e-6) > 0, "prompts must get their full share"
    # Without other clients, prompts get all rows that fit the cost limit of a step.
    alone = slots(4, costs=costs)
    alone.waiting.append(replace(prompt, placement=Placement()))
    (plan,) = run(alone, 1)
    assert rows_of(plan, "greedy") == int(32 * FREE * costs.row / row + 1e-6)


def test_scored_rows_cost_more_until_they_are_scored() -> None:
    prompt = owned(0, "a", "one", tokens=3)
    scored = PromptLogprobs(prompt.token_ids, 0)
    prompt = replace(prompt, prompt_logprobs=scored)
    costs = RowCosts(step=4, row=1, scored_row=0.5)
    assert costs.of_prompt_row(prompt) == 1.5
    scored.num_scored = 2
    assert costs.of_prompt_row(prompt) == 1


def test_prompts_beside_calls_of_the_same_client_get_all_prompt_rows() -> None:
    scheduler = slots(4)
    scheduler.waiting.append(owned(0, "normal", "one"))
    run(scheduler, 2)
    scheduler.waiting.append(owned(1, "normal", "two", tokens=300))
    rows = [rows_of(plan, "normal") for plan in run(scheduler, 4)]
    assert rows == [1 + 32 * FREE, 1 + 32 * FREE, 1 + 300 - 64 * FREE, 2]


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    """Clients with waiting prompts get equal parts of a step.

    Rows that a client does not need go to the others.
    """
    scheduler = slots(8)
    scheduler.waiting += [owned(i, "greedy", f"call {i}", tokens=400) for i in range(4)]
    (alone,) = run(scheduler, 1)
    assert rows_of(alone, "greedy") == 32 * FREE, "newcomers must not wait for a longer step"
    scheduler.waiting += [owned(4, "normal", "one", tokens=7), owned(5, "third", "one", tokens=30)]
    plans = run(scheduler, 2)
    expected = {"normal": 7, "third": 30, "greedy": 4 * FREE}
    assert {client: rows_of(plans[0], client) for client in expected} == expected
    # Then the other two clients decode.
    assert {client: rows_of(plans[1], client) for client in expected} == {
        "normal": 1,
        "third": 1,
        "greedy": 2 + FREE,
    }


def test_long_prompts_of_several_clients_share_the_prompt_rows() -> None:
    scheduler = slots(8)
    scheduler.waiting += [owned(i, client, "one", tokens=400) for i, client in enumerate("ab")]
    (plan,) = run(scheduler, 1)
    assert [rows_of(plan, client) for client in "ab"] == [16 * FREE, 16 * FREE]
    # Both prompts end in one step: neither is postponed for the other.
    both = slots(8)
    both.waiting += [owned(i, client, "one", tokens=40) for i, client in enumerate("ab")]
    (plan,) = run(both, 1)
    assert [rows_of(plan, client) for client in "ab"] == [40, 40]


def test_greedy_client_cannot_make_the_first_step_long() -> None:
    """A client with only a prompt of eight tokens limits the rows of the others."""
    scheduler = slots(32)
    scheduler.waiting += [owned(i, "greedy", "many") for i in range(60)]
    run(scheduler, 5)
    scheduler.waiting.append(owned(60, "normal", "one", tokens=8))
    (plan,) = run(scheduler, 1)
    assert rows_of(plan, "normal") == 8
    assert rows_of(plan, "greedy") == 8 + FREE
    assert len(plan.paused) == 32 - 1 - (8 + FREE)
    # No request pauses for one that gets no slot, since all clients have equally many slots.
    full = slots(2)
    full.waiting += [owned(i, client, "one") for i, client in enumerate("ab")]
    run(full, 2)
    full.waiting.append(owned(2, "a", "two"))
    assert [len(plan.parts) for plan in run(full, 5)] == [2] * 5


def test_newcomers_of_other_clients_start_a_few_at_a_time() -> None:
    scheduler = slots(32)
    scheduler.waiting.append(owned(0, "normal", "one"))
    run(scheduler, 2)
    scheduler.waiting += [owned(i, "greedy", "many") for i in range(1, 60)]
    plans = run(scheduler, 3)
    assert [len(plan.started) for plan in plans] == [2, 2, 1]  # prompts of three tokens
    assert all(rows_of(plan, "greedy") <= 4 * FREE + FREE + 1 for plan in plans)


def test_newcomer_starts_beside_a_request_with_many_drafts() -> None:
    """The other client's drafts exceed the rows of a step, and the newcomer still gets a row."""
    scheduler = slots(4)
    scheduler.waiting.append(owned(0, "wide", "one"))
    run(scheduler, 2, drafts=16)
    scheduler.waiting.append(owned(1, "normal", "one", tokens=1))
    (plan,) = run(scheduler, 1, drafts=16)
    assert {client_of(part): part.num_rows for part in plan.parts} == {
        "wide": 17,
        "normal": 1,
    }


def test_many_drafts_are_cut_beside_other_clients() -> None:
    """An audit verifies 63 drafts a step alone, and no more rows than a prompt beside others."""
    scheduler = slots(8)
    scheduler.waiting.append(owned(0, "audit", "one"))
    assert [rows_of(plan, "audit") for plan in run(scheduler, 2, drafts=63)] == [3, 64]
    scheduler.waiting += [owned(i, "normal", "one", tokens=1) for i in range(1, 4)]
    run(scheduler, 1)
    for plan in run(scheduler, 6, drafts=63):
        assert rows_of(plan, "audit") in (0, 4 * FREE)
        assert all(part.num_rows <= 4 * FREE for part in plan.parts)


def test_no_request_pauses_without_free_rows() -> None:
    scheduler = slots(32, free_rows=None)
    scheduler.waiting += [owned(i, "greedy", "many", tokens=1) for i in range(31)]
    scheduler.waiting.append(owned(31, "normal", "one", tokens=1))
    assert all(len(plan.parts) == 32 and not plan.paused for plan in run(scheduler, 5))


# ---- tokens ----

METHODS: dict[str, dict[str, Any]] = {
    "naive": {},
    "ngram": {"num_speculative_tokens": 4, "min_ngram_size": 1},
    "suffix": {"num_speculative_tokens": 6},
    "mtp": {"num_speculative_tokens": 3},
    "hybrid": {"method": "mtp+suffix", "num_speculative_tokens": 4},
    "adaptive": {"method": "mtp", "num_speculative_tokens": 4, "adaptive_verification": True},
}


def engine_of(name: str, **config: Any) -> Engine:
    own = METHODS.get(name, {})
    # If measured times selected drafts, the number of paused steps would depend on them.
    fixed = {"method": name, "adaptive_verification": False}
    speculative = SpeculativeConfig.from_dict({**fixed, **own})
    engine = make(speculative, max_num_seqs=16, **config)
    if speculative.adaptive_verification:
        set_row_cost(engine)
    return engine


def complete_owned(engine: Engine, count: int, **own: Any) -> list[Completion]:
    """Complete requests of one client, and a few of another client one after the other."""
    texts, each, _ = plain()
    names = [""] * count
    mine = [i for i in range(count) if i % 6 == 0]
    others = [i for i in range(count) if i % 6]
    for i in others:
        call = f"call {i % 2}"
        names[i] = engine.add_request(texts[i], each[i], owners=("greedy", call), **own)
    done: dict[int, Completion] = {}
    current: int | None = None
    while engine.has_unfinished() or mine:
        if current is None and mine:
            current = mine.pop(0)
            names[current] = engine.add_request(
                texts[current], each[current], owners=("normal", "one"), **own
            )
        for output in engine.step():
            if output.finish_reason is not None:
                i = names.index(output.request_id)
                done[i] = engine.completion(output.request_id)
                current = None if i == current else current
    return [done[i] for i in range(count)]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "limits",
    [{}, {"num_pages": 130, "max_model_len": 1024, "max_num_batched_tokens": 64}],
    ids=["wide", "narrow"],
)
@pytest.mark.fast("narrow-hybrid")
def test_paused_requests_continue_with_the_same_bits(
    name: str, limits: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, _, expected = plain()
    engine = engine_of(name, **limits)
    done = complete_owned(engine, 24)
    assert [i for i, one in enumerate(done) if bits(one) != bits(expected[i])] == []
    # Few requests of the narrow engine decode at once, and without drafts their rows are free.
    assert engine.stats.num_paused_steps > 0 or (limits and name == "naive")
    assert engine.num_free_pages == engine.num_pages
    if name != "naive":
        assert engine.stats.speculative.num_accepted_tokens > 100


@pytest.mark.parametrize("name", ["ngram", "suffix", "mtp"])
@pytest.mark.fast("suffix")
def test_drafts_outlast_a_pause(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that were due before a pause are verified after it."""
    engine = engine_of(name)
    had: dict[Request, list[int]] = {}
    verified = 0
    collect = engine._runner.collect

    def watched(plan: Plan) -> Any:
        nonlocal verified
        for part in plan.parts:
            request = part.request
            if request in had:
                drafts = engine._drafting.drafts_of(request.slot, part.num_drafts).tolist()
                assert drafts == had.pop(request)
                verified += bool(drafts)
        emitted = collect(plan)
        for request in plan.paused:
            count = engine._drafting.num_proposed(request)
            drafts = engine._drafting.proposals.token_ids[request.slot, :count].tolist()
            assert had.setdefault(request, drafts) == drafts
        return emitted

    monkeypatch.setattr(engine._runner, "collect", watched)
    complete_owned(engine, 24)
    assert verified > 30


@pytest.mark.parametrize("strategy", ["rejection", "block"])
@pytest.mark.fast("rejection")
def test_sampled_drafts_are_dropped_after_a_pause(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` has the probabilities of one step's drafts only, so a paused request drafts anew."""
    engine = engine_of("mtp")
    was_paused, dropped, num_drafts = set[Request](), 0, 0
    launch = engine._runner.launch

    def watched(plan: Plan, **options: Any) -> None:
        nonlocal dropped, num_drafts
        for part in plan.parts:
            request = part.request
            num_drafts += part.num_drafts
            if request in was_paused and request.params.temperature > 0:
                was_paused.discard(request)
                assert part.num_drafts == 0
                dropped += 1
        was_paused.update(plan.paused)
        launch(plan, **options)

    monkeypatch.setattr(engine._runner, "launch", watched)
    done = complete_owned(engine, 24, speculative_config={"verify_strategy": strategy})
    assert dropped > 5 and num_drafts > 100
    assert all(len(one.token_ids) == NUM_TOKENS for one in done)


def test_requests_of_a_single_client_are_never_paused() -> None:
    engine = engine_of("ngram")
    for i in range(16):
        engine.add_request([1, 2, 3 + i], SamplingParams(max_tokens=8), owners=("a", "call"))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats.num_paused_steps == 0


# ---- costs ----


def test_costs_of_rows_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps advance the clock. After the measurement, the engine has no trace of it."""
    engine = engine_of("ngram")
    clock, kinds = [0.0], list[tuple[int, bool, bool]]()
    launch = engine._runner.launch

    def launching(plan: Plan, **options: Any) -> None:
        (part,) = plan.parts
        is_scored = part.prompt_rows is not None
        kinds.append((part.num_rows, part.emits, is_scored))
        # The first run of each kind and disturbed runs do not count.
        seen = kinds.count(kinds[-1])
        time = 4.0 if part.emits else 2.0 + 0.5 * part.num_rows + 0.25 * part.num_rows * is_scored
        clock[0] += time * (9 if seen == 1 else 1 if seen == 3 else 1.5) / 1000
        launch(plan, **options)

    monkeypatch.setattr(engine._runner, "launch", launching)
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: clock[0])
    engine.measure_row_costs()
    rows = 4 * FREE
    kinds_of_a_round = [(1, True, False), (1, False, False), (rows, False, False)]
    assert kinds[:4] == [*kinds_of_a_round, (rows, False, True)]
    assert len(kinds) == 4 * (1 + step_costs._ROW_ROUNDS)
    costs = engine._scheduler.costs
    found = costs.step, costs.row, costs.scored_row
    assert found == pytest.approx((3.5e-3, 0.5e-3, 0.25e-3))
    assert engine.num_free_pages == engine.num_pages and engine.stats.num_steps == 0
    monkeypatch.undo()
    texts, each, expected = plain()
    found_tokens = engine.generate(texts[:2], each[:2])
    assert [bits(one) for one in found_tokens] == [bits(one) for one in expected[:2]]
