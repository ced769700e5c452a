# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""The HTTP server when clients disconnect, steps fail or it shuts down."""

import concurrent.futures
import gc
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx", "openai"):
    pytest.importorskip(name)

import httpx
import openai
from fake_engine import FakeEngine
from serving import (
    CHAT,
    HANG_SECONDS,
    STEP_FAILED,
    STREAM,
    TEXT,
    Served,
    assert_failed,
    connect,
    counters,
    events,
    hang_up_on,
    health,
    post,
    serving,
    wait_for,
)
from specops.engine import (
    EngineConfig,
    EngineError,
    RequestOutput,
)

HTTP = httpx.Client(timeout=HANG_SECONDS)


@pytest.fixture
def slow() -> Iterator[Served]:
    """Serve an engine that works on a LONG request until something ends it."""
    config = EngineConfig(served_model_name="fake", max_num_seqs=1, max_model_len=100_000)
    engine = FakeEngine(config, step_seconds=0.005)
    engine.holds_at = 1000
    with serving(engine) as served:
        yield served


LONG = {"prompt": "abc", "max_tokens": 90_000, "speculative_config": {"method": "naive"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_disconnected_client_frees_its_pages(slow: Served, path: str, stream: bool) -> None:
    body = dict(LONG) | {"stream": stream, "ignore_eos": True, "n": 2}
    if path != "completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    running = hang_up_on(slow, path, body)
    wait_for(lambda: slow.engine.num_running == 1)
    queued = hang_up_on(slow, path, body)
    wait_for(lambda: slow.engine.num_waiting == 3)
    assert slow.engine.num_free_pages < slow.engine.num_pages
    if stream:
        assert b"200 OK" in running.recv(100)
    queued.close()
    wait_for(lambda: slow.engine.num_waiting == 1)
    running.close()
    slow.wait_until_idle()
    assert slow.engine.num_uncollected == 0
    wait_for(lambda: counters(slow)["specops:request_success_total"]["abort"] == 4)


def test_client_may_disconnect_in_the_middle_of_its_body(slow: Served) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt"'
        )
    assert post(slow, "completions", TEXT).status_code == 200
    slow.wait_until_idle()


def test_failed_step_ends_its_requests_but_not_the_server(slow: Served) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = pool.submit(post, slow, "completions", LONG | STREAM)
        wait_for(lambda: slow.engine.num_running == 1)
        others = [
            pool.submit(post, slow, "completions", TEXT),
            pool.submit(post, slow, "completions", TEXT | STREAM),
            pool.submit(post, slow, "chat/completions", CHAT | {"n": 2, "max_tokens": 9}),
        ]
        wait_for(lambda: slow.engine.num_running + slow.engine.num_waiting == 5)
        slow.engine.num_failures = 1
        assert_failed(running.result())
        for answer in others:
            assert answer.result().status_code == 200
            assert '"error"' not in answer.result().text
    slow.wait_until_idle()
    assert slow.engine.num_uncollected == 0
    assert health(slow) == (200, "ok")
    assert counters(slow)["specops:request_success_total"]["error"] == 1
    assert counters(slow)["specops:request_success_total"]["abort"] == 0
    slow.engine.num_failures = 1
    with connect(slow) as client, pytest.raises(openai.InternalServerError, match=STEP_FAILED):
        client.completions.create(model="fake", prompt="a")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), EngineError("names no request")])
def test_step_failure_without_request_ids_ends_all_requests(slow: Served, error: Exception) -> None:
    step, failures = slow.engine.step, [error]

    def failing() -> Any:
        if failures:
            raise failures.pop()
        return step()

    slow.engine.step = failing
    assert_failed(post(slow, "completions", TEXT))
    slow.wait_until_idle()
    assert post(slow, "completions", TEXT).status_code == 200
    assert slow.engine.num_uncollected == 0


def test_failed_request_ends_alone() -> None:
    """All its choices fail with it: an answer has all of them or none."""

    class Failing(FakeEngine):
        def _advance(self, request: Any) -> RequestOutput:
            if request.index == 1 and len(request.token_ids) >= 8:
                request.reason = "error"
                return RequestOutput(request.id, [], "", [], "error", error="planted failure")
            return super()._advance(request)

    with serving(Failing(step_seconds=0.01)) as served:
        body = {"prompt": "abc", "max_tokens": 100}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            good = [pool.submit(post, served, "completions", body | more) for more in ({}, STREAM)]
            bad = [
                pool.submit(post, served, "completions", body | {"n": 2} | more)
                for more in ({}, STREAM)
            ]
            for answer in bad:
                assert_failed(
                    answer.result(),
                    "the request failed within the engine; the server's log says why",
                )
            assert good[0].result().json()["choices"][0]["text"] == ("abc" * 40)[:100]
            pieces = [one["choices"] for one in events(good[1].result())]
            assert "".join(one["text"] for each in pieces for one in each) == ("abc" * 40)[:100]
        served.wait_until_idle()
        assert served.engine.num_uncollected == 0
        assert health(served) == (200, "ok")
        assert counters(served)["specops:request_success_total"]["error"] == 4


def test_repeated_step_failures_show_in_health(slow: Served) -> None:
    slow.engine.num_failures = 3
    for expected in ((200, "ok"), (200, "ok"), (503, "failing")):
        assert_failed(post(slow, "completions", TEXT))
        assert health(slow) == expected
    assert post(slow, "completions", TEXT).status_code == 200, "the engine must try again"
    assert health(slow) == (200, "ok")


def test_drafter_failures_are_reported_while_the_server_stays_healthy() -> None:
    with serving(FakeEngine()) as served:
        assert HTTP.get(f"{served.url}/health").json() == {"status": "ok"}
        served.engine.stats.drafter_failures = {"mtp": 0, "hydra": 2}
        assert post(served, "completions", TEXT).status_code == 200  # makes the engine report it
        answer = HTTP.get(f"{served.url}/health")
        assert answer.status_code == 200
        assert answer.json() == {"status": "ok", "drafter_failures": {"hydra": 2}}
        failures = counters(served)["specops:drafter_failures_total"]
        assert failures == {"mtp": 0, "hydra": 2}
        served.engine.stats.drafter_warnings = {"drafter hydra: it drafted nothing": 1}
        assert post(served, "completions", TEXT).status_code == 200
        answer = HTTP.get(f"{served.url}/health")
        assert answer.json()["drafter_warnings"] == ["drafter hydra: it drafted nothing"]
        warnings = counters(served)["specops:drafter_warnings"]
        assert warnings == {"drafter hydra: it drafted nothing": 1}


@pytest.mark.parametrize("drops", [False, True])
def test_requests_of_a_failed_step_are_dropped_by_engine_or_thread(drops: bool) -> None:
    """The thread drops what the engine leaves, and other requests continue."""
    with serving(FakeEngine()) as served:
        served.engine.keeps_failed = not drops
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            long = {"prompt": "abc", "max_tokens": 250}
            with served.holding(5):
                answers = [pool.submit(post, served, "completions", long) for _ in range(6)]
                wait_for(lambda: served.engine.num_running == 4 and served.engine.num_waiting == 2)
                served.engine.num_failures = 1
                wait_for(lambda: served.engine.num_failures == 0)
            found = [answer.result() for answer in answers]
            failed = [one for one in found if one.status_code != 200]
            assert len(failed) == 4
            for one in failed:
                assert_failed(one)
        served.wait_until_idle()
        assert health(served) == (200, "ok")
        assert post(served, "completions", TEXT).status_code == 200


def test_requests_ended_by_shutdown_get_an_error() -> None:
    engine = FakeEngine()
    long = {"prompt": "abc", "max_tokens": 250, "speculative_config": {"method": "naive"}}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with serving(engine, drain_timeout=1) as served:
            engine.holds_at = 5
            whole = pool.submit(post, served, "completions", long)
            stream = pool.submit(post, served, "completions", long | STREAM)
            wait_for(lambda: engine.num_running == 2)
        assert whole.result().status_code == 503
        assert whole.result().headers["retry-after"] == "1"
        *_, last, done = [line for line in stream.result().text.splitlines() if line]
        assert done == "data: [DONE]"
        for error in (whole.result().json()["error"], json.loads(last[6:])["error"]):
            assert error["message"] == "the server is shutting down"
    assert engine.num_free_pages == engine.num_pages


@pytest.mark.parametrize("stream", [{}, STREAM])
@pytest.mark.parametrize("failing", [0, 1])
def test_failure_to_add_a_choice_ends_the_whole_request(
    stream: dict[str, Any], failing: int
) -> None:
    """The failing choice is the first, or one that waited for the first one's pages."""

    class Refusing(FakeEngine):
        def add_request(self, *args: Any, choice_index: int = 0, **options: Any) -> str:
            if choice_index == failing:
                raise RuntimeError("planted failure")
            return super().add_request(*args, choice_index=choice_index, **options)

    with serving(Refusing(step_seconds=0.002)) as served:
        body = {"prompt": "a prompt of more than one page", "n": 2, "max_tokens": 200} | stream
        message = "the engine could not take the request; the server's log says why"
        assert_failed(post(served, "completions", body), message)
        served.wait_until_idle()
        assert served.engine.num_uncollected == 0
        assert health(served) == (200, "ok")
        assert counters(served)["specops:request_success_total"]["error"] == failing


class CannotAbort(FakeEngine):
    def abort(self, request_id: str) -> bool:
        raise RuntimeError("planted failure")


class LosesPages(FakeEngine):
    def abort(self, request_id: str) -> bool:
        self.num_pages += 1  # so that one page seems never to be freed
        self.lost = True
        return super().abort(request_id)

    @property
    def num_free_pages(self) -> int:
        return super().num_free_pages - getattr(self, "lost", False)


@pytest.mark.parametrize("broken", [CannotAbort, LosesPages])
def test_engine_that_does_not_recover_is_reported(broken: type[FakeEngine]) -> None:
    with serving(broken()) as served:
        served.engine.num_failures = 1
        served.engine.keeps_failed = True
        assert_failed(post(served, "completions", TEXT))
        wait_for(lambda: health(served) == (503, "failed"))
        assert_failed(post(served, "completions", TEXT), "the engine has stopped")


def test_requests_leave_no_reference_cycles(fake: Served) -> None:
    """Collecting cycles would pause every request (service/garbage.py)."""
    whole = {"prompt": "a", "max_tokens": 4}
    stream = whole | {"stream": True, "max_tokens": 200}
    full = whole | {"n": 40, "max_tokens": 200}  # two of these exceed the waiting queue
    wrong = whole | {"speculative_config": {"method": "suffix"}}

    def ask() -> None:
        statuses = [post(fake, "completions", body).status_code for body in (whole, wrong)]
        assert statuses == [200, 400] and post(fake, "no-such-route", {}).status_code == 404
        assert len(events(post(fake, "completions", stream))) > 1
        with HTTP.stream("POST", f"{fake.url}/v1/completions", json=stream) as response:
            next(response.iter_lines())
        fake.wait_until_idle()
        fake.engine.num_failures = 1
        assert post(fake, "completions", whole).status_code == 500
        with concurrent.futures.ThreadPoolExecutor(4) as threads, fake.holding(1):
            futures = [threads.submit(post, fake, "completions", full) for _ in range(4)]
            wait_for(lambda: any(one.done() for one in futures))
        assert {one.result().status_code for one in futures} == {200, 429}
        fake.wait_until_idle()

    ask()  # objects that are created once
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        ask()
        time.sleep(0.05)  # the server's thread ends its last task
        gc.collect()
        kinds = Counter(f"{type(one).__module__}.{type(one).__name__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not [kind for kind in kinds if kind.startswith(("specops", "uvicorn", "starlette"))], (
        kinds
    )
