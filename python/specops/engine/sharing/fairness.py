# SPDX-License-Identifier: Apache-2.0
"""Who is next, and who gives way: slots are shared among all who ask.

A request has owners, the widest first: a client, then one of the client's calls. Owners with fewer
running requests go first; on one level equal, the next level decides, and after that the order of
waiting. None of this can change a token: it only decides when.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from specops.engine.request import Request


class Shares:
    """How many running requests each owner has, on every level.

    Args:
        running: requests that hold a slot. Whoever changes it says so.
    """

    def __init__(self, running: Sequence[Request]) -> None:
        self._running = running
        self._counts = Counter(path for request in running for path in _paths(request))

    def started(self, request: Request) -> None:
        """Counts a request that got a slot."""
        self._counts.update(_paths(request))

    def stopped(self, request: Request) -> None:
        """Counts a request no longer that gave its slot back."""
        for path in _paths(request):
            self._counts[path] -= 1
            if not self._counts[path]:
                del self._counts[path]  # or clients that are gone would stay

    def in_turn(self, waiting: Iterable[Request]) -> list[Request]:
        """Who is next among those who wait, whose owners have least first.

        Of requests whose owners differ on the innermost level alone, or not at all, it is one: the
        first of those who have least. So of each client the next call is there.
        """
        best: dict[tuple[str, ...], tuple[int, Request]] = {}
        last = None
        for request in waiting:
            if request.owners == last:  # one call's requests wait one behind the other
                continue
            last = request.owners
            around, count = last[:-1], self._counts[last]
            if around not in best or count < best[around][0]:
                best[around] = count, request
        return sorted((request for _, request in best.values()), key=self._counts_of)

    def last(self) -> Request:
        """The running request that goes first where pages are short.

        Of those whose owners have most it is the latest arrival.
        """
        return max(self._running, key=lambda request: (self._counts_of(request), request.arrival))

    def victim(self, newcomer: Request) -> Request | None:
        """The running request that gives way to a newcomer; None: nobody does.

        On the widest level on which some owner has more than the newcomer's, and still has as many
        once it has given one up (or they would take turns for ever), it is the last of the owner
        that has most.
        """
        among = self._running
        for level, own in enumerate(_paths(newcomer)):
            among = [request for request in among if len(request.owners) > level]
            if not among:
                return None
            last = max(among, key=lambda one: (self._counts_of(one)[level:], one.arrival))
            if self._counts[last.owners[: level + 1]] - self._counts[own] > 1:
                return last
            among = [request for request in among if request.owners[: level + 1] == own]
        return None

    def _counts_of(self, request: Request) -> list[int]:
        return [self._counts[path] for path in _paths(request)]


def _paths(request: Request) -> list[tuple[str, ...]]:
    """Its owners, each with those around it."""
    return [request.owners[:end] for end in range(1, len(request.owners) + 1)]
