# SPDX-License-Identifier: Apache-2.0
"""The measured loops over a suffix cache, the same for every side.

Each side runs them in its own process, with a `Side` that calls its library.

Only calls into a library are timed, with prepared arguments; the cost of reading the clock is
subtracted. Times are CPU time unless they say `wall`.
"""

import gc
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from protocol import Answer, serve

Tokens = NDArray[np.int32]
Call = tuple[Callable[..., Any], tuple[Any, ...]]

PROMPT, GENERATED = 256, 1024
NOTHING = np.empty(0, dtype=np.int32)
PAGE = os.sysconf("SC_PAGE_SIZE")


class Batch(Protocol):
    """Rows of running requests that step together."""

    def prepare(self, new: Sequence[Tokens], contexts: Sequence[Tokens]) -> None:
        """Prepare the next step's arguments: each row's new tokens, and its text up to there."""

    def step(self) -> None:
        """Append every row's new tokens and draft for every row; this is timed."""

    def drafts(self) -> list[list[int]]:
        """Return the drafts of the last step."""


class Side(Protocol):
    """A library under measurement. Timed operations return a function and its arguments."""

    version: str

    def open(self, depth: int, max_cached_requests: int, read_on: bool) -> None:
        """Create a new cache."""

    @abstractmethod
    def start(self, request: int, prompt: Tokens) -> Call:
        """Open a request."""

    @abstractmethod
    def extend(self, request: int, token_ids: Tokens) -> Call:
        """Append tokens to the response of a request."""

    @abstractmethod
    def speculate(self, request: int, context: Tokens, factor: float) -> Call:
        """Draft; the result's `token_ids` are a list."""

    @abstractmethod
    def stop(self, request: int) -> Call:
        """End a request."""

    @abstractmethod
    def evict(self, request: int) -> Call:
        """Remove a response from the cache and free its memory."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until background work is done."""

    @abstractmethod
    def batch(self, requests: Mapping[int, Any]) -> Batch:
        """Return running requests as a batch; values are the results of starting each request."""

    @abstractmethod
    def threads(self, count: int) -> None:
        """Set how many threads a batch may use."""

    @abstractmethod
    def wake(self) -> None:
        """Wake every thread with some work."""

    @abstractmethod
    def save(self, path: str) -> None:
        """Write the cached content to a file."""

    @abstractmethod
    def load(self, path: str) -> None:
        """Load the file into a new cache."""


class Replay:
    """The measurements of one side; every public method answers an `op` of the protocol."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._depth = 0
        self._shown: list[Tokens] = []
        self._held: list[Tokens] = []
        self._rows: dict[int, tuple[Tokens, int]] = {}
        self._fresh: list[Tokens] = []
        self._batch: Batch | None = None

    def start(self, threads: int) -> Answer:
        """Pin the process to the run's last core; return the version."""
        self._cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, self._cpus[-1:])
        gc.disable()
        self._clock_ns = {clock: _clock_cost(clock) for clock in (_cpu, _wall)}
        return {"version": self._side.version}

    def open(
        self, streams: str, stream: str, depth: int, max_cached_requests: int, read_on: bool = False
    ) -> Answer:
        """Read a stream and create a cache; return the bytes that are resident then."""
        self._shown = _read(Path(streams) / stream)
        self._held = _read(Path(streams) / f"{stream}.held")
        self._depth = depth
        self._side.open(depth, max_cached_requests, read_on)
        # One-time setup by a first request must not count as the cost of a cached token.
        self._insert(-1, self._held[0][:64])
        _run(self._side.evict(-1))
        return self.resident()

    def resident(self) -> Answer:
        """Return the resident bytes of the process."""
        return {"bytes": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE}

    def insert(self, first: int, last: int) -> Answer:
        """Insert whole requests: open, append their response, end."""
        requests = self._shown[first:last]
        begun = time.process_time_ns()
        for i, token_ids in enumerate(requests, first):
            self._insert(i, token_ids)
        nanoseconds = time.process_time_ns() - begun
        return {"ns": nanoseconds, "tokens": sum(map(len, requests))}

    def evict(self, first: int, last: int) -> Answer:
        """Evict responses, oldest first."""
        tokens = sum(map(len, self._shown[first:last]))
        begun = time.process_time_ns()
        for i in range(first, last):
            _run(self._side.evict(i))
        return {"ns": time.process_time_ns() - begun, "tokens": tokens}

    def replay(self, held: int, factor: float = 1.0) -> Answer:
        """Replay a held-out request greedily: check each draft and append its right tokens."""
        request = -2 - held
        text = self._held[held][: PROMPT + GENERATED]
        _run(self._side.start(request, text[:PROMPT]))
        self._side.wait()
        draft_ns, extend_ns, drafted, position = [], [], 0, PROMPT
        while position < len(text):
            context = text[max(0, position - self._depth) : position]
            nanoseconds, draft = self._timed(self._side.speculate(request, context, factor))
            draft_ns.append(nanoseconds)
            drafted += len(draft.token_ids)
            fresh = text[position : position + 1 + _accepted(draft.token_ids, text[position:])]
            extend_ns.append(self._timed(self._side.extend(request, fresh))[0])
            position += len(fresh)
        _run(self._side.stop(request))
        tokens = len(text) - PROMPT
        return {"draft_ns": draft_ns, "extend_ns": extend_ns, "tokens": tokens, "drafted": drafted}

    def forget(self, held: Sequence[int]) -> Answer:
        """Remove the responses of replays from the cache."""
        for i in held:
            _run(self._side.evict(-2 - i))
        return {}

    def begin_batch(self, held: Sequence[int], generated: int) -> Answer:
        """Start running requests with `generated` tokens already appended."""
        self._rows = {-2 - i: (self._held[i], PROMPT + generated) for i in held}
        started = {}
        for request, (text, position) in self._rows.items():
            started[request] = _run(self._side.start(request, text[:PROMPT]))
            _run(self._side.extend(request, text[PROMPT : position - 1]))
        self._side.wait()
        # The first step appends the last of these tokens.
        self._fresh = [text[position - 1 : position] for text, position in self._rows.values()]
        self._batch = self._side.batch(started)
        return {}

    def steps(self, count: int, threads: int | None = None) -> Answer:
        """Run steps of the batch; each row appends its right drafts and one more token.

        threads: number of threads, woken before each step as they would be after a verification.
        """
        assert self._batch is not None
        if threads:
            os.sched_setaffinity(0, self._cpus[-threads:])
            self._side.threads(threads)
        cpu, wall, tokens = [], [], 0
        for _ in range(count):
            contexts = [
                text[max(0, position - self._depth) : position]
                for text, position in self._rows.values()
            ]
            tokens += sum(map(len, self._fresh))
            self._batch.prepare(self._fresh, contexts)
            if threads:
                self._side.wake()
            begun, begun_cpu = _wall(), time.process_time_ns()
            self._batch.step()
            cpu.append(time.process_time_ns() - begun_cpu - self._clock_ns[_cpu])
            wall.append(_wall() - begun)
            self._fresh = []
            for draft, (request, (text, position)) in zip(
                self._batch.drafts(), self._rows.items(), strict=True
            ):
                fresh = text[position : position + 1 + _accepted(draft, text[position:])]
                self._fresh.append(fresh)
                self._rows[request] = (text, position + len(fresh))
        if threads:
            os.sched_setaffinity(0, self._cpus[-1:])
            self._side.threads(1)
        return {"ns": cpu, "wall_ns": wall, "tokens": tokens}

    def end_batch(self, evict: bool = True) -> Answer:
        """End the requests of the batch and, by default, remove them from the cache."""
        for request in self._rows:
            _run(self._side.stop(request))
            if evict:
                _run(self._side.evict(request))
        self._batch = None
        return {}

    def churn(self, first: int, last: int) -> Answer:
        """Run requests, one after the other, through a full cache, timing every single call."""
        cpu: list[int] = []
        wall: list[int] = []
        kinds: list[str] = []

        def timed(kind: str, call: Call) -> Any:
            function, arguments = call
            begun_wall = _wall()
            begun = _cpu()
            result = function(*arguments)
            ended = _cpu()
            wall.append(_wall() - begun_wall - self._clock_ns[_wall] - 2 * self._clock_ns[_cpu])
            cpu.append(ended - begun - self._clock_ns[_cpu])
            kinds.append(kind)
            return result

        for i, text in enumerate(self._shown[first:last], first):
            timed("start", self._side.start(i, text[:PROMPT]))
            position = PROMPT
            while position < len(text):
                context = text[max(0, position - self._depth) : position]
                draft = timed("speculate", self._side.speculate(i, context, 1.0))
                fresh = text[position : position + 1 + _accepted(draft.token_ids, text[position:])]
                timed("extend", self._side.extend(i, fresh))
                position += len(fresh)
            timed("stop", self._side.stop(i))
        return {
            "cpu": _longest(cpu, kinds),
            "wall": _longest(wall, kinds),
            "kinds": {
                kind: _longest([ns for ns, of in zip(cpu, kinds, strict=True) if of == kind])
                for kind in ("start", "speculate", "extend", "stop")
            },
        }

    def prompt(self, begin: int, size: int) -> Answer:
        """Open a long prompt; time the call, and the wait until drafts can use the whole prompt."""
        text = np.concatenate(self._shown[begin : begin + size // 1024 + 1])[:size]
        os.sched_setaffinity(0, self._cpus)
        function, arguments = self._side.start(-1, np.ascontiguousarray(text))
        begun, begun_all, begun_cpu = _wall(), time.process_time_ns(), _cpu()
        function(*arguments)
        waited_cpu = _cpu() - begun_cpu - self._clock_ns[_cpu]
        waited = _wall() - begun
        self._side.wait()
        complete, complete_cpu = _wall() - begun, time.process_time_ns() - begun_all
        os.sched_setaffinity(0, self._cpus[-1:])
        _run(self._side.stop(-1))
        _run(self._side.evict(-1))
        return {
            "wait_ns": waited,
            "wait_cpu_ns": waited_cpu,
            "complete_ns": complete,
            "complete_cpu_ns": complete_cpu,
        }

    def save(self, path: str) -> Answer:
        """Write the cache; return the size of the file."""
        begun = _wall()
        self._side.save(path)
        return {"wall_ns": _wall() - begun, "bytes": Path(path).stat().st_size}

    def load(self, path: str) -> Answer:
        """Load the file into a new cache."""
        begun, begun_cpu = _wall(), time.process_time_ns()
        self._side.load(path)
        cpu = time.process_time_ns() - begun_cpu
        return {"ns": cpu, "wall_ns": _wall() - begun}

    def _insert(self, request: int, token_ids: Tokens) -> None:
        _run(self._side.start(request, NOTHING))
        _run(self._side.extend(request, token_ids))
        _run(self._side.stop(request))

    def _timed(self, call: Call) -> tuple[int, Any]:
        function, arguments = call
        begun = _cpu()
        result = function(*arguments)
        return _cpu() - begun - self._clock_ns[_cpu], result


def serve_side(side: Side) -> None:
    """Answer for a side until stdin ends."""
    replay = Replay(side)
    operations = [name for name in dir(Replay) if not name.startswith("_")]
    serve({name: getattr(replay, name) for name in operations})


def _cpu() -> int:
    return time.thread_time_ns()


def _wall() -> int:
    return time.perf_counter_ns()


def _clock_cost(clock: Callable[[], int]) -> int:
    """Return the median difference between two consecutive readings."""
    differences = []
    for _ in range(10_000):
        begun = clock()
        differences.append(clock() - begun)
    return sorted(differences)[len(differences) // 2]


def _run(call: Call) -> Any:
    function, arguments = call
    return function(*arguments)


def _accepted(draft: Sequence[int], text: Tokens) -> int:
    """Return how many tokens of a draft are right; the last token of a text never counts."""
    right = 0
    for token, wanted in zip(draft, text[: len(text) - 1].tolist(), strict=False):
        if token != wanted:
            break
        right += 1
    return right


def _longest(nanoseconds: Sequence[int], kinds: Sequence[str] = ()) -> Answer:
    """Return the number of calls, and their median, 99.9th percentile and maximum."""
    times = np.asarray(nanoseconds)
    return {
        "calls": len(times),
        "p50": float(np.median(times)),
        "p999": float(np.percentile(times, 99.9)),
        "max": int(times.max()),
        **({"kind": kinds[int(times.argmax())]} if kinds else {}),
    }


def _read(stem: Path) -> list[Tokens]:
    """Return the requests of a stream, each a separate array."""
    tokens = np.load(f"{stem}.npy")
    ends = np.load(f"{stem}.ends.npy")
    return [piece.copy() for piece in np.split(tokens, ends[:-1])]
