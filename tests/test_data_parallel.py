# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Several engines behind one door: the answers of one, and what happens when one of them dies."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from fake_engine import FakeEngine
from msgspec import structs
from server_pairs import ServerProcess, bodies, choices_of, options, servers, wait_until_idle
from serving import Served, wait_for
from specops.cli.roles import setups
from specops.cli.serve import _parser, _read
from specops.engine import SamplingParams
from specops.engine.outputs import EngineStats, SpeculativeStats
from specops.service.client import EngineClient
from specops.service.data_parallel import DataParallelClient, Prefixes
from specops.service.messages import Abort, Batch, Command, End, Failed, Output, Submit
from specops.service.snapshot import capabilities_of, status_of
from specops.service.wire import Peer


@pytest.fixture(scope="module")
def server(mtp_model: Path) -> Iterator[ServerProcess]:
    with servers(options(mtp_model, "--data-parallel-size", "2")) as (started,):
        yield started


def statuses_and_choices(url: str, asked: list[dict[str, Any]], at_once: int = 8) -> list[Any]:
    def one(body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        return answer.status_code, answer.json().get("choices")

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, asked))


@pytest.mark.fast("20")
@pytest.mark.parametrize("count", [20, 500])
@pytest.mark.ci
def test_answers_do_not_depend_on_the_engine(
    server: ServerProcess, reference_server: Served, count: int
) -> None:
    """Both engines work, and a prompt that comes again goes where its pages are."""
    asked = bodies(count, seed=count + 4)
    expected = [(200, choices) for choices in choices_of(reference_server, asked)]
    assert len(server.engines) == 2
    assert statuses_and_choices(server.url, asked) == expected
    hits = server.gauge("prefix_cache_hits_total")
    # One after the other: no engine is then too busy for a prompt whose pages it has.
    assert statuses_and_choices(server.url, asked[-20:], at_once=1) == expected[-20:]
    pages = sum((len(body["prompt"]) - 2) // 16 for body in asked[-20:])
    assert server.gauge("prefix_cache_hits_total") - hits >= 16 * pages * 0.8
    wait_until_idle(server)


@pytest.mark.ci
def test_an_engine_that_dies_ends_its_own_requests_alone(
    server: ServerProcess, reference_server: Served
) -> None:
    """Each engine has a stream of hundreds of steps when one of them dies."""
    asked = [{**body, "max_tokens": 40, "ignore_eos": True} for body in bodies(40, seed=8)]
    right = [(200, choices) for choices in choices_of(reference_server, asked)]
    victim = server.engines[1]
    long = {"n": 64, "max_tokens": 200, "ignore_eos": True, "stream": True}
    long["speculative_config"] = {"method": "naive"}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        streams = []
        for prompt in ([5] * 20, [6] * 20):
            asking = httpx.stream(
                "POST",
                f"{server.url}/v1/completions",
                json={**long, "prompt": prompt},
                timeout=120,
            )
            lines = stack.enter_context(asking).iter_lines()
            assert "error" not in json.loads(next(lines)[6:])
            streams.append(lines)
        os.kill(victim, signal.SIGKILL)
        rest = [[line[6:] for line in lines if line] for lines in pool.map(list, streams)]
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert [events.pop() for events in rest] == ["[DONE]"] * 2
    last = [json.loads(events[-1]) for events in rest]
    (finished,) = [one for one in last if "error" not in one]
    assert finished["choices"][0]["finish_reason"] == "length"
    assert statuses_and_choices(server.url, asked) == right
    wait_for(lambda: len(server.engines) == 2 and victim not in server.engines, 240)
    assert statuses_and_choices(server.url, asked) == right


# ---- where jobs go ----


class FakeClient(EngineClient):
    """An engine that does nothing, and notes what it is sent."""

    def __init__(self) -> None:
        engine: Any = FakeEngine()
        super().__init__(
            structs.replace(capabilities_of(engine, contract={"digest": "x"}), page_size=4),
            status_of(engine),
        )
        self.sent: list[Command] = []

    def _send(self, command: Command) -> None:
        self.sent.append(command)

    @property
    def jobs(self) -> list[int]:
        return [one.job for one in self.sent if isinstance(one, Submit)]


class Door:
    """Two such engines behind one door."""

    def __init__(self) -> None:
        self.engines = FakeClient(), FakeClient()
        self.client = DataParallelClient(self.engines, seed=3)
        self.batches: list[Batch] = []
        asyncio.run(self.client.start(self.batches.append, lambda message: None, 1))

    def submit(self, job: int, prompt: list[int], **params: Any) -> None:
        self.client.submit(Submit(job, "", [prompt], SamplingParams(**params), None, False))

    def end(self, job: int, engine: int, index: int = 0) -> None:
        end = End("length", None, 1, 1, 0, 0.0, SpeculativeStats())
        output = Output(job, index, [1], "", [], end=end)
        one = self.engines[engine]
        one._take(Batch(0.0, "ok", one.status, None, {}, [output]))


def test_prompts_meet_where_their_beginning_is_until_others_are_idle() -> None:
    door, prompt = Door(), list(range(16))
    for job in range(3):  # four pages known at the first engine weigh more than two choices
        door.submit(job, prompt)
    assert [one.jobs for one in door.engines] == [[0, 1, 2], []]
    door.submit(3, [9] * 16)
    door.submit(4, prompt, n=3)
    door.submit(5, prompt)
    assert [one.jobs for one in door.engines] == [[0, 1, 2, 4], [3, 5]]
    for job in (0, 1, 2):
        door.end(job, 0)
    for index in range(3):
        door.end(4, 0, index)
    door.submit(6, [*prompt[:8], 1, 1])
    assert door.engines[0].jobs == [0, 1, 2, 4, 6]


def test_seeds_are_drawn_at_the_door() -> None:
    """As one engine with that seed draws them, in the order of jobs."""
    import random

    door, drawn = Door(), random.Random(3)
    for job in range(4):
        door.submit(job, [job])
    seeds = {one.job: one.params.seed for engine in door.engines for one in engine.sent}  # type: ignore[union-attr]
    assert [seeds[job] for job in range(4)] == [drawn.getrandbits(53) for _ in range(4)]


def test_an_engine_that_is_away_or_full_gets_nothing() -> None:
    door = Door()
    door.engines[0].health = "restarting"
    door.submit(0, [1])
    door.submit(1, [1])
    door.engines[0].health, door.engines[1].full = "ok", {"": "no room"}
    door.submit(2, [1])
    assert [one.jobs for one in door.engines] == [[2], [0, 1]]
    assert door.client.health == "ok" and door.client.full == {}
    door.engines[0].health = door.engines[1].health = "failed"
    assert door.client.health == "failed"


def test_a_death_ends_the_jobs_of_that_engine_and_counters_go_on() -> None:
    door = Door()
    door.submit(0, [1])
    door.submit(1, [2])
    one, other = door.engines
    stats = EngineStats(num_steps=4, speculative=SpeculativeStats(num_drafts_per_length=[0, 2]))
    stats.drafter_failures = {"mtp": 1}
    one._take(Batch(0.0, "ok", structs.replace(one.status, stats=stats), None, {}, []))
    other._take(Batch(0.0, "ok", structs.replace(other.status, stats=stats), None, {}, []))
    one._lost("it is gone")
    assert [batch.events for batch in door.batches if batch.events] == [
        [Failed(0, "it is gone", True)]
    ]
    assert door.batches[-1].dropped == {"error": 1}
    counted = door.client.status.stats
    assert counted.num_steps == 8 and counted.speculative.num_drafts_per_length == [0, 4]
    assert counted.drafter_failures == {"mtp": 2}
    door.client.abort(0)
    door.client.abort(1)
    assert Abort(1) in other.sent and Abort(0) not in one.sent


def test_only_the_latest_prefixes_are_remembered() -> None:
    prefixes = Prefixes(page_size=2, most=3)
    first, second = prefixes.pages([1, 2, 3, 4, 5]), prefixes.pages([1, 2, 9, 9])
    assert len(first) == 2 and first[0] == second[0] and first[1] != second[1]
    prefixes.note(first, 0)
    prefixes.note(second, 1)
    assert [prefixes.num_known(first, engine) for engine in (0, 1)] == [2, 1]
    prefixes.note(prefixes.pages([7, 7]), 0)
    assert [prefixes.num_known(first, engine) for engine in (0, 1)] == [1, 1]
    prefixes.forget(1)
    assert prefixes.num_known(second, 1) == 0 and prefixes.num_known(second, 0) == 1


def test_a_prefix_of_another_salt_is_another_one() -> None:
    prefixes = Prefixes(page_size=2, most=10)
    salts = (None, "a", "b")
    names = [tuple(prefixes.pages([1, 2, 3, 4], salt)) for salt in salts]
    assert len({one for name in names for one in name}) == 6
    prefixes.note(names[1], 0)
    assert [prefixes.num_known(name, 0) for name in names] == [0, 2, 0]


# ---- processes ----


def made(*given: str) -> list[Any]:
    args = _read(_parser(), ["--device", "cpu", "--num-threads", "1", *given])
    return setups(args, {"device": "cpu", "num_threads": 1})


def test_each_engine_has_its_ports() -> None:
    given = ("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--role", "prefill")
    one, other = made(*given, "--kv-port", "6000")
    assert [one.role.port, other.role.port] == [6000, 6002]
    assert [one.data_parallel_rank, other.data_parallel_rank] == [0, 1]
    pytest.importorskip("zmq")
    told = ("--kv-events-endpoint", "tcp://*:5557", "--kv-events-replay", "tcp://*:6557")
    one, other = (setup.kv_events for setup in made("--data-parallel-size", "2", *told))
    assert [one.endpoint, other.endpoint] == ["tcp://*:5557", "tcp://*:5558"]
    assert [one.replay, other.replay] == ["tcp://*:6557", "tcp://*:6558"]


def test_peers_have_ports_unless_servers_tell_them() -> None:
    given = ("--kv-peers", "node1:7-9, [::1]:5", "--kv-peers", "10.0.0.1:80")
    named = [Peer("node1", 7, 9), Peer("::1", 5, 5), Peer("10.0.0.1", 80, 80)]
    queue = ("--scheduler-name", "splitwise")
    for more in ((), queue):
        assert made("--role", "decode", *given, *more)[0].role.peers == named
    (bare,) = made("--role", "decode", "--kv-peers", "node1,::1", *queue)
    assert bare.role.peers == [Peer("node1", 1, 65535), Peer("::1", 1, 65535)]
    (mine,) = made("--role", "decode", *queue)
    assert {one.host for one in mine.role.peers} == {"127.0.0.1", "localhost", "::1"}
    assert made("--role", "mixed")[0].role.peers == []


@pytest.mark.parametrize(
    "given,message",
    [
        (["--data-parallel-size", "0"], "data_parallel_size must be at least 1, got 0"),
        (["--data-parallel-size", "2", "--in-process"], "in processes of their own"),
        (
            ["--data-parallel-size", "2", "--role", "mixed", "--scheduler-name", "splitwise"],
            "data_parallel_size must be 1 with a scheduler, got 2",
        ),
        (
            ["--role", "decode"],
            "role decode needs kv_peers .HOST:PORT or HOST:FIRST-LAST, .*got none",
        ),
        *(
            (["--role", "mixed", "--kv-peers", wrong], f"kv_peers must be HOST:PORT or .*'{wrong}'")
            for wrong in ("node1", "::1", "node1:", "node1:0", "node1:9-8", "node1:65536", ":7", "")
        ),
        (["--kv-events-topic", "a"], "kv_events_topic needs kv_events_endpoint"),
    ],
)
def test_what_does_not_go_together_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(*given)
