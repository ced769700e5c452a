# SPDX-License-Identifier: Apache-2.0
"""Phases of `append_attention`'s blocks as fractions of a call, from their time stamps.

A call lasts from the start of its first block to the end of its last block. A phase's fraction is
the total time that blocks spend in it, divided by (number of blocks * duration of the call); `idle`
is the rest.
"""

from collections.abc import Sequence
from statistics import median

import torch
from specops import attention
from torch import Tensor

from bench.common import Figure
from bench.cuda import Call, CudaBench

IDLE = "idle"  # time before a block begins and after it ends
SHARES = (*attention.PHASES, IDLE)
WORDS = 3 + len(attention.PHASES)
MOST_BLOCKS = 1024  # upper bound on any GPU's grid
CALLS = 9
WHAT = {
    "plan": "working out who does what",
    "item": "finding work items",
    "load": "from the begin of a work item to its first tile",
    "stream": "over tiles of keys and values",
    "merge": "merging states",
    IDLE: "not begun or ended",
}


def add_phases(bench: CudaBench, id: str, what: str, calls: Sequence[Call]) -> None:
    """Add the microseconds and the fraction of a call that its blocks spend in each phase.

    A figure is the median of several calls on cold pages. If blocks cannot record time stamps, a
    note says why.
    """
    stamps = torch.zeros(MOST_BLOCKS, WORDS, dtype=torch.int64, device=bench.device)
    if not bench.runs(f"{id}.phases", lambda: attention.set_phase_stamps(stamps)):
        return
    found = []
    try:
        for turn in range(bench.pick(CALLS, 1)):
            stamps.zero_()
            calls[turn % len(calls)]()
            bench.synchronize()
            found.append(shares_of(stamps.cpu()))
    finally:
        attention.set_phase_stamps(None)
    us = median([took for took, _ in found])
    for phase in SHARES:
        share = median([shares[phase] for _, shares in found])
        bench.add(
            Figure(
                f"{id}.{phase}",
                f"{what}: blocks {WHAT[phase]}",
                share * us,
                "us",
                "the stamped call",
                us,
                share,
                us=share * us,
            )
        )


def shares_of(stamps: Tensor) -> tuple[float, dict[str, float]]:
    """Return a call's duration in microseconds, and each phase's fraction of the blocks' time.

    Args:
        stamps: [rows, 8], int64, as `attention.set_phase_stamps` describes them; unused rows are
            zero.
    """
    rows = stamps[stamps[:, 0] != 0].double()
    begin, end, cycles = rows[:, 0], rows[:, 1], rows[:, 2:-1]
    took = float(end.max() - begin.min())
    # The global clock has steps of up to a microsecond, so use one clock rate for all blocks.
    ns_of_cycle = float((end - begin).sum() / cycles.sum())
    spent = cycles.mean(dim=0) * ns_of_cycle / took
    shares = dict(zip(attention.PHASES, spent.tolist(), strict=True))
    return took * 1e-3, {**shares, IDLE: max(0.0, 1.0 - sum(shares.values()))}
