# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Several engines behind one frontend answer like one engine, even when an engine is killed."""

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
from specops.api.messages import Abort, Batch, Command, End, Failed, Output, Submit
from specops.api.outputs import EngineStats, SpeculativeStats
from specops.cli.roles import setups
from specops.cli.serve import _parser, _read
from specops.engine import SamplingParams
from specops.service.client import EngineClient
from specops.service.data_parallel import DataParallelClient, Prefixes
from specops.service.snapshot import capabilities_of, status_of
from specops.service.wire import Peer


@pytest.fixture(scope="module")
def server(mtp_model: Path) -> Iterator[ServerProcess]:
    with servers(options(mtp_model, "--data-parallel-size", "2")) as (started,):
        yield started


def statuses_and_choices(url: str, requests: list[dict[str, Any]], at_once: int = 8) -> list[Any]:
    def one(body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        return answer.status_code, answer.json().get("choices")

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, requests))


@pytest.mark.fast("20")
@pytest.mark.parametrize("count", [20, 500])
@pytest.mark.ci
def test_answers_do_not_depend_on_the_engine(
    server: ServerProcess, reference_server: Served, count: int
) -> None:
    """Both engines work, and a repeated prompt goes to the engine with its pages."""
    requests = bodies(count, seed=count + 4)
    expected = [(200, choices) for choices in choices_of(reference_server, requests)]
    assert len(server.engines) == 2
    assert statuses_and_choices(server.url, requests) == expected
    hits = server.gauge("prefix_cache_hits_total")
    # One request at a time, so that no engine is too busy for a prompt whose pages it has.
    assert statuses_and_choices(server.url, requests[-20:], at_once=1) == expected[-20:]
    pages = sum((len(body["prompt"]) - 2) // 16 for body in requests[-20:])
    assert server.gauge("prefix_cache_hits_total") - hits >= 16 * pages * 0.8
    wait_until_idle(server)


@pytest.mark.ci
def test_killed_engine_ends_only_its_own_requests(
    server: ServerProcess, reference_server: Served
) -> None:
    """Each engine runs a long stream when one engine is killed."""
    requests = [{**body, "max_tokens": 40, "ignore_eos": True} for body in bodies(40, seed=8)]
    expected = [(200, choices) for choices in choices_of(reference_server, requests)]
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
    assert statuses_and_choices(server.url, requests) == expected
    wait_for(lambda: len(server.engines) == 2 and victim not in server.engines, 240)
    assert statuses_and_choices(server.url, requests) == expected


# ---- routing ----


class FakeClient(EngineClient):
    """Client of an engine that does nothing, and a record of the commands sent."""

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


class Frontend:
    """Two fake clients behind one data-parallel client."""

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
        one._handle_batch(Batch(0.0, "ok", one.status, None, {}, [output]))


def test_prompts_go_to_the_engine_with_their_prefix_unless_it_is_busy() -> None:
    frontend, prompt = Frontend(), list(range(16))
    for job in range(3):  # four cached pages outweigh two running choices
        frontend.submit(job, prompt)
    assert [one.jobs for one in frontend.engines] == [[0, 1, 2], []]
    frontend.submit(3, [9] * 16)
    frontend.submit(4, prompt, n=3)
    frontend.submit(5, prompt)
    assert [one.jobs for one in frontend.engines] == [[0, 1, 2, 4], [3, 5]]
    for job in (0, 1, 2):
        frontend.end(job, 0)
    for index in range(3):
        frontend.end(4, 0, index)
    frontend.submit(6, [*prompt[:8], 1, 1])
    assert frontend.engines[0].jobs == [0, 1, 2, 4, 6]


def test_seeds_are_drawn_by_the_frontend() -> None:
    """A single engine with the same seed would draw the same seeds, in the order of jobs."""
    import random

    frontend, drawn = Frontend(), random.Random(3)
    for job in range(4):
        frontend.submit(job, [job])
    seeds = {one.job: one.params.seed for engine in frontend.engines for one in engine.sent}  # type: ignore[union-attr]
    assert [seeds[job] for job in range(4)] == [drawn.getrandbits(53) for _ in range(4)]


def test_restarting_or_full_engine_gets_no_requests() -> None:
    frontend = Frontend()
    frontend.engines[0].health = "restarting"
    frontend.submit(0, [1])
    frontend.submit(1, [1])
    frontend.engines[0].health, frontend.engines[1].full = "ok", {"": "queue full"}
    frontend.submit(2, [1])
    assert [one.jobs for one in frontend.engines] == [[2], [0, 1]]
    assert frontend.client.health == "ok" and frontend.client.full == {}
    frontend.engines[0].health = frontend.engines[1].health = "failed"
    assert frontend.client.health == "failed"


def test_lost_engine_ends_its_jobs_and_keeps_its_counters() -> None:
    frontend = Frontend()
    frontend.submit(0, [1])
    frontend.submit(1, [2])
    one, other = frontend.engines
    stats = EngineStats(num_steps=4, speculative=SpeculativeStats(num_drafts_per_length=[0, 2]))
    stats.drafter_failures = {"mtp": 1}
    one._handle_batch(Batch(0.0, "ok", structs.replace(one.status, stats=stats), None, {}, []))
    other._handle_batch(Batch(0.0, "ok", structs.replace(other.status, stats=stats), None, {}, []))
    one._lost("it is gone")
    assert [batch.events for batch in frontend.batches if batch.events] == [
        [Failed(0, "it is gone", True)]
    ]
    assert frontend.batches[-1].dropped == {"error": 1}
    counted = frontend.client.status.stats
    assert counted.num_steps == 8 and counted.speculative.num_drafts_per_length == [0, 4]
    assert counted.drafter_failures == {"mtp": 2}
    frontend.client.abort(0)
    frontend.client.abort(1)
    assert Abort(1) in other.sent and Abort(0) not in one.sent


def test_least_recent_prefixes_are_forgotten() -> None:
    prefixes = Prefixes(page_size=2, max_pages=3)
    first, second = prefixes.pages([1, 2, 3, 4, 5]), prefixes.pages([1, 2, 9, 9])
    assert len(first) == 2 and first[0] == second[0] and first[1] != second[1]
    prefixes.note(first, 0)
    prefixes.note(second, 1)
    assert [prefixes.num_known(first, engine) for engine in (0, 1)] == [2, 1]
    prefixes.note(prefixes.pages([7, 7]), 0)
    assert [prefixes.num_known(first, engine) for engine in (0, 1)] == [1, 1]
    prefixes.forget(1)
    assert prefixes.num_known(second, 1) == 0 and prefixes.num_known(second, 0) == 1


def test_prefixes_with_different_salts_differ() -> None:
    prefixes = Prefixes(page_size=2, max_pages=10)
    salts = (None, "a", "b")
    names = [tuple(prefixes.pages([1, 2, 3, 4], salt)) for salt in salts]
    assert len({one for name in names for one in name}) == 6
    prefixes.note(names[1], 0)
    assert [prefixes.num_known(name, 0) for name in names] == [0, 2, 0]


# ---- processes ----


def make_setups(*arguments: str) -> list[Any]:
    args = _read(_parser(), ["--device", "cpu", "--num-threads", "1", *arguments])
    return setups(args, {"device": "cpu", "num_threads": 1})


def test_each_engine_has_its_own_ports() -> None:
    options = ("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--role", "prefill")
    one, other = make_setups(*options, "--kv-port", "6000")
    assert [one.role.port, other.role.port] == [6000, 6002]
    assert [one.data_parallel_rank, other.data_parallel_rank] == [0, 1]
    pytest.importorskip("zmq")
    event_options = ("--kv-events-endpoint", "tcp://*:5557", "--kv-events-replay", "tcp://*:6557")
    one, other = (
        setup.kv_events for setup in make_setups("--data-parallel-size", "2", *event_options)
    )
    assert [one.endpoint, other.endpoint] == ["tcp://*:5557", "tcp://*:5558"]
    assert [one.replay, other.replay] == ["tcp://*:6557", "tcp://*:6558"]


def test_peers_need_ports_unless_a_scheduler_is_used() -> None:
    options = ("--kv-peers", "node1:7-9, [::1]:5", "--kv-peers", "10.0.0.1:80")
    named = [Peer("node1", 7, 9), Peer("::1", 5, 5), Peer("10.0.0.1", 80, 80)]
    queue = ("--scheduler-name", "splitwise")
    for more in ((), queue):
        assert make_setups("--role", "decode", *options, *more)[0].role.peers == named
    (bare,) = make_setups("--role", "decode", "--kv-peers", "node1,::1", *queue)
    assert bare.role.peers == [Peer("node1", 1, 65535), Peer("::1", 1, 65535)]
    (mine,) = make_setups("--role", "decode", *queue)
    assert {one.host for one in mine.role.peers} == {"127.0.0.1", "localhost", "::1"}
    assert make_setups("--role", "mixed")[0].role.peers == []


@pytest.mark.parametrize(
    "options,message",
    [
        (["--data-parallel-size", "0"], "data_parallel_size must be at least 1, got 0"),
        (
            ["--data-parallel-size", "2", "--in-process"],
            "data_parallel_size must be 1 with --in-process, got 2",
        ),
        (
            ["--data-parallel-size", "2", "--role", "mixed", "--scheduler-name", "splitwise"],
            "data_parallel_size must be 1 with scheduler_name splitwise, got 2",
        ),
        (
            ["--role", "decode"],
            "role decode requires kv_peers .HOST:PORT or HOST:FIRST-LAST, .*got none",
        ),
        *(
            (["--role", "mixed", "--kv-peers", wrong], f"kv_peers must be HOST:PORT or .*'{wrong}'")
            for wrong in ("node1", "::1", "node1:", "node1:0", "node1:9-8", "node1:65536", ":7", "")
        ),
        (["--kv-events-topic", "a"], "kv_events_topic has no effect without kv_events_endpoint"),
    ],
)
def test_incompatible_options_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_setups(*options)
