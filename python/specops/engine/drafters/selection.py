# SPDX-License-Identifier: Apache-2.0
"""Draft selection: verify the likeliest drafts of all requests while they pay for their rows.

The selection maximizes tokens per second, from counted acceptance probabilities and from step times
that were measured once. No clock is read, so equal calls give equal selections, and no token
depends on them.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TypeAlias

from specops.engine.drafters.acceptance import MethodAcceptance, RequestAcceptance

Acceptances: TypeAlias = Sequence[RequestAcceptance]
Floats: TypeAlias = Sequence[Sequence[float]]

_LOSS = 0.02  # share of plain decoding's tokens that testing unlikely drafts may cost


class DraftSelector:
    """Selects the drafts of every step: call `select` to plan a step and `observe` after it.

    Args:
        seconds: duration of a step by its number of rows, from 0 rows on; never decreasing.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self._methods: dict[str, MethodAcceptance] = {}
        self._credit = 0.0  # tokens that tests may still cost
        self._tested: set[RequestAcceptance] = set()  # requests tested in the step

    def start(self, method: str) -> RequestAcceptance:
        """Return the acceptance probabilities of a new request."""
        return RequestAcceptance(self._methods.setdefault(method, MethodAcceptance()))

    def select(
        self, acceptance: Acceptances, confidences: Floats, room: int, others: int
    ) -> list[int]:
        """Choose how many drafts of each request a step verifies.

        Args:
            acceptance: acceptance probabilities of all requests with draft selection in the step.
            confidences: of each request's drafts, in [0, 1]; empty if it has no drafts.
            room: limit on the number of chosen drafts.
            others: rows of the step that belong to other requests.

        Returns:
            The number of leading drafts of each request that are verified.
        """
        products = [one.products(own) for one, own in zip(acceptance, confidences, strict=True)]
        self._tested.clear()
        rows = len(acceptance) + others
        best = sorted(chain.from_iterable(products), reverse=True)[:room]
        tokens = accumulate(best, initial=float(rows))  # other rows count as one token each
        rates = [n / t for n, t in zip(tokens, self.seconds[rows:], strict=False)]
        count = rates.index(max(rates))
        least = best[count - 1] if count else 2.0
        ties = best[:count].count(least)  # how many drafts as likely as the last to take
        # Probabilities fall along a chain, so the likeliest drafts of a chain are its first ones.
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
        """Return whether to add `count` drafts to the step although they do not seem to pay.

        Drafts that are never verified are never counted, yet they may have become likelier. So the
        likeliest draft of each idle request is tested now and then, and again while that pays off.
        """
        if count > room:
            return False
        price = rows * (self.seconds[rows + count] / self.seconds[rows] - 1.0)  # in tokens
        self._credit = min(self._credit + _LOSS * count, price)
        is_due = self._credit >= price
        self._credit = 0.0 if is_due else self._credit
        return is_due

    def observe(self, acceptance: Acceptances, verified: Floats, accepted: Sequence[int]) -> None:
        """Count the outcome of the verified drafts of some requests.

        Args:
            acceptance: of the requests, as in `select`.
            verified: confidences of their verified drafts.
            accepted: how many of these were accepted.
        """
        for one, own, count in zip(acceptance, verified, accepted, strict=True):
            one.observe(own[: count + 1], count)
            if one in self._tested:
                self._credit += count
        for method in self._methods.values():
            method.update()
