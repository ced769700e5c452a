# SPDX-License-Identifier: Apache-2.0
"""Tests decide how many drafts requests are given and verify: tokens must never depend on it."""

import random
from collections import Counter
from collections.abc import Sequence

from specops.engine import Engine
from specops.engine.request import Request


class Lengths:
    """Gives all that is asked for, and counts.

    Attributes:
        verified: how often a request verified so many drafts.
        num_suspended: how often a request was to have none.
    """

    def __init__(self) -> None:
        self.verified: Counter[int] = Counter()
        self.num_suspended = 0

    def begin_step(self) -> None:
        """Called before the others, once in every step."""

    def limit(self, request: Request) -> int:
        """Most drafts that a request may be given at the end of a step."""
        return request.speculative.num_speculative_tokens

    def verify(self, request: Request) -> int:
        """How many of those that it was given it verifies."""
        return request.num_drafts

    def decide_for(self, engine: Engine) -> Engine:
        """Takes the engine's decisions from now on."""
        select = engine._drafting.select

        def selecting(requests: Sequence[Request], room: int) -> None:
            select(requests, room)
            self.begin_step()
            for request in requests:
                request.num_drafts = min(request.num_drafts, self.verify(request))
                if request.draft_stages:
                    self.verified[request.num_drafts] += 1
            for request in engine._requests.values():
                if request.draft_stages:
                    request.draft_limit = self.limit(request)
                    self.num_suspended += not request.draft_limit

        engine._drafting.select = selecting  # type: ignore[method-assign]
        return engine


class NothingVerified(Lengths):
    """All is drafted, and nothing verified: every step is of one token."""

    def verify(self, request: Request) -> int:
        return 0


class RandomLengths(Lengths):
    """Drafts of any length, and none at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(5)

    def limit(self, request: Request) -> int:
        most = request.speculative.num_speculative_tokens
        return self._random.choice([0, most, self._random.randint(0, most)])

    def verify(self, request: Request) -> int:
        return self._random.randint(0, request.num_drafts)


class RandomRests(RandomLengths):
    """Long rests of all, too."""

    def __init__(self) -> None:
        super().__init__()
        self._resting = 0  # steps to come

    def begin_step(self) -> None:
        if self._resting == 0 and self._random.random() < 0.04:
            self._resting = self._random.choice([self._random.randrange(1, 10), 40])
        self._resting = max(self._resting - 1, 0)

    def limit(self, request: Request) -> int:
        most = request.speculative.num_speculative_tokens
        return 0 if self._resting else self._random.randint(0, most)
