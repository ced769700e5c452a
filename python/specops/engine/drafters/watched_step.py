# SPDX-License-Identifier: Apache-2.0
"""Wrapper of a drafter's part in steps that catches its exceptions."""

from collections.abc import Callable, Sequence

from specops.engine.drafters.base import DrafterStep, Proposals, TargetStep
from specops.engine.memory.step_memory import Array
from specops.engine.plan import Part


class WatchedStep:
    """Wrapper of a drafter's part in the steps of one shape that never raises.

    Args:
        step: the drafter's part.
        name: name of the drafter.
        counts: see the attribute.
        parts: returns the parts of the current step.
        lose: called when a hook raises, with its name and the exception; drops the drafts.

    Attributes:
        name: name of the drafter.
        counts: int32 [slots], number of drafts after this drafter; None: not recorded.
    """

    def __init__(
        self,
        step: DrafterStep,
        name: str,
        counts: Array | None,
        parts: Callable[[], Sequence[Part]],
        lose: Callable[[str, Exception], None],
    ) -> None:
        self.name, self.counts = name, counts
        self.workspace_size, self.sums_size = step.workspace_size, step.sums_size
        self._step, self._parts, self._lose = step, parts, lose
        self._error: Exception | None = None  # raised by a launch; reported by `read`

    def fill(self) -> None:
        """Write the host side of the drafter's arrays before the step runs."""
        self._error = None
        try:
            self._step.fill(self._parts())
        except Exception as error:
            self._lose("fill", error)

    def launch(self, target: TargetStep) -> None:
        """Launch the drafter on the device."""
        try:
            self._step.launch(target)
        except Exception as error:
            self._error = error
        if self.counts is not None:
            self.counts.device.copy_(target.num_draft_tokens)

    def read(self, proposals: Proposals) -> None:
        """Let the drafter read its other results, or report the error that `launch` raised."""
        error, self._error = self._error, None
        if error is not None:
            self._lose("launch", error)
            return
        try:
            self._step.read(self._parts(), proposals)
        except Exception as wrong:
            self._lose("read", wrong)
