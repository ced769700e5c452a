# SPDX-License-Identifier: Apache-2.0
"""Comparison of decoding a prompt with and without drafts: outputs and speed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specops.api.errors import EngineError
from specops.cli.exactness import first_difference, forget_responses
from specops.cli.speed_up import SpeedUp, speed_up
from specops.engine import Completion, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from specops.engine import Engine

_PLAIN = {"method": "naive"}
_MAX_PAIRS = 7  # upper bound on the timed pairs of runs
_TIMING_SECONDS = 3.0  # time limit of all timed pairs together


@dataclass(frozen=True)
class Step:
    """A step that emitted tokens: its output, and its end in seconds since the run began."""

    seconds: float
    output: RequestOutput


@dataclass(frozen=True)
class Run:
    """A completed text and the steps that produced it."""

    completion: Completion
    steps: list[Step]

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens per step after the first (the prefill); None if there was only one step."""
        return self._num_later / (len(self.steps) - 1) if len(self.steps) > 1 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first step; None if there was only one step."""
        seconds = self.steps[-1].seconds - self.steps[0].seconds
        return self._num_later / seconds if seconds > 0 else None

    @property
    def _num_later(self) -> int:
        return len(self.completion.token_ids) - len(self.steps[0].output.token_ids)


@dataclass(frozen=True)
class Decoder:
    """Repeated decoding of one prompt; every run produces the same text.

    Attributes:
        engine: engine without a prefix cache, if it decodes more than once.
        prompt: text to complete.
        params: sampling parameters, with a seed.
        speculative_config: configuration of runs with drafts; None: the engine's.
    """

    engine: "Engine"
    prompt: str
    params: SamplingParams
    speculative_config: dict[str, Any] | None

    def run(
        self, *, plainly: bool = False, show: Callable[[RequestOutput], None] | None = None
    ) -> Run:
        """Decode with or without drafts; `show` is called with each step's output.

        Raises:
            EngineError: the request failed.
        """
        forget_responses(self.engine)  # else it would draft from the previous run's text
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
        plain: the first run without drafts.
        drafted: the run with drafts.
        pairs: tokens per second of timed runs, (plain, with drafts); empty if the outputs differ
            or are too short to be timed.
    """

    plain: Run
    drafted: Run
    pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def first_difference(self) -> int | None:
        """Index of the first output token in which the two runs differ, or None."""
        return first_difference(self.plain.completion, self.drafted.completion)

    @property
    def speed_up(self) -> SpeedUp | None:
        """Speed-up of decoding with drafts over plain decoding; None if nothing was timed."""
        per_step = self.drafted.tokens_per_step
        return speed_up(self.pairs, per_step) if self.pairs and per_step is not None else None


def compare(decoder: Decoder, drafted: Run) -> Comparison:
    """Decode plainly; if the outputs are equal, time further runs of both kinds.

    Args:
        decoder: the decoder that produced `drafted`.
        drafted: a run with drafts.

    Returns:
        The comparison with `drafted`, or with a timed run whose output differs from the plain one.
    """
    begin = time.perf_counter()
    plain = decoder.run(plainly=True)
    first = Comparison(plain, drafted)
    if first.first_difference is not None or drafted.tokens_per_s is None:
        return first
    now = time.perf_counter()
    end = now + _TIMING_SECONDS
    seconds = 2 * (now - begin)  # rough time of a pair
    pairs: list[tuple[float, float]] = []
    while len(pairs) < _MAX_PAIRS and time.perf_counter() + seconds < end:
        speeds: dict[bool, float | None] = {}
        # Alternate which kind goes first, so that drift of the machine affects both equally.
        for plainly in (True, False) if len(pairs) % 2 else (False, True):
            run = decoder.run(plainly=plainly)
            if first_difference(plain.completion, run.completion) is not None:
                return Comparison(plain, run)
            speeds[plainly] = run.tokens_per_s
        pairs += _pair(speeds[True], speeds[False])
    # The first two runs include warm-up; use their times only if there are no later runs.
    return Comparison(plain, drafted, pairs or _pair(plain.tokens_per_s, drafted.tokens_per_s))


def _pair(plain: float | None, drafted: float | None) -> list[tuple[float, float]]:
    """Return the speeds as a list of one pair; empty if a run had only one step and so no speed."""
    return [] if plain is None or drafted is None else [(plain, drafted)]
