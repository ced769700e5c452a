# SPDX-License-Identifier: Apache-2.0
"""`append_attention` on a GPU against FlashInfer's fastest path; cascade attention of both.

All paths of FlashInfer that run are timed in turn with ours on the same memory; for others the
reason is recorded as a note. A path counts only if its result equals ours.
"""

from dataclasses import dataclass

import torch
from specops.attention import PrefixTensors
from torch import Tensor

from bench.cuda import Call, CudaBench, bandwidth_figure, time_figure
from bench.cuda_caches import PAGE_SIZE, TOKEN_BYTES, Cache, Load, loads
from bench.peers import flashinfer_attention as flashinfer
from bench.peers import flashinfer_cascade
from bench.peers.flashinfer_peer import Refused, module

LOADS = ("b1.4k", "b1.32k", "b8.4k", "b32.4k", "b8.32k", "b32.skewed")
ROWS = (1, 2, 5, 8)
GROUPS = (4, 8)


def run_attention_peers_cuda(bench: CudaBench) -> None:
    """Time `append_attention` and every path of FlashInfer in turn, for each load and shape."""
    space = flashinfer.workspaces(bench.device, bench.pick(flashinfer.WORKSPACE_BYTES, 64))
    labels = _installed(bench, "attention_peers", tuple(flashinfer.PATHS))
    for name in LOADS:
        cache = Cache(bench, loads(bench)[name])
        both = name in ("b1.4k", "b32.4k")
        for group in GROUPS if both else (4,):
            for q_len in ROWS if both else (1, 5):
                case = flashinfer.Case(cache, *cache.queries(bench, q_len, group), q_len, *space)
                id = f"attention_peers.{name}.g{group}.q{q_len}"
                cases = {"ours": cache.ours(case.q, case.qo_indptr)}
                cases |= _paths(bench, id, case, cases["ours"], labels)
                bar = "ratio >= 1.2" if name == "b32.skewed" else "ratio >= 1"
                bench.add(
                    time_figure(
                        bench.time(cases),
                        "ours",
                        id,
                        f"append_attention bf16 {name}, group {group}, {q_len} rows: times faster "
                        "than FlashInfer's fastest path",
                        {label: f"FlashInfer {label}" for label in cases if label != "ours"},
                        bar,
                    )
                )
                del case, cases
        del cache


def _installed(bench: CudaBench, family: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels if FlashInfer is installed; else add a note and return no labels."""
    try:
        module()
    except Refused as refused:
        bench.note(family, str(refused))
        return ()
    return labels


def _paths(
    bench: CudaBench, id: str, case: flashinfer.Case, ours: list[Call], labels: tuple[str, ...]
) -> dict[str, list[Call]]:
    expected = _result(bench, ours[0])
    found = {}
    for label in labels:
        try:
            found[label] = flashinfer.attention(label, case, expected)
        except Refused as refused:
            bench.note(f"{id}.{label}", str(refused))
    return found


def _result(bench: CudaBench, call: Call) -> Tensor:
    """Run our call and return a copy of its result."""
    out = call()
    assert isinstance(out, Tensor)
    bench.synchronize()
    return out.clone()


@dataclass(frozen=True)
class Shared:
    """Load of requests that begin with the same tokens."""

    name: str
    batch: int
    prefix_len: int
    own_len: int

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, counting shared ones once."""
        return TOKEN_BYTES * (self.prefix_len + self.batch * self.own_len)


def shared_loads(bench: CudaBench) -> list[Shared]:
    """Return the loads: many requests that share a prefix of 2,048 or 8,192 tokens.

    A rehearsal gets one small load.
    """
    return bench.pick(
        [
            Shared("b32.2k", 32, 2048, 256),
            Shared("b32.8k", 32, 8192, 256),
            Shared("b128.2k", 128, 2048, 256),
        ],
        [Shared("b3.64", 3, 64, 32)],
    )


class SharedCache(Cache):
    """A cache in which every request's page list begins with the same pages."""

    def __init__(self, bench: CudaBench, shared: Shared) -> None:
        self.shared = shared
        total = shared.prefix_len + shared.batch * shared.own_len
        super().__init__(bench, Load(shared.name, (total,)))
        prefix_pages, own_pages = shared.prefix_len // PAGE_SIZE, shared.own_len // PAGE_SIZE
        each, batch = prefix_pages + own_pages, shared.batch
        pools, self.batch = self.kv_indices, batch
        prefixes = [pool[:prefix_pages] for pool in pools]
        owns = [pool[prefix_pages:].view(batch, own_pages) for pool in pools]
        self.kv_indices = [
            torch.cat([prefix.expand(batch, -1), own], dim=1).flatten()
            for prefix, own in zip(prefixes, owns, strict=True)
        ]
        steps = torch.arange(batch + 1)
        self.kv_indptr = bench.ints(steps * each)
        self.kv_lens = bench.ints([shared.prefix_len + shared.own_len] * batch)
        self.kv_last_page_len = bench.ints([PAGE_SIZE] * batch)
        self._levels = [
            ([0, prefix_pages], [PAGE_SIZE], prefixes),
            ((steps * own_pages).tolist(), [PAGE_SIZE] * batch, [own.flatten() for own in owns]),
        ]
        self._bench = bench

    def declared(self) -> PrefixTensors:
        """Return the arguments of our op that declare the shared prefix."""
        batch, ints = self.shared.batch, self._bench.ints
        return PrefixTensors(ints([[0] * batch]), ints([[self.shared.prefix_len] * batch]))

    def levels(self, qo_indptr: Tensor) -> list[flashinfer_cascade.Level]:
        """Return FlashInfer's levels: one group of all rows, then one group per request."""
        rows = [qo_indptr[[0, -1]].contiguous(), qo_indptr]
        ints = self._bench.ints
        return [
            flashinfer_cascade.Level(of_level, ints(indptr), ints(last), pages)
            for of_level, (indptr, last, pages) in zip(rows, self._levels, strict=True)
        ]


def run_cascade_cuda(bench: CudaBench) -> None:
    """Time a declared prefix against none, the read bandwidth and FlashInfer's cascades."""
    space = flashinfer.workspaces(bench.device, bench.pick(flashinfer.WORKSPACE_BYTES, 64))
    labels = _installed(bench, "cascade", flashinfer_cascade.CASCADES)
    for shared in shared_loads(bench):
        cache = SharedCache(bench, shared)
        for q_len in (1, 5):
            case = flashinfer.Case(cache, *cache.queries(bench, q_len, 4), q_len, *space)
            id = f"cascade.{shared.name}.q{q_len}"
            cases = {
                "flat": cache.ours(case.q, case.qo_indptr),
                "ours": cache.ours(case.q, case.qo_indptr, prefixes=cache.declared()),
            }
            levels = cache.levels(case.qo_indptr)
            cases |= _cascades(bench, id, case, levels, cases["flat"], labels)
            _cascade_figures(bench, id, shared, q_len, cases)
            del case, cases
        del cache


def _cascades(
    bench: CudaBench,
    id: str,
    case: flashinfer.Case,
    levels: list[flashinfer_cascade.Level],
    flat: list[Call],
    labels: tuple[str, ...],
) -> dict[str, list[Call]]:
    expected = _result(bench, flat[0])
    found = {}
    for label in labels:
        try:
            found[label] = flashinfer_cascade.cascade(label, levels, case, expected)
        except Refused as refused:
            bench.note(f"{id}.{label}", str(refused))
    return found


def _cascade_figures(
    bench: CudaBench, id: str, shared: Shared, q_len: int, cases: dict[str, list[Call]]
) -> None:
    timings = bench.time(cases)
    what = (
        f"append_attention bf16, {shared.batch} requests sharing {shared.prefix_len} tokens, "
        f"{shared.own_len} of their own, group 4, {q_len} rows"
    )
    text = f"{what}: share of read bandwidth, shared tokens counted once"
    bench.add(bandwidth_figure(timings, "ours", f"{id}.read", text, shared.num_bytes, None))
    text, bar = f"{what}: times faster than undeclared", "ratio >= 0.97"
    bench.add(time_figure(timings, "ours", f"{id}.flat", text, {"flat": "undeclared"}, bar))
    peers = {
        label: f"FlashInfer {label}" for label in flashinfer_cascade.CASCADES if label in cases
    }
    text, bar = f"{what}: times faster than FlashInfer's fastest cascade", "ratio >= 1.3"
    bench.add(time_figure(timings, "ours", f"{id}.peers", text, peers, bar))
