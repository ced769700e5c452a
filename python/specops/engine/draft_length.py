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

from specops.engine.step_costs import StepCosts

# What a verification still counts for when the next one comes, for how many the prior counts, and
# what it is in the beginning.
_OWN_MEMORY, _COMMON_MEMORY = 0.93, 0.98
_OWN_PRIOR, _COMMON_PRIOR = 3.0, 4.0
_FADING = 0.7  # what is left of it after a rest
_DOUBT = 0.95  # what looks best looks better than it is

# Turning requests down, in steps.
_PATIENCE = 8  # with the drafter before it may happen
_FIRST_NAP = 2  # without; doubled each time in a row
_REVIEW = 4  # from one decision about rests to the next
_WORTH_WEIGHT = 0.3  # of the steps since then in an average gain
_NO_GAIN = 0.01  # tokens per step that are not worth the trouble
_TRIAL_SHARE = 0.01  # of all time, for drafts that are verified only to learn; also for drafters
_SMALL = 24  # drafts, up to which plain loops are faster than arrays


@dataclass(slots=True, eq=False)
class Acceptance:
    """How often the first draft of a step is right, and each next one if those before it were.

    Attributes:
        memory: what a verification still counts for when the next one comes.
        strength: verifications that the prior counts for.
        first: the estimate for a first draft.
        following: the estimate for each next one.
    """

    memory: float
    strength: float
    first: float
    following: float
    num_tries: float = 0.0
    num_hits: float = 0.0
    num_following_tries: float = 0.0
    num_following_hits: float = 0.0

    def observe(self, drafts: int, accepted: int, prior: "Acceptance", weight: float = 1.0) -> None:
        """Takes in a verification."""
        memory = 1 - (1 - self.memory) * weight
        self.num_tries = memory * self.num_tries + weight
        self.num_hits = memory * self.num_hits + weight * (accepted > 0)
        if accepted:
            tries, hits = min(accepted, drafts - 1), accepted - 1
            self.num_following_tries = memory * self.num_following_tries + weight * tries
            self.num_following_hits = memory * self.num_following_hits + weight * hits
        self._estimate(prior)

    def fade(self, prior: "Acceptance") -> None:
        """Some of it is forgotten: after a rest the text may be another."""
        self.num_tries *= _FADING
        self.num_hits *= _FADING
        self.num_following_tries *= _FADING
        self.num_following_hits *= _FADING
        self._estimate(prior)

    def _estimate(self, prior: "Acceptance") -> None:
        strength = self.strength
        self.first = (self.num_hits + strength * prior.first) / (self.num_tries + strength)
        self.following = (self.num_following_hits + strength * prior.following) / (
            self.num_following_tries + strength
        )


@dataclass(slots=True, eq=False)
class Rest:
    """When a drafter has a rest, because it gains too little, and for how long.

    Attributes:
        awake_since: the step from which on it runs; in the future while it rests.
        nap: steps of the next rest.
        worth: tokens per step that its drafts gained lately beyond what their rows cost.
    """

    awake_since: int
    nap: int = _FIRST_NAP
    worth: float = 0.0

    def judge(self, step: int, surplus: float, least: float, longest: float) -> bool:
        """Takes in the steps since the last review; returns whether it rests from now on.

        Args:
            step: that begins now.
            surplus: what its drafts gained a step.
            least: what they must gain on average.
            longest: rest.
        """
        steps = step - self.awake_since
        self.worth += max(min(_REVIEW / steps, 1.0), _WORTH_WEIGHT) * (surplus - self.worth)
        if steps < _PATIENCE:
            return False
        if self.worth >= least:
            self.nap = _FIRST_NAP
            return False
        nap = min(self.nap, max(int(longest), _FIRST_NAP))
        self.awake_since, self.nap = step + nap, 2 * nap
        return True


@dataclass(slots=True, eq=False)
class DraftState:
    """What is remembered of one request; it stays with the request through preemptions.

    Attributes:
        most: drafts it may verify in a step.
        common: the acceptance of all requests with its method.
        own: its own.
        rest: its own, too.
        wants_trial: its next draft is verified whatever it seems to be worth.
        surplus: tokens that its drafts gained beyond their cost, since the last review.
    """

    most: int
    common: Acceptance
    own: Acceptance
    rest: Rest
    wants_trial: bool = True
    surplus: float = 0.0


_COLD = Acceptance(memory=1.0, strength=0.0, first=0.6, following=0.8)


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
    planned, `observe` when it is done. Requests without a state are not decided upon; their drafts
    still count as rows.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._common: dict[str, Acceptance] = {}
        self._step = 0
        self._batch = 1  # requests of the last step
        self._rest = Rest(0)  # of all together
        self._is_resting = False
        self._surplus = 0.0  # of all, in the steps since the last review
        self._credit = 0.0  # seconds that may go into trials
        self._is_reference = False  # the step that is going on is for its costs alone

    def start(self, method: str, most: int) -> DraftState:
        """A new request's state."""
        common = self._common.get(method)
        if common is None:
            common = Acceptance(_COMMON_MEMORY, _COMMON_PRIOR, _COLD.first, _COLD.following)
            self._common[method] = common
        own = Acceptance(_OWN_MEMORY, _OWN_PRIOR, common.first, common.following)
        if self._is_resting:  # all the sooner is it tried, the more the new one counts
            left = self._rest.awake_since - self._step
            self._rest.awake_since -= left // self._batch
        return DraftState(most, common, own, Rest(self._step))

    def limit(self, state: DraftState) -> int:
        """Drafts to propose for the request's next step; 0: its drafter has a rest."""
        if self._is_resting or self._is_reference or state.rest.awake_since > self._step:
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
        drafting = [
            (index, state)
            for index, (state, drafts) in enumerate(zip(states, proposed, strict=True))
            if drafts and state is not None
        ]
        self._is_reference = bool(drafting) and self.costs.wants_reference(len(states))
        if not drafting or room <= 0 or self._is_reference:
            return counts
        drafts = [proposed[index] for index, _ in drafting]
        first = [_DOUBT * state.own.first for _, state in drafting]
        following = [state.own.following for _, state in drafting]
        most = min(sum(drafts), room)
        seconds = self.costs.seconds(len(states), fixed + most)[fixed : fixed + most + 1]
        choose = _choose if most <= _SMALL else _choose_by_arrays
        chosen, gains = choose(first, following, drafts, seconds, float(len(states)))
        total = sum(chosen)
        if total:
            # Every draft's part of what the drafts cost, in the tokens that the time is worth.
            begin, end = float(seconds[0]), float(seconds[total])
            toll = (len(states) + sum(gains)) * (1 - begin / end) / total
            for (index, state), count, gain in zip(drafting, chosen, gains, strict=True):
                counts[index] = count
                state.surplus += gain - toll * count
            self._surplus += sum(gains) - toll * total
        if total < len(drafting) and self.costs.wants_load(len(states)):
            for index, _ in drafting[:room]:
                counts[index] = 1
        elif total < most:
            self._try(drafting, counts, seconds[total:].tolist())
        return counts

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
    ) -> None:
        """Takes in a step that is done.

        Args:
            states: of its requests that had a row with logits; None as in `allocate`.
            drafts: how many of them each verified.
            accepted: how many of these were right.
            seconds: what the step took; None where that tells nothing about others, because it
                computed prompts too, or was the first of its shape.
            drafting: a drafter ran in it.
            draft_seconds: what the drafter took of it; None where that cannot be told.
        """
        self._step = step = self._step + 1
        self._is_reference = False
        total = sum(drafts)
        batch = self._batch = len(states)
        if seconds is not None:
            self.costs.observe(
                batch, total, seconds, drafting=drafting, draft_seconds=draft_seconds
            )
            self._credit = min(self._credit + _TRIAL_SHARE * seconds, seconds)
        if self._is_resting and step >= self._rest.awake_since:
            self._is_resting = False
            self._rest.awake_since = step
            for state in states:
                if state is not None:
                    state.rest.awake_since = step
                    state.wants_trial = True
            return
        if not drafting and not total:
            return
        for index in [index for index, verified in enumerate(drafts) if verified]:
            state = states[index]
            if state is not None:
                state.own.observe(drafts[index], accepted[index], state.common)
                # It stands for requests of which little is known: such ones count most.
                weight = 1 / state.own.num_tries
                state.common.observe(drafts[index], accepted[index], _COLD, weight)
                state.wants_trial = False
        if step % _REVIEW == 0:
            self._review(states)

    def _review(self, states: Sequence[DraftState | None]) -> None:
        """Decides who rests, by the steps since the last time."""
        step, batch = self._step, len(states)
        share = self.costs.drafter_share(batch)
        # Tried for _PATIENCE steps after each rest, a drafter takes up to its share of the time.
        longest = _PATIENCE * (share / _TRIAL_SHARE - 1)
        # Half of the drafter's time is taken to be for all requests together.
        least = max(share / 2, _NO_GAIN)
        for state in states:
            if state is None:
                continue
            if not state.own.num_tries:
                state.own.first, state.own.following = state.common.first, state.common.following
            if state.rest.awake_since < step:
                gain, state.surplus = state.surplus / _REVIEW, 0.0
                if state.rest.judge(step, gain, least, longest):
                    state.own.fade(state.common)
                    state.wants_trial = True
        gain, self._surplus = self._surplus / batch / _REVIEW, 0.0
        if not self._is_resting and self._rest.awake_since < step:
            least = max(share, _NO_GAIN)
            self._is_resting = self._rest.judge(step, gain, least, longest)


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
