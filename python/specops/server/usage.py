# SPDX-License-Identifier: Apache-2.0
"""Counts and timings in an answer: tokens in OpenAI's format, drafts in vLLM's."""

from collections.abc import Sequence
from typing import Any

from specops.api.outputs import SpeculativeStats
from specops.server.jobs import Span


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int,
    stats: SpeculativeStats,
) -> dict[str, Any]:
    """Return the usage object; OpenAI's prediction fields count accepted and rejected drafts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": stats.num_accepted_tokens,
            "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
        },
    }


def metrics(stats: SpeculativeStats, num_speculative_tokens: int) -> dict[str, Any]:
    """Return the counts of speculation for one answer, in vLLM's shape.

    `mean_acceptance_length` is the mean number of tokens that a step with drafts added to the
    output; 1.0 if no step had drafts.
    """
    # At least j drafts were accepted in per_pos[j - 1] steps.
    at_least = [stats.num_drafts, *stats.num_accepted_tokens_per_pos]
    at_least += [0] * (num_speculative_tokens + 2 - len(at_least))
    length = stats.num_emitted_tokens / stats.num_drafts if stats.num_drafts else 1.0
    return {
        "speculative_decoding": {
            "mean_acceptance_length": length,
            "draft_acceptance_rate": stats.num_accepted_tokens / max(stats.num_draft_tokens, 1),
            "acceptance_histogram": [
                at_least[j] - at_least[j + 1] for j in range(num_speculative_tokens + 1)
            ],
            "num_spec_steps": stats.num_drafts,
            "num_accepted_draft_tokens": stats.num_accepted_tokens,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_spec_tokens": num_speculative_tokens,
        }
    }


def timings(spans: Sequence[Span], num_tokens: int) -> dict[str, Any]:
    """Return the durations of an answer's phases by the server's clock, over all of its choices.

    `decode_seconds` runs from the first tokens of the first choice to the last tokens of the last
    choice. `verify_seconds` and `draft_seconds` are the time that the engine's steps spent on each
    part in this period, including rows of other requests; null if the engine does not measure it.
    `tokens_per_second` counts the tokens that arrived in this period; null if there were none.
    """
    begin = min(span.begin for span in spans)
    first = min(spans, key=lambda span: span.first)
    last = max(spans, key=lambda span: span.last)
    decoding = last.last - first.first
    verifying = drafting = None
    if first.steps_at_first is not None and last.steps_at_last is not None:
        verifying = last.steps_at_last.verify - first.steps_at_first.verify
        drafting = last.steps_at_last.draft - first.steps_at_first.draft
    num_later = num_tokens - first.num_first
    return {
        "queue_seconds": begin,
        "prefill_seconds": first.first - begin,
        "decode_seconds": decoding,
        "verify_seconds": verifying,
        "draft_seconds": drafting,
        "tokens_per_second": num_later / decoding if num_later and decoding > 0 else None,
    }


def add_stats(each: Sequence[SpeculativeStats]) -> SpeculativeStats:
    """Return the sum of the statistics of all choices."""
    total = SpeculativeStats()
    for stats in each:
        total.num_steps += stats.num_steps
        total.num_drafts += stats.num_drafts
        total.num_draft_tokens += stats.num_draft_tokens
        total.num_accepted_tokens += stats.num_accepted_tokens
        total.num_emitted_tokens += stats.num_emitted_tokens
        for name in ("num_accepted_tokens_per_pos", "num_drafts_per_length"):
            counts, sums = getattr(stats, name), getattr(total, name)
            sums.extend([0] * (len(counts) - len(sums)))
            for index, count in enumerate(counts):
                sums[index] += count
    return total
