# SPDX-License-Identifier: Apache-2.0
"""How often drafts are right, estimated from verifications."""

from dataclasses import dataclass

# What is thought of requests of which nothing is known, and for how many verifications it counts.
_COLD_FIRST, _COLD_FOLLOWING = 0.6, 0.8
_PRIOR = 3.0
_HOPE = 0.5  # part of the way from an old estimate to that one, when a rest is over
_DOUBTED = 2.0  # verifications that it counts for then


@dataclass(slots=True, eq=False)
class Tally:
    """Counts of verifications, those whose first draft was right, and the same of next drafts."""

    tries: int = 0
    hits: int = 0
    following_tries: int = 0
    following_hits: int = 0

    def add(self, drafts: int, accepted: int) -> None:
        """Takes in a verification."""
        self.tries += 1
        if accepted:
            self.hits += 1
            self.following_tries += min(accepted, drafts - 1)
            self.following_hits += accepted - 1


@dataclass(slots=True, eq=False)
class Acceptance:
    """How often the first draft of a step is right, and each next one if those before it were.

    Attributes:
        first: the estimate for a first draft.
        following: the estimate for each next one.
        num_tries: verifications behind the first one.
        num_following_tries: drafts behind the other.
    """

    first: float = _COLD_FIRST
    following: float = _COLD_FOLLOWING
    num_tries: float = _PRIOR
    num_following_tries: float = _PRIOR

    def observe(self, seen: Tally, memory: float, weight: float = 1.0) -> None:
        """Takes in some verifications.

        Args:
            seen: their counts.
            memory: what those before count for, with each of these.
            weight: of each.
        """
        tries = weight * seen.tries
        kept = self.num_tries * memory**tries
        self.num_tries = kept + tries
        self.first = (kept * self.first + weight * seen.hits) / self.num_tries
        if seen.following_tries:
            kept = self.num_following_tries * memory**tries
            self.num_following_tries = kept + weight * seen.following_tries
            hits = kept * self.following + weight * seen.following_hits
            self.following = hits / self.num_following_tries

    def approach(self, other: "Acceptance", part: float) -> None:
        """Comes closer to another: what was seen long ago says less of what comes."""
        self.first += part * (other.first - self.first)
        self.following += part * (other.following - self.following)

    def hope(self) -> None:
        """Comes closer to what is thought of new texts, to be moved by the next verifications."""
        self.approach(_COLD, _HOPE)
        self.num_tries = min(self.num_tries, _DOUBTED)
        self.num_following_tries = min(self.num_following_tries, _DOUBTED)


_COLD = Acceptance()
