# SPDX-License-Identifier: Apache-2.0
"""What drafting may lose beside plain decoding, and when it has a rest.

Everything here is in plain steps: the time of a step that neither drafts nor verifies, in which
every request gets a token. So what a step gains is what it emitted less what it took, and the sum
of that is bounded from below, whatever drafters, texts and machines do.
"""

from dataclasses import dataclass

_MAY_LOSE = 2.0  # between two rests
_MAY_BANK = 3.0  # of what was gained, to be lost later
LOST_SHARE = 0.02  # of all steps, that may be lost for good
_LEAST_REST = 16
PLAIN_STEPS = 5  # in a row, of which all but the first tell what plain decoding takes
# Steps with drafts, after which such ones are due; each time twice as many.
_FIRST_REFERENCE, _REFERENCE = 16, 128
WAKING = 3  # steps after a rest, whose loss comes with it
_BUILD_SHARE = 0.05  # a step's part of what new shapes took and is not counted yet
_FIRST_STRETCH, STRETCH = 2, 8  # steps; each is twice as long as the one before


@dataclass(slots=True, eq=False)
class Budget:
    """What drafting may still lose, for batches of one size, and when it has a rest.

    Attributes:
        left: plain steps that may be lost until the next rest; it grows with what drafting gains.
        rest: steps of plain decoding to come, at least; 0: it has none.
        is_reference: the rest is only for the time that plain steps take.
        num_steps: that drafted, since the last rest; `reference`: after which one is due again.
        sunk: plain steps that the end of the last rest took: it is too late to save them.
        unpaid: plain steps that new shapes took and that were not counted yet.
        stretch: steps of this stretch; `to_come`: of these.
    """

    left: float = _MAY_LOSE
    rest: int = PLAIN_STEPS
    is_reference: bool = False
    num_steps: int = 0
    reference: int = _FIRST_REFERENCE
    sunk: float = 0.0
    unpaid: float = 0.0
    stretch: int = _FIRST_STRETCH
    to_come: int = _FIRST_STRETCH

    def note(self, gain: float, build: float) -> None:
        """Takes in a step that drafted or verified.

        Args:
            gain: of it; less than 0 if it lost.
            build: what it took beside that, once, because nothing had its shape before.
        """
        self.unpaid += build
        part = _BUILD_SHARE * self.unpaid
        self.unpaid -= part
        gain += LOST_SHARE - part
        if self.num_steps < WAKING and not self.is_reference:
            self.sunk -= gain
            return
        self.left += gain
        surplus = self.left - _MAY_LOSE - _MAY_BANK
        if surplus > 0:
            self.left -= surplus
            self.sunk = max(self.sunk - surplus, 0.0)

    def count(self) -> bool:
        """Counts a step that drafted; returns whether it was the last of its stretch.

        Where too much is lost, or times of plain steps are getting old, a rest begins.
        """
        self.num_steps += 1
        self.to_come -= 1
        if self.left < 0:
            self._begin_rest()
        elif self.num_steps >= self.reference:
            self.is_reference = True
            self.rest = PLAIN_STEPS
            self.reference = min(2 * self.reference, _REFERENCE)
        return self.to_come <= 0 and not self.rest

    def _begin_rest(self) -> None:
        """Drafting does not pay: it rests until a small share of the time will have been lost."""
        self.is_reference = False
        self.rest = max(_LEAST_REST, int((_MAY_LOSE - self.left + self.sunk) / LOST_SHARE))
        self.sunk = self.unpaid = 0.0

    def end_rest(self) -> None:
        """Drafting begins again, and may lose what it may, if it was not for a reference."""
        if not self.is_reference:
            self.left = max(self.left, _MAY_LOSE)
            self.stretch = _FIRST_STRETCH
        self.rest, self.num_steps, self.to_come = 0, 0, self.stretch

    def begin_stretch(self) -> None:
        """The steps to come are one, longer than the last."""
        self.stretch = min(2 * self.stretch, STRETCH)
        self.to_come = self.stretch
