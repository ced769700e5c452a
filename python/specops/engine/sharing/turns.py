# SPDX-License-Identifier: Apache-2.0
"""Whose requests decode in a step, where several owners have some.

A step lasts as long as its rows take, so an owner with many of them makes everybody's tokens late.
Where several decode, a step has no more of their rows than if each of them had as many as the one
with fewest, and what a step computes in the time that it takes anyway. Requests that are beyond
their owner's share keep slot and pages, and take turns. An owner who has a prompt to compute, and
nothing else yet, counts as one with so many rows: so a newcomer's first step is no longer than its
later ones. How many rows prompts have themselves is another matter (prompt_shares.py).
None of this can change a token: it only decides when.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from specops.engine.request import Request


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request would have of a step."""

    request: Request
    rows: int


@dataclass(slots=True)
class _Owner:
    """An owner with work: those within it have the requests, or it has them itself."""

    within: "dict[str, _Owner]" = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=list)
    rows: int = 0  # that it gets
    last_step: int = 1 << 62  # in which the one of its requests that waits longest had any

    def add(self, ask: Ask, path: Sequence[str]) -> None:
        """Adds a request at the end of a path of owners."""
        owner = self
        for name in path:
            owner.last_step = min(owner.last_step, ask.request.last_step)
            if name not in owner.within:
                owner.within[name] = _Owner()
            owner = owner.within[name]
        owner.last_step = min(owner.last_step, ask.request.last_step)
        owner.asks.append(ask)

    def width(self, free_rows: int, beside: Collection[int] = ()) -> int:
        """The most rows that it has in a step in which those within it have equal shares.

        Args:
            free_rows: as `take_turns` has them.
            beside: rows of others, who have as large a share as each of those within.
        """
        if not self.within:
            return sum(ask.rows for ask in self.asks)
        widths = [one.width(free_rows) for one in self.within.values()]
        least = min(*widths, *beside) if beside else min(widths)
        equal = len(widths) * least + (len(widths) + len(beside) - 1) * free_rows
        return min(sum(widths), equal)

    def next_in(self) -> "list[tuple[str, _Owner]]":
        """Owners within it, each within the one before it, down to that of the next request."""
        path: list[tuple[str, _Owner]] = []
        owner = self
        while owner.within:
            path.append(min(owner.within.items(), key=_turn))
            owner = path[-1][1]
        if not path[-1][1].rows:  # in this step for the first time
            owner.asks.sort(key=lambda ask: (-ask.request.last_step, -ask.request.arrival))
        return path

    def drop(self, path: "Sequence[tuple[str, _Owner]]") -> None:
        """Drops the request at the end of a path, and owners that have no other."""
        path[-1][1].asks.pop()
        around = [self, *(owner for _, owner in path)]
        for (name, owner), outer in reversed(list(zip(path, around, strict=False))):
            if not (owner.asks or owner.within):
                del outer.within[name]


def _turn(item: tuple[str, _Owner]) -> tuple[int, int]:
    """Who has least in this step is next, and of those whose request waits longest.

    So a request that is too wide for what is left of a step comes first in a later one.
    """
    return item[1].rows, item[1].last_step


def _beside(root: _Owner, prompts: Iterable[Ask], level: int) -> Mapping[str, int]:
    """The rows of owners on a level who have prompts, and nobody who decodes."""
    rows: Counter[str] = Counter()
    for ask in prompts:
        path = (*ask.request.owners, "")
        if level < len(path) and path[level] not in root.within:
            rows[path[level]] += ask.rows
    return rows


def take_turns(
    asks: Iterable[Ask], max_rows: int, free_rows: int, prompts: Sequence[Ask] = ()
) -> Set[Request] | None:
    """Shares the rows of a step among owners, and an owner's among those within it.

    Each owner on the widest level has one request in the step at least, whatever that asks for.

    Args:
        asks: of all who decode.
        max_rows: of a step.
        free_rows: that a step computes in the time that it takes however few it has.
        prompts: what prompts need; they get no rows here, but those who have them count as owners.

    Returns:
        The requests whose turn it is, with all that they ask for. None: everybody's.
    """
    root = _Owner()
    total = 0
    for ask in asks:
        root.add(ask, (*ask.request.owners, ""))
        total += ask.rows
    level = 0
    while len(root.within) == 1 and not _beside(root, prompts, level):
        (root,) = root.within.values()
        level += 1
    beside = _beside(root, prompts, level) if root.within else {}
    left = min(root.width(free_rows, list(beside.values())), max_rows)
    if not root.within or left >= total:
        return None
    given: set[Request] = set()
    num_without = len(root.within)
    while root.within and (left > 0 or num_without):
        path = root.next_in()
        ask, is_first = path[-1][1].asks[-1], not path[0][1].rows
        if ask.rows <= left or is_first:
            num_without -= is_first
            given.add(ask.request)
            left -= ask.rows
            for _, owner in path:
                owner.rows += ask.rows
        root.drop(path)
    return given
