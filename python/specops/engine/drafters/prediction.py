# SPDX-License-Identifier: Apache-2.0
"""Predicted outputs: drafts are copied from the output text that the client predicted."""

from specops.engine.drafters.base import Drafter, DrafterContext, StepResults, stage_limit
from specops.engine.request import Request
from specops.predicted_text import PredictedText


def load(context: DrafterContext) -> Drafter:
    """Make the drafter; every model supports it."""
    return PredictionDrafter()


class PredictionDrafter(Drafter):
    """Drafter that reads drafts from a request's `specops.predicted_text.PredictedText`.

    While the output follows the prediction, drafts from the prediction replace those of earlier
    drafters. Elsewhere, the earlier drafters' drafts stay.
    """

    name = "prediction"

    def __init__(self) -> None:
        self._texts: dict[Request, PredictedText] = {}

    def start(self, request: Request) -> bool:
        """Index the request's prediction, unless it is indexed already."""
        if request.prediction and request not in self._texts:
            self._texts[request] = PredictedText(request.prediction, request.prompt_len)
        return False

    def leave(self, request: Request) -> None:
        """Drop the request's prediction."""
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
                continue  # both agree; the earlier drafts may extend beyond the prediction
            proposals.counts[slot] = count
            proposals.token_ids[slot, :count] = drafts
            proposals.stages[slot, :count] = list(request.drafts.stages).index(self.name)
            # Longer matches give higher confidence; acceptance counts calibrate it.
            proposals.confidences[slot, :count] = (text.match_len + 1) / (text.match_len + 2)
