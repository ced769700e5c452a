# SPDX-License-Identifier: Apache-2.0
"""The suffix tree against arctic-inference's, through public APIs, in CPU time on one core.

Both trees run the loops of bench/peers/suffix_replay.py in separate processes on the same core,
alternating piece by piece. Drafts end at the depth of the tree, unless a figure says "read on".
`ratio` is the peer's time or bytes over ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.common import WORK, Bench, Figure, PeerError
from bench.suffix_streams import HELD_REVISIONS, REVISIONS, SHORTEST, streams

PEER = "arctic-inference"
NAMES = {"code": "code", "edit": "near-copies"}
Answer = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Amounts to measure."""

    cached_tokens: int = 1_000_000
    saved_tokens: int = 5_000_000
    pieces: int = 10
    replays: int = 24
    passes: int = 3
    batch: int = 64
    steps: int = 20
    churn: int = 120
    prompt: int = 32_768
    loads: int = 3


# Required ratio of a figure: (stream, depth) or depth -> bar. Faster memory helps the peer more
# than us where the peer waits for memory; these bars hold on a Zen 4 and on a Zen 5.
BARS: dict[str, dict[tuple[str, int], float]] = {
    "insert": {("code", 64): 5, ("edit", 64): 4},
    "resident": {("code", 64): 7, ("edit", 64): 7, ("code", 24): 5.5, ("edit", 24): 5.5},
    "speculate.p50": {("code", 64): 8, ("edit", 64): 8},
    "speculate.p99": {("code", 64): 12, ("edit", 64): 10},
    "step": {("code", 64): 12, ("edit", 64): 9, ("code", 24): 8, ("edit", 24): 8},
    "tokens": {(stream, depth): 0.995 for stream in NAMES for depth in (64, 24)},
    "read_on": {("edit", 24): 1.15},
    "evict": {("code", 64): 3, ("edit", 64): 3},
}
# Required speedup of two threads over one. On near-copies, most of a step appends to the single
# shared tree, which is serial.
THREADS_BARS = {"code": 1.5, "edit": 1.1}


def run_suffix_tree(bench: Bench) -> None:
    """Measure every request stream with both maximum tree depths, then loading a saved cache."""
    measure(bench, Sizes(), streams(), (64, 24))


def measure(bench: Bench, sizes: Sizes, folder: Path, depths: Sequence[int]) -> None:
    """Add all figures for the streams in a folder."""
    for depth in depths:
        for stream in NAMES:
            _Tree(bench, sizes, folder, stream, depth).run()
    for stream in NAMES:
        _load(bench, sizes, folder, stream)


class _Tree:
    """Measurements of one stream of requests with trees of one maximum depth.

    Our tree and the peer's (if the peer is installed) run in one process each.
    """

    def __init__(self, bench: Bench, sizes: Sizes, folder: Path, stream: str, depth: int) -> None:
        self.bench, self.sizes, self.stream, self.depth = bench, sizes, stream, depth
        self.where = {"streams": str(folder), "stream": stream, "depth": depth}
        self.ends = np.load(folder / f"{stream}.ends.npy")
        num_held = len(np.load(folder / f"{stream}.held.ends.npy"))
        # The number of requests that together have `cached_tokens` tokens.
        self.cached = int(np.searchsorted(self.ends, sizes.cached_tokens)) + 1
        if stream == "edit":
            # Only documents whose revisions are in the cache; first one ninth revision of each.
            num_held = self.cached // REVISIONS * HELD_REVISIONS
            order = sorted(range(num_held), key=lambda i: (i % HELD_REVISIONS, i))
        else:
            order = list(range(num_held))
        self.replayed = order[: sizes.replays]
        self.batched = order[sizes.replays :][: sizes.batch]
        self.limit = self.cached + len(self.batched)

    def run(self) -> None:
        sides = {"ours": self.bench.peer("specops_suffix", own=True)}
        sides["peer"] = self.bench.peer("arctic_peer")
        self.sides = {name: side for name, side in sides.items() if side}
        if "ours" not in self.sides:
            raise PeerError("our own side does not run, see bench/work/specops_suffix.log")
        try:
            self._fill()
            tokens = self._replay()
            self._batch()
            if self.depth == 64:
                self._threads()
                self._prompt()
            self._full()
            self._read_on(tokens)
        finally:
            for side in self.sides.values():
                side.close()

    def _fill(self) -> None:
        """Insert whole requests, and measure the process's memory before and after."""
        before = self._ask("open", **self.where, max_cached_requests=self.limit)
        took = self._pieces("insert", 0, self.cached)
        after = self._ask("resident")
        self._time("insert", "a request inserted whole: CPU a token", took)
        tokens = int(self.ends[self.cached - 1])
        bytes_a_token = {
            name: (after[name]["bytes"] - before[name]["bytes"]) / tokens for name in after
        }
        self._add("resident", "resident memory", bytes_a_token, "B/token")

    def _replay(self) -> dict[str, float]:
        """Replay held-out requests one by one: cost of drafts, and fraction of accepted ones."""
        passes: list[dict[str, list[Answer]]] = []
        for _ in range(self.sizes.passes):
            answers: dict[str, list[Answer]] = {name: [] for name in self.sides}
            for held in self.replayed:
                for name, answer in self._ask("replay", held=held).items():
                    answers[name].append(answer)
            self._ask("forget", held=self.replayed)
            passes.append(answers)
        for id, field, what in (
            ("speculate", "draft_ns", "one draft"),
            ("extend", "extend_ns", "what was right appended"),
        ):
            for percent in (50, 99):
                times = {name: _percentile(passes, name, field, percent) for name in self.sides}
                what_of = f"{what}, {'median' if percent == 50 else '99th percentile'}: CPU"
                self._add(f"{id}.p{percent}", what_of, times, "us")
        tokens = {name: _tokens_a_step(passes[0][name]) for name in self.sides}
        self._add("tokens", "tokens a step at equal settings", tokens, "tokens", better=1)
        return tokens

    def _read_on(self, tokens: dict[str, float]) -> None:
        """Replay with drafts that continue beyond the depth of the tree ("read on")."""
        ours = self.sides["ours"]
        ours.ask("open", **self.where, max_cached_requests=self.limit, read_on=True)
        ours.ask("insert", first=0, last=self.cached)
        answers = [ours.ask("replay", held=held) for held in self.replayed]
        reading = {**tokens, "ours": _tokens_a_step(answers)}
        self._add("read_on", "tokens a step, reading on", reading, "tokens", better=1)

    def _batch(self) -> None:
        """Time a decode step of a whole batch: our single call against a loop."""
        took = self._steps()
        self._ask("end_batch")
        step = {name: median(times) / 1e3 for name, times in took.items()}
        self._add("step", f"a step of {len(self.batched)} requests: CPU", step, "us")

    def _steps(self) -> dict[str, list[int]]:
        """Run steps of a batch whose requests have 128 generated tokens, alternating both sides."""
        self._ask("begin_batch", held=self.batched, generated=128)
        took: dict[str, list[int]] = {name: [] for name in self.sides}
        for _ in range(4):
            for name, answer in self._ask("steps", count=self.sizes.steps // 4).items():
                took[name] += answer["ns"]
        return took

    def _threads(self) -> None:
        """Time our batch with two threads and with one, in wall-clock time."""
        ours = self.sides["ours"]
        ours.ask("begin_batch", held=self.batched, generated=128)
        took: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(3):
            for threads, times in took.items():

                def steps(threads: int = threads) -> list[int]:
                    answer = ours.ask("steps", count=4, threads=threads)
                    return list(answer["wall_ns"])

                times += self.bench.undisturbed(steps)[1:]
        ours.ask("end_batch")
        one, two = (median(took[threads]) / 1e3 for threads in (1, 2))
        self._figure(
            "threads",
            f"a step of {len(self.batched)} requests, two threads: wall",
            two,
            "us",
            "one thread",
            one,
            one / two,
            f"ratio >= {THREADS_BARS[self.stream]}",
            threads=2,
        )

    def _prompt(self) -> None:
        """Time a long prompt: how long the caller waits, and when drafts can use all of it."""
        answers: dict[str, list[Answer]] = {name: [] for name in self.sides}
        needed = self.sizes.prompt // SHORTEST + 1
        for turn in range(5):
            begin = (self.limit + 40 * turn) % (len(self.ends) - needed)
            replies = self._ask("prompt", begin=begin, size=self.sizes.prompt)
            for name, answer in replies.items():
                answers[name].append(answer)
        what = f"a prompt of {self.sizes.prompt:,} tokens"
        for id, field, description, bar in (
            ("wait", "wait_ns", "until its caller goes on, wall", "ratio >= 100"),
            ("wait_cpu", "wait_cpu_ns", "CPU of its caller", None),
            ("complete", "complete_ns", "until its drafts are complete, wall", "ratio >= 2"),
            ("complete_cpu", "complete_cpu_ns", "CPU of all threads", None),
        ):
            times = {name: median([a[field] for a in of]) / 1e6 for name, of in answers.items()}
            self._add(f"prompt.{id}", f"{what}: {description}", times, "ms", bar=bar)

    def _full(self) -> None:
        """Measure a full cache: longest pauses, memory after replacing every request, eviction."""
        first = self.limit
        self._ask("insert", first=self.cached, last=first)
        full = self._ask("resident")
        churned = self._ask("churn", first=first, last=first + self.sizes.churn)
        for clock in ("cpu", "wall"):
            for id, field, what in (
                ("longest", "max", "longest call"),
                ("p999", "p999", "99.9th percentile of all calls"),
            ):
                times = {name: answer[clock][field] / 1e6 for name, answer in churned.items()}
                bar = "value <= 0.3" if (clock, id) == ("cpu", "longest") else None
                description = f"a full cache, {what}: {clock if clock == 'wall' else 'CPU'}"
                self._add(f"full.{id}.{clock}", description, times, "ms", bar=bar)
        first += self.sizes.churn
        steps = self._steps()
        self._ask("end_batch", evict=False)
        for id, percent, what in (("", 50, ""), (".longest", 100, ", the longest")):
            times = {name: float(np.percentile(of, percent)) / 1e3 for name, of in steps.items()}
            description = f"a full cache, a step of {len(self.batched)} requests{what}: CPU"
            self._add(f"full.step{id}", description, times, "us")
        self._pieces("insert", first, first + self.limit)
        first += self.limit
        after = self._ask("resident")
        grown = {name: after[name]["bytes"] / full[name]["bytes"] for name in after}
        self._add("turnover", "resident memory after a full turnover", grown, "of before", better=0)
        took = self._pieces("evict", first - self.limit, first)
        self._time("evict", "evicted and given back: CPU a token", took)

    def _ask(self, op: str, **arguments: Any) -> dict[str, Answer]:
        """Send the same request to both sides in turn, and return the answers."""
        return {name: side.ask(op, **arguments) for name, side in self.sides.items()}

    def _pieces(self, op: str, first: int, last: int) -> dict[str, list[Answer]]:
        """Run requests `first` to `last` piece by piece, alternating both sides."""
        edges = np.linspace(first, last, self.sizes.pieces + 1).astype(int).tolist()
        answers: dict[str, list[Answer]] = {name: [] for name in self.sides}
        for begin, end in pairwise(edges):
            for name, answer in self._ask(op, first=begin, last=end).items():
                answers[name].append(answer)
        return answers

    def _time(self, id: str, what: str, took: dict[str, list[Answer]]) -> None:
        """Add the nanoseconds per token over all pieces."""
        times = {
            name: sum(a["ns"] for a in answers) / sum(a["tokens"] for a in answers)
            for name, answers in took.items()
        }
        self._add(id, what, times, "ns/token")

    def _add(
        self,
        id: str,
        what: str,
        values: dict[str, float],
        unit: str,
        *,
        better: int = -1,
        bar: str | None = None,
    ) -> None:
        """Add a figure of both sides; `better`: -1 if less is better, 1 if more, 0 for no ratio."""
        ours, peer = values["ours"], values.get("peer")
        ratio = None
        if peer is not None and better:
            ratio = peer / ours if better < 0 else ours / peer
        limit = BARS.get(id, {}).get((self.stream, self.depth))
        if limit is not None:
            bar = f"ratio >= {limit}"
        if peer is None and bar and bar.startswith("ratio"):
            bar = None
        self._figure(id, what, ours, unit, PEER if peer is not None else None, peer, ratio, bar)

    def _figure(
        self,
        id: str,
        what: str,
        value: float,
        unit: str,
        peer: str | None,
        peer_value: float | None,
        ratio: float | None,
        bar: str | None,
        threads: int = 1,
    ) -> None:
        self.bench.add(
            Figure(
                f"suffix_tree.{self.stream}.{self.depth}.{id}",
                f"{NAMES[self.stream]}, depth {self.depth}: {what}",
                value,
                unit,
                peer,
                peer_value,
                ratio,
                bar,
                threads=threads,
                read_gb_s=self.bench.read_gb_s(),
            )
        )


def _load(bench: Bench, sizes: Sizes, folder: Path, stream: str) -> None:
    """Time loading a saved cache against inserting all its requests again."""
    tree = _Tree(bench, sizes, folder, stream, 64)
    last = int(np.searchsorted(tree.ends, sizes.saved_tokens)) + 1
    ours, peer = bench.peer("specops_suffix", own=True), bench.peer("arctic_peer")
    tree.sides = {name: side for name, side in (("ours", ours), ("peer", peer)) if side}
    assert ours
    tree._ask("open", **tree.where, max_cached_requests=-1)
    took = tree._pieces("insert", 0, last)
    inserted = {name: sum(a["ns"] for a in answers) / 1e6 for name, answers in took.items()}
    path = WORK / "suffix-cache.bin"
    try:
        ours.ask("save", path=str(path))
        size = path.stat().st_size
        ours.close()
        loaded = []
        for _ in range(sizes.loads):
            ours = bench.peer("specops_suffix", own=True)
            assert ours
            ours.ask("open", **tree.where, max_cached_requests=-1)
            loaded.append(ours.ask("load", path=str(path))["ns"] / 1e6)
            ours.close()
    finally:
        path.unlink(missing_ok=True)
        if peer:
            peer.close()
    values = {**inserted, "ours": median(loaded)}
    what = f"{last} saved requests of {int(tree.ends[last - 1]):,} tokens"
    description = f"{what} loaded, against inserting them: CPU"
    tree._add("load", description, values, "ms", bar="ratio >= 35")
    tree._add("reinsert", f"{what} inserted: CPU", inserted, "ms")
    tree._figure("file", f"{what}: file", size / 2**20, "MiB", None, None, None, None)


def _tokens_a_step(answers: Sequence[Answer]) -> float:
    return float(sum(a["tokens"] for a in answers) / sum(len(a["draft_ns"]) for a in answers))


def _percentile(
    passes: Sequence[dict[str, list[Answer]]], name: str, field: str, percent: float
) -> float:
    """Return the median over passes of a percentile of one side's calls, in microseconds."""
    times = [np.concatenate([answer[field] for answer in answers[name]]) for answers in passes]
    return float(median([np.percentile(of, percent) for of in times])) / 1e3
