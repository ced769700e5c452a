# SPDX-License-Identifier: Apache-2.0
"""Forced tokens: tokens that a grammar fixes are drafted at no cost and always accepted.

This drafter completes the drafts of a request's method, and drafts alone if the method finds none.
No request selects it: every request that speculates and has a grammar uses it.
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
    """Drafts on the host, when a step's tokens are committed.

    Drafts that are verified with the distributions that they were drawn from stay as they are: a
    forced token in their place was not drawn from these.
    """

    name = "forced"

    def __init__(self) -> None:
        self._requests: set[Request] = set()

    def start(self, request: Request) -> bool:
        """Record a request with a grammar."""
        if request.grammar is not None and not request.features & Feature.DRAFT_PROBS:
            self._requests.add(request)
        return False

    def stop(self, request: Request, slot: int) -> None:
        """Drop a request that gave its slot back."""
        self._requests.discard(request)

    def finish(self, results: StepResults) -> None:
        """Complete the proposals of unfinished requests whose grammar has begun."""
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
                except Exception as error:  # the grammar's state is unknown now
                    results.fail(request, error)

    def _complete(self, request: Request, proposals: Proposals) -> None:
        assert request.grammar is not None
        slot = request.slot
        count = int(proposals.counts[slot])
        if count and request.grammar.is_slow:
            return  # walking along drafts would take as long as verifying them
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
