# SPDX-License-Identifier: Apache-2.0
"""`append_attention` on a GPU against the run's read bandwidth, and the cost of exactness.

There are 8 KV heads of 128, and 4 or 8 query heads per KV head. Batches and lengths vary, requests
have 1 to 8 rows, and pages are shuffled.
"""

from collections.abc import Sequence
from functools import partial

import torch
from specops import attention

from bench.common import Timing
from bench.cuda import CudaBench, bandwidth_figure, seconds, time_figure
from bench.cuda_caches import TOKEN_BYTES_8BIT, Cache, Load, loads
from bench.variants import FREE_SPLITS, build, using

ROWS = (1, 2, 5, 8)
GROUPS = (4, 8)


def run_attention_cuda(bench: CudaBench) -> None:
    """Measure which fraction of the read bandwidth each load reaches.

    Each load runs with several numbers of rows, and of query heads per KV head (`group`). The time
    of 8 rows divided by that of 1 row is also measured.
    """
    for load in loads(bench).values():
        for page_size in (16, 64) if load.name == "b32.4k" else (16,):
            cache = Cache(bench, load, page_size)
            name = load.name if page_size == 16 else f"{load.name}.page{page_size}"
            for group in GROUPS:
                cases = {
                    f"q{q_len}": cache.ours(*cache.queries(bench, q_len, group)) for q_len in ROWS
                }
                _figures(bench, bench.time(cases), f"attention.{name}.g{group}", load, group)
            del cache, cases


def _figures(
    bench: CudaBench, timings: Sequence[Timing], prefix: str, load: Load, group: int
) -> None:
    for q_len in ROWS:
        what = f"append_attention bf16 {load.name}, group {group}, {q_len} rows"
        case, id = f"q{q_len}", f"{prefix}.q{q_len}"
        if load.name == "b1.4k":
            bar = bench.goal("G3") if group == 4 else None
            bench.add(time_figure(timings, case, id, what, bar=bar))
            continue
        bar = (bench.goal("G1") or bench.goal("G10")) if load.is_big else None
        what += ": share of read bandwidth"
        bench.add(bandwidth_figure(timings, case, id, what, load.num_bytes, bar))
    bench.add(
        time_figure(
            timings,
            "q8",
            f"{prefix}.q8_over_q1",
            f"append_attention bf16 {load.name}, group {group}: time of 8 rows over that of 1",
            over=("q1", "1 row"),
            bar=bench.goal("G2") if load.is_big else None,
        )
    )


KINDS_8BIT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def run_attention_8bit_cuda(bench: CudaBench) -> None:
    """Measure 8-bit caches: fraction of the read bandwidth, and time divided by that of bf16."""
    for load in loads(bench).values():
        caches = {"bf16": Cache(bench, load)}
        caches |= {kind: Cache(bench, load, dtype=dtype) for kind, dtype in KINDS_8BIT.items()}
        for q_len in (1, 5):
            cases = {
                kind: cache.ours(*cache.queries(bench, q_len, 4)) for kind, cache in caches.items()
            }
            timings = bench.time(cases)
            num_bytes = TOKEN_BYTES_8BIT * sum(load.kv_lens)
            for kind in KINDS_8BIT:
                id = f"attention_8bit.{kind}.{load.name}.q{q_len}"
                what = f"append_attention {kind} {load.name}, group 4, {q_len} rows"
                share = f"{what}: share of read bandwidth"
                bench.add(bandwidth_figure(timings, kind, id, share, num_bytes, None))
                over = ("bf16", "bf16 caches")
                what += ": time over that of bf16 caches"
                bench.add(time_figure(timings, kind, f"{id}.over_bf16", what, over=over))
        del caches, cases


def run_exactness_cuda(bench: CudaBench) -> None:
    """Time the fixed leaf and chunk sizes against the fastest other sizes for each load."""
    modules = {"leaf512": attention._C}
    if not bench.rehearsal:
        modules = build(list(FREE_SPLITS))
    for load in loads(bench).values():
        cache = Cache(bench, load)
        for q_len in (1, 5):
            q, qo_indptr = cache.queries(bench, q_len, 4)
            id = f"exactness.{load.name}.q{q_len}"
            cases = {"ours": cache.ours(q, qo_indptr)}
            for name, module in modules.items():
                # The workspace size depends on the build.
                workspace = using(module, partial(cache.workspace, q))()
                calls = cache.ours(q, qo_indptr, workspace=workspace)
                calls = [using(module, call) for call in calls]
                if bench.runs(f"{id}.{name}", calls[0]):
                    cases[name] = calls
            timings = bench.time(cases)
            best = min(cases, key=lambda name: seconds(timings, name))
            bar = bench.goal("G8") if len(load.kv_lens) > 1 else "ratio <= 1.1"
            bench.add(
                time_figure(
                    timings,
                    "ours",
                    id,
                    f"append_attention bf16 {load.name}, group 4, {q_len} rows: time over that of "
                    "the best split for this load",
                    over=(best, best),
                    bar=bar,
                )
            )
        del cache
