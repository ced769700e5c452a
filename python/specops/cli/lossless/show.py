# SPDX-License-Identifier: Apache-2.0
"""Results of a comparison, as lines of text."""

import math
from collections import Counter
from collections.abc import Sequence

from specops.cli.lossless.differences import Side
from specops.cli.lossless.modes import Mode
from specops.cli.lossless.server import CHAT, COMPLETIONS
from specops.cli.lossless.verdict import Comparison, Found

_COLUMNS = (
    "decoding",
    "setting",
    "sampling",
    "compared",
    "texts",
    "tokens",
    "logprobs",
    "endings",
    "largest gap",
    "drafts",
    "accepted",
    "failed",
)


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a table: per comparison, the outputs that differ in each respect, and drafts."""
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
        one.mode,
        one.setting,
        one.sampling,
        str(one.num_compared),
        *counts,
        gap,
        drafts,
        accepted,
        str(one.failures.total()),
    ]


def cautions(comparisons: Sequence[Comparison], modes: Sequence[Mode]) -> list[str]:
    """Return sentences about what could not be compared, and why."""
    notes = []
    servers = {mode.server.url: mode.server for mode in modes}.values()
    went = {COMPLETIONS: "all texts went as messages", CHAT: "messages went as prompts"}
    for server in servers:
        for endpoint, instead in went.items():
            if endpoint not in server.fields and endpoint in server.refusals:
                why = server.refusals[endpoint]
                notes.append(f"{server.url} does not answer at {endpoint} ({why}): {instead}.")
    lacks = sum((one.lacks for one in comparisons), Counter[str]())
    refusals = {
        refusal
        for server in servers
        for endpoint, refusal in server.refusals.items()
        if endpoint in server.fields
    }
    why = "; ".join(sorted(refusals))
    told = {
        "tokens": f"tokens are not reported{f' ({why})' if why else ''}, texts and endings are",
        "logprobs": f"logprobs are not reported{f' ({why})' if why else ''}",
        "ids": "token ids are not reported, tokens are compared by their text",
    }
    for name, sentence in told.items():
        if lacks[name] > (0 if name == "tokens" else lacks["tokens"]):
            notes.append(f"In {lacks[name]} answers, {sentence}.")
    failures = sum((one.failures for one in comparisons), Counter[str]())
    return [*notes, *(f"{count} failed: {why}" for why, count in failures.most_common())]


def difference_lines(comparisons: Sequence[Comparison], most: int | None) -> list[str]:
    """Return lines that show where answers first differ and the likely tokens of each there.

    Args:
        comparisons: comparisons of all modes.
        most: upper bound on the differences shown; None: all.
    """
    told = [(place, one, found) for one in comparisons for place, found in enumerate(one.found)]
    # Modes with speculation come first; then the first difference of each comparison, the second...
    told.sort(key=lambda item: (not item[1].is_drafted, item[0]))
    lines = [line for _, one, found in told[:most] for line in _told(one, found)]
    left = len(told) - len(told[:most])
    return [*lines, "", f"{left} more: --verbose shows them."] if left else lines


def _told(one: Comparison, found: Found) -> list[str]:
    it = found.difference
    names = ("plain", one.mode) if one.is_drafted else ("first time", "again")
    width = max(map(len, names))
    kinds = ", ".join(it.kinds)
    if it.logprob_place not in (None, it.place):
        kinds += f" from {it.logprob_place}"
    return [
        "",
        f"{found.text.kind}, {one.sampling}, {one.mode}, {one.setting}: {it.unit} {it.place} "
        f"({kinds})",
        f"  after {it.before!r}",
        f"  {names[0]:>{width}}: {_side(it.plain, it.other)}",
        f"  {names[1]:>{width}}: {_side(it.other, it.plain)}",
    ]


def _side(side: Side, other: Side) -> str:
    """Describe the next token of one side and its probability, and the other side's token."""
    if side.next is None:
        return f"the end ({side.ending})"
    parts = [_token(side.next, side.logprob)]
    if other.next is not None and other.next != side.next and side.others_logprob is not None:
        parts.append(_token(other.next, side.others_logprob))
    if other.next == side.next:
        known = dict(other.alternatives)
        parts += [
            _token(text, logprob)
            for text, logprob in side.alternatives
            if text != side.next and known.get(text) != logprob
        ]
    return "; ".join(parts)


def _token(text: str, logprob: float | None) -> str:
    return repr(text) if logprob is None else f"{text!r} {math.exp(logprob):.4%} ({logprob!r})"
