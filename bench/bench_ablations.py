# SPDX-License-Identifier: Apache-2.0
"""Costs of the parts of `append_attention` on a GPU, measured by leaving out one at a time.

Each case leaves out one part of the whole call; only the last case needs another build:

* `hot`: all pages are in 16 MB that stay in the L2 cache, so no key or value comes from DRAM. If
  the case takes as long as the whole call, memory is not the bottleneck.
* `launch`: requests have no tokens before their rows. Only the grid, the plan, the results and one
  tile remain: the fixed cost of a call.
* `unsplit`: the workspace is too small to split requests, so no partial results are written and
  merged. If the case is faster than the whole call, splitting costs more than it gains; if it is
  slower, the difference is the gain of splitting.
* `no_mma`: a build of the kernel without tensor-core instructions, whose results mean nothing. If
  the case takes as long as the whole call, arithmetic is not the bottleneck.

`verify` with top-p is analyzed in the same way, for 256 requests of 5 rows.

The phases of the whole call are measured by a kernel whose blocks record time stamps
(`bench/attention_phases.py`). `tools/gpu_check/held_back.py` draws the conclusion.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from specops import attention, sampling
from specops.sampling import VerifyStrategy
from torch import Tensor

from bench.attention_phases import MOST_BLOCKS, add_phases
from bench.bench_sampling import TOP_P, top_drafts
from bench.bench_sampling_cuda import BATCH, ONE_HOT, random_logits, verify_calls
from bench.bench_sampling_cuda import ROWS as VERIFY_ROWS
from bench.common import Figure
from bench.cuda import Call, CudaBench, time_figure
from bench.cuda_caches import TOKEN_BYTES, Cache, loads
from bench.variants import build, using

LOADS = ("b32.4k", "b8.4k", "b8.32k", "b1.4k", "b1.32k")
ROWS = (1, 8)
GROUPS = (4, 8)
HOT_BYTES = 16 << 20
WHAT = {
    "whole": "the whole call",
    "hot": "over 16 MB of pages that are in the cache",
    "launch": "of requests no longer than their rows",
    "unsplit": "without a workspace to split in",
    "no_mma": "without the tensor cores",
}
WHAT_OF_VERIFY = {
    "whole": "the whole call",
    "scan": "rows read once and drafts walked, nothing chosen by a filter: greedy",
    "leaf": "over one leaf of tokens: launch, choice and walk alone",
}
LEAF_LOGITS = 1024  # 2 KB in bf16


def run_ablations_cuda(bench: CudaBench) -> None:
    """Measure the microseconds of each case, and its fraction of the whole call."""
    for id, what, cache, q, qo_indptr, q_len in _calls(bench):
        cases = _cases(bench, id, cache, q, qo_indptr, q_len)
        _add(bench, id, what, cases)
        add_phases(bench, id, what, cases["whole"])
    _verify(bench)
    # Last, because compiling this kernel takes long unless all variants are already built.
    module = attention._C
    if not bench.rehearsal:
        module = build(["no_mma"])["no_mma"]
    for id, what, cache, q, qo_indptr, _ in _calls(bench):
        whole = cache.ours(q, qo_indptr)
        cases = {"whole": whole, "no_mma": [using(module, call) for call in whole]}
        _add(bench, id, what, cases, but="whole")


def _verify(bench: CudaBench) -> None:
    """Measure the parts of `verify` with top-p: scanning, choosing tokens, walking drafts."""
    batch = bench.pick(BATCH, 2)
    cold = random_logits(bench, batch * VERIFY_ROWS, torch.bfloat16)
    leaf = [cold[0][:, : bench.pick(LEAF_LOGITS, 64)].contiguous()]

    def calls(logits: list[Tensor], strategy: VerifyStrategy) -> list[Call]:
        drafts = [top_drafts(x, batch) for x in logits]
        filters = {} if strategy == VerifyStrategy.GREEDY else {"top_p": TOP_P}
        return verify_calls(bench, logits, drafts, strategy, filters)

    cases = {
        "whole": calls(cold, ONE_HOT),
        "scan": calls(cold, VerifyStrategy.GREEDY),
        "leaf": calls(leaf, ONE_HOT),
    }
    timings = bench.time(cases)
    for case in cases:
        id, text = f"ablations.verify.{case}", f"verify bf16, rejection, {WHAT_OF_VERIFY[case]}"
        over = ("whole", "the whole call")
        bench.add(time_figure(timings, case, id, text, over=over))
    _verify_phases(bench, cases["whole"], batch)


def _verify_phases(bench: CudaBench, calls: Sequence[Call], batch: int) -> None:
    """Add the fractions of block time that scanning, choosing and walking take in a cold call."""
    words = 3 + len(sampling.VERIFY_PHASES)
    blocks = max(batch * VERIFY_ROWS, MOST_BLOCKS)
    stamps = torch.zeros(blocks, words, dtype=torch.int64, device=bench.device)
    if not bench.runs("ablations.verify.phases", lambda: sampling.set_verify_stamps(stamps)):
        return
    try:
        calls[-1]()
        bench.synchronize()
    finally:
        sampling.set_verify_stamps(None)
    rows = stamps[stamps[:, 0] != 0].cpu().double()
    us = float(rows[:, 1].max() - rows[:, 0].min()) * 1e-3
    cycles = rows[:, 2:-1].sum(dim=0)
    for phase, share in zip(sampling.VERIFY_PHASES, (cycles / cycles.sum()).tolist(), strict=True):
        text = f"verify bf16, rejection: its blocks {phase}"
        id = f"ablations.verify.blocks.{phase}"
        bench.add(Figure(id, text, share * us, "us", "the stamped call", us, share, us=share * us))


def _calls(bench: CudaBench) -> Iterator[tuple[str, str, Cache, Tensor, Tensor, int]]:
    """Yield id, description, cache, q, qo_indptr and rows of every measured call."""
    for name in LOADS:
        cache = Cache(bench, loads(bench)[name])
        for group in GROUPS:
            for q_len in ROWS:
                what = f"append_attention bf16 {name}, group {group}, {q_len} rows"
                queries = cache.queries(bench, q_len, group)
                yield f"ablations.{name}.g{group}.q{q_len}", what, cache, *queries, q_len
        del cache


def _add(
    bench: CudaBench, id: str, what: str, cases: Mapping[str, list[Call]], but: str = ""
) -> None:
    timings = bench.time(cases)
    for case in (name for name in cases if name != but):
        text = f"{what}, {WHAT[case]}"
        over = ("whole", "the whole call")
        bench.add(time_figure(timings, case, f"{id}.{case}", text, over=over))


def _cases(
    bench: CudaBench, id: str, cache: Cache, q: Tensor, qo_indptr: Tensor, q_len: int
) -> dict[str, list[Call]]:
    page_bytes = cache.page_size * TOKEN_BYTES
    few = max(1, HOT_BYTES // page_bytes)
    hot = [pages % few for pages in cache.kv_indices]
    cases = {
        "whole": cache.ours(q, qo_indptr),
        "hot": cache.ours(q, qo_indptr, kv_indices=hot),
        "launch": cache.ours(q, qo_indptr, kv_lens=torch.full_like(cache.kv_lens, q_len)),
    }
    unsplit = cache.ours(q, qo_indptr, workspace=cache.workspace(q, share=0.0))
    if bench.runs(f"{id}.unsplit", unsplit[0]):
        cases["unsplit"] = unsplit
    return cases
