# SPDX-License-Identifier: Apache-2.0
"""Scoring: logprobs of given continuations, with the bits that decoding reports for them.

    ((yes, no),) = score(engine, ["Is 7 prime? "], [["yes", "no"]])
    print(yes.total > no.total)

The continuations of a prompt share its pages: the first one computes the prompt, then the others
run together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specops.api.outputs import TokenLogprob
from specops.api.sampling_params import SamplingParams
from specops.engine import Engine

__all__ = ["Score", "score"]

Text = str | Sequence[int]


@dataclass(frozen=True)
class Score:
    """Logprobs of one continuation.

    Attributes:
        logprobs: one entry per token, with its id, rank and alternatives.
    """

    logprobs: list[TokenLogprob]

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the continuation."""
        return [one.token_id for one in self.logprobs]

    @property
    def total(self) -> float:
        """Logprob of the whole continuation: the sum over its tokens."""
        return math.fsum(one.logprob for one in self.logprobs)


def score(
    engine: Engine,
    prompts: Sequence[Text],
    continuations: Sequence[Sequence[Text]],
    params: SamplingParams | None = None,
    *,
    num_alternatives: int = 0,
) -> list[list[Score]]:
    """Return the logprobs of continuations of prompts.

    Args:
        engine: the engine.
        prompts: texts, or lists of token ids.
        continuations: the continuations of each prompt. A text is tokenized on its own.
        params: sampling parameters, of which an engine with processed logprobs applies temperature
            and filters.
        num_alternatives: number of most likely tokens to report at each position.

    Raises:
        ContextOverflow: a prompt and its continuation exceed the context.
        EngineError: a step or a request failed.
        ValueError: an argument is invalid.
    """
    if len(prompts) != len(continuations):
        raise ValueError(
            f"continuations must have one list for each of {len(prompts)} prompts, got "
            f"{len(continuations)}"
        )
    jobs: list[tuple[list[int], SamplingParams]] = []
    first: list[int] = []  # the first continuation of each prompt, in `jobs`
    for prompt, texts in zip(prompts, continuations, strict=True):
        prompt_ids = _token_ids(engine, prompt, add_special_tokens=True)
        if isinstance(texts, str):
            raise ValueError(f"continuations must be a list for each prompt, got {texts!r}")
        if not prompt_ids:
            raise ValueError("prompts must have at least one token each, got none")
        first += [len(jobs)] if texts else []
        own = (params or SamplingParams()).for_scores(len(prompt_ids), num_alternatives)
        for text in texts:
            token_ids = _token_ids(engine, text, add_special_tokens=False)
            if not token_ids:
                raise ValueError("continuations must have at least one token each, got none")
            jobs.append((prompt_ids + token_ids, own))
    leaders = set(first)
    rest = [index for index in range(len(jobs)) if index not in leaders]
    scores: dict[int, Score] = {}
    for indices in (first, rest):
        found = engine.generate(
            [jobs[index][0] for index in indices],
            [jobs[index][1] for index in indices],
            speculative_config={"method": "naive"},
        )
        for index, one in zip(indices, found, strict=True):
            scored = (one.prompt_logprobs or ())[jobs[index][1].prompt_logprobs_start :]
            scores[index] = Score([token for token in scored if token is not None])
    in_order = iter(range(len(jobs)))
    return [[scores[next(in_order)] for _ in texts] for texts in continuations]


def _token_ids(engine: Engine, text: Text, *, add_special_tokens: bool) -> list[int]:
    if isinstance(text, str):
        return engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return list(text)
