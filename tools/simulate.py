# SPDX-License-Identifier: Apache-2.0
"""Simulate nodes that compute prompts, decode or do both: `python -m tools.simulate [FILE]`.

This is a discrete-event simulation. A node runs steps, one after the other. A step contains the
rows of all requests that decode there, one plus its drafts each, and rows of prompts, first come,
first served. It takes as long as a step of that many rows was measured to take. A request whose
prompt was computed on another node waits until its pages have crossed a link. FILE has the
measurements; the default is docs/examples/simulation.json, which names the source of its numbers.

Without `--draw` it prints a table; with it, it draws docs/simulation.svg.
"""

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import numpy as np

from tools.pictures import BORDER, DOCS, MARGIN, WIDTH, picture, words

EXAMPLE = DOCS / "examples" / "simulation.json"
PICTURE = DOCS / "simulation.svg"
SEED = 5
REQUESTS = 200


@dataclass(frozen=True)
class Machine:
    """Measured properties of a node, and the assumed load.

    Attributes:
        step_seconds: duration of steps by their rows; linear between these, and beyond.
        max_rows: prompt rows in a step.
        max_beside: prompt rows in a step in which requests also decode.
        bytes_per_token: bytes of a page per token.
        link_bytes_per_second: bandwidth of the link between two nodes.
        link_seconds: fixed latency of a page transfer.
        page_size: tokens of a page; a decode node computes the prompt's last ones itself.
        acceptance: probability that a draft is accepted if those before it are.
        prompt_tokens, output_tokens: of a request, from half to one and a half times as many.
    """

    step_seconds: tuple[tuple[int, float], ...]
    max_rows: int
    max_beside: int
    bytes_per_token: int
    link_bytes_per_second: float
    link_seconds: float
    page_size: int
    acceptance: float
    prompt_tokens: int
    output_tokens: int

    @classmethod
    def load(cls, path: Path) -> "Machine":
        """Read a file of measurements."""
        values: dict[str, Any] = json.loads(path.read_text())
        values.pop("measured")
        points = tuple((rows, seconds) for rows, seconds in values.pop("step_seconds"))
        return cls(step_seconds=points, **values)

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step."""
        return _seconds(self.step_seconds, rows)

    def on_the_link(self, tokens: int) -> float:
        """Return the seconds that the transfer of a prompt's pages takes."""
        return self.link_seconds + tokens * self.bytes_per_token / self.link_bytes_per_second


@cache
def _seconds(points: tuple[tuple[int, float], ...], rows: int) -> float:
    places, seconds = zip(*points, strict=True)
    if rows <= places[-1]:
        return float(np.interp(rows, places, seconds))
    slope = (seconds[-1] - seconds[-2]) / (places[-1] - places[-2])
    return float(seconds[-1] + slope * (rows - places[-1]))


@dataclass(eq=False)
class Request:
    """A request, and when it received its tokens.

    Attributes:
        arrival: in seconds.
        prompt: prompt tokens that have no keys and values yet.
        left: tokens still to generate.
        times: when tokens arrived, and how many.
    """

    arrival: float
    prompt: int
    left: int
    times: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.times[0][0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Seconds from each step that emitted tokens for it to the next one."""
        return [b - a for (a, _), (b, _) in itertools.pairwise(self.times)]

    @property
    def per_token(self) -> float:
        """Mean seconds per token after the first step's tokens."""
        count = sum(tokens for _, tokens in self.times[1:])
        return (self.times[-1][0] - self.times[0][0]) / max(count, 1)


class Node:
    """One engine.

    Args:
        machine: measurements of the engine.
        drafts: drafts of a request in a step.
        draw: returns random numbers in [0, 1) that decide acceptance.
        prompt_done: called with a request whose prompt is computed, if another node decodes it.
    """

    def __init__(
        self,
        machine: Machine,
        drafts: int,
        draw: Callable[[], float],
        prompt_done: Callable[[Request], None] | None = None,
    ) -> None:
        self._machine, self._drafts, self._draw = machine, drafts, draw
        self._prompt_done = prompt_done
        self.prompts: deque[Request] = deque()
        self._decoding: list[Request] = []
        self._shares: list[tuple[Request, int]] = []  # rows of prompts in the current step
        self.is_busy = False

    @property
    def load(self) -> int:
        """Requests on this node."""
        return len(self.prompts) + len(self._decoding)

    def begin(self) -> float | None:
        """Begin a step; return its duration, or None if there is nothing to do."""
        rows = len(self._decoding) * (1 + self._drafts)
        budget = self._machine.max_beside if self._decoding else self._machine.max_rows
        self._shares = []
        for request in self.prompts:
            share = min(request.prompt, budget)
            if not share:
                break
            self._shares.append((request, share))
            budget -= share
            rows += share
        self.is_busy = rows > 0
        return self._machine.seconds(rows) if rows else None

    def end(self, now: float) -> None:
        """End the step: its requests get their tokens."""
        for request in self._decoding:
            count = 1
            while count <= self._drafts and self._draw() < self._machine.acceptance:
                count += 1
            self._emit(request, now, count)
        for request, share in self._shares:
            request.prompt -= share
            if request.prompt:
                continue
            self.prompts.remove(request)
            if self._prompt_done is not None:
                self._prompt_done(request)
            else:
                self._emit(request, now, 1)
                self._decoding.append(request)
        self._decoding = [one for one in self._decoding if one.left]
        self.is_busy = False

    def _emit(self, request: Request, now: float, count: int) -> None:
        count = min(count, request.left)
        request.left -= count
        request.times.append((now, count))


def arrivals(machine: Machine, rate: float, count: int, seed: int) -> list[Request]:
    """Return requests of a Poisson process with `rate` arrivals per second."""
    draw, now, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        prompt, output = (
            max(round(size * draw.uniform(0.5, 1.5)), 1)
            for size in (machine.prompt_tokens, machine.output_tokens)
        )
        requests.append(Request(now, prompt, output))
    return requests


def simulate(
    machine: Machine,
    requests: Sequence[Request],
    *,
    prefill: int,
    decode: int,
    mixed: int = 0,
    drafts: int = 0,
    seed: int = SEED,
) -> None:
    """Run requests to their ends and fill in their times.

    Args:
        machine: measurements of every node.
        requests: by arrival; modified.
        prefill, decode: numbers of separate nodes; both, or none.
        mixed: nodes that do both, if there are no separate ones.
        drafts: drafts of a request in a step.
        seed: seed of acceptance.
    """
    draw = random.Random(seed).random
    numbers = itertools.count()  # of two events at the same time, the older one comes first
    events: list[tuple[float, int, Callable[[float], None]]] = []
    prompts: list[Node] = []
    decoders: list[Node] = []

    def at(time: float, work: Callable[[float], None]) -> None:
        heapq.heappush(events, (time, next(numbers), work))

    def wake(node: Node, now: float) -> None:
        seconds = None if node.is_busy else node.begin()
        if seconds is not None:
            at(now + seconds, lambda then: finish(node, then))

    def finish(node: Node, now: float) -> None:
        node.end(now)
        wake(node, now)

    def give(nodes: Sequence[Node], request: Request, now: float) -> None:
        node = min(nodes, key=lambda one: one.load)
        node.prompts.append(request)
        wake(node, now)

    def hand_over(request: Request, tokens: int, now: float) -> None:
        request.prompt = tokens % machine.page_size or 1  # the decode node computes these
        at(now + machine.on_the_link(tokens), lambda then: give(decoders, request, then))

    clock = [0.0]
    sizes = {id(one): one.prompt for one in requests}
    done: Callable[[Request], None] = lambda one: hand_over(one, sizes[id(one)], clock[0])  # noqa: E731
    prompts += [Node(machine, 0, draw, done) for _ in range(prefill)]
    decoders += [Node(machine, drafts, draw) for _ in range(decode)]
    both = [Node(machine, drafts, draw) for _ in range(mixed)]
    for request in requests:
        at(request.arrival, lambda now, one=request: give(prompts or both, one, now))  # type: ignore[misc]
    while events:
        now, _, work = heapq.heappop(events)
        clock[0] = now
        work(now)


@dataclass(frozen=True)
class Outcome:
    """Results over all requests: two 95th percentiles and a mean."""

    first_token: float
    gap: float
    per_token: float


def outcome(machine: Machine, rate: float, count: int = REQUESTS, **nodes: int) -> Outcome:
    """Return the outcome at `rate` requests per second."""
    requests = arrivals(machine, rate, count, SEED)
    simulate(machine, requests, **{"prefill": 0, "decode": 0, **nodes})
    firsts = [one.first_token for one in requests]
    gaps = [gap for one in requests for gap in one.gaps] or [0.0]
    return Outcome(_p95(firsts), _p95(gaps), mean(one.per_token for one in requests))


def _p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def most(machine: Machine, first_token: float, gap: float, **nodes: int) -> float:
    """Return the highest request rate per second that meets both time limits, by bisection."""
    row_seconds = machine.seconds(machine.max_rows) / machine.max_rows
    low, high = 0.0, sum(nodes.values()) / (machine.prompt_tokens * row_seconds)
    for _ in range(7):
        rate = (low + high) / 2
        found = outcome(machine, rate, **nodes)
        is_good = found.first_token <= first_token and found.gap <= gap
        low, high = (rate, high) if is_good else (low, rate)
    return low


def best_drafts(machine: Machine, running: int, most_drafts: int = 8) -> int:
    """Return the number of drafts that maximizes the speed of `running` decoding requests."""

    def speed(drafts: int) -> float:
        chance = machine.acceptance
        tokens = sum(chance**place for place in range(drafts + 1))
        return tokens / machine.seconds(running * (1 + drafts))

    return max(range(most_drafts + 1), key=speed)


# ---- printing and drawing ----

_FIRST_TOKEN, _GAPS = 5.0, (0.15, 0.1)  # limits in seconds for the 95th percentile
_OUTPUTS = (32, 128, 512)
_RUNNING = (1, 2, 4, 8, 16, 32, 64)
_RATES = tuple(0.2 * place for place in range(1, 13))  # for three nodes, in requests per second
# Three nodes: most prompt rows beside decoding, and the roles of the nodes.
_KINDS: dict[str, tuple[int, dict[str, int]]] = {
    "both, 128 rows": (128, {"mixed": 3}),
    "both, 16 rows": (16, {"mixed": 3}),
    "two for prompts, one decodes": (16, {"prefill": 2, "decode": 1}),
}
_COLOURS = ("#0969da", "#8250df", "#bc4c00")
_PANEL, _LEFT = 170, 60


def table(machine: Machine) -> str:
    """Return Markdown tables of the load that three nodes sustain, and of the best draft counts."""
    lines = [f"| gap | output tokens | {' | '.join(_KINDS)} |", "| --- " * (2 + len(_KINDS)) + "|"]
    for gap, output in itertools.product(_GAPS, _OUTPUTS):
        rates = [
            most(
                replace(machine, output_tokens=output, max_beside=rows), _FIRST_TOKEN, gap, **nodes
            )
            for rows, nodes in _KINDS.values()
        ]
        told = " | ".join(f"{rate:.1f}" for rate in rates)
        lines.append(f"| {gap:g} s | {output} | {told} |")
    lines += ["", "| requests that decode | best drafts |", "| --- | --- |"]
    lines += [f"| {count} | {best_drafts(machine, count)} |" for count in _RUNNING]
    return "\n".join(lines)


def _curve(
    points: Sequence[tuple[float, float]], top: float, right: float, most_y: float, colour: str
) -> str:
    """Return a line through points, in a panel whose lower left corner is (0, 0)."""
    places = " ".join(
        f"{_LEFT + x / right * (WIDTH - _LEFT - MARGIN):.1f},"
        f"{top + _PANEL - min(y / most_y, 1.0) * _PANEL:.1f}"
        for x, y in points
    )
    return f'  <polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _axes(top: float, most_y: float, unit: str, labels: Sequence[tuple[float, str]]) -> list[str]:
    """Return a frame with its greatest value, and texts below it at fractions of the width."""
    width = WIDTH - _LEFT - MARGIN
    frame = f'x="{_LEFT}" y="{top}" width="{width}" height="{_PANEL}"'
    return [
        f'  <rect {frame} fill="none" stroke="{BORDER}"/>',
        words(MARGIN, top + 12, f"{most_y:g}{unit}", "note"),
        words(MARGIN, top + _PANEL, f"0{unit}", "note"),
        *[
            words(_LEFT + share * width - 10, top + _PANEL + 18, text, "note")
            for share, text in labels
        ],
    ]


def drawn(machine: Machine) -> str:
    """Return the picture: gaps by load, mixed and separate, and the best drafts by load."""
    top, most_gap, right = 76.0, 0.2, _RATES[-1]
    body = [words(MARGIN, 30, "Time between two steps of a request, 95th percentile", "title")]
    for place, (name, (rows, nodes)) in enumerate(_KINDS.items()):
        one = replace(machine, max_beside=rows)
        gaps = [(rate, outcome(one, rate, **nodes).gap) for rate in _RATES]
        body.append(_curve(gaps, top, right, most_gap, _COLOURS[place]))
        x = MARGIN + 150 * place
        body.append(f'  <path d="M{x} 53h20" stroke="{_COLOURS[place]}" stroke-width="2"/>')
        body.append(words(x + 26, 58, name, "note"))
    labels = [(rate / right, f"{rate:.1f}") for rate in _RATES[1::2]]
    body += _axes(top, most_gap, " s", labels)
    body.append(words(_LEFT, top + _PANEL + 38, "requests a second, on three nodes", "note"))
    second, most_drafts = top + _PANEL + 90, 8
    body.append(words(MARGIN, second - 18, "Drafts that give the most tokens a second", "title"))
    last = len(_RUNNING) - 1
    best = [(place, best_drafts(machine, count)) for place, count in enumerate(_RUNNING)]
    body.append(_curve(best, second, last, most_drafts, _COLOURS[0]))
    body += _axes(
        second,
        most_drafts,
        "",
        [(place / last, str(count)) for place, count in enumerate(_RUNNING)],
    )
    body.append(words(_LEFT, second + _PANEL + 38, "requests that decode on a node", "note"))
    return picture(
        "Requests on nodes that do both wait longer between tokens, as long as a step has rows; on "
        "a node that decodes alone they do not. The more requests decode, the fewer drafts pay",
        int(second) + _PANEL + 56,
        body,
    )


def main() -> None:
    """Print the table or draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--draw", action="store_true", help=f"write {PICTURE.name}")
    args = parser.parse_args()
    machine = Machine.load(args.file)
    if args.draw:
        PICTURE.write_text(drawn(machine))
    else:
        print(table(machine))


if __name__ == "__main__":
    main()
