# SPDX-License-Identifier: Apache-2.0
"""A server's counts of its drafts, wherever it has them. Standard library only."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# vLLM's names, after a prefix such as vllm: or specops:.
_COUNTERS = {
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens",
}
_SAMPLE = re.compile(r"^(?:\w+:)?(\w+?)(?:_total)?(?:\{.*\})? (\S+)", re.MULTILINE | re.ASCII)


@dataclass(frozen=True)
class DraftCounts:
    """A server's counts of its drafts.

    Attributes:
        num_drafts: steps with drafts; None: not reported.
        num_draft_tokens: that were verified.
        num_accepted_tokens: of them.
    """

    num_drafts: int | None
    num_draft_tokens: int
    num_accepted_tokens: int

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """The counts since `before`."""
        steps = None
        if self.num_drafts is not None and before.num_drafts is not None:
            steps = self.num_drafts - before.num_drafts
        return DraftCounts(
            steps,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
        )


def counts_in(reply: Mapping[str, Any]) -> DraftCounts | None:
    """The counts of one request, in its response or the last event of its stream.

    They are vLLM's and specops' `metrics`, OpenAI's `usage` of predictions, or llama.cpp's
    `timings`, in this order.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the reply has another form.
    """
    found = (reply.get("metrics") or {}).get("speculative_decoding")
    if found:
        return DraftCounts(
            int(found["num_spec_steps"]),
            int(found["num_draft_tokens"]),
            int(found["num_accepted_draft_tokens"]),
        )
    details = (reply.get("usage") or {}).get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens")
    rejected = details.get("rejected_prediction_tokens")
    if accepted is not None and rejected is not None:
        return DraftCounts(None, int(accepted) + int(rejected), int(accepted))
    timings = reply.get("timings") or {}
    if "draft_n" in timings:
        return DraftCounts(None, int(timings["draft_n"]), int(timings["draft_n_accepted"]))
    return None


def read_counters(text: str) -> DraftCounts | None:
    """The counts of all requests so far, in what /metrics gives; None: there are none."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        if name in _COUNTERS.values():
            sums[name] = sums.get(name, 0.0) + float(value)
    if _COUNTERS["num_draft_tokens"] not in sums:
        return None
    return DraftCounts(**{field: int(sums.get(name, 0)) for field, name in _COUNTERS.items()})
