# SPDX-License-Identifier: Apache-2.0
"""Where the time of `append_attention` goes on a GPU, from outside: the same call with less to do.

Each case leaves one thing out of the whole call, and no kernel is built for it:

* `hot`: every page is the same one, so that no key or value comes from memory. What is left is
  instructions: if it takes as long as the whole call, memory is not what is waited for.
* `launch`: the requests are no longer than their rows. The grid, the plan, the results and one
  tile are left: what a call costs before it streams.
* `unsplit`: a workspace too small to split in. No states are written and merged: if it is faster
  than the whole call, splitting costs more than it gains; if slower, that is what it gains.

Beside them stand the phases of the whole call, by a kernel whose blocks keep time
(`bench/attention_phases.py`). What all say together is for `tools/gpu_check/held_back.py`.
"""

import torch
from torch import Tensor

from bench.attention_phases import add_phases
from bench.cuda import Call, CudaBench, time_figure
from bench.cuda_caches import Cache, loads

LOADS = ("b32.4k", "b8.4k", "b8.32k", "b1.4k", "b1.32k")
ROWS = (1, 8)
GROUPS = (4, 8)
WHAT = {
    "whole": "the whole call",
    "hot": "with every page the same one",
    "launch": "of requests no longer than their rows",
    "unsplit": "without a workspace to split in",
}


def run_ablations_cuda(bench: CudaBench) -> None:
    """Microseconds of each case, and its share of the whole call."""
    for name in LOADS:
        cache = Cache(bench, loads(bench)[name])
        for group in GROUPS:
            for q_len in ROWS:
                id = f"ablations.{name}.g{group}.q{q_len}"
                cases = _cases(bench, id, cache, *cache.queries(bench, q_len, group), q_len)
                timings = bench.time(cases)
                what = f"append_attention bf16 {name}, group {group}, {q_len} rows"
                for case in cases:
                    bench.add(
                        time_figure(
                            timings,
                            case,
                            f"{id}.{case}",
                            f"{what}, {WHAT[case]}",
                            over=("whole", "the whole call"),
                        )
                    )
                add_phases(bench, id, what, cases["whole"])
        del cache, cases


def _cases(
    bench: CudaBench, id: str, cache: Cache, q: Tensor, qo_indptr: Tensor, q_len: int
) -> dict[str, list[Call]]:
    one_page = [torch.zeros_like(pages) for pages in cache.kv_indices]
    cases = {
        "whole": cache.ours(q, qo_indptr),
        "hot": cache.ours(q, qo_indptr, kv_indices=one_page),
        "launch": cache.ours(q, qo_indptr, kv_lens=torch.full_like(cache.kv_lens, q_len)),
    }
    unsplit = cache.ours(q, qo_indptr, workspace=cache.workspace(q, share=0.0))
    if bench.runs(f"{id}.unsplit", unsplit[0]):
        cases["unsplit"] = unsplit
    return cases
