# SPDX-License-Identifier: Apache-2.0
"""Scheduling of slow grammars: their requests skip steps until their token mask is ready.

A mask usually takes 20 us. If an ambiguous grammar parses a text in ever more ways, a mask may take
hundreds of times as long, and all requests of the step would wait for it. So a background thread
computes the next mask of requests that were slow in their last steps. If there are other requests,
slow ones get a small part of the time, and few drafts. This only decides when a token is computed;
it never changes a token.
"""

import time
from collections.abc import Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from specops.engine.plan import Plan
from specops.engine.request import Request

# A request is slow if its grammar takes longer per step than this, and longer than _SLOW_FRACTION
# of the rest of the step.
_SLOW_SECONDS = 2e-3
_DRAFTS_SECONDS = 2e-3  # for a slow request's drafts; more if the rest of the step is longer
_STEP_SECONDS = 5e-3  # for the masks of a step of slow requests only; more if the rest is longer
_SLOW_FRACTION = 0.1  # fraction of the time for slow requests if there are others
_WAIT_SECONDS = 1e-3  # waiting time for a mask when idle; short, since requests may arrive


class GrammarScheduler:
    """Selector of the requests that skip a step because of slow grammars."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specops-masks")
        self._rest_seconds = 0.0  # duration of the last step without grammars
        self._next_at = 0.0  # earliest start of a mask while there are other requests

    def requests_to_skip(self, decoding: Sequence[Request], has_prompts: bool) -> Set[Request]:
        """Return the decoding requests that must skip the next step."""
        slow = [one for one in decoding if one.grammar is not None and self._is_slow(one)]
        if not slow:
            return frozenset()
        slow.sort(key=lambda request: request.placement.last_step)
        is_alone = not has_prompts and len(slow) == len(decoding)
        jobs = _jobs(slow)
        if is_alone or (not jobs and time.monotonic() >= self._next_at):
            for request in slow if is_alone else slow[:1]:
                if request not in jobs and request.grammar is not None:
                    try:
                        request.grammar.preparing = self._thread.submit(request.grammar.prepare)
                    except RuntimeError:  # no thread can start: steps compute masks themselves
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
        """Return the limit on a request's drafts in the next step, or None."""
        if request.grammar is None or not self._is_slow(request):
            return None
        return int(max(_DRAFTS_SECONDS, self._rest_seconds) / request.grammar.row_seconds)

    def note(self, plan: Plan, seconds: float) -> None:
        """Record the duration of a step.

        Args:
            plan: the step's plan; its tokens are committed.
            seconds: time of the whole step.
        """
        total = slow = 0.0
        for part in plan.parts:
            request = part.request
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
            self._next_at = time.monotonic() + slow * (1 / _SLOW_FRACTION - 1)

    def _is_slow(self, request: Request) -> bool:
        return _seconds(request) > max(_SLOW_SECONDS, _SLOW_FRACTION * self._rest_seconds)


def _seconds(request: Request) -> float:
    """Return the average time per step of a request's grammar."""
    return 0.0 if request.grammar is None else request.grammar.step_seconds


def _jobs(requests: Sequence[Request]) -> dict[Request, "Future[None]"]:
    """Return the started computations of next masks, by request."""
    return {
        request: request.grammar.preparing
        for request in requests
        if request.grammar is not None and request.grammar.preparing is not None
    }
