# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's cascades, planned before they are timed: its wrapper, and its parts by hand.

The wrapper picks its kernels itself; on Hopper, it picks one made for prefill. For a fair
comparison the benchmark also runs the parts by hand: a kernel that we choose computes shared and
unshared tokens, and FlashInfer's merge combines the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.peers.flashinfer_attention import Case, Path, checked
from bench.peers.flashinfer_peer import Call, given, named


@dataclass(frozen=True)
class Level:
    """One cascade level in FlashInfer's format: the pages of each group of requests.

    Attributes:
        qo_indptr: rows of each group.
        kv_indptr: pages of each group.
        kv_last_page_len: tokens in the last page of each group.
        kv_indices: page indices, for each set of pages.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_last_page_len: Tensor
    kv_indices: Sequence[Tensor]


def multi_level(levels: Sequence[Level]) -> Path:
    """Return the path of FlashInfer's cascade wrapper, which picks its kernels itself."""

    def path(case: Case) -> tuple[list[Call], Tensor]:
        cache = case.cache
        wrapper_class = named("MultiLevelCascadeAttentionWrapper")
        result = torch.empty_like(case.q)

        def planned(number: int) -> Call:
            wrapper = wrapper_class(len(levels), case.workspace, "NHD")
            wrapper.plan(
                [level.qo_indptr for level in levels],
                [level.kv_indptr for level in levels],
                [level.kv_indices[number] for level in levels],
                [level.kv_last_page_len for level in levels],
                *case.heads,
                cache.page_size,
                causal=True,
                **given(wrapper.plan, **case.types),
            )
            return lambda: wrapper.run(case.q, (cache.k, cache.v))

        calls = [planned(number) for number in range(len(levels[0].kv_indices))]
        result.copy_(calls[0]())
        return calls, result

    return path


def two_levels(levels: Sequence[Level], backend: str) -> Path:
    """Return a cascade by hand: one kernel for shared and unshared tokens, and a merge."""

    def path(case: Case) -> tuple[list[Call], Tensor]:
        cache = case.cache
        wrapper_class = named("BatchPrefillWithPagedKVCacheWrapper")
        merge = named("merge_state_in_place")
        outs = [torch.empty_like(case.q) for _ in levels]
        lses = [
            torch.empty(case.q.shape[:2], dtype=torch.float32, device=case.q.device) for _ in levels
        ]

        def planned(level: Level, number: int) -> Any:
            wrapper = wrapper_class(case.workspace, "NHD", backend=backend)
            wrapper.plan(
                level.qo_indptr,
                level.kv_indptr,
                level.kv_indices[number],
                level.kv_last_page_len,
                *case.heads,
                cache.page_size,
                causal=level is levels[-1],
                **case.types,
            )
            return wrapper

        def call(number: int) -> Call:
            wrappers = [planned(level, number) for level in levels]

            def run() -> None:
                for wrapper, out, lse in zip(wrappers, outs, lses, strict=True):
                    wrapper.run(case.q, (cache.k, cache.v), out=out, lse=lse, return_lse=True)
                for out, lse in zip(outs[:-1], lses[:-1], strict=True):
                    merge(outs[-1], lses[-1], out, lse)

            return run

        return [call(number) for number in range(len(levels[0].kv_indices))], outs[-1]

    return path


def cascade(label: str, levels: Sequence[Level], case: Case, wanted: Tensor) -> list[Call]:
    """Return the calls of a cascade of CASCADES, one per set of pages.

    Raises:
        Refused: it does not run here.
    """
    if label == "MultiLevelCascade":
        return checked(multi_level(levels), case, wanted)
    return checked(two_levels(levels, label.split()[-1]), case, wanted)


CASCADES = ("MultiLevelCascade", "two levels fa2", "two levels fa3")
