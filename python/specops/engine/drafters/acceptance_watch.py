# SPDX-License-Identifier: Apache-2.0
"""Detection of drafters whose drafts are almost never accepted."""

from collections.abc import Callable, Iterable, Sequence

from specops.engine.plan import Part

# Drafts to count, and the fraction of them below which acceptance counts as near zero. A draft
# counts if it was accepted, or was the first rejected one of its step.
_COUNTED = 512
_LEAST = 0.01
_HIGHEST_TEMPERATURE = 1.0  # at higher temperatures, even good drafts are rejected


class AcceptanceWatch:
    """Counts the first drafts of each drafter, and warns if almost none of them was accepted.

    Only requests with a single drafter count, without a grammar and at usual temperatures.

    Args:
        names: names of the drafters.
        warn: called with the name of a drafter and a sentence.
    """

    def __init__(self, names: Iterable[str], warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        # Counted drafts, and accepted ones, of each drafter that is not decided yet.
        self._counts = {name: [0, 0] for name in names}

    def observe(self, parts: Sequence[Part], accepted: Sequence[int]) -> None:
        """Count the drafts of a step.

        Args:
            parts: the parts of the step.
            accepted: for each part, the number of its accepted drafts.
        """
        if not self._counts:
            return
        for part, count in zip(parts, accepted, strict=True):
            request = part.request
            if not part.num_drafts or len(request.drafts.stages) != 1:
                continue
            (name,) = request.drafts.stages
            counts, params = self._counts.get(name), request.params
            is_usual = params.structured_output is None and (
                params.temperature <= _HIGHEST_TEMPERATURE
            )
            if counts is None or not is_usual:
                continue
            counts[0] += min(count + 1, part.num_drafts)
            counts[1] += count
            if counts[0] >= _COUNTED:
                del self._counts[name]
                if counts[1] < _LEAST * counts[0]:
                    self._warn(
                        name,
                        f"only {counts[1]} of its first {counts[0]} drafts were accepted; its "
                        "weights may belong to another model",
                    )
