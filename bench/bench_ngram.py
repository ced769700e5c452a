# SPDX-License-Identifier: Apache-2.0
"""`ngram_propose` for 64 requests whose contexts have no match, with and without an index.

Every step appends one token to each request. Without an index, a step reads all contexts, as a KMP
search does; with an index, it reads only the new tokens.
"""

import time
from collections.abc import Callable

import torch
from specops.ngram import NgramIndex, ngram_propose

from bench.common import Bench, Figure

BATCH, VOCAB, DRAFTS = 64, 128_256, 8
SIZES = {"min_ngram_size": 1, "max_ngram_size": 3}
CONTEXTS = (1024, 16_384, 131_072)
STEPS, ROUNDS = 64, 7


def run_ngram_propose(bench: Bench) -> None:
    """Time a step at each context length."""
    for context in CONTEXTS:
        _context(bench, context)


def _context(bench: Bench, context: int) -> None:
    """Add the microseconds of a step with the index, and of a step without."""
    # Measure a disturbed window again, up to three times in all.
    length = context + (3 * ROUNDS + 1) * STEPS
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, VOCAB, (BATCH, length), dtype=torch.int32, generator=generator)
    index = NgramIndex.empty(BATCH, length, num_sizes=3)
    # The first call indexes the existing tokens; later steps index only new ones.
    all_at_once = NgramIndex(index.table, index.state, index_tokens=length)
    _steps(rows, context, all_at_once)(1)
    cases = {"index": _steps(rows, context, index), "rescan": _steps(rows, context, None)}
    timing = bench.rounds(
        {case: lambda run=run: run(STEPS) for case, run in cases.items()}, rounds=ROUNDS
    )
    bench.add(
        Figure(
            f"ngram_propose.{context // 1024}k",
            f"{BATCH} requests, contexts of {context:,} without a match: a step, with the index",
            timing.median("index") * 1e6,
            "us",
            "without it",
            timing.median("rescan") * 1e6,
            timing.ratio("rescan", "index"),
            threads=bench.num_threads,
            read_gb_s=timing.read_gb_s(),
        )
    )


def _steps(rows: torch.Tensor, context: int, index: NgramIndex | None) -> Callable[[int], float]:
    """Return a function that runs a number of further steps and returns the seconds per step."""
    lens = torch.full((BATCH,), context, dtype=torch.int32)
    limits = torch.full((BATCH,), DRAFTS, dtype=torch.int32)
    drafts = torch.empty(BATCH, DRAFTS, dtype=torch.int32)
    num_drafts = torch.empty(BATCH, dtype=torch.int32)

    def steps(count: int) -> float:
        seconds = 0.0
        for _ in range(count):
            lens.add_(1)
            begun = time.perf_counter()
            ngram_propose(
                rows,
                lens,
                limits,
                **SIZES,
                draft_token_ids=drafts,
                num_draft_tokens=num_drafts,
                index=index,
            )
            seconds += time.perf_counter() - begun
        return seconds / count

    return steps
