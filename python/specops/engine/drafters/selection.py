# SPDX-License-Identifier: Apache-2.0
"""Which drafts a step verifies: the likeliest ones of all requests, as many as pay for their rows.

That is what gives the most tokens per second, by chances that are counted and by seconds that were
measured once. No clock decides, equal calls give equal choices, and no token depends on them.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TypeAlias

from specops.engine.drafters.chances import MethodChances, RequestChances

Chances: TypeAlias = Sequence[RequestChances]
Floats: TypeAlias = Sequence[Sequence[float]]
Nodes: TypeAlias = Sequence[Sequence[int]]
Trees: TypeAlias = Sequence[Sequence[int] | None]

_LOSS = 0.02  # tokens of plain decoding that tests of unlikely drafts may cost


class DraftSelector:
    """Selects the drafts of every step: `select` when it is planned, `observe` when it is done.

    Args:
        seconds: of a step, by its rows from 0 on; they never fall.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self._methods: dict[str, MethodChances] = {}
        self._credit = 0.0  # tokens that may be lost with tests
        self._tested: set[RequestChances] = set()  # of the step

    def start(self, method: str) -> RequestChances:
        """The chances of a new request's drafts."""
        return RequestChances(self._methods.setdefault(method, MethodChances()))

    def select(
        self, chances: Chances, confidences: Floats, parents: Trees, room: int, others: int
    ) -> list[list[int]]:
        """Chooses the drafts that a step verifies, with those before them on their paths.

        Args:
            chances: of all requests whose drafts are selected in the step.
            confidences: in [0, 1], of each request's drafts; empty if it has none.
            parents: of each draft, the one before it on its path, which precedes it; -1: it comes
                after the last token. None for a request: its drafts are a chain.
            room: most drafts that are chosen.
            others: rows of the step beside those of these requests.

        Returns:
            The chosen drafts of each request, ascending; of a chain they are its first ones.
        """
        products = [
            one.products(own, tree) if own else []
            for one, own, tree in zip(chances, confidences, parents, strict=True)
        ]
        self._tested.clear()
        rows = len(chances) + others
        best = sorted(chain.from_iterable(products), reverse=True)[:room]
        tokens = accumulate(best, initial=float(rows))  # as if others verified what is accepted
        rates = [n / t for n, t in zip(tokens, self.seconds[rows:], strict=False)]
        count = rates.index(max(rates))
        least = best[count - 1] if count else 2.0
        ties = best[:count].count(least)  # to be chosen of those exactly as likely as the last one
        chosen = [
            [n for n, p in enumerate(own) if p > least or (p == least and (ties := ties - 1) >= 0)]
            for own in products
        ]
        idle = [i for i, own in enumerate(products) if own and not chosen[i]]
        if idle and self._may_test(len(idle), rows + count, room - count):
            for i in idle:
                chosen[i].append(products[i].index(max(products[i])))
                self._tested.add(chances[i])
        return chosen

    def _may_test(self, count: int, rows: int, room: int) -> bool:
        """Whether so many drafts are added to the step's rows though they do not seem to pay.

        What is never verified is never counted, and may have become likelier. So the likeliest
        draft of each idle request is tested now and then, and again while that gains something.
        """
        if count > room:
            return False
        price = rows * (self.seconds[rows + count] / self.seconds[rows] - 1.0)  # in tokens
        self._credit = min(self._credit + _LOSS * count, price)
        is_due = self._credit >= price
        self._credit = 0.0 if is_due else self._credit
        return is_due

    def observe(self, chances: Chances, verified: Floats, accepted: Nodes, parents: Trees) -> None:
        """Counts what came of the verified drafts of some requests.

        Args:
            chances, parents: of the requests and their verified drafts, as in `select`.
            verified: confidences of these drafts.
            accepted: which of them were, along a path; of a chain any sequence as long.
        """
        for one, own, path, tree in zip(chances, verified, accepted, parents, strict=True):
            decided = own[: len(path) + 1]
            if tree is not None:
                reached = {-1, *path}
                nodes = [n for n, parent in enumerate(tree) if parent in reached]
                decided = [own[n] for n in [*path, *(n for n in nodes if n not in reached)]]
            one.observe(decided, len(path))
            if one in self._tested:
                self._credit += len(path)
        for method in self._methods.values():
            method.update()
