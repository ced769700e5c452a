# SPDX-License-Identifier: Apache-2.0
"""Predicted outputs: a request brings the text that it expects, and drafts are read from that."""

from specops.engine.drafters.base import Drafter, DrafterContext, StepResults, stage_limit
from specops.engine.request import Request
from specops.predicted_text import PredictedText


def load(context: DrafterContext) -> Drafter:
    """Every model can draft so."""
    return PredictionDrafter()


class PredictionDrafter(Drafter):
    """Drafts with `specops.predicted_text.PredictedText`.

    While the output is in the prediction, its drafts take the place of other ones by the methods
    before it; elsewhere these stand. So they draft what the prediction does not have.
    """

    name = "prediction"

    def __init__(self) -> None:
        self._texts: dict[Request, PredictedText] = {}

    def start(self, request: Request) -> bool:
        """Indexes the prediction, unless the request was here before."""
        if request.prediction and request not in self._texts:
            self._texts[request] = PredictedText(request.prediction, request.prompt_len)
        return False

    def leave(self, request: Request) -> None:
        """Drops the prediction."""
        self._texts.pop(request, None)

    def finish(self, results: StepResults) -> None:
        """Drafts for those whose output is in their prediction."""
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
                continue  # they agree, and may go on behind the end of the prediction
            proposals.counts[slot] = count
            proposals.token_ids[slot, :count] = drafts
            proposals.stages[slot, :count] = list(request.draft_stages).index(self.name)
            # The longer it was right, the surer; how sure that is the counts of the method say.
            proposals.confidences[slot, :count] = (text.match_len + 1) / (text.match_len + 2)
