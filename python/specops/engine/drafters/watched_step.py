# SPDX-License-Identifier: Apache-2.0
"""A drafter's part in steps, behind which its exceptions end."""

from collections.abc import Callable, Sequence

from specops.engine.drafters.base import DrafterStep, Proposals, Scheduled, TargetStep
from specops.engine.memory.step_memory import Array


class WatchedStep:
    """A drafter's part in the steps of one shape, as the steps see it: it does not raise.

    Args:
        step: the part.
        name: of the drafter.
        counts: as below.
        scheduled: gives the parts of the step, as drafters have them.
        lose: goes on without the drafter, which has raised: in which hook, and what.

    Attributes:
        name: of the drafter.
        counts: int32 [slots], how many drafts there are behind it; None: nobody asks.
    """

    def __init__(
        self,
        step: DrafterStep,
        name: str,
        counts: Array | None,
        scheduled: Callable[[], Sequence[Scheduled]],
        lose: Callable[[str, Exception], None],
    ) -> None:
        self.name, self.counts = name, counts
        self.workspace_size, self.sums_size = step.workspace_size, step.sums_size
        self._step, self._scheduled, self._lose = step, scheduled, lose
        self._error: Exception | None = None  # of a launch, while its results are on their way

    def fill(self) -> None:
        """Writes the host's side of its arrays, before the step runs."""
        self._error = None
        try:
            self._step.fill(self._scheduled())
        except Exception as error:
            self._lose("fill", error)

    def launch(self, target: TargetStep) -> None:
        """Drafts on the device."""
        try:
            self._step.launch(target)
        except Exception as error:
            self._error = error
        if self.counts is not None:
            self.counts.device.copy_(target.num_draft_tokens)

    def read(self, proposals: Proposals) -> None:
        """Takes over what its results say beside the drafts."""
        error, self._error = self._error, None
        if error is not None:
            self._lose("launch", error)
            return
        try:
            self._step.read(self._scheduled(), proposals)
        except Exception as wrong:
            self._lose("read", wrong)
