# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: several engines of one model behind one frontend, each in its own process.

Each job runs on the engine with the least cost: the number of pages of its prompt that the engine
has not computed recently, plus the number of the engine's unfinished choices. So prompts with the
same beginning run on the same engine until others are idle. No bit of an answer depends on the
engine that computed it.
"""

import asyncio
import hashlib
import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, reduce
from itertools import zip_longest
from typing import Any

from msgspec import structs

from specops.api.messages import (
    Abort,
    Batch,
    Command,
    Event,
    Failed,
    Health,
    Output,
    Refused,
    Status,
    Submit,
)
from specops.api.outputs import EngineStats
from specops.service.client import EngineClient

_SEED_BITS = 53  # as in loop.py, where engines draw seeds
_MAX_PREFIXES = 1 << 18  # maximum number of pages in the record of prefixes
_BEST_FIRST: tuple[Health, ...] = (
    "ok",
    "failing",
    "stalled",
    "restarting",
    "disconnected",
    "failed",
)


@dataclass
class _Running:
    """Job that runs on an engine."""

    engine: int
    num_left: int  # choices that have not ended


class Prefixes:
    """Record of which engines recently computed which prefixes of prompts.

    The record is only a hint: an engine that has evicted a prefix computes it again.

    Args:
        page_size: number of tokens of a page.
        max_pages: maximum number of pages in the record.
    """

    def __init__(self, page_size: int, max_pages: int) -> None:
        self._size = page_size
        self._max_pages = max_pages
        self._engines: OrderedDict[bytes, set[int]] = OrderedDict()  # oldest first

    def pages(self, prompt: Sequence[int], salt: str | None = None) -> list[bytes]:
        """Return a hash per full page of a prompt, of the salt and all tokens up to its end."""
        names = list[bytes]()
        name = b"" if salt is None else hashlib.blake2b(salt.encode(), digest_size=16).digest()
        for end in range(self._size, len(prompt) + 1, self._size):
            tokens = array("q", prompt[end - self._size : end]).tobytes()
            name = hashlib.blake2b(name + tokens, digest_size=16).digest()
            names.append(name)
        return names

    def num_known(self, pages: Sequence[bytes], engine: int) -> int:
        """Return the number of a prompt's leading pages that an engine has computed."""
        for count, name in enumerate(pages):
            if engine not in self._engines.get(name, ()):
                return count
        return len(pages)

    def note(self, pages: Sequence[bytes], engine: int) -> None:
        """Record that an engine computes these pages."""
        for name in reversed(pages):  # so that the end of a prompt is evicted first
            self._engines.setdefault(name, set()).add(engine)
            self._engines.move_to_end(name)
        while len(self._engines) > self._max_pages:
            self._engines.popitem(last=False)

    def forget(self, engine: int) -> None:
        """Forget all pages of an engine, which has lost them."""
        for engines in self._engines.values():
            engines.discard(engine)


class DataParallelClient(EngineClient):
    """Client that combines several engines into one.

    If an engine dies, its jobs end with an error; the jobs of the other engines continue.

    Args:
        clients: clients of engines with the same configuration.
        seed: seed of the generator that draws seeds for jobs without one, as `EngineConfig.seed`.
    """

    def __init__(self, clients: Sequence[EngineClient], seed: int | None) -> None:
        first = clients[0].capabilities
        self._clients = clients
        # Each engine times its own steps; their sum would be no meaningful time of drafting.
        total = sum(client.capabilities.num_pages for client in clients)
        capabilities = structs.replace(first, num_pages=total, times_drafting=False)
        self._lost_stats = EngineStats()  # counters of dead engines, so that sums never decrease
        super().__init__(capabilities, self._all_status())
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._jobs: dict[int, _Running] = {}
        self._prefixes = Prefixes(first.page_size, _MAX_PREFIXES)

    @property
    def health(self) -> Health:
        """Health of the healthiest engine, since one working engine can serve all jobs."""
        return min((client.health for client in self._clients), key=_BEST_FIRST.index)

    @health.setter
    def health(self, value: Health) -> None:
        """Ignore the value: the getter computes health from the engines."""

    @property
    def is_behind(self) -> bool:
        """True if no engine accepts further jobs."""
        return all(client.is_behind for client in self._clients)

    async def start(
        self, receive: Callable[[Batch], None], lost: Callable[[str], None], num_clients: int
    ) -> None:
        """Start all engines' clients. Call this once, on the event loop."""
        await super().start(receive, lost, num_clients)
        for index, client in enumerate(self._clients):
            await client.start(
                partial(self._from_engine, index), partial(self._engine_lost, index), num_clients
            )

    async def stop(self) -> None:
        """Drop the remaining jobs and wait for the engines to end."""
        await asyncio.gather(*(client.stop() for client in self._clients))

    def _send(self, command: Command) -> None:
        if isinstance(command, Submit):
            if command.params.seed is None:  # else all engines would draw the same seeds
                seeded = replace(command.params, seed=self._random.getrandbits(_SEED_BITS))
                command = structs.replace(command, params=seeded)
            engine = self._choose(command)
            self._clients[engine].submit(command)
            count = len(command.prompts) * command.params.n
            self._jobs[command.job] = _Running(engine, count)
        elif isinstance(command, Abort):
            running = self._jobs.pop(command.job, None)
            if running is not None:
                self._clients[running.engine].abort(command.job)

    def _choose(self, job: Submit) -> int:
        """Choose an engine for a job, and return its index.

        The prompt's pages are recorded as computed by that engine.
        """
        salt = job.params.cache_salt
        if job.adapter is not None:
            salt = f"{job.adapter[0]} {salt}"  # if ambiguous, only a wrong hint
        pages = self._prefixes.pages(job.prompts[0], salt)
        loads = [0] * len(self._clients)
        for running in self._jobs.values():
            loads[running.engine] += running.num_left

        def cost(engine: int) -> tuple[bool, bool, int, int]:
            client = self._clients[engine]
            is_away = client.health in ("stalled", "restarting", "failed")
            is_full = client.is_behind or job.client in client.full
            unknown = len(pages) - self._prefixes.num_known(pages, engine)
            return is_away, is_full, unknown + loads[engine], loads[engine]

        engine = min(range(len(self._clients)), key=cost)
        self._prefixes.note(pages, engine)
        return engine

    def _from_engine(self, engine: int, batch: Batch) -> None:
        for event in batch.events:
            running = self._jobs.get(event.job)
            if running is None:
                continue
            if isinstance(event, Output) and event.end is not None:
                running.num_left -= 1
            if not running.num_left or isinstance(event, (Refused, Failed)):
                del self._jobs[event.job]
        self._deliver(batch.now, batch.dropped, batch.events)

    def _engine_lost(self, engine: int, message: str) -> None:
        """Fail the jobs of an engine that has ended."""
        self._prefixes.forget(engine)
        client = self._clients[engine]
        self._lost_stats = _added(self._lost_stats, client.status.stats)
        client.status = structs.replace(client.status, stats=EngineStats())
        lost_jobs = {
            job: running for job, running in self._jobs.items() if running.engine == engine
        }
        for job in lost_jobs:
            del self._jobs[job]
        dropped = {"error": sum(running.num_left for running in lost_jobs.values())}
        self._deliver(0.0, dropped, [Failed(job, message, is_lost=True) for job in lost_jobs])

    def _deliver(self, now: float, dropped: dict[str, int], events: list[Event]) -> None:
        first, *others = (client.full for client in self._clients)
        full = {
            name: text for name, text in first.items() if all(name in other for other in others)
        }
        self._handle_batch(Batch(now, self.health, self._all_status(), full, dropped, events))

    def _all_status(self) -> Status:
        """Return the sum of the states of all engines."""
        return reduce(
            lambda one, other: Status(
                one.num_running + other.num_running,
                one.num_waiting + other.num_waiting,
                one.num_free_pages + other.num_free_pages,
                _added(one.stats, other.stats),
                {
                    name: one.drafter_gauges.get(name, 0) + size
                    for name, size in other.drafter_gauges.items()
                },
                one.adapters,  # all engines have the same ones
            ),
            (client.status for client in self._clients),
            Status(0, 0, 0, self._lost_stats, {}, self._clients[0].status.adapters),
        )


def _added(first: Any, second: Any) -> Any:
    """Return the sum of the counters of two engines.

    Counters may be numbers, lists, dicts, and dataclasses that hold these.
    """
    if isinstance(first, dict):
        return {name: first.get(name, 0) + second.get(name, 0) for name in first | second}
    if isinstance(first, list):
        return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return replace(first, **{n: _added(getattr(first, n), getattr(second, n)) for n in names})
    return first + second
