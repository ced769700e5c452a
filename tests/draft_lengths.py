# SPDX-License-Identifier: Apache-2.0
"""Controls that set the number of drafts per request, on which no token may depend."""

import random
from collections import Counter
from collections.abc import Sequence

from specops.engine import Engine
from specops.engine.request import Request


class Lengths:
    """Control that allows all requested drafts and counts them.

    Attributes:
        verified: how often a request verified each number of drafts.
        num_suspended: how often a request was allowed no drafts.
    """

    def __init__(self) -> None:
        self.verified: Counter[int] = Counter()
        self.num_suspended = 0

    def begin_step(self) -> None:
        """Prepare a step; called once per step, before the other methods."""

    def limit(self, request: Request) -> int:
        """Return the maximum number of drafts for a request at the end of a step."""
        return request.speculative.num_speculative_tokens

    def verify(self, request: Request) -> int:
        """Return how many of its drafts a request verifies."""
        return request.drafts.num_selected

    def decide_for(self, engine: Engine) -> Engine:
        """Make the engine use this control's numbers of drafts from now on."""
        select = engine._drafting.select

        def selecting(requests: Sequence[Request], max_rows: int) -> None:
            select(requests, max_rows)
            self.begin_step()
            for request in requests:
                request.drafts.num_selected = min(request.drafts.num_selected, self.verify(request))
                if request.drafts.stages:
                    self.verified[request.drafts.num_selected] += 1
            for request in engine._requests.values():
                if request.drafts.stages:
                    request.drafts.limit = self.limit(request)
                    self.num_suspended += not request.drafts.limit

        engine._drafting.select = selecting  # type: ignore[method-assign]
        return engine


class NothingVerified(Lengths):
    """Control that drafts but verifies no draft: every step emits one token."""

    def verify(self, request: Request) -> int:
        return 0


class RandomLengths(Lengths):
    """Control with a random number of drafts, often zero."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(5)

    def limit(self, request: Request) -> int:
        most = request.speculative.num_speculative_tokens
        return self._random.choice([0, most, self._random.randint(0, most)])

    def verify(self, request: Request) -> int:
        return self._random.randint(0, request.drafts.num_selected)


class RandomRests(RandomLengths):
    """Control that also suspends all drafting for long periods."""

    def __init__(self) -> None:
        super().__init__()
        self._resting = 0  # steps left in this period

    def begin_step(self) -> None:
        if self._resting == 0 and self._random.random() < 0.04:
            self._resting = self._random.choice([self._random.randrange(1, 10), 40])
        self._resting = max(self._resting - 1, 0)

    def limit(self, request: Request) -> int:
        most = request.speculative.num_speculative_tokens
        return 0 if self._resting else self._random.randint(0, most)
