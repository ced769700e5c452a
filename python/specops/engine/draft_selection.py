# SPDX-License-Identifier: Apache-2.0
"""Which drafts a step verifies, and whose drafters run at all.

Of all drafts of a batch those with the highest chances are verified, as many as bring the most
tokens per second. What drafts brought is set against what they cost: a request that loses by
drafting pauses until the loss is a small share of its time, and a method as a whole never loses
more than that share and a few steps. Seconds are those of the cost table. No clock decides, equal
calls give equal choices, and which tokens are emitted never depends on any of it.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from typing import TypeAlias

from specops.engine.cost_table import CostTable
from specops.engine.draft_chances import MethodChances, RequestChances

_FIRST_BANK, _BANK = 1.0, 8.0  # plain steps that a method may lose: at first, and of its gains
_FIRST_CREDIT, _CREDIT = 2.0, 5.0  # tokens that a request may lose, likewise


class Method:
    """What is remembered of a drafting method.

    Attributes:
        name: the key of its costs.
        account: plain steps that it may lose with as many requests as in the last step, to the next
            power of two; while it is below 0, no request drafts.
        chances: how likely its drafts are to be accepted.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.chances = MethodChances()
        self._accounts, self._size = [_FIRST_BANK] * 32, 0

    @property
    def account(self) -> float:
        return self._accounts[self._size]

    def gain(self, steps: float) -> None:
        """Adds some plain steps to what it may lose."""
        self._accounts[self._size] = min(self._accounts[self._size] + steps, _BANK)

    def enter(self, batch: int) -> None:
        """Takes note of how many requests a step has."""
        self._size = (batch - 1).bit_length()


class RequestState:
    """What is remembered of one request, from its start to its end.

    Attributes:
        drafts: whether its drafter runs at the end of the coming step.
        method: its method.
        chances: how likely its drafts are to be accepted.
        credit: tokens that it may lose, each worth its time in plain decoding; while it is below 0,
            the request does not draft.
        is_on_trial: a draft was verified only as a test, and none was rejected since.
        wakes: its drafter runs at the end of the coming step, and rested in the last one.
        rows_behind: rows of earlier steps that its drafter runs again then.
    """

    __slots__ = (
        "chances", "credit", "drafts", "is_on_trial", "method", "rows_behind", "wakes"
    )  # fmt: skip

    def __init__(self, method: Method) -> None:
        self.method, self.chances = method, RequestChances(method.chances)
        self.credit, self.drafts, self.is_on_trial = _FIRST_CREDIT, method.account >= 0, False
        self.rows_behind, self.wakes = 0, False


States: TypeAlias = Sequence[RequestState]
Floats: TypeAlias = Sequence[Sequence[float]]
Nodes: TypeAlias = Sequence[Sequence[int]]
Trees: TypeAlias = Sequence[Sequence[int] | None] | None


class DraftSelector:
    """Selects the drafts of every step: `select` when it is planned, `observe` when it is done.

    Args:
        costs: of steps and drafters. None: every draft is verified, as far as there is room.
        loss: share of plain decoding's time that drafting may lose, beside a few steps.
    """

    def __init__(self, costs: CostTable | None, loss: float = 0.02) -> None:
        self._costs, self._loss = costs, loss
        self._test_credit = 0.0  # tokens that may be lost with tests
        self._methods: dict[str, Method] = {}

    def start(self, method: str) -> RequestState:
        """The state of a new request."""
        if method not in self._methods:
            self._methods[method] = Method(method)
        return RequestState(self._methods[method])

    def select(
        self, states: States, confidences: Floats, room: int, parents: Trees = None, others: int = 0
    ) -> list[list[int]]:
        """Chooses the drafts that a step verifies, with those before them on their paths.

        Args:
            states: of all requests that decode in the step.
            confidences: in [0, 1], of each request's drafts; empty if it has none.
            room: most drafts of the step.
            parents: of each draft, the one before it on its path, which precedes it; -1: it comes
                after the last token. None, for all or for one: its drafts are a chain.
            others: rows of the step beside those of the requests and their drafts.

        Returns:
            The chosen drafts of each request, ascending; of a chain they are its first ones.
        """
        trees = repeat(None, len(states)) if parents is None else parents
        products = [
            state.chances.products(own, tree) if own else own
            for state, own, tree in zip(states, confidences, trees, strict=True)
        ]
        best = sorted(chain.from_iterable(products), reverse=True)[:room]
        if not best:
            return [[]] * len(states)
        count = self._best_count(states, best, others)
        least = best[count - 1] if count else 2.0
        ties = best[:count].count(least)  # to be chosen of those exactly as likely as the last one
        chosen = [
            [n for n, p in enumerate(own) if p > least or (p == least and (ties := ties - 1) >= 0)]
            if own
            else []
            for own in products
        ]
        idle = [i for i, nodes in enumerate(chosen) if not nodes and products[i]]
        if self._costs and idle and count < room:
            for i in self._tested(states, idle, others + count)[: room - count]:
                chosen[i].append(products[i].index(max(products[i])))
        return chosen

    def _best_count(self, states: States, best: Sequence[float], others: int) -> int:
        """How many of the likeliest drafts bring the most tokens per second."""
        if self._costs is None:
            return len(best)
        batch, first = len(states), len(states) + others
        curve = self._costs.curve(batch, first + len(best))
        fixed = curve[batch] - curve[first]
        for method, count in _num_drafting(states).items():
            fixed += self._costs.drafting(method.name, count)
        tokens = accumulate(best, initial=float(batch))
        seconds = curve[first : first + len(best) + 1]
        rates = [n / (fixed + t) for n, t in zip(tokens, seconds, strict=True)]
        return rates.index(max(rates))

    def _tested(self, states: States, idle: list[int], more_rows: int) -> list[int]:
        """Those without a draft that seems to pay whose first one is tested in the step.

        All are tested at once, since a first row may cost more than the next; a test that succeeds
        is repeated until a draft is rejected.
        """
        assert self._costs is not None
        batch, rows = len(states), len(states) + more_rows
        curve = self._costs.curve(batch, rows + len(idle))
        price = (curve[rows + len(idle)] - curve[rows]) / curve[batch] * batch
        if self._test_credit < price:
            return [i for i in idle if states[i].is_on_trial]
        self._test_credit = 0.0
        for i in idle:
            states[i].is_on_trial = True
        return idle

    def observe(
        self,
        states: States,
        verified: Floats,
        accepted: Nodes,
        parents: Trees = None,
        others: int = 0,
    ) -> None:
        """Takes in a step that is done, and decides which requests draft in the next one.

        Args:
            states: as in `select`.
            verified: confidences of the drafts that each request verified.
            accepted: of these the accepted ones, along a path; of a chain any sequence as long.
            parents: of the verified drafts, likewise.
            others: as in `select`.
        """
        counted: set[Method] = set()
        for index, (state, own, path) in enumerate(zip(states, verified, accepted, strict=True)):
            if own:
                counted.add(state.method)
                decided = own[: len(path) + 1]
                tree = None if parents is None else parents[index]
                if tree is not None:
                    reached = {-1, *path}
                    nodes = [n for n, parent in enumerate(tree) if parent in reached]
                    decided = [own[n] for n in [*path, *(n for n in nodes if n not in reached)]]
                state.chances.observe(decided, len(path))
                state.is_on_trial &= len(decided) == len(path)
        for method in counted:
            method.chances.update()
        if self._costs and states:
            self._settle(states, list(map(len, verified)), list(map(len, accepted)), others)

    def _settle(self, states: States, drafts: list[int], hits: list[int], others: int) -> None:
        """Sets what a step brought against what it cost beyond plain decoding.

        A request pays for its rows and for what it adds to its drafter's cost. The rest of that
        cost is shared: only the method pays it.
        """
        assert self._costs is not None
        batch, rows = len(states), sum(drafts)
        first = batch + others
        curve = self._costs.curve(batch, first + rows)
        token = curve[batch] / batch  # seconds of one in plain decoding
        row = (curve[first + rows] - curve[first]) / (rows * token) if rows else 0.0
        gains = {state.method: 0.0 for state in states}  # tokens
        added = {}  # tokens that one more request costs its drafter
        for method, count in _num_drafting(states).items():
            seconds = self._costs.drafting(method.name, count)
            last = seconds - self._costs.drafting(method.name, count - 1)
            added[method] = last / token
            gains[method] -= (seconds - last * count) / token
        for state, n, hit in zip(states, drafts, hits, strict=True):
            gain = self._loss + hit - row * n
            if state.drafts:
                gain -= added[state.method]
            if state.rows_behind:
                gain -= state.rows_behind * self._costs.drafting_row(state.method.name) / token
                state.rows_behind = 0
            state.credit = min(state.credit + gain, _CREDIT)
            gains[state.method] += gain
        self._test_credit = min(self._test_credit + self._loss * drafts.count(0), float(batch))
        _decide(states, gains)

    def rest(self, states: States) -> None:
        """Takes in a step in which none of these requests drafted, or had drafts."""
        loss, gains = self._loss, {state.method: 0.0 for state in states}
        for state in states:
            state.credit = min(state.credit + loss, _CREDIT)
            gains[state.method] += loss
        self._test_credit = min(self._test_credit + loss * len(states), float(len(states)))
        _decide(states, gains)


def _decide(states: States, gains: dict[Method, float]) -> None:
    """Whose drafters run at the end of the coming step; `gains`: tokens of the last one."""
    for method, tokens in gains.items():
        method.enter(len(states))
        method.gain(tokens / len(states))
    solvent = {method: method.account >= 0 for method in gains}
    for state in states:
        drafts = state.credit >= 0 and solvent[state.method]
        state.wakes, state.drafts = drafts and not state.drafts, drafts


def _num_drafting(states: States) -> dict[Method, int]:
    """How many requests of each method draft at the end of the coming step."""
    counts: dict[Method, int] = {}
    for state in states:
        if state.drafts:
            counts[state.method] = counts.get(state.method, 0) + 1
    return counts
