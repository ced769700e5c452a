# SPDX-License-Identifier: Apache-2.0
"""How long steps wait for grammars: who is slow sits out a step until its next mask is ready.

A mask takes 20 us, but a text that an ambiguous grammar reads in ever more ways comes to take
hundreds of times as long, and all of a step's requests would wait for it. A request that took long
in its last steps has its next mask computed by a thread beside the steps, beside others in a small
part of the time, and has few drafts. None of this can change a token: it only decides when.
"""

import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from specops.engine.plan import Plan
from specops.engine.request import Request

# Of a step, where it is more than a tenth of the rest of it: the request is slow then.
_SLOW_SECONDS = 2e-3
_DRAFTS_SECONDS = 2e-3  # of a slow request's drafts, where the rest of a step is no longer
_STEP_SECONDS = 5e-3  # of a step's slow requests if it has no others, likewise
_SHARE = 0.1  # of the time, for slow requests beside others
_WAIT_SECONDS = 1e-3  # where there is nothing else to do; somebody may come


class GrammarTurns:
    """Which requests sit out because of their grammars."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specops-masks")
        self._rest_seconds = 0.0  # of the last step, but for grammars
        self._next_at = 0.0  # when a mask may be begun beside others

    def sitting_out(self, decoding: Sequence[Request], has_prompts: bool) -> Set[Request]:
        """Those that are to wait, of all that could decode."""
        slow = [one for one in decoding if one.grammar is not None and self._is_slow(one)]
        if not slow:
            return frozenset()
        slow.sort(key=lambda request: request.last_step)
        is_alone = not has_prompts and len(slow) == len(decoding)
        jobs = _jobs(slow)
        if is_alone or (not jobs and time.monotonic() >= self._next_at):
            for request in slow if is_alone else slow[:1]:
                if request not in jobs and request.grammar is not None:
                    try:
                        request.grammar.preparing = self._thread.submit(request.grammar.prepare)
                    except RuntimeError:  # there is no thread: steps compute masks themselves
                        return frozenset()
            jobs = _jobs(slow)
        if is_alone:
            wait(jobs.values(), _WAIT_SECONDS, FIRST_COMPLETED)
        late, left = set(slow), max(_STEP_SECONDS, self._rest_seconds)
        for request in slow:
            if request in jobs and jobs[request].done() and left > 0:
                late.discard(request)
                left = left - _seconds(request) if is_alone else 0.0
        return late

    def most_drafts(self, request: Request) -> int | None:
        """How many drafts its next step may have; None: nothing limits them."""
        if request.grammar is None or not self._is_slow(request):
            return None
        return int(max(_DRAFTS_SECONDS, self._rest_seconds) / request.grammar.row_seconds)

    def note(self, plan: Plan, at: Mapping[int, Request], seconds: float) -> None:
        """Notes what a step has taken.

        Args:
            plan: of the step; its tokens are committed.
            at: requests by slot.
            seconds: of the step as a whole.
        """
        total = slow = 0.0
        for part in plan.parts:
            request = at[part.slot]
            if request.grammar is None or not part.emits:
                continue
            try:
                request.grammar.note_step(1 + part.num_drafts)
            except Exception as error:
                plan.fail(request.request_id, error)
            total += _seconds(request)
            slow += _seconds(request) if self._is_slow(request) else 0.0
        self._rest_seconds = max(seconds - total, 0.0)
        if slow and len(plan.parts) > 1:
            self._next_at = time.monotonic() + slow * (1 / _SHARE - 1)

    def _is_slow(self, request: Request) -> bool:
        return _seconds(request) > max(_SLOW_SECONDS, _SHARE * self._rest_seconds)


def _seconds(request: Request) -> float:
    """What its grammar takes of a step."""
    return 0.0 if request.grammar is None else request.grammar.step_seconds


def _jobs(requests: Sequence[Request]) -> dict[Request, "Future[None]"]:
    """The computations of their next masks, as far as they have begun."""
    return {
        request: request.grammar.preparing
        for request in requests
        if request.grammar is not None and request.grammar.preparing is not None
    }
