# SPDX-License-Identifier: Apache-2.0
"""What was found, in lines of text."""

import math
from collections import Counter
from collections.abc import Sequence

from specops.cli.lossless.differences import Side
from specops.cli.lossless.modes import Mode
from specops.cli.lossless.server import CHAT, COMPLETIONS
from specops.cli.lossless.verdict import Comparison, Found

_COLUMNS = (
    *("decoding", "setting", "sampling", "compared", "texts", "tokens", "logprobs", "endings"),
    *("largest gap", "drafts", "accepted", "failed"),
)


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """A row for each comparison: outputs that differ in each respect, and drafts."""
    rows = [list(_COLUMNS), *(_row(one) for one in comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _row(one: Comparison) -> list[str]:
    counts = [
        "-" if 0 < one.num_compared == one.lacks[f"{kind}s"] else str(count)
        for kind, count in one.counts.items()
    ]
    drafts, accepted = ("-", "-")
    if one.drafts is not None:
        drafts, accepted = str(one.drafts.num_draft_tokens), str(one.drafts.num_accepted_tokens)
    gap = "-" if one.logprob_gap is None else f"{one.logprob_gap:.1e}"
    return [
        *(one.mode, one.setting, one.sampling, str(one.num_compared)),
        *(*counts, gap, drafts, accepted, str(one.failures.total())),
    ]


def cautions(comparisons: Sequence[Comparison], modes: Sequence[Mode]) -> list[str]:
    """Sentences about what could not be compared, and why."""
    notes = []
    servers = {mode.server.url: mode.server for mode in modes}.values()
    went = {COMPLETIONS: "all texts went as messages", CHAT: "messages went as prompts"}
    for server in servers:
        for endpoint, instead in went.items():
            if endpoint not in server.fields and endpoint in server.refusals:
                why = server.refusals[endpoint]
                notes.append(f"{server.url} does not answer at {endpoint} ({why}): {instead}.")
    lacks = sum((one.lacks for one in comparisons), Counter[str]())
    of = sum(one.num_compared for one in comparisons)
    why = "; ".join(
        refusal
        for server in servers
        for endpoint, refusal in server.refusals.items()
        if endpoint in server.fields
    )
    told = {
        "tokens": f"tokens are not reported{f' ({why})' if why else ''}, texts and endings are",
        "logprobs": f"logprobs are not reported{f' ({why})' if why else ''}",
        "ids": "token ids are not reported, tokens are compared by their text",
    }
    for name, sentence in told.items():
        if lacks[name] > (0 if name == "tokens" else lacks["tokens"]):
            notes.append(f"Of {lacks[name]} of {of} answers, {sentence}.")
    failures = sum((one.failures for one in comparisons), Counter[str]())
    return [*notes, *(f"{count} failed: {why}" for why, count in failures.most_common())]


def difference_lines(comparisons: Sequence[Comparison], most: int | None) -> list[str]:
    """Where answers differ first, and what else each of them could have said there.

    Args:
        comparisons: of all modes.
        most: differences that are shown; None: all.
    """
    told = [(one, found) for one in comparisons for found in one.found]
    # With speculation first: that is the question.
    told.sort(key=lambda pair: not pair[0].is_drafted)
    lines = [line for one, found in told[:most] for line in _told(one, found)]
    left = len(told) - len(told[:most])
    return [*lines, "", f"{left} more: --verbose shows them."] if left else lines


def _told(one: Comparison, found: Found) -> list[str]:
    it = found.difference
    names = ("first time", "again") if one.mode == "plain" else ("plain", one.mode)
    kinds = ", ".join(it.kinds)
    return [
        "",
        f"{found.text.kind}, {one.sampling}, {one.mode}, {one.setting}: {it.unit} {it.place} "
        f"({kinds})",
        f"  after {it.before!r}",
        f"  {names[0]:>10}: {_side(it.plain)}",
        f"  {names[1]:>10}: {_side(it.other)}",
    ]


def _side(side: Side) -> str:
    if side.next is None:
        return f"the end ({side.ending})"
    parts = [repr(side.next)]
    if side.logprob is not None:
        parts.append(f"{_percent(side.logprob)} (logprob {side.logprob!r})")
    if side.others_logprob is not None:
        parts.append(f"the other one {_percent(side.others_logprob)}")
    others = [
        f"{text!r} {_percent(logprob)}" for text, logprob in side.alternatives if text != side.next
    ]
    if others:
        parts.append(f"of [{', '.join(others)}]")
    return ", ".join(parts)


def _percent(logprob: float) -> str:
    return f"{math.exp(logprob):.4%}"
