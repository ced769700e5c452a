# SPDX-License-Identifier: Apache-2.0
"""Fair scheduling of decode rows: which requests decode in a step if several clients have some.

The number of rows determines how long a step takes, so a client with many rows delays the tokens of
all clients. If several clients decode, the rows of a step are limited: each client gets about as
many as the client with the fewest rows, plus the rows that hardly prolong a step. Requests beyond
their client's share keep their slot and pages, and run in later steps. A client that only has a
prompt to compute counts as if it decoded as many rows, so that its first step is no longer than its
later ones. prompt_budgets.py limits the rows of the prompts themselves. Fair scheduling only
decides when a token is computed; it never changes a token.

`Request.owners` names a request's owners, outermost first: usually a client, then one of its calls.
Rows are divided among clients first, and a client's rows among its calls.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from specops.engine.request import Request


@dataclass(frozen=True, slots=True)
class Demand:
    """Number of rows that a request needs in a step."""

    request: Request
    rows: int


@dataclass(slots=True)
class _Owner:
    """Client or call that needs rows in this step; holds either inner owners or requests."""

    within: "dict[str, _Owner]" = field(default_factory=dict)
    demands: list[Demand] = field(default_factory=list)
    rows: int = 0  # rows assigned to it in the step
    last_step: int = 1 << 62  # step in which its longest waiting request last had rows

    def add(self, demand: Demand, path: Sequence[str]) -> None:
        """Add a request at the end of a path of owners."""
        owner = self
        for name in path:
            owner.last_step = min(owner.last_step, demand.request.placement.last_step)
            if name not in owner.within:
                owner.within[name] = _Owner()
            owner = owner.within[name]
        owner.last_step = min(owner.last_step, demand.request.placement.last_step)
        owner.demands.append(demand)

    def width(self, free_rows: int, beside: Collection[int] = ()) -> int:
        """Return the maximum rows that this owner may have if its inner owners share them equally.

        Args:
            free_rows: as in `select_decoding`.
            beside: rows needed by further owners, each entitled to the same share.
        """
        if not self.within:
            return sum(demand.rows for demand in self.demands)
        widths = [one.width(free_rows) for one in self.within.values()]
        least = min(*widths, *beside) if beside else min(widths)
        equal = len(widths) * least + (len(widths) + len(beside) - 1) * free_rows
        return min(sum(widths), equal)

    def next_in(self) -> "list[tuple[str, _Owner]]":
        """Return the path of inner owners to the owner of the request to schedule next."""
        path: list[tuple[str, _Owner]] = []
        owner = self
        while owner.within:
            path.append(min(owner.within.items(), key=_priority))
            owner = path[-1][1]
        if not path[-1][1].rows:  # no request of this owner is scheduled yet
            owner.demands.sort(
                key=lambda demand: (-demand.request.placement.last_step, -demand.request.arrival)
            )
        return path

    def drop(self, path: "Sequence[tuple[str, _Owner]]") -> None:
        """Remove the scheduled request at the end of a path, and owners without requests."""
        path[-1][1].demands.pop()
        around = [self, *(owner for _, owner in path)]
        for (name, owner), outer in reversed(list(zip(path, around, strict=False))):
            if not (owner.demands or owner.within):
                del outer.within[name]


def _priority(item: tuple[str, _Owner]) -> tuple[int, int]:
    """Return the sort key of an owner: fewest rows in this step first, then longest waiting.

    So a request that does not fit the remaining rows comes first in a later step.
    """
    return item[1].rows, item[1].last_step


def _beside(root: _Owner, prompts: Iterable[Demand], level: int) -> Mapping[str, int]:
    """Return the prompt rows of those owners on a level that have no decoding request."""
    rows: Counter[str] = Counter()
    for demand in prompts:
        path = (*demand.request.owners, "")
        if level < len(path) and path[level] not in root.within:
            rows[path[level]] += demand.rows
    return rows


def select_decoding(
    demands: Iterable[Demand], max_rows: int, free_rows: int, prompts: Sequence[Demand] = ()
) -> Set[Request] | None:
    """Divide the rows of a step among clients, and the rows of a client among its calls.

    Each outermost owner gets at least one request, regardless of the request's rows.

    Args:
        demands: rows that all decoding requests need.
        max_rows: maximum number of rows of a step.
        free_rows: number of rows that hardly prolong a step.
        prompts: rows that prompts need. They get no rows here, but their owners count in the
            division.

    Returns:
        The requests that decode in this step, each with all rows it needs. None: all requests.
    """
    root = _Owner()
    total = 0
    for demand in demands:
        root.add(demand, (*demand.request.owners, ""))
        total += demand.rows
    level = 0
    while len(root.within) == 1 and not _beside(root, prompts, level):
        (root,) = root.within.values()
        level += 1
    beside = _beside(root, prompts, level) if root.within else {}
    left = min(root.width(free_rows, list(beside.values())), max_rows)
    if not root.within or left >= total:
        return None
    selected: set[Request] = set()
    num_without = len(root.within)
    while root.within and (left > 0 or num_without):
        path = root.next_in()
        demand = path[-1][1].demands[-1]
        is_first = not path[0][1].rows
        if demand.rows <= left or is_first:
            num_without -= is_first
            selected.add(demand.request)
            left -= demand.rows
            for _, owner in path:
                owner.rows += demand.rows
        root.drop(path)
    return selected
