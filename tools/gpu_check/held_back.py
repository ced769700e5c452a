# SPDX-License-Identifier: Apache-2.0
"""Conclusions about what limits a call.

The sources are the ablations (bench/bench_ablations.py) and the phases of the call's blocks, from
their time stamps (bench/attention_phases.py). The order of the questions matters: the cost of
splitting shows only in the whole call, and better reads do not help a call that does not wait for
memory.
"""

import re
from collections.abc import Mapping
from typing import Any

Figures = Mapping[str, Mapping[str, Any]]

NO_GAIN = 0.97  # of the whole call: it is faster unsplit than split
BUSY = 0.90  # of the whole call, when nothing is read from DRAM
FIXED = 0.25  # of the whole call, when there is nothing to stream
PHASES = ("plan", "item", "load", "stream", "merge", "idle")
PHASES_OF_VERIFY = ("scan", "choose", "walk")
TOLD = 0.05  # smallest share of the call at which a phase of its blocks is mentioned


def of_attention(figures: Figures, load: str, group: int, q_len: int) -> str:
    """Return a sentence about `append_attention` on a load; empty if it was not measured."""
    measured_rows = 1 if q_len < 4 else 8
    prefix = f"ablations.{load}.g{8 if group > 4 else 4}.q{measured_rows}."
    us = {
        id.removeprefix(prefix): float(row["us"])
        for id, row in figures.items()
        if id.startswith(prefix)
    }
    if not {"whole", "hot", "launch"} <= us.keys():
        return ""
    shares = {case: us[case] / us["whole"] for case in us}
    return _concluded(shares) + _phases(figures, prefix)


def _concluded(shares: Mapping[str, float]) -> str:
    if shares.get("unsplit", 1.0) < NO_GAIN:
        return f"splitting: unsplit it takes {shares['unsplit']:.2f} of the time"
    if shares["hot"] >= BUSY:
        text = f"instructions: with pages in the cache it takes {shares['hot']:.2f} of the time"
        if "no_mma" in shares:
            text += f", without the tensor cores {shares['no_mma']:.2f}"
        if shares["launch"] >= FIXED:
            text += f", launch, plan and results alone {shares['launch']:.2f}"
        return text
    if shares["launch"] >= FIXED:
        return f"launch, plan and results: alone {shares['launch']:.2f} of the time"
    return f"memory: with pages in the cache it takes {shares['hot']:.2f} of the time"


def _phases(figures: Figures, prefix: str) -> str:
    """Return how blocks spend their time, the longest phase first; empty without time stamps."""
    ids = {phase: f"{prefix}{phase}" for phase in (*PHASES, *PHASES_OF_VERIFY)}
    shares = {phase: float(figures[id]["ratio"]) for phase, id in ids.items() if id in figures}
    most = sorted(shares, key=lambda phase: shares[phase], reverse=True)
    told = [f"{phase} {shares[phase]:.2f}" for phase in most if shares[phase] >= TOLD]
    return f"; its blocks' time: {', '.join(told)}" if told else ""


def of_verify(figures: Figures, prefix: str) -> str:
    """Return a sentence about verification of the rows that `prefix` names."""
    greedy, read = figures.get(f"{prefix}.greedy"), figures.get(f"{prefix}.greedy.read")
    if greedy is None or read is None:
        return ""
    share = float(read["ratio"])
    gap = figures.get("facts.gap")
    if share >= 0.85:
        return f"memory: greedy reads at {share:.2f} of bandwidth"
    launch = "" if gap is None else f"; an empty kernel takes {float(gap['us']):.1f} us"
    rejection = figures.get(f"{prefix}.rejection")
    more = (
        "" if rejection is None else f"; rejection takes {float(rejection['ratio']):.2f} times it"
    )
    return f"not memory: greedy reads at {share:.2f} of bandwidth{launch}{more}"


def of_rejection(figures: Figures) -> str:
    """Return a sentence about verification with top-p; empty if it was not measured."""
    us = {
        case: float(figures[id]["us"])
        for case in ("whole", "scan", "leaf")
        if (id := f"ablations.verify.{case}") in figures
    }
    if len(us) < 3:
        return ""
    scan, leaf = (us[case] / us["whole"] for case in ("scan", "leaf"))
    # Time beyond the first scan that one leaf does not need grows with the row: the row is read
    # again.
    parts = {"the scan": scan - leaf, "choosing over the whole row": 1.0 - scan}
    parts["launch, choice and walk"] = leaf
    most = max(parts, key=lambda part: parts[part])
    told = ", ".join(f"{part} {share:.2f}" for part, share in parts.items())
    return f"{most}: {told} of the time" + _phases(figures, "ablations.verify.blocks.")


def of_figure(figures: Figures, id: str) -> str:
    """Return what limits the case of a figure; empty if no measurement says so."""
    if match := re.match(r"(?:attention|attention_peers)\.(b\d+\.\d+k)\S*\.g(\d)\.q(\d)", id):
        return of_attention(figures, match[1], int(match[2]), int(match[3]))
    if match := re.match(r"exactness\.(b\d+\.\d+k)\.q(\d)", id):
        return of_attention(figures, match[1], 4, int(match[2]))
    if match := re.match(r"(sampling\.verify\.\w+\.b\d+)\.", id):
        return of_verify(figures, match[1])
    if id.startswith(("recorded.verify.", "ablations.verify")):
        return of_rejection(figures)
    if match := re.match(r"(cascade\.\S+)\.peers", id):
        flat, read = figures.get(f"{match[1]}.flat"), figures.get(f"{match[1]}.read")
        if flat is not None and read is not None:
            return (
                f"{float(flat['ratio']):.2f} times as fast as undeclared, "
                f"{float(read['ratio']):.2f} of read bandwidth"
            )
    return ""
