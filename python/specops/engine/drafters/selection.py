# SPDX-License-Identifier: Apache-2.0
"""Draft selection: verify the drafts that are likely enough to be worth their rows.

The selection maximizes the expected tokens per second, from counted acceptance probabilities and
from step times that were measured once. It reads no clock, so equal calls give equal selections. No
token depends on a selection.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TypeAlias

from specops.engine.drafters.acceptance import MethodAcceptance, RequestAcceptance

Acceptances: TypeAlias = Sequence[RequestAcceptance]
Floats: TypeAlias = Sequence[Sequence[float]]

_LOSS = 0.02  # fraction of the throughput without drafts that testing unlikely drafts may cost


class DraftSelector:
    """Selector of the drafts of every step: call `select` to plan a step and `observe` after it.

    Args:
        seconds: duration of a step by its number of rows, from 0 rows on; never decreasing.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self._methods: dict[str, MethodAcceptance] = {}
        self._credit = 0.0  # number of tokens that tests may still cost
        self._tested: set[RequestAcceptance] = set()  # requests tested in the step

    def start(self, method: str) -> RequestAcceptance:
        """Return the acceptance probabilities of a new request of a method."""
        return RequestAcceptance(self._methods.setdefault(method, MethodAcceptance()))

    def select(
        self, acceptance: Acceptances, confidences: Floats, room: int, others: int
    ) -> list[int]:
        """Choose how many drafts of each request a step verifies.

        Args:
            acceptance: acceptance probabilities of all requests with draft selection in the step.
            confidences: confidences of each request's drafts, in [0, 1]; empty without drafts.
            room: limit on the number of chosen drafts.
            others: rows of the step that belong to other requests.

        Returns:
            The number of leading drafts of each request that are verified.
        """
        products = [one.products(own) for one, own in zip(acceptance, confidences, strict=True)]
        self._tested.clear()
        rows = len(acceptance) + others
        best = sorted(chain.from_iterable(products), reverse=True)[:room]
        tokens = accumulate(best, initial=float(rows))  # each request's first row emits one token
        rates = [n / t for n, t in zip(tokens, self.seconds[rows:], strict=False)]
        count = rates.index(max(rates))
        least = best[count - 1] if count else 2.0
        ties = best[:count].count(least)  # number of chosen drafts as likely as the last
        # Probabilities never rise along a chain, so the likeliest drafts of a chain are its first
        # ones.
        chosen = [
            sum(p > least or (p == least and (ties := ties - 1) >= 0) for p in own)
            for own in products
        ]
        idle = [i for i, own in enumerate(products) if own and not chosen[i]]
        if idle and self._may_test(len(idle), rows + count, room - count):
            for i in idle:
                chosen[i] = 1
                self._tested.add(acceptance[i])
        return chosen

    def _may_test(self, count: int, rows: int, room: int) -> bool:
        """Return whether to verify `count` drafts although they do not seem worth their rows.

        Acceptance probabilities are only counted for verified drafts, so those of requests without
        verified drafts go stale. So the first draft of each such request is tested from time to
        time, and sooner again if it is accepted.
        """
        if count > room:
            return False
        cost = rows * (self.seconds[rows + count] / self.seconds[rows] - 1.0)  # in tokens
        self._credit = min(self._credit + _LOSS * count, cost)
        is_due = self._credit >= cost
        self._credit = 0.0 if is_due else self._credit
        return is_due

    def observe(self, acceptance: Acceptances, verified: Floats, accepted: Sequence[int]) -> None:
        """Count the outcome of the verified drafts of some requests.

        Args:
            acceptance: acceptance probabilities of the requests, as in `select`.
            verified: confidences of the verified drafts of each request.
            accepted: number of accepted drafts of each request.
        """
        for one, own, count in zip(acceptance, verified, accepted, strict=True):
            one.observe(own[: count + 1], count)
            if one in self._tested:
                self._credit += count
        for method in self._methods.values():
            method.update()
