# SPDX-License-Identifier: Apache-2.0
"""Forced tokens: where a grammar allows a single token, it is a free draft that is always accepted.

This drafter adds forced tokens to the drafts of a request's method, or drafts alone if the method
finds none. It is no method of its own: every speculating request with a grammar uses it.
"""

from specops.engine.drafters.base import Drafter, DrafterContext, Proposals, StepResults
from specops.engine.features import Feature
from specops.engine.request import Request
from specops.engine.structured import has_begun
from specops.engine.structured.forcing import CompletedDrafts, complete


def load(context: DrafterContext) -> Drafter:
    """Make the drafter; every model supports it."""
    return ForcedDrafter()


class ForcedDrafter(Drafter):
    """Drafter that adds forced tokens on the host, once a step's tokens are committed.

    It skips requests whose drafts are verified with the distributions that they were drawn from: a
    forced token was not drawn from such a distribution.
    """

    name = "forced"

    def __init__(self) -> None:
        self._requests: set[Request] = set()

    def start(self, request: Request) -> bool:
        """Track the request if it has a grammar."""
        if request.grammar is not None and not request.features & Feature.DRAFT_PROBS:
            self._requests.add(request)
        return False

    def stop(self, request: Request, slot: int) -> None:
        """Stop tracking a request that lost its slot."""
        self._requests.discard(request)

    def finish(self, results: StepResults) -> None:
        """Add forced tokens to the proposals of requests that are past their thinking."""
        if not self._requests:
            return
        for part in results.parts:
            request = part.request
            has_ended = request.output.finish_reason is not None
            if request not in self._requests or not part.emits or has_ended:
                continue
            injected = len(request.inject_token_ids)
            if has_begun(request.output.thinking_state, injected):
                try:
                    self._complete(request, results.proposals)
                except Exception as error:  # leaves the grammar in an unknown state
                    results.fail(request, error)

    def _complete(self, request: Request, proposals: Proposals) -> None:
        assert request.grammar is not None
        slot = request.slot
        count = int(proposals.counts[slot])
        if count and request.grammar.is_slow:
            return  # advancing the grammar along the drafts would take too long
        completed = complete(
            request.grammar,
            proposals.token_ids[slot, :count].tolist(),
            min(request.speculative.num_speculative_tokens, request.draft_room),
        )
        if completed is not None:
            _write(completed, proposals, slot)


def _write(drafts: CompletedDrafts, proposals: Proposals, slot: int) -> None:
    """Write drafts into the table; forced ones have confidence 1."""
    count, forced = len(drafts.token_ids), slice(drafts.num_given, len(drafts.token_ids))
    proposals.token_ids[slot, :count] = drafts.token_ids
    proposals.counts[slot] = count
    proposals.confidences[slot, forced] = 1.0
    proposals.stages[slot, forced] = -1
