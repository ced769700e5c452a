# SPDX-License-Identifier: Apache-2.0
"""A prompt decoded with drafts and plainly: whether both are the same, and how fast each is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specops.cli.exactness import first_difference, forget_responses
from specops.cli.speed_up import SpeedUp, speed_up
from specops.engine import Completion, Engine, RequestOutput, SamplingParams
from specops.engine.errors import EngineError

_PLAIN = {"method": "naive"}
_MOST_PAIRS = 7  # that are timed
_TIMING_SECONDS = 3.0  # for all of them


@dataclass(frozen=True)
class Step:
    """A step that emitted tokens: its end, in seconds since the beginning, and its output."""

    seconds: float
    output: RequestOutput


@dataclass(frozen=True)
class Run:
    """A text that was completed, and how."""

    completion: Completion
    steps: list[Step]

    @property
    def tokens_per_step(self) -> float | None:
        """Excludes the first step, which reads the prompt; None if there is no other."""
        return self._num_later / (len(self.steps) - 1) if len(self.steps) > 1 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Excludes the first step; None if there is no other."""
        seconds = self.steps[-1].seconds - self.steps[0].seconds
        return self._num_later / seconds if seconds > 0 else None

    @property
    def _num_later(self) -> int:
        return len(self.completion.token_ids) - len(self.steps[0].output.token_ids)


@dataclass(frozen=True)
class Decoder:
    """Decodes one prompt repeatedly, each time to the same text.

    Attributes:
        engine: without a prefix cache, if it is to decode more than once.
        prompt: a text.
        params: with a seed.
        speculative_config: of the request with drafts; None: the engine's.
    """

    engine: Engine
    prompt: str
    params: SamplingParams
    speculative_config: dict[str, Any] | None

    def run(
        self, *, plainly: bool = False, show: Callable[[RequestOutput], None] | None = None
    ) -> Run:
        """Decodes with or without drafts; `show` is called with each step's output.

        Raises:
            EngineError: the request failed.
        """
        forget_responses(self.engine)  # the text must not be drafted from itself
        config = _PLAIN if plainly else self.speculative_config
        name = self.engine.add_request(self.prompt, self.params, speculative_config=config)
        begin = time.perf_counter()
        steps: list[Step] = []
        while self.engine.has_unfinished():
            for output in self.engine.step():
                steps.append(Step(time.perf_counter() - begin, output))
                if show is not None:
                    show(output)
        completion = self.engine.completion(name)
        if completion.error is not None:
            raise EngineError(f"the request failed: {completion.error}")
        return Run(completion, steps)


@dataclass(frozen=True)
class Comparison:
    """Plain decoding compared with a run with drafts.

    Attributes:
        plain: the first such run.
        drafted: the run with drafts.
        pairs: tokens a second of runs that took turns, plain and with drafts; none where texts
            differ or are too short to be timed.
    """

    plain: Run
    drafted: Run
    pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def first_difference(self) -> int | None:
        """The first output token in which they differ."""
        return first_difference(self.plain.completion, self.drafted.completion)

    @property
    def speed_up(self) -> SpeedUp | None:
        """Of the run with drafts over the plain one; None where nothing was timed."""
        per_step = self.drafted.tokens_per_step
        return speed_up(self.pairs, per_step) if self.pairs and per_step is not None else None


def compare(decoder: Decoder, drafted: Run) -> Comparison:
    """Decodes plainly as well; where nothing differs, both again in turn, to time them.

    Args:
        decoder: that made `drafted`.
        drafted: with drafts.

    Returns:
        Where a text differs when it is decoded again, that run is the one with drafts.
    """
    begin = time.perf_counter()
    plain = decoder.run(plainly=True)
    first = Comparison(plain, drafted)
    if first.first_difference is not None or drafted.tokens_per_s is None:
        return first
    now = time.perf_counter()
    end, seconds = now + _TIMING_SECONDS, 2 * (now - begin)  # that a pair takes, about
    pairs: list[tuple[float, float]] = []
    while len(pairs) < _MOST_PAIRS and time.perf_counter() + seconds < end:
        speeds: dict[bool, float | None] = {}
        # The two take turns at beginning, so that a slow moment does not always hit the same one.
        for plainly in (True, False) if len(pairs) % 2 else (False, True):
            again = decoder.run(plainly=plainly)
            if first_difference(plain.completion, again.completion) is not None:
                return Comparison(plain, again)
            speeds[plainly] = again.tokens_per_s
        pairs += _pair(speeds[True], speeds[False])
    # The first runs warmed up. They count where there is time for no others.
    return Comparison(plain, drafted, pairs or _pair(plain.tokens_per_s, drafted.tokens_per_s))


def _pair(plain: float | None, drafted: float | None) -> list[tuple[float, float]]:
    """One pair, or none where a text is so short that one step held all of it."""
    return [] if plain is None or drafted is None else [(plain, drafted)]
