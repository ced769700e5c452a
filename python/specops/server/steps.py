# SPDX-License-Identifier: Apache-2.0
"""What one step did for one choice, for streams with `include_steps`."""

from collections.abc import Sequence
from typing import Any

from specops.engine.outputs import sources_of
from specops.server.jobs import ChoiceOutput
from specops.tokenizer import Tokenizer


def step_report(tokenizer: Tokenizer, output: ChoiceOutput) -> dict[str, Any]:
    """The tokens of a step, who proposed each, and all drafts that were verified for them.

    Args:
        tokenizer: of the model.
        output: of one step and choice; its request has `report_drafts`.

    Returns:
        `seconds` from the request's arrival to the end of the step; `token_ids`, `bytes` (empty for
        a special token, which is no text) and `sources` (a drafter's name, or "target") of what it
        emitted; and `drafts`, null where it verified none, with `parents` and `accepted` as in
        `StepDrafts`.
    """
    step = output.output
    report: dict[str, Any] = {
        "seconds": output.seconds,
        "token_ids": step.token_ids,
        "bytes": _bytes_of(tokenizer, step.token_ids),
        "sources": sources_of(step.token_ids, step.drafts),
        "drafts": None,
    }
    if step.drafts is not None:
        report["drafts"] = {
            "token_ids": step.drafts.token_ids,
            "bytes": _bytes_of(tokenizer, step.drafts.token_ids),
            "sources": step.drafts.sources,
            "parents": step.drafts.parents,
            "accepted": step.drafts.accepted,
        }
    return report


def _bytes_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[list[int]]:
    return [
        [] if tokenizer.is_special(token_id) else list(tokenizer.token_bytes(token_id))
        for token_id in token_ids
    ]
