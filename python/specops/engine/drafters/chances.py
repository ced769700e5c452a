# SPDX-License-Identifier: Apache-2.0
"""How likely a draft is to be accepted, given that those before it on its path were."""

from collections.abc import Sequence

_BUCKETS = 8  # of squared confidence: narrower near 1; and one more for a confidence of 1
_PRIOR = 2.0  # drafts: weight of the confidence itself beside the counts
_LIMIT = 256.0  # drafts of a method; when it has counted more, its counts are halved
_OWN_PRIOR = 8.0  # drafts: weight of the method's chances beside a request's counts
_OWN_MEMORY = 0.97  # weight that a request's counts keep at its next verification


class MethodChances:
    """Counts of a method's decided drafts, by bucket of confidence.

    Attributes:
        tries: decided drafts.
        hits: those that were accepted.
        table: chances of acceptance, as of the last `update`.
    """

    def __init__(self) -> None:
        self._middles = [((i + 0.5) / _BUCKETS) ** 0.5 for i in range(_BUCKETS)] + [1.0]
        self.tries, self.hits = [0.0] * len(self._middles), [0.0] * len(self._middles)
        self.table = self._middles.copy()

    def update(self) -> None:
        """Sets the chances from the counts; old counts fade, which leaves the confidences."""
        if sum(self.tries) > _LIMIT:
            self.tries, self.hits = [n / 2 for n in self.tries], [n / 2 for n in self.hits]
        self.table = [
            (hits + _PRIOR * middle) / (tries + _PRIOR)
            for hits, tries, middle in zip(self.hits, self.tries, self._middles, strict=True)
        ]


class RequestChances:
    """The chances of one request's drafts: the method's, corrected by its own counts.

    Where fewer of its drafts were accepted than the method's counts say, all chances are scaled;
    where more were, the chances of rejection are.

    Args:
        method: counts of its method.
    """

    __slots__ = ("_accepted", "_decided", "_expected", "_method", "_offset", "_scale")

    def __init__(self, method: MethodChances) -> None:
        self._method = method
        self._decided = self._accepted = self._expected = 0.0
        self._offset, self._scale = 0.0, 1.0

    def products(self, confidences: Sequence[float], parents: Sequence[int] | None) -> list[float]:
        """For each draft, the chance that it and all before it on its path are accepted.

        Args:
            confidences: of the drafts, in [0, 1].
            parents: of each the one before it, which precedes it, or -1; None: they are a chain.
        """
        table, offset, scale = self._method.table, self._offset, self._scale
        products: list[float] = []
        product = 1.0
        for node, confidence in enumerate(confidences):
            if parents is not None:
                product = products[parents[node]] if parents[node] >= 0 else 1.0
            product *= offset + scale * table[int(confidence * confidence * _BUCKETS)]
            products.append(product)
        return products

    def observe(self, decided: Sequence[float], accepted: int) -> None:
        """Counts the decided drafts of a verification, for the request and for its method.

        Args:
            decided: confidences of those that were accepted, then of those that were rejected
                though all before them were accepted.
            accepted: how many were accepted.
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
