# SPDX-License-Identifier: Apache-2.0
"""Statistics of a run, computed from its answers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from specops.cli.load.answers import Answer
from specops.cli.load.drafts import DraftCounts

PERCENTILES = (50, 90, 95, 99)
_SERVER_TIMES = tuple(
    f"{part}_seconds" for part in ("queue", "prefill", "decode", "verify", "draft")
)


def figures(answers: Sequence[Answer], metrics: DraftCounts | None = None) -> dict[str, Any]:
    """Return the figures of a run, ready for JSON.

    Args:
        answers: answers to all requests.
        metrics: difference of the server's own counters over the run. Counts in the answers take
            precedence, because other clients may use the server as well.

    Returns:
        "num_requests", "num_failed" and "failures" (a count per message); "seconds" from the
        first due time to the last answer; tokens, and tokens and requests per second;
        in milliseconds and for successful answers "first_token_ms", "per_output_token_ms" and
        "whole_ms" by the client's clock; "sent_late_ms" (how late the generator sent requests);
        "server_ms" by the server's clock; "acceptance" of drafts, or None.
    """
    successful = [answer for answer in answers if answer.error is None]
    seconds = max(a.end for a in answers) - min(a.due for a in answers)
    tokens = sum(answer.completion_tokens for answer in successful)
    return {
        "num_requests": len(answers),
        "num_failed": len(answers) - len(successful),
        "failures": dict(Counter(a.error for a in answers if a.error is not None).most_common()),
        "seconds": seconds,
        "prompt_tokens": sum(answer.prompt_tokens or 0 for answer in successful),
        "completion_tokens": tokens,
        "tokens_are_counted_by": _counter(successful),
        "requests_per_s": len(successful) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "first_token_ms": spread(answer.seconds_to_first for answer in successful),
        "per_output_token_ms": spread(answer.seconds_per_token for answer in successful),
        "whole_ms": spread(answer.seconds for answer in successful),
        "sent_late_ms": spread(answer.sent - answer.due for answer in answers),
        "server_ms": _server_times(successful),
        "acceptance": _acceptance(successful, metrics),
    }


def spread(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum in milliseconds of the times that are not None."""
    milliseconds = [1e3 * second for second in seconds if second is not None]
    if not milliseconds:
        return None
    of_each = np.percentile(milliseconds, PERCENTILES)
    return {
        "mean": float(np.mean(milliseconds)),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, of_each, strict=True)},
        "max": max(milliseconds),
    }


def request_records(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return every request as a dict, with times in seconds from the first due time."""
    begin = min(answer.due for answer in answers)
    records = []
    for answer in sorted(answers, key=lambda answer: answer.due):
        record = asdict(answer)
        for name in ("due", "sent", "first", "last", "end"):
            if record[name] is not None:
                record[name] -= begin
        records.append(record)
    return records


def _counter(answers: Sequence[Answer]) -> str:
    """Return how tokens were counted: by the server, or as pieces of text, which may be fewer."""
    has_usage = all(answer.prompt_tokens is not None for answer in answers)
    return "the server" if has_usage else "pieces of text, since the server sends no usage"


def _server_times(answers: Sequence[Answer]) -> dict[str, dict[str, float] | None] | None:
    reported = [answer.timings for answer in answers if answer.timings]
    if not reported:
        return None
    return {
        name.removesuffix("_seconds"): spread(timings.get(name) for timings in reported)
        for name in _SERVER_TIMES
    }


def _acceptance(answers: Sequence[Answer], metrics: DraftCounts | None) -> dict[str, Any] | None:
    counts = metrics
    source = "metrics"
    reported = [answer for answer in answers if answer.num_draft_tokens is not None]
    if any(answer.num_draft_tokens for answer in reported):
        steps = [answer.num_drafts for answer in reported]
        counts, source = (
            DraftCounts(
                None if None in steps else sum(step or 0 for step in steps),
                sum(answer.num_draft_tokens or 0 for answer in reported),
                sum(answer.num_accepted_tokens or 0 for answer in reported),
            ),
            "answers",
        )
    if counts is None or not counts.num_draft_tokens:
        return None
    length = None
    if counts.num_drafts:
        length = 1 + counts.num_accepted_tokens / counts.num_drafts
    return {
        "source": source,
        **asdict(counts),
        "rate": counts.num_accepted_tokens / counts.num_draft_tokens,
        "mean_length": length,
    }
