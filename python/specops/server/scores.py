# SPDX-License-Identifier: Apache-2.0
"""POST /v1/score: logprobs of given continuations of a prompt."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specops.api.outputs import PromptLogprobs, TokenLogprob
from specops.api.sampling_params import WHOLE_RANGES, SamplingParams, check_cache_salt
from specops.server.api_error import ApiError, too_long
from specops.server.clients import scoped_salt
from specops.server.logprobs import finite
from specops.server.protocol import MAX_PROMPTS, TOKEN_IDS, Body, is_token_ids
from specops.server.strict import Strict

# Maximum number of tokens of a request, with the prompt counted once for each continuation. A short
# body could otherwise make the engine hold gigabytes.
MAX_TOKENS = 1 << 20

# Sampling fields that change logprobs, which only a server with processed logprobs reports.
_PROCESSED = ("temperature", "top_p", "top_k", "min_p", "typical_p")

_SEVERAL = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


class ScoreRequest(Body):
    """Body of POST /v1/score."""

    prompt_field: ClassVar[str] = "prompt"
    model: str | None = None
    prompt: Any = Field(json_schema_extra={"anyOf": [{"type": "string"}, TOKEN_IDS]})
    continuations: Annotated[list[str], _SEVERAL] | Annotated[list[list[int]], _SEVERAL]
    logprobs: int = Field(0, ge=0, le=WHOLE_RANGES["logprobs"][1])  # alternatives of each token
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    cache_salt: str | None = None

    def texts(self, max_ids: int, max_characters: int) -> list[str | list[int]]:
        """Return the prompt and the continuations.

        Args:
            max_ids, max_characters: maximum lengths, checked before any element is examined.

        Raises:
            ApiError: the prompt is no text, or a text is too long.
        """
        prompt = self.prompt
        if not isinstance(prompt, str) and not is_token_ids(prompt):
            message = "prompt must be a string or a list of token ids; it may not be empty"
            raise ApiError(400, message, param="prompt", code="invalid_type")
        texts: list[str | list[int]] = [prompt, *self.continuations]
        for index, text in enumerate(texts):
            is_text = isinstance(text, str)
            if len(text) > (max_characters if is_text else max_ids):
                size = f"{len(text)} {'characters' if is_text else 'tokens'}"
                message = f"a text of {size} exceeds the context of {max_ids} tokens"
                raise too_long(message, "continuations" if index else "prompt")
        return texts

    def sampling_params(self, start: int, cache_scope: str, logprobs_mode: str) -> SamplingParams:
        """Return the parameters of the requests in the engine's form.

        Args:
            start: number of tokens of the prompt.
            cache_scope: as returned by `Clients.cache_scope`.
            logprobs_mode: the server's.

        Raises:
            ApiError: a sampling field would have no effect.
            ValueError: a value is out of range.
        """
        sent = [name for name in _PROCESSED if name in self.model_fields_set]
        if sent and logprobs_mode != "processed_logprobs":
            raise ApiError(
                400,
                f"{sent[0]} needs a server with --logprobs-mode processed_logprobs: raw logprobs "
                "do not depend on it",
                param=sent[0],
                code="invalid_value",
            )
        check_cache_salt(self.cache_salt)
        values = {name: getattr(self, name) for name in _PROCESSED}
        values["top_k"] = 0 if self.top_k == -1 else self.top_k  # -1 means off
        salt = scoped_salt(cache_scope, self.cache_salt)
        return SamplingParams(**values, cache_salt=salt).for_scores(start, self.logprobs)


class Score(Strict):
    """Logprobs of one continuation: of its tokens, and of all of them together."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    top_logprobs: list[list[tuple[int, float]]] | None = None
    total_logprob: float


class ScoreUsage(Strict):
    """Token counts, with the prompt counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ScoreReply(Strict):
    """The answer of POST /v1/score."""

    object: Literal["score"]
    model: str
    system_fingerprint: str
    scores: list[Score]
    usage: ScoreUsage


def check_tokens(prompt: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
    """Check the numbers of tokens of a request.

    Raises:
        ApiError: a text has no token, or all have too many.
    """
    names = {"prompt": prompt, **{f"continuations[{i}]": v for i, v in enumerate(continuations)}}
    for name, token_ids in names.items():
        if not token_ids:
            message = f"{name} must have at least one token, got none"
            raise ApiError(400, message, param=name.partition("[")[0], code="invalid_value")
    count = len(prompt) * len(continuations) + sum(map(len, continuations))
    if count > MAX_TOKENS:
        raise ApiError(
            400,
            f"prompt and continuations must have at most {MAX_TOKENS} tokens, with the prompt "
            f"counted once for each continuation, got {count}; use several requests",
            param="continuations",
            code="invalid_value",
        )


def scores_of(
    num_prompt: int, found: Mapping[int, PromptLogprobs], *, has_alternatives: bool
) -> dict[str, Any]:
    """Return the fields of an answer with scores and usage.

    Args:
        num_prompt: number of tokens of the prompt.
        found: logprobs of prompt and continuation, by the continuation's index.
        has_alternatives: whether the answer has alternatives.
    """
    scores = []
    for index in sorted(found):
        tokens = [one for one in found[index][num_prompt:] if one is not None]
        scores.append(_score(index, tokens, has_alternatives=has_alternatives))
    count = sum(len(one["token_ids"]) for one in scores)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": count}
    return {"scores": scores, "usage": {**usage, "total_tokens": num_prompt + count}}


def _score(index: int, tokens: Sequence[TokenLogprob], *, has_alternatives: bool) -> dict[str, Any]:
    logprobs = [finite(one.logprob) for one in tokens]
    score: dict[str, Any] = {
        "index": index,
        "token_ids": [one.token_id for one in tokens],
        "logprobs": logprobs,
        "ranks": [one.rank for one in tokens],
        "total_logprob": math.fsum(logprobs),
    }
    if has_alternatives:
        score["top_logprobs"] = [
            [(token_id, finite(logprob)) for token_id, logprob in one.alternatives]
            for one in tokens
        ]
    return score
