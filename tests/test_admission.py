# SPDX-License-Identifier: Apache-2.0
"""Clients are served fairly: the order in which requests are admitted and results delivered."""
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)

import asyncio
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2"):
    pytest.importorskip(name)

from specops.server.clients import Clients
from specops.server.intake import (
    _MOST_PAUSE_SECONDS,
    _PAUSE_SECONDS,
    Intake,
    Turn,
    Turns,
)
from specops.server.outbox import _AT_ONCE, Outbox
from starlette.requests import HTTPConnection


def scope(method: str = "POST", key: str = "", host: str = "10.0.0.1") -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    return {"type": "http", "method": method, "headers": headers, "client": (host, 1)}


def test_requests_are_admitted_in_order_and_fairly_among_clients() -> None:
    async def run() -> list[str]:
        turns, order = Turns(), list[str]()

        async def work(client: str, number: int) -> None:
            turn = Turn(turns, client)
            for stage in range(2):
                await turn.begin()
                order.append(f"{client}{number}.{stage}")
                await asyncio.sleep(0)
                turn.end()
                turn.end()  # harmless

        await asyncio.gather(*(work("a", i) for i in range(50)), work("b", 0))
        assert len(turns) == 0, "a client without requests is removed"
        return order

    order = asyncio.run(run())
    assert [one for one in order if one[0] == "a" and one[-1] == "0"] == [
        f"a{i}.0" for i in range(50)
    ]
    assert order.index("b0.0") == 1 and order.index("b0.1") <= 4


def test_canceled_request_does_not_block_the_queue() -> None:
    async def run() -> None:
        turns = Turns()
        first, second, third = (Turn(turns, "a") for _ in range(3))
        await first.begin()
        waiting = [asyncio.ensure_future(one.begin()) for one in (second, third)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        first.end()
        await waiting[1]
        third.end()
        assert len(turns) == 0

    asyncio.run(run())


def test_requests_without_bodies_are_not_queued_and_a_response_admits_the_next() -> None:
    async def run() -> None:
        turns = Turns()
        gate, seen = asyncio.Event(), list[str]()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["state"]["client"])
            if scope["state"]["client"] == "key-0":
                await gate.wait()
            await send({"type": "http.response.start"})
            assert len(turns) <= 1

        async def send(message: Any) -> None:
            pass

        intake = Intake(app, Clients(["one", "two"]), turns)
        calls = [intake(scope(key="one"), None, send) for _ in range(3)]  # type: ignore[arg-type]
        tasks = [asyncio.ensure_future(one) for one in calls]
        await asyncio.sleep(0.01)
        assert seen == ["key-0"]
        await intake(scope("GET", key="two"), None, send)  # type: ignore[arg-type]
        await intake(scope(key="two"), None, send)  # type: ignore[arg-type]
        assert seen == ["key-0", "key-1", "key-1"]
        gate.set()
        await asyncio.gather(*tasks)
        assert len(turns) == 0 and seen.count("key-0") == 3

    asyncio.run(run())


def test_clients_are_identified_by_key_or_address() -> None:
    def identify(clients: Clients, **own: Any) -> tuple[str, bool]:
        return clients.identify(HTTPConnection(scope(**own)))

    keyed = Clients(["one", "two"])
    assert identify(keyed, key="two") == ("key-1", True)
    assert identify(keyed, key="made up") == ("from 10.0.0.1", False), "not a client"
    assert identify(Clients([]), key="made up") == ("from 10.0.0.1", True)
    assert identify(Clients([]), host="2001:db8::7") == ("from 2001:db8::/64", True)


def test_results_are_delivered_a_few_per_client_and_round() -> None:
    class Job:
        def __init__(self, client: str) -> None:
            self.client = client

        def put(self, event: Any) -> None:
            order.append((self.client, event))

    order: list[tuple[str, Any]] = []

    async def run() -> None:
        outbox = Outbox(asyncio.get_running_loop())
        greedy: Any = Job("greedy")
        normal: Any = Job("normal")
        outbox.add([*((greedy, i) for i in range(30)), (normal, "first")])
        assert order[0] == ("normal", "first") and len(order) == 1 + _AT_ONCE
        outbox.add([(normal, "second")])
        assert len(order) == 1 + _AT_ONCE, "in the next round"
        await asyncio.sleep(0)
        assert order[1 + _AT_ONCE] == ("normal", "second")
        while len(order) < 32:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [event for client, event in order if client == "greedy"] == list(range(30))


def test_aborted_requests_are_dropped_and_pause_their_client() -> None:
    """A client that aborts its requests is not served at the rate at which it sends them."""
    seen: list[str] = []

    async def run() -> None:
        loop, turns, gone = asyncio.get_running_loop(), Turns(), set[str]()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["name"])
            if scope["name"].startswith("leaves"):
                await asyncio.sleep(0)
                gone.add(scope["name"])

        async def ask(name: str, host: str = "10.0.0.1") -> None:
            state = {"is_gone": lambda: name in gone}
            await intake(scope(host=host) | {"name": name, "state": state}, None, None)  # type: ignore[arg-type]

        intake = Intake(app, Clients([]), turns)
        gone.add("left")
        begun = loop.time()
        await asyncio.gather(ask("left"), ask("stays"), ask("left"))
        assert seen == ["stays"] and len(turns) == 0
        await asyncio.gather(*(ask(f"leaves {i}") for i in range(5)), ask("late"))
        assert seen[1:] == [*(f"leaves {i}" for i in range(5)), "late"]
        assert loop.time() - begun >= 5 * _PAUSE_SECONDS, "a pause follows each aborted request"
        # The pause is limited, however many requests were aborted at once.
        for _ in range(1000):
            turns.pause("from 10.0.0.1")
        waiting = asyncio.ensure_future(ask("next"))
        await asyncio.wait_for(ask("another", "10.0.0.2"), _MOST_PAUSE_SECONDS / 2)
        await asyncio.sleep(2 * _PAUSE_SECONDS)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(ask("last"), _MOST_PAUSE_SECONDS + 1)
        await asyncio.sleep(_PAUSE_SECONDS)
        assert len(turns) == 0, "a client without requests is removed after its pause"

    asyncio.run(run())
