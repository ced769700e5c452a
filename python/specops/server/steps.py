# SPDX-License-Identifier: Apache-2.0
"""Reports of what one step did for one choice, for streams with `include_steps`."""

from collections.abc import Collection, Sequence
from typing import Any

from specops.api.outputs import HIDDEN, sources_of, without_rejected
from specops.api.tokenizer import Tokenizer
from specops.server.jobs import ChoiceOutput


def step_report(
    tokenizer: Tokenizer, output: ChoiceOutput, hidden_drafters: Collection[str] = ()
) -> dict[str, Any]:
    """Return the tokens of a step, the proposer of each, and the drafts that were verified.

    A rejected draft that may come from another client's or the operator's text has no token id and
    no bytes.

    Args:
        tokenizer: the model's tokenizer.
        output: output of one step for one choice of a request with `report_drafts`.
        hidden_drafters: names of the drafters whose drafts may be another client's text.

    Returns:
        `seconds` from the request's arrival to the end of the step; `token_ids`, `bytes` (empty for
        a special token, which is no text) and `sources` (a drafter's name, or "target") of the
        tokens that it emitted; and `drafts`, the verified drafts, of which the first `num_accepted`
        are in the output; null if the step verified none.
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
        drafts = without_rejected(step.drafts, hidden_drafters)
        report["drafts"] = {
            "token_ids": [
                None if token_id == HIDDEN else token_id for token_id in drafts.token_ids
            ],
            "bytes": _bytes_of(tokenizer, drafts.token_ids),
            "sources": drafts.sources,
            "num_accepted": drafts.num_accepted,
        }
    return report


def _bytes_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[list[int]]:
    return [
        []
        if token_id == HIDDEN or tokenizer.is_special(token_id)
        else list(tokenizer.token_bytes(token_id))
        for token_id in token_ids
    ]
