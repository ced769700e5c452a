# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request verifies in a step, and whether drafters run at all.

A request's length holds for some steps, the stretch; then it is chosen anew, from how often its
drafts are right (`Acceptance`) and what drafts cost (`StepCosts`). Whether drafting pays at all, no
estimate decides: what it brings and takes is measured beside plain decoding, and what it may lose
is bounded (`Budget`). A step of a rest is one of plain decoding, in which nothing is decided and
hardly anything noted.

Lengths decide when a token is computed, never which: they may depend on the clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specops.engine.acceptance import Acceptance, Tally
from specops.engine.draft_budget import LOST_SHARE, PLAIN_STEPS, STRETCH, WAKING, Budget
from specops.engine.step_costs import StepCosts

# What a verification still counts for when the next one comes, of the same request, and of as many
# as there are.
_OWN_MEMORY, _COMMON_MEMORY = 0.93, 0.98
_DRIFT = 0.02  # part of the way to the common estimates, a stretch without verification
_SAMPLED = 4  # steps of a long rest, of which one is timed
_SHAKEN = 2.5  # times what was expected, as which a step counts at most: the machine was busy
_LEAST_CHANCE = 0.02  # of a draft that is thought of at all
_FEW = 16  # requests, below which a step has all that they ask for or nothing
_FOUND_MEMORY = 0.8  # of a stretch's drafts, when another one is over
_TRIED = 4  # where no draft seems to gain anything, one request in so many gets one to learn from
_IDLE = 4  # stretches without drafts, after which a request may be tried
_TRIAL_SHARE = LOST_SHARE / 2  # of all steps, for that
_PRECISION = 4  # bits of a step's drafts, where their numbers are to be few


@dataclass(slots=True, eq=False)
class DraftState:
    """What is remembered of one request; it stays with the request through preemptions.

    Attributes:
        most: drafts it may verify in a step.
        common: the acceptance of all requests with its method.
        own: its own.
        length: drafts it verifies in a step of this stretch, if they are found.
        seen: its verifications in the stretch.
        idle: stretches without one.
    """

    most: int
    common: Acceptance
    own: Acceptance
    length: int = 0
    seen: Tally = field(default_factory=Tally)
    idle: int = 0

    def learn(self, batch: int) -> None:
        """Takes in what was seen in a stretch of steps with so many requests."""
        if self.seen.tries:
            self.own.observe(self.seen, _OWN_MEMORY)
            self.common.observe(self.seen, _COMMON_MEMORY, 1 / batch)
            self.seen = Tally()
            self.idle = 0
        else:
            self.own.approach(self.common, _DRIFT)
            self.idle += 1


class Choice(NamedTuple):
    """Lengths, and the least chance of a draft within them; 1, if all are 0."""

    lengths: list[int]
    threshold: float


def choose(
    chances: Sequence[tuple[float, float]],
    most: Sequence[int],
    tokens: float,
    time: Callable[[int], float],
    room: int,
) -> Choice:
    """The lengths with the most expected tokens by time; all 0, if a plain step has more.

    A draft's chance to be emitted is that of all before it too, so the best n drafts are the n
    likeliest; costs may have any shape. Larger n are looked at where `round_down` keeps them.

    Args:
        chances: of each request: that its first draft is right, and each next one.
        most: its drafts at most.
        tokens: that are emitted without any.
        time: of a step with so many drafts in all, in plain steps.
        room: drafts in all, at most.
    """
    drafts = []
    for index, (chance, following) in enumerate(chances):
        for _ in range(most[index]):
            if chance < _LEAST_CHANCE:
                break
            drafts.append((chance, index))
            chance *= following
    drafts.sort(key=_first_of_pair, reverse=True)
    best, best_rate, expected = 0, tokens, tokens
    for count, (chance, _) in enumerate(drafts[:room], 1):
        expected += chance
        if count == round_down(count) and expected / time(count) > best_rate:
            best, best_rate = count, expected / time(count)
    lengths = [0] * len(chances)
    for _, index in drafts[:best]:
        lengths[index] += 1
    return Choice(lengths, drafts[best - 1][0] if best else 1.0)


def _first_of_pair(pair: tuple[float, int]) -> float:
    return pair[0]


def round_down(drafts: int) -> int:
    """The next lower one of few numbers: 0 to 16, and eight from a power of two to the next."""
    shift = max(drafts.bit_length() - _PRECISION, 0)
    return drafts >> shift << shift


def share_out(wanted: Sequence[int], total: int) -> list[int]:
    """Cuts numbers to the largest equal cap under which their sum keeps within a total.

    What is left over goes one each to the first that were cut.
    """
    if sum(wanted) <= total:
        return list(wanted)
    low, high = 0, max(wanted)
    while low + 1 < high:
        cap = (low + high) // 2
        if sum(min(number, cap) for number in wanted) <= total:
            low = cap
        else:
            high = cap
    shares = [min(number, low) for number in wanted]
    left = total - sum(shares)
    for index, number in enumerate(wanted):
        if number > low and left > 0:
            shares[index] += 1
            left -= 1
    return shares


class DraftLengths:
    """Decides how many drafts requests verify, and whether their drafters run.

    For every step: `limit` of each request when the step before is filled, `allocate` when it is
    planned, `observe` when it is done, or `pass_by` where it was one of plain decoding in a rest.
    Requests without a state are not decided upon; their drafts still count as rows.

    Attributes:
        has_few_totals: a step has one of few numbers of drafts, as every other is a new shape.
        is_resting: all requests together have a rest.
        rest: how many more steps, as long as there are about as many requests.
    """

    def __init__(self) -> None:
        self.is_resting, self.rest = True, PLAIN_STEPS
        self.has_few_totals = False
        # By whether there are requests without a state: what is plain then is another thing.
        self._costs = {False: StepCosts(), True: StepCosts()}
        self._budgets: dict[tuple[int, bool], Budget] = {}  # by the batch to a power of two, too
        self._common: dict[str, Acceptance] = {}
        self._batch = (0, False)  # requests of the last step, and the same; and its budget
        self._budget = Budget()
        self._times: list[tuple[float, float]] = []  # of the stretch, as StepCosts has them
        self._room = 1
        self._threshold = 1.0  # the least chance of a draft that is verified
        self._asked = self._found = 1.0  # drafts, slowly forgotten
        self._trial_steps = 0.0  # that may go into drafts of requests that draft badly

    def start(self, method: str, most: int) -> DraftState:
        """A new request's state."""
        common = self._common.setdefault(method, Acceptance())
        state = DraftState(most, common, Acceptance(common.first, common.following))
        chance = common.first
        while state.length < most and chance >= self._threshold:
            state.length += 1
            chance *= common.following
        return state

    def limit(self, state: DraftState) -> int:
        """Drafts to propose for the request's next step; 0: its drafter has a rest."""
        return 0 if self.is_resting else state.length

    def allocate(
        self,
        states: Sequence[DraftState | None],
        proposed: Sequence[int],
        room: int,
    ) -> list[int]:
        """How many of its proposed drafts each request of a step verifies.

        Args:
            states: of the step's requests; None for those that keep what they have.
            proposed: drafts that there are.
            room: rows of the step beside one per request.
        """
        fixed = [n if state is None else 0 for state, n in zip(states, proposed, strict=True)]
        if any(fixed):
            fixed = share_out(fixed, room)
            room -= sum(fixed)
        wanted = [0 if state is None else state.length for state in states]
        counts = [min(pair) for pair in zip(wanted, proposed, strict=True)]
        total = sum(counts)
        self._asked += sum(wanted)
        self._found += total
        self._room = room
        most = min(total, room)
        if self.has_few_totals:
            most = round_down(most)
        if most < total:
            counts = share_out(counts, most)
        return [sum(pair) for pair in zip(counts, fixed, strict=True)]

    def pass_by(self, states: Sequence[DraftState | None], seconds: float | None) -> None:
        """Takes in a step in which all rested and nothing was drafted or verified.

        Args:
            states: as in `observe`.
            seconds: likewise.
        """
        budget, costs = self._enter(states)
        if budget.rest and seconds is not None:
            batch = len(states)
            budget.rest -= 1
            if budget.rest < PLAIN_STEPS - 1 or budget.rest % _SAMPLED == 0:
                costs.observe_plain(batch, seconds)
            if not budget.rest:
                if costs.knows_plain(batch):
                    self._end_rest(budget, costs, states)
                else:
                    budget.rest = 1
        self.is_resting, self.rest = budget.rest > 0, budget.rest

    def observe(
        self,
        states: Sequence[DraftState | None],
        drafts: Sequence[int],
        accepted: Sequence[int],
        *,
        seconds: float | None,
        build_seconds: float = 0.0,
    ) -> None:
        """Takes in a step that is done.

        Args:
            states: of its requests that had a row with logits; None as in `allocate`.
            drafts: how many of them each verified.
            accepted: how many of these were right.
            seconds: all that the step took, decisions and drafters too; None where that tells
                nothing about others, because it computed prompts, too, or captured a graph.
            build_seconds: what it took beside that because nothing had its shape before.
        """
        budget, costs = self._enter(states)
        batch, total, right = len(states), 0, 0
        for state, count, kept in zip(states, drafts, accepted, strict=True):
            if count and state is not None:
                state.seen.add(count, kept)
                total += count
                right += kept
        if seconds is not None and costs.knows_plain(batch):
            plain, share = costs.plain_seconds(batch), total / batch
            time = seconds / plain
            if budget.num_steps >= WAKING:
                time = min(time, _SHAKEN * costs.multiple(batch, share))
            if budget.num_steps and not budget.rest:  # the first step makes up for the rest
                self._times.append((share, time))
            budget.note(1 + right / batch - time, build_seconds / plain if total else 0.0)
        if not budget.rest and budget.count():
            self._review(budget, costs, states)
        self.is_resting, self.rest = budget.rest > 0, budget.rest

    def _enter(self, states: Sequence[DraftState | None]) -> tuple[Budget, StepCosts]:
        """The budget and the costs of a batch like this one."""
        batch = len(states), None in states
        if batch != self._batch:
            self._batch = batch
            size = batch[0].bit_length(), batch[1]
            budget = self._budgets.setdefault(size, Budget())
            if budget is not self._budget:
                self._budget, self._times = budget, []
                if not budget.rest:
                    self._choose(self._costs[batch[1]], states)
        return self._budget, self._costs[batch[1]]

    def _end_rest(
        self, budget: Budget, costs: StepCosts, states: Sequence[DraftState | None]
    ) -> None:
        """Drafts may be good by now: none is left out for what it was before."""
        if not budget.is_reference:
            for state in states:
                if state is not None:
                    state.own.hope()
        budget.end_rest()
        self._choose(costs, states)

    def _review(
        self, budget: Budget, costs: StepCosts, states: Sequence[DraftState | None]
    ) -> None:
        """Learns from a stretch, and chooses the lengths of the next one."""
        budget.begin_stretch()
        drafting = [state for state in states if state is not None]
        if any([state.length for state in drafting]) and not any(
            [state.seen.tries for state in drafting]
        ):
            return  # nothing was found, from which nothing follows
        batch = len(states)
        costs.observe(batch, self._times)
        self._times = []
        for state in drafting:
            state.learn(batch)
        self._asked *= _FOUND_MEMORY
        self._found *= _FOUND_MEMORY
        self._trial_steps = min(self._trial_steps + _TRIAL_SHARE * budget.stretch, 1.0)
        self._choose(costs, states)

    def _choose(self, costs: StepCosts, states: Sequence[DraftState | None]) -> None:
        """Sets the lengths of a stretch."""
        batch, found = len(states), self._found / self._asked
        drafting = [state for state in states if state is not None]

        def time(drafts: int) -> float:
            if batch >= _FEW:
                return costs.multiple(batch, found * drafts / batch)
            none = costs.multiple(batch, 0.0)
            return none + found * (costs.multiple(batch, drafts / batch) - none)

        choice = choose(
            [(state.own.first, state.own.following) for state in drafting],
            [state.most for state in drafting],
            batch / found,
            time,
            min(self._room, costs.reach(batch)),
        )
        self._threshold = choice.threshold
        for state, length in zip(drafting, choice.lengths, strict=True):
            state.length = length
        total, room = sum(choice.lengths), max(batch // _TRIED, 1)
        if total:
            cost = STRETCH * (time(total + batch) - time(total)) / batch
            room = int(self._trial_steps / cost) if cost else batch
            idle = [one for one in drafting if not one.length and one.idle >= _IDLE]
            self._trial_steps -= cost * min(room, len(idle))
        else:
            idle = drafting
        for state in sorted(idle, key=_idleness, reverse=True)[:room]:
            state.length = 1


def _idleness(state: DraftState) -> int:
    return state.idle
