# SPDX-License-Identifier: Apache-2.0
"""Results of a comparison, as lines of text."""

import math
from collections import Counter
from collections.abc import Sequence

from specops.cli.lossless.differences import Side
from specops.cli.lossless.modes import Mode
from specops.cli.lossless.server import CHAT, COMPLETIONS
from specops.cli.lossless.verdict import Comparison, TextDifference

_COLUMNS = ("decoding", "requests", "outputs", "texts", "tokens", "logprobs", "ends", "accepted")


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a table of 80 columns with a row per comparison, and the largest logprob difference.

    The columns from "texts" to "ends" have the numbers of outputs that differ.
    """
    rows = [list(_COLUMNS), *(_row(comparison) for comparison in comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    gaps = [one.logprob_gap for one in comparisons if one.logprob_gap]
    return [*lines, f"Logprobs differ by up to {max(gaps):.1e}."] if gaps else lines


def _row(comparison: Comparison) -> list[str]:
    counts = [
        "-" if 0 < comparison.num_compared == comparison.missing[f"{kind}s"] else str(count)
        for kind, count in comparison.counts.items()
    ]
    accepted, drafts = "-", comparison.drafts
    if drafts is not None and drafts.num_draft_tokens:
        accepted = f"{drafts.num_accepted_tokens / drafts.num_draft_tokens:.0%}"
    setting = comparison.setting.partition(" ")[0]
    return [
        comparison.mode,
        f"{comparison.sampling}, {setting}",
        str(comparison.num_compared),
        *counts,
        accepted,
    ]


def cautions(comparisons: Sequence[Comparison], modes: Sequence[Mode]) -> list[str]:
    """Return sentences about what could not be compared, and why."""
    notes = []
    servers = {mode.server.url: mode.server for mode in modes}.values()
    consequences = {
        COMPLETIONS: "all prompts were sent as messages",
        CHAT: "chats were sent as prompts",
    }
    for server in servers:
        for endpoint, instead in consequences.items():
            if endpoint not in server.fields and endpoint in server.refusals:
                why = server.refusals[endpoint]
                notes.append(f"{server.url} does not answer at {endpoint} ({why}): {instead}.")
    num_missing = sum((comparison.missing for comparison in comparisons), Counter[str]())
    refusals = {
        refusal
        for server in servers
        for endpoint, refusal in server.refusals.items()
        if endpoint in server.fields
    }
    why = "; ".join(sorted(refusals))
    cause = f" ({why})" if why else ""
    sentences = {
        "tokens": f"tokens are not reported{cause}; only texts and finish reasons were compared",
        "logprobs": f"logprobs are not reported{cause}",
        "ids": "token ids are not reported; tokens were compared by their text",
    }
    for name, sentence in sentences.items():
        if num_missing[name] > (0 if name == "tokens" else num_missing["tokens"]):
            notes.append(f"In {num_missing[name]} answers, {sentence}.")
    failures = sum((comparison.failures for comparison in comparisons), Counter[str]())
    return [*notes, *(f"{count} failed: {why}" for why, count in failures.most_common())]


def difference_lines(comparisons: Sequence[Comparison], limit: int | None) -> list[str]:
    """Return lines that show where answers first differ, and both answers' likely tokens there.

    Args:
        comparisons: comparisons of all modes.
        limit: upper bound on the differences shown; None: all.
    """
    items = [
        (place, comparison, shown)
        for comparison in comparisons
        for place, shown in enumerate(comparison.differences)
    ]
    # Order: modes with speculation first; within these, the first difference of each comparison,
    # then the second of each, and so on.
    items.sort(key=lambda item: (not item[1].is_drafted, item[0]))
    lines = [
        line for _, comparison, shown in items[:limit] for line in _description(comparison, shown)
    ]
    num_hidden = len(items) - len(items[:limit])
    return (
        [*lines, "", f"{num_hidden} more differences; --verbose shows them."]
        if num_hidden
        else lines
    )


def _description(comparison: Comparison, shown: TextDifference) -> list[str]:
    it = shown.difference
    names = ("plain", comparison.mode) if comparison.is_drafted else ("first time", "again")
    width = max(map(len, names))
    kinds = ", ".join(it.kinds)
    if it.logprob_place not in (None, it.place):
        kinds += f" from {it.logprob_place}"
    return [
        "",
        f"{shown.text.kind}, {comparison.sampling}, {comparison.mode}, {comparison.setting}: "
        f"{it.unit} {it.place} ({kinds})",
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
        others = dict(other.alternatives)
        parts += [
            _token(text, logprob)
            for text, logprob in side.alternatives
            if text != side.next and others.get(text) != logprob
        ]
    return "; ".join(parts)


def _token(text: str, logprob: float | None) -> str:
    return repr(text) if logprob is None else f"{text!r} {math.exp(logprob):.4%} ({logprob!r})"
