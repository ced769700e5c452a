# SPDX-License-Identifier: Apache-2.0
"""Sweeps over sizes and workspaces, between the cases that have goals.

The sweeps cover batch, rows and group of `append_attention` at 4,096 tokens; the size of its
workspace; and the batch of `verify`. `linear` over M is a separate family.
"""

from specops.sampling import VerifyStrategy

from bench.bench_sampling import TOP_P, top_drafts
from bench.bench_sampling_cuda import DTYPES, ONE_HOT, ROWS, random_logits, verify_calls
from bench.cuda import CudaBench, bandwidth_figure
from bench.cuda_caches import Cache, load, loads

KV_LEN = 4096
BATCHES = (1, 2, 4, 8, 16, 32, 64)
Q_LENS = (1, 2, 3, 4, 5, 8, 16)
GROUPS = (1, 2, 4, 8)
SHARES = (0.0, 0.25, 0.5, 1.0)


def run_sweeps_cuda(bench: CudaBench) -> None:
    """Measure fractions of the read bandwidth; the bars of other benches follow from them."""
    _workspaces(bench)
    _verify(bench)
    for batch in bench.pick(BATCHES, (1, 3)):
        cache = Cache(bench, load(bench, f"b{batch}.4k", *[KV_LEN] * batch))
        for group in bench.pick(GROUPS, (1, 8)):
            cases = {
                f"q{q_len}": cache.ours(*cache.queries(bench, q_len, group))
                for q_len in bench.pick(Q_LENS, (1, 16))
            }
            timings = bench.time(cases)
            for case in cases:
                id = f"sweeps.attention.b{batch}.g{group}.{case}"
                what = f"append_attention bf16, batch {batch}, kv 4,096, group {group}, {case}"
                num_bytes = cache.load.num_bytes
                bench.add(bandwidth_figure(timings, case, id, what, num_bytes, None))
        del cache, cases


def _workspaces(bench: CudaBench) -> None:
    for name in ("b8.4k", "b1.32k", "b1.4k"):
        cache = Cache(bench, loads(bench)[name])
        for q_len in (1, 8):
            q, qo_indptr = cache.queries(bench, q_len, 4)
            cases = {}
            for share in SHARES:
                calls = cache.ours(q, qo_indptr, workspace=cache.workspace(q, share))
                case = f"{share:.0%}"
                if bench.runs(f"sweeps.workspace.{name}.q{q_len}.{case}", calls[0]):
                    cases[case] = calls
            timings = bench.time(cases)
            for case in cases:
                id = f"sweeps.workspace.{name}.q{q_len}.{case}"
                what = f"append_attention bf16 {name}, group 4, {q_len} rows, {case} of workspace"
                num_bytes = cache.load.num_bytes
                bench.add(bandwidth_figure(timings, case, id, what, num_bytes, None))
        del cache, cases, calls


def _verify(bench: CudaBench) -> None:
    for dtype, name in DTYPES:
        for batch in bench.pick((1, 4, 16, 64, 128, 512), (1, 2)):
            logits = random_logits(bench, batch * ROWS, dtype)
            drafts = [top_drafts(x, batch) for x in logits]
            cases = {
                "greedy": verify_calls(bench, logits, drafts, VerifyStrategy.GREEDY),
                "rejection": verify_calls(bench, logits, drafts, ONE_HOT, {"top_p": TOP_P}),
            }
            timings = bench.time(cases)
            num_bytes = logits[0].numel() * logits[0].element_size()
            for case in cases:
                id = f"sweeps.verify.{name}.b{batch}.{case}"
                what = f"verify {name}, batch {batch}, k 4, {case}: bytes read once"
                bench.add(bandwidth_figure(timings, case, id, what, num_bytes, None))
            del logits, drafts, cases
