# SPDX-License-Identifier: Apache-2.0
"""Predicted outputs: drafts are read from the text that a request expects."""

from specops.engine.drafters.base import Drafter, DrafterContext, StepResults, stage_limit
from specops.engine.request import Request
from specops.predicted_text import PredictedText


def load(context: DrafterContext) -> Drafter:
    """Make the drafter; every model supports it."""
    return PredictionDrafter()


class PredictionDrafter(Drafter):
    """Drafts with `specops.predicted_text.PredictedText`.

    While the output follows the prediction, its drafts replace those of earlier methods. Elsewhere
    the earlier drafts stay, so those methods draft what the prediction does not contain.
    """

    name = "prediction"

    def __init__(self) -> None:
        self._texts: dict[Request, PredictedText] = {}

    def start(self, request: Request) -> bool:
        """Index the prediction, unless this was done before."""
        if request.prediction and request not in self._texts:
            self._texts[request] = PredictedText(request.prediction, request.prompt_len)
        return False

    def leave(self, request: Request) -> None:
        """Drop the prediction."""
        self._texts.pop(request, None)

    def finish(self, results: StepResults) -> None:
        """Draft for the requests whose output follows their prediction."""
        if not self._texts:
            return
        proposals = results.proposals
        for part in results.parts:
            request, limit = part.request, stage_limit(part, self.name)
            text = self._texts.get(request)
            if text is None or not limit:
                continue
            drafts = text.draft(request.token_ids, limit)
            slot, count = request.slot, len(drafts)
            if proposals.token_ids[slot, :count].tolist() == drafts and (
                proposals.counts[slot] >= count
            ):
                continue  # they agree, and may continue after the end of the prediction
            proposals.counts[slot] = count
            proposals.token_ids[slot, :count] = drafts
            proposals.stages[slot, :count] = list(request.drafts.stages).index(self.name)
            # Confidence grows with the match; the method's counts calibrate it.
            proposals.confidences[slot, :count] = (text.match_len + 1) / (text.match_len + 2)
