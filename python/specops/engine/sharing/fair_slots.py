# SPDX-License-Identifier: Apache-2.0
"""Fair sharing of slots: the order in which requests get slots, and which ones are preempted.

A request has owners, outermost first: a client, then one of the client's calls. Requests whose
owner has fewer running requests go first. If owners are equal on one level, the next level decides,
and finally the order of waiting. This only decides when a token is computed; it never changes a
token.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from specops.engine.request import Request


class FairSlots:
    """Counts of running requests per owner on every level, and the orders that follow from them.

    Args:
        running: requests that hold a slot. The caller reports changes by `started` and `stopped`.
    """

    def __init__(self, running: Sequence[Request]) -> None:
        self._running = running
        self._counts = Counter(path for request in running for path in _paths(request))

    def started(self, request: Request) -> None:
        """Count a request that got a slot."""
        self._counts.update(_paths(request))

    def stopped(self, request: Request) -> None:
        """Stop counting a request that lost its slot."""
        for path in _paths(request):
            self._counts[path] -= 1
            if not self._counts[path]:
                del self._counts[path]  # so that the table does not grow with every client

    def in_order(self, waiting: Iterable[Request]) -> list[Request]:
        """Return waiting requests in scheduling order: owners with the fewest requests first.

        Of requests that differ only in their innermost owner, such as the calls of one client, only
        one is returned: the first whose innermost owner has the fewest running requests.
        """
        best: dict[tuple[str, ...], tuple[int, Request]] = {}
        last = None
        for request in waiting:
            if request.owners == last:  # requests of one call are adjacent
                continue
            last = request.owners
            around, count = last[:-1], self._counts[last]
            if around not in best or count < best[around][0]:
                best[around] = count, request
        return sorted((request for _, request in best.values()), key=self._counts_of)

    def last(self) -> Request:
        """Return the running request to preempt first if pages are short.

        It is the latest arrival among the requests whose owners have the most running requests.
        """
        return max(self._running, key=lambda request: (self._counts_of(request), request.arrival))

    def victim(self, newcomer: Request) -> Request | None:
        """Return the running request to preempt in favor of a new request, or None.

        The decision is made on the outermost level on which some owner has at least two running
        requests more than the new request's owner. With a difference of one, the two would preempt
        each other forever. The result is the last request of the owner with the most running
        requests.
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
    """Return the path from the outermost owner to each of the request's owners."""
    return [request.owners[:end] for end in range(1, len(request.owners) + 1)]
