# SPDX-License-Identifier: Apache-2.0
"""Acceptance probabilities of drafts: each is conditional on all earlier drafts being accepted."""

from collections.abc import Sequence

# Buckets of the squared confidence, so that buckets are narrower near 1. One more bucket holds a
# confidence of exactly 1.
_BUCKETS = 8
_PRIOR = 2.0  # weight of a draft's confidence against the counts, as a number of drafts
_LIMIT = 256.0  # when a method has counted more drafts than this, its counts are halved
_OWN_PRIOR = 8.0  # weight of the method against a request's counts, as a number of drafts
_OWN_MEMORY = 0.97  # factor on a request's counts at each verification


class MethodAcceptance:
    """Counts of a method's accepted and rejected drafts, by bucket of confidence.

    Drafts after the first rejected one are undecided and are not counted.

    Attributes:
        tries: number of accepted and rejected drafts by bucket.
        hits: number of accepted drafts by bucket.
        table: acceptance probabilities by bucket, as of the last `update`.
    """

    def __init__(self) -> None:
        self._middles = [((i + 0.5) / _BUCKETS) ** 0.5 for i in range(_BUCKETS)] + [1.0]
        self.tries, self.hits = [0.0] * len(self._middles), [0.0] * len(self._middles)
        self.table = self._middles.copy()

    def update(self) -> None:
        """Recompute `table` from the counts, after halving the counts if they are large."""
        if sum(self.tries) > _LIMIT:
            self.tries, self.hits = [n / 2 for n in self.tries], [n / 2 for n in self.hits]
        self.table = [
            (hits + _PRIOR * middle) / (tries + _PRIOR)
            for hits, tries, middle in zip(self.hits, self.tries, self._middles, strict=True)
        ]


class RequestAcceptance:
    """Acceptance probabilities of a request's drafts, from counts of its method and its own counts.

    If fewer drafts of the request were accepted than the method's counts predict, all acceptance
    probabilities are scaled down. If more were accepted, all rejection probabilities are scaled
    down.

    Args:
        method: counts of the request's method.
    """

    __slots__ = ("_accepted", "_decided", "_expected", "_method", "_offset", "_scale")

    def __init__(self, method: MethodAcceptance) -> None:
        self._method = method
        self._decided = self._accepted = self._expected = 0.0
        self._offset, self._scale = 0.0, 1.0

    def products(self, confidences: Sequence[float]) -> list[float]:
        """Return for each draft the probability that it and all drafts before it are accepted.

        Args:
            confidences: confidences of the drafts, in [0, 1].
        """
        table, offset, scale = self._method.table, self._offset, self._scale
        products: list[float] = []
        product = 1.0
        for confidence in confidences:
            product *= offset + scale * table[int(confidence * confidence * _BUCKETS)]
            products.append(product)
        return products

    def observe(self, decided: Sequence[float], accepted: int) -> None:
        """Count the accepted and rejected drafts of a verification, for the request and its method.

        Args:
            decided: confidences of the accepted drafts and of the first rejected draft, if any.
            accepted: number of accepted drafts.
        """
        method, expected, count = self._method, 0.0, len(decided)
        for place, confidence in enumerate(decided):
            bucket = int(confidence * confidence * _BUCKETS)
            expected += method.table[bucket]
            method.tries[bucket] += 1.0
            if place < accepted:
                method.hits[bucket] += 1.0
        self._decided = self._decided * _OWN_MEMORY + count
        self._accepted = self._accepted * _OWN_MEMORY + accepted
        self._expected = self._expected * _OWN_MEMORY + expected
        if self._accepted < self._expected:
            self._scale = (self._accepted + _OWN_PRIOR) / (self._expected + _OWN_PRIOR)
            self._offset = 0.0
        else:
            rejected = self._decided - self._accepted + _OWN_PRIOR
            self._scale = rejected / (self._decided - self._expected + _OWN_PRIOR)
            self._offset = 1.0 - self._scale
