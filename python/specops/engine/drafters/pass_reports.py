# SPDX-License-Identifier: Apache-2.0
"""Draft probabilities that a recurrent drafter's passes report to the host."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specops.engine.drafters.base import Proposals, RequestsFailed
from specops.engine.memory.step_memory import Layout
from specops.engine.plan import Part
from specops.engine.request import Request


class PassReports:
    """Draft probabilities that the passes of a step report; `read` stores them as confidences.

    Args:
        results: allocates the memory.
        batch: number of requests of the step.
        slots: rows of the table of proposals.
        passes: number of passes that report the probability of each draft.

    Attributes:
        logprobs: log-probabilities of the drafts, one array per pass.
    """

    def __init__(self, results: Layout, batch: int, slots: int, passes: int) -> None:
        self._counts = results.int32(slots if passes else 0)
        self.logprobs = [results.float32(batch) for _ in range(passes)]

    def note_counts(self, num_draft_tokens: Tensor) -> None:
        """Record the number of drafts after the passes have run, int32 [slots].

        They are recorded on the device, since later drafters may add drafts before the host reads.
        """
        if self.logprobs:
            self._counts.device.copy_(num_draft_tokens)

    def read(self, parts: Sequence[Part], ran: Sequence[bool], proposals: Proposals) -> None:
        """Write the reported probabilities to the proposals' confidences.

        Args:
            parts: the parts of the step.
            ran: for each part, whether passes ran for it.
            proposals: the table with the drafts; its confidences are written.

        Raises:
            RequestsFailed: probabilities of these requests are NaN. Their drafts are dropped.
        """
        if not self.logprobs:
            return
        logprobs = np.array([array.host[: len(parts)] for array in self.logprobs])
        # Read only drafts of passes that ran: the memory for other drafts is uninitialized.
        counts = self._counts.host[[part.request.slot for part in parts]]
        counts = np.where(ran, np.minimum(counts, len(logprobs)), 0)
        written = np.arange(len(logprobs))[:, None] < counts
        probs = np.exp(np.minimum(np.where(written, logprobs, 0), 0)).clip(1e-6, 1)
        failed: list[Request] = []
        for index, (part, count) in enumerate(zip(parts, counts.tolist(), strict=True)):
            if not (count and part.request.speculative.selects_drafts):
                continue
            if np.isnan(probs[:count, index]).any():
                failed.append(part.request)
                proposals.counts[part.request.slot] = 0
                continue
            proposals.confidences[part.request.slot, :count] = probs[:count, index]
        if failed:
            names = ", ".join(one.request_id for one in failed)
            raise RequestsFailed(f"NaN among the probabilities of drafts of {names}", failed)
