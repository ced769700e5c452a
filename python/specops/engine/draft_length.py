# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request verifies in a step: as many as make the whole batch fastest.

What a step costs by its rows is learnt from the engine's own steps (`StepCosts`); how often a
request's drafts are right, from its last verifications, and from those of the others while it has
few of its own (`Acceptance`). Both give the drafts with the most expected tokens per second
(`DraftLengths.allocate`). A request that gains less by drafts than its drafter costs is turned
down, and tried again after a while.

Lengths decide when a token is computed, never which: they may depend on the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specops.engine.step_costs import KNOTS, StepCosts

# What a verification still counts for when the next one comes; what is thought of requests of which
# nothing is known, and for how many verifications that counts.
_OWN_MEMORY, _COMMON_MEMORY = 0.93, 0.98
_COLD_FIRST, _COLD_FOLLOWING = 0.6, 0.8
_OWN_PRIOR, _COMMON_PRIOR = 3.0, 4.0
_DOUBTED = 2.0  # verifications that an estimate counts for after a rest
_NEWS = 2.0  # what a request's verification counts for in the common estimates, by how many it had
_DRIFT = 0.08  # part of the way to the common estimates between two reviews without verification
_EXPECTED, _MOST_EXPECTED = 20.0, 200.0  # tokens by which it is known how right estimates are
_DOUBT = 0.9  # what looks best looks better than it is

# Turning requests down.
_REVIEW = 4  # steps from one decision to the next
_LEAST_BUDGET = 0.5  # tokens that may be lost between two rests; at least what this many steps lose
_PATIENCE = 4
_SMALL_BUDGET = 1.0
_FIRST_SHARE = 0.05  # of all time, to be lost; halved with each rest in a row
_MOST_SAVED = 4.0  # tokens of gains that may be lost later
_NO_GAIN = 0.01  # tokens per step that are not worth the trouble
_TRIAL_SHARE = 0.01  # of all time, for drafts that are verified only to learn; also for drafters
_SMALL = 24  # drafts, up to which plain loops are faster than arrays


@dataclass(slots=True, eq=False)
class Acceptance:
    """How often the first draft of a step is right, and each next one if those before it were.

    Attributes:
        memory: what a verification still counts for when the next one comes.
        first: the estimate for a first draft.
        following: the estimate for each next one.
        num_tries: verifications behind the first one.
        num_following_tries: drafts behind the other.
    """

    memory: float
    first: float
    following: float
    num_tries: float
    num_following_tries: float

    def observe(self, drafts: int, accepted: int, weight: float = 1.0) -> None:
        """Takes in a verification."""
        memory = 1 - (1 - self.memory) * weight
        kept = memory * self.num_tries
        self.num_tries = kept + weight
        self.first = (kept * self.first + weight * (accepted > 0)) / self.num_tries
        if accepted and drafts > 1:
            kept, tries = memory * self.num_following_tries, weight * min(accepted, drafts - 1)
            self.num_following_tries = kept + tries
            hits = kept * self.following + weight * (accepted - 1)
            self.following = hits / self.num_following_tries

    def approach(self, other: "Acceptance", part: float) -> None:
        """Comes closer to another: what was seen long ago says less of what would be seen now."""
        self.first += part * (other.first - self.first)
        self.following += part * (other.following - self.following)

    def doubt(self) -> None:
        """Keeps the estimates, to be moved by the next few verifications: the text may change."""
        self.num_tries = min(self.num_tries, _DOUBTED)
        self.num_following_tries = min(self.num_following_tries, _DOUBTED)


@dataclass(slots=True, eq=False)
class Rest:
    """When a drafter has a rest, because it gains too little, and for how long.

    After every rest it may lose some tokens; what it gains beyond its cost may be lost later.

    Attributes:
        awake_since: the step from which on it runs; in the future while it rests.
        budget: tokens that may still be lost before the next rest.
        share: of the time since the last rest began, that may be lost until the end of the next.
    """

    awake_since: int
    budget: float = _LEAST_BUDGET
    share: float = _FIRST_SHARE

    def judge(self, step: int, gain: float, budget: float) -> bool:
        """Takes in the steps since the last review; returns whether it rests from now on.

        Args:
            step: that begins now.
            gain: tokens that the drafter brought in these beyond what it took.
            budget: of the time after a rest.
        """
        self.budget = min(self.budget + gain, budget + _MOST_SAVED)
        if self.budget >= 0:
            if self.budget > budget:
                self.share = _FIRST_SHARE
            return False
        self.awake_since, self.budget = step + int(budget / self.share), budget
        self.share = max(self.share / 2, _TRIAL_SHARE)
        return True


@dataclass(slots=True, eq=False)
class DraftState:
    """What is remembered of one request; it stays with the request through preemptions.

    Attributes:
        most: drafts it may verify in a step.
        common: the acceptance of all requests with its method.
        own: its own.
        rest: its own, too.
        is_known: drafts of it were verified; `is_fresh`: since the last review.
        wants_trial: its next draft is verified whatever it seems to be worth.
        surplus: tokens that its drafts gained beyond what their rows cost, since the last review.
    """

    most: int
    common: Acceptance
    own: Acceptance
    rest: Rest
    is_known: bool = False
    is_fresh: bool = False
    wants_trial: bool = True
    surplus: float = 0.0


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
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.is_resting = False
        self.has_few_totals = False
        self._refused: NDArray[np.float64] = np.zeros(0)  # by drafts of a step: 0, or infinity
        self._common: dict[str, Acceptance] = {}
        self._step = 0
        self._batch = 1  # requests of the last step
        self._rest = Rest(0)  # of all together
        self._surplus = 0.0  # of all, in the steps since the last review
        # Tokens of chosen drafts, as they were expected and as they came; both slowly forgotten.
        self._expected = self._accepted = _EXPECTED
        self._is_chosen = False  # the drafts of the step that is going on were
        self._credit = 0.0  # seconds that may go into trials
        self._is_reference = False  # the step that is going on is for its costs alone

    def start(self, method: str, most: int) -> DraftState:
        """A new request's state."""
        common = self._common.get(method)
        if common is None:
            common = Acceptance(
                _COMMON_MEMORY, _COLD_FIRST, _COLD_FOLLOWING, _COMMON_PRIOR, _COMMON_PRIOR
            )
            self._common[method] = common
        own = Acceptance(_OWN_MEMORY, common.first, common.following, _OWN_PRIOR, _OWN_PRIOR)
        # All the sooner is it tried, the more the new one counts, if trials cost little.
        if self.is_resting and self._rest.budget <= _SMALL_BUDGET:
            left = self._rest.awake_since - self._step
            self._rest.awake_since -= left // self._batch
        return DraftState(most, common, own, Rest(self._step))

    def limit(self, state: DraftState) -> int:
        """Drafts to propose for the request's next step; 0: its drafter has a rest."""
        if self.is_resting or self._is_reference or state.rest.awake_since > self._step:
            return 0
        return state.most

    def allocate(
        self,
        states: Sequence[DraftState | None],
        proposed: Sequence[int],
        room: int,
    ) -> list[int]:
        """How many of its proposed drafts each request of a step verifies.

        Of all choices with at most `room` drafts, the one with the most expected tokens per second:
        a draft's chance to be emitted is that of all before it too, so the best n drafts are the n
        likeliest; every n is looked at, so costs may have any shape.

        Args:
            states: of the step's requests; None for those that keep what they have.
            proposed: drafts that there are.
            room: rows of the step beside one per request.
        """
        counts = [0] * len(states)
        if not any(proposed):
            return counts
        fixed = 0
        if None in states:
            even = share_out(proposed, room)
            for index, state in enumerate(states):
                if state is None:
                    counts[index] = even[index]
                    fixed += counts[index]
            room -= fixed
        self._is_chosen = False
        drafting = [
            (index, state)
            for index, (state, drafts) in enumerate(zip(states, proposed, strict=True))
            if drafts and state is not None
        ]
        self._is_reference = bool(drafting) and self.costs.wants_reference(len(states))
        if not drafting or room <= 0 or self._is_reference:
            return counts
        drafts = [proposed[index] for index, _ in drafting]
        doubt = min(self._accepted / self._expected, 1.0) * _DOUBT
        first = [doubt * state.own.first for _, state in drafting]
        following = [state.own.following for _, state in drafting]
        most = min(sum(drafts), room)
        table = self.costs.seconds(len(states), fixed + most)[: fixed + most + 1]
        seconds = table[fixed:]
        if self.has_few_totals:
            choices = (table + self._refusals(fixed + most))[fixed:]
            choices[0] = seconds[0]
        else:
            choices = seconds
        choose = _choose if most <= _SMALL else _choose_by_arrays
        chosen, gains = choose(first, following, drafts, choices, float(len(states)))
        total = sum(chosen)
        if total:
            # A draft's part of what all cost, in the tokens that the time would bring without them.
            toll = len(states) * float(seconds[total] / seconds[0] - 1) / total
            for (index, state), count, gain in zip(drafting, chosen, gains, strict=True):
                counts[index] = count
                state.surplus += gain - toll * count
            expected = sum(gains)
            self._surplus += expected - toll * total
            self._expected += expected / doubt * _DOUBT
            self._is_chosen = True
        if total < len(drafting) and self.costs.wants_load(len(states)):
            for index, _ in drafting[:room]:
                counts[index] = 1
        elif total < most:
            self._try(drafting, counts, seconds[total:].tolist())
        return counts

    def _refusals(self, most: int) -> NDArray[np.float64]:
        """What keeps steps to few numbers of drafts, to be added to what 0 .. most take."""
        if len(self._refused) <= most:
            self._refused = np.full(2 * most + 1, np.inf)
            self._refused[[knot for knot in KNOTS if knot <= 2 * most]] = 0.0
        return self._refused[: most + 1]

    def _try(
        self, drafting: Sequence[tuple[int, DraftState]], counts: list[int], seconds: list[float]
    ) -> None:
        """Adds a draft to requests that wait for a trial, as long as time is left for that."""
        tried = 0
        for index, state in drafting:
            if state.wants_trial and counts[index] == 0 and tried + 1 < len(seconds):
                cost = seconds[tried + 1] - seconds[tried]
                if cost > self._credit:
                    return
                self._credit -= cost
                counts[index] = 1
                tried += 1

    def observe(
        self,
        states: Sequence[DraftState | None],
        drafts: Sequence[int],
        accepted: Sequence[int],
        *,
        seconds: float | None,
        drafting: bool,
        draft_seconds: float | None = None,
        build_seconds: float = 0.0,
    ) -> None:
        """Takes in a step that is done.

        Args:
            states: of its requests that had a row with logits; None as in `allocate`.
            drafts: how many of them each verified.
            accepted: how many of these were right.
            seconds: what the step took; None where that tells nothing about others, because it
                computed prompts too, or was the first of its shape.
            drafting: a drafter ran in it.
            draft_seconds: what the drafter and all decisions about lengths took of it; None where
                that cannot be told.
            build_seconds: what it took beside that because nothing had its shape before.
        """
        self._step = step = self._step + 1
        self._is_reference = False
        total = sum(drafts)
        batch = self._batch = len(states)
        if seconds is not None:
            build_seconds = build_seconds if total else 0.0
            if step % _REVIEW and self.costs.knows(batch, total):
                self.costs.count(batch, total, drafting=drafting, build_seconds=build_seconds)
            else:
                self.costs.observe(
                    batch,
                    total,
                    seconds,
                    drafting=drafting,
                    draft_seconds=draft_seconds,
                    build_seconds=build_seconds,
                )
            self._save_for_trials(seconds)
        if self.is_resting and step >= self._rest.awake_since:
            self._wake(states)
            return
        if not drafting and not total:
            return
        for index in [index for index, verified in enumerate(drafts) if verified]:
            state = states[index]
            if state is not None:
                own = state.own
                own.observe(drafts[index], accepted[index])
                # It stands for requests of which little is known: such ones count most.
                weight = min(max(_NEWS / own.num_tries, 1 / batch), 1.0)
                state.common.observe(drafts[index], accepted[index], weight)
                state.wants_trial = accepted[index] > 0
                state.is_known = state.is_fresh = True
        if self._is_chosen:
            self._is_chosen = False
            self._accepted += sum(
                right for state, right in zip(states, accepted, strict=True) if state is not None
            )
            scale = min(_MOST_EXPECTED / self._expected, 1.0)
            self._expected *= scale
            self._accepted *= scale
        if step % _REVIEW == 0:
            self._review(states)

    def pass_by(self, states: Sequence[DraftState | None], seconds: float | None) -> None:
        """Takes in a step in which all rested and nothing was drafted.

        Args:
            states: as in `observe`.
            seconds: likewise.
        """
        self._step += 1
        self._batch = len(states)
        if seconds is not None:
            self._save_for_trials(seconds)
            if self._step % _REVIEW == 0:
                self.costs.observe(len(states), 0, seconds, drafting=False)
        if self._step >= self._rest.awake_since:
            self._wake(states)

    def _save_for_trials(self, seconds: float) -> None:
        """Puts a part of a step's time by, up to the time of a step."""
        self._credit = min(self._credit + _TRIAL_SHARE * seconds, seconds)

    def _wake(self, states: Sequence[DraftState | None]) -> None:
        """Ends the rest of all."""
        self.is_resting = False
        self._rest.awake_since = self._step
        self._surplus = 0.0
        for state in states:
            if state is not None:
                state.rest.awake_since = self._step
                state.own.doubt()
                state.wants_trial = True
                state.surplus = 0.0

    def _review(self, states: Sequence[DraftState | None]) -> None:
        """Decides who rests, by the steps since the last time."""
        step, batch = self._step, len(states)
        share = self.costs.drafter_share(batch)
        share = max(share / (1 - share), _NO_GAIN)  # of a step without drafter: tokens
        budget = max(_LEAST_BUDGET, _PATIENCE * share)
        # Half of the drafter's time is taken to be for all requests together.
        own_share = share / 2
        for state in states:
            if state is None:
                continue
            if not state.is_fresh:
                state.own.approach(state.common, _DRIFT if state.is_known else 1.0)
            state.is_fresh = False
            if state.rest.awake_since < step:
                gain, state.surplus = state.surplus - own_share * _REVIEW, 0.0
                if state.rest.judge(step, gain, budget):
                    state.own.doubt()
                    state.wants_trial = True
        gain, self._surplus = self._surplus / batch - share * _REVIEW, 0.0
        if not self.is_resting and self._rest.awake_since < step:
            self.is_resting = self._rest.judge(step, gain, budget)


def _choose(
    first: Sequence[float],
    following: Sequence[float],
    most: Sequence[int],
    seconds: NDArray[np.float64],
    tokens: float,
) -> tuple[list[int], list[float]]:
    """The drafts of each request that make the step's tokens per second the most.

    Args:
        first: per request, the chance that its first draft is right.
        following: that each next one is, if those before it are.
        most: drafts it has.
        seconds: [drafts + 1], what a step with so many drafts takes.
        tokens: that the step emits without drafts.

    Returns:
        Per request, its drafts, and the tokens expected of them.
    """
    gains = []
    for index, chance in enumerate(first):
        for _ in range(most[index]):
            gains.append((chance, index))
            chance *= following[index]
    gains.sort(key=_first_of_pair, reverse=True)
    costs = seconds.tolist()
    best, best_rate, expected = 0, tokens / costs[0], tokens
    for count, (gain, _) in enumerate(gains[: len(costs) - 1], 1):
        expected += gain
        rate = expected / costs[count]
        if rate > best_rate:
            best, best_rate = count, rate
    chosen, gained = [0] * len(most), [0.0] * len(most)
    for gain, index in gains[:best]:
        chosen[index] += 1
        gained[index] += gain
    return chosen, gained


def _choose_by_arrays(
    first: Sequence[float],
    following: Sequence[float],
    most: Sequence[int],
    seconds: NDArray[np.float64],
    tokens: float,
) -> tuple[list[int], list[float]]:
    """As `_choose`, for many drafts."""
    width = max(most)
    gains = np.empty((width, len(most)))
    gains[1:] = following
    gains[0] = first
    np.multiply.accumulate(gains, axis=0, out=gains)
    if min(most) < width:
        gains[np.arange(width)[:, None] >= most] = -1.0
    falling = np.sort(gains, axis=None)[::-1][: len(seconds) - 1]
    expected = np.cumsum(falling)
    expected += tokens
    rates = expected / seconds[1:]
    best = int(rates.argmax())
    if rates[best] <= tokens / seconds[0]:
        return [0] * len(most), [0.0] * len(most)
    is_chosen = gains >= falling[best]
    surplus = int(np.count_nonzero(is_chosen)) - best - 1
    if surplus:  # of those that are equal to the last one, the last
        equal = np.flatnonzero(gains == falling[best])
        is_chosen.flat[equal[len(equal) - surplus :]] = False
    return is_chosen.sum(axis=0).tolist(), (gains * is_chosen).sum(axis=0).tolist()


def _first_of_pair(pair: tuple[float, int]) -> float:
    return pair[0]
