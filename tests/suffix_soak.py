# SPDX-License-Identifier: Apache-2.0
"""A full suffix cache under churn for half an hour: memory stays flat, and nothing breaks.

    python tests/suffix_soak.py [--seconds 1800] [--seed 0]

Requests with prompts of mixed lengths start, are stepped, stop and are evicted; the shared tree
reaches its budget early. Once a second, the resident memory is recorded, minus the memory that was
used before the cache was made. The mean of the last third of these values must be within 3% of the
mean of the middle third. Call durations are printed, too.
"""

import argparse
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import specops
import torch
from specops.suffix_tree import SuffixCache

BATCH = 64
CAPACITY = 16  # drafts per row
MAX_CACHED_TOKENS = 2_000_000  # smaller if there is little time to reach it
PROMPTS = [20, 200, 1_000, 3_000, 12_000]  # the last ones are built in the background
FLAT = 0.03


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Text:
    """Endless text that repeats itself: copies of a slowly changing pool of pieces."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.pool = [self.fresh(int(size)) for size in self.random.integers(50, 2_000, 200)]

    def fresh(self, size: int) -> np.ndarray:
        return (self.random.zipf(1.3, size) % 50_000).astype(np.int32)

    def take(self, size: int) -> np.ndarray:
        pieces: list[np.ndarray] = []
        left = size
        while left > 0:
            number = int(self.random.integers(len(self.pool)))
            if self.random.random() < 0.05:
                self.pool[number] = self.fresh(len(self.pool[number]))
            start = int(self.random.integers(len(self.pool[number])))
            piece = self.pool[number][start:].copy()
            piece[self.random.random(len(piece)) < 0.02] = self.random.integers(50_000)
            pieces.append(piece[:left])
            left -= len(pieces[-1])
        return np.concatenate([*pieces, np.empty(0, np.int32)])


class Calls:
    """Timer of calls. Other load on the machine affects wall time, not the caller's CPU time."""

    BUCKETS = 20  # per doubling: quantiles to 4%, in memory that does not grow

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        self.longest: dict[tuple[str, str], float] = defaultdict(float)

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = call(*args, **kwargs)
        self.note((name, "CPU"), time.thread_time_ns() - cpu)
        self.note((name, "wall"), time.perf_counter_ns() - wall)
        return result

    def note(self, key: tuple[str, str], ns: int) -> None:
        self.counts[key][int(math.log2(max(ns, 1)) * self.BUCKETS)] += 1
        self.longest[key] = max(self.longest[key], ns)

    def quantile(self, key: tuple[str, str], share: float) -> float:
        left = share * self.counts[key].total()
        for bucket, count in sorted(self.counts[key].items()):
            left -= count
            if left <= 0:
                return float(2 ** ((bucket + 1) / self.BUCKETS))
        return 0.0

    def table(self) -> str:
        lines = [f"{'call':<12} {'calls':>8}  {'p50':>8} {'p99.9':>8} {'longest':>8}  (ms)"]
        for key in sorted(self.counts):
            cuts = [self.quantile(key, 0.5), self.quantile(key, 0.999), self.longest[key]]
            times = " ".join(f"{cut / 1e6:8.3f}" for cut in cuts)
            lines.append(f"{' '.join(key):<12} {self.counts[key].total():>8}  {times}")
        return "\n".join(lines)


def soak(seconds: float, seed: int) -> list[tuple[float, int]]:
    """Return samples of resident memory minus the initial one: seconds since the start, bytes."""
    text, calls = Text(seed), Calls()
    before = resident_bytes()
    budget = min(MAX_CACHED_TOKENS, int(2_500 * seconds))
    cache = SuffixCache(max_cached_tokens=budget)
    slots: list[tuple[int, int, int] | None] = [None] * BATCH  # id, number, remaining tokens
    samples: list[tuple[float, int]] = []
    start, next_id, next_sample, next_check = time.monotonic(), 0, 0.0, 0.0
    drafts = torch.zeros(BATCH, CAPACITY, dtype=torch.int32)
    parents = torch.zeros_like(drafts)
    steps = drafted = 0
    while (now := time.monotonic() - start) < seconds:
        if now >= next_sample:
            samples.append((now, resident_bytes() - before))
            next_sample += max(1.0, seconds / 1800)
        if now >= next_check:
            problem = cache.check_integrity()
            assert problem == "", problem
            next_check += seconds / 50
        for i, slot in enumerate(slots):
            if slot is not None and slot[2] <= 0:
                calls("stop", cache.stop, slot[0])
                slots[i] = slot = None
            if slot is None and text.random.random() < 0.2:
                prompt = text.take(int(text.random.choice(PROMPTS, p=[0.3, 0.3, 0.25, 0.1, 0.05])))
                number = calls("start", cache.start, next_id, prompt)
                slots[i] = (next_id, number, int(text.random.integers(10, 1_500)))
                next_id += 1
        if steps % 100 == 99 and cache.cached_requests:
            cached = cache.cached_requests
            request = cached[int(text.random.integers(min(len(cached), 20)))]
            calls("evict", cache.evict, request)
        width = 4
        new_token_ids = text.take(BATCH * width).reshape(BATCH, width)
        num_new_tokens = text.random.integers(1, width + 1, BATCH).astype(np.int32)
        _, num_draft_tokens = calls(
            "step",
            cache.step,
            torch.tensor([-1 if slot is None else slot[1] for slot in slots]),
            torch.from_numpy(new_token_ids),
            torch.from_numpy(num_new_tokens),
            torch.full((BATCH,), CAPACITY, dtype=torch.int32),
            draft_token_ids=drafts,
            parents=parents,
            use_tree=steps % 2 == 1,
        )
        drafted += int(num_draft_tokens.sum())
        slots = [
            None if slot is None else (*slot[:2], slot[2] - int(num_new_tokens[i]))
            for i, slot in enumerate(slots)
        ]
        steps += 1
    problem = cache.check_integrity()
    assert problem == "", problem
    assert cache.num_cached_tokens <= budget
    for slot in slots:
        if slot is not None:
            cache.stop(slot[0])
    print(f"{steps} steps, {next_id} requests, {drafted} drafts")
    print(f"{cache.num_cached_tokens} tokens cached in {cache.num_bytes} bytes")
    print(calls.table())
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    specops.set_num_threads(2)
    samples = soak(args.seconds, args.seed)
    thirds = []
    for third in range(3):
        begin, end = args.seconds * third / 3, args.seconds * (third + 1) / 3
        thirds.append(float(np.mean([size for now, size in samples if begin <= now < end])))
    highest = max(size for _, size in samples)
    growth = thirds[2] / thirds[1] - 1
    print("resident MB by third: " + ", ".join(f"{mean / 1e6:.1f}" for mean in thirds), end="")
    print(f"; highest {highest / 1e6:.1f}; last against middle {growth:+.2%}")
    if abs(growth) > FLAT:
        print(f"memory is not flat: {abs(growth):.2%} is more than {FLAT:.0%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
