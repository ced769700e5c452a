# SPDX-License-Identifier: Apache-2.0
"""Outputs of the engine: per-step deltas of requests, completions, and statistics."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

HIDDEN = -1  # replaces the token id of a rejected draft that must not be reported
TARGET = "target"  # source of the model's own tokens; no drafter has this name


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one emitted token, and its alternatives.

    The engine's logprobs_mode selects the distribution: the raw logits, or the distribution that
    the token was drawn from.
    """

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    rank: int = 0  # 1 + number of tokens with a greater logit


# Scores of some consecutive prompt tokens: logprobs [tokens]; ranks [tokens], 1 + the number of
# greater logits; ids of the most likely tokens [tokens, >= num_alternatives], and their logprobs.
PromptScores: TypeAlias = Sequence[NDArray[Any]]


class PromptLogprobs(Sequence["TokenLogprob | None"]):
    """Log-probability of each token of a prompt, given the tokens before it.

    The first entry is None, since no token precedes the first one. Prompts can be long, so an entry
    takes only 8 bytes, and 8 more for each alternative.

    Args:
        token_ids: the prompt.
        num_alternatives: number of most likely tokens kept for each prompt token.
        start: index of the first token whose logprob is wanted; earlier tokens have none.
    """

    def __init__(
        self,
        token_ids: Sequence[int] | NDArray[np.int32],
        num_alternatives: int,
        start: int = 0,
    ) -> None:
        self.token_ids: NDArray[np.int32] = np.array(token_ids, dtype=np.int32)
        self.num_alternatives = num_alternatives
        self._start = max(start, 1)
        # Tokens that have a logprob or need none; the first token is not counted.
        self.num_scored = self._start - 1
        self._scores: tuple[NDArray[np.float32], NDArray[np.int32]] | None = None
        self._tops: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None

    @property
    def num_missing(self) -> int:
        """Number of tokens without a logprob so far, not counting the first."""
        return len(self.token_ids) - 1 - self.num_scored

    def add(self, scores: PromptScores) -> None:
        """Append the logprobs of the next tokens of the prompt."""
        logprobs, ranks, top_ids, top_logprobs = scores
        count, width = len(self.token_ids) - self._start, self.num_alternatives
        if self._scores is None or self._tops is None:  # allocated when the first scores arrive
            self._scores = np.empty(count, np.float32), np.empty(count, np.int32)
            self._tops = np.empty((count, width), np.int32), np.empty((count, width), np.float32)
        begin = self.num_scored - self._start + 1
        new = slice(begin, begin + len(logprobs))
        self._scores[0][new], self._scores[1][new] = logprobs, ranks
        self._tops[0][new] = top_ids[:, :width]
        self._tops[1][new] = top_logprobs[:, :width]
        self.num_scored += len(logprobs)

    def packed(self) -> tuple[int, int, list[bytes]]:
        """Return the contents as plain data, for `unpacked`."""
        arrays = [self.token_ids, *(self._scores or ()), *(self._tops or ())]
        return self.num_alternatives, self._start, [one.tobytes() for one in arrays]

    @classmethod
    def unpacked(cls, packed: tuple[int, int, list[bytes]]) -> "PromptLogprobs":
        """Rebuild the object from `packed` data in which all tokens or none have a logprob."""
        num_alternatives, start, arrays = packed
        result = cls(np.frombuffer(arrays[0], np.int32), num_alternatives, start)
        if len(arrays) > 1:
            result.num_scored = len(result.token_ids) - 1
            shape = len(result.token_ids) - start, num_alternatives
            result._scores = (
                np.frombuffer(arrays[1], np.float32),
                np.frombuffer(arrays[2], np.int32),
            )
            ids, logprobs = arrays[3:]
            result._tops = (
                np.frombuffer(ids, np.int32).reshape(shape),
                np.frombuffer(logprobs, np.float32).reshape(shape),
            )
        return result

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> "list[TokenLogprob | None]": ...

    def __getitem__(self, index: int | slice) -> "TokenLogprob | list[TokenLogprob | None] | None":
        """Return the entry of a token, or a list of entries for a slice."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = index % len(self) - self._start
        if row < 0 or self._scores is None or self._tops is None:
            return None
        logprobs, ranks = self._scores
        ids, values = (one[row].tolist() for one in self._tops)
        return TokenLogprob(
            int(self.token_ids[row + self._start]),
            float(logprobs[row]),
            tuple(zip(ids, values, strict=True)),
            int(ranks[row]),
        )


@dataclass
class SpeculativeStats:
    """Speculation statistics of one request, or of the engine since its start.

    A draft counts as accepted if it was verified and is in the output. So drafts after the token
    that ends a request, and drafts that a limit on thinking replaces, are not accepted.
    """

    num_steps: int = 0  # steps in which a row of the request was verified or decoded
    num_drafts: int = 0  # steps with at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0  # tokens emitted by steps with drafts, including accepted drafts
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_drafts_per_length: list[int] = field(default_factory=list)  # steps by number of drafts

    def count(self, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """Count a step that verified drafts.

        Args:
            num_drafts: number of drafts that the step verified; 0 for plain decoding.
            num_accepted: drafts among these that are in the output.
            num_emitted: tokens that the step added to the output.
        """
        self.num_steps += 1
        if not num_drafts:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_emitted_tokens += num_emitted
        per_pos, per_length = self.num_accepted_tokens_per_pos, self.num_drafts_per_length
        per_pos.extend([0] * (num_drafts - len(per_pos)))
        for position in range(num_accepted):
            per_pos[position] += 1
        per_length.extend([0] * (num_drafts + 1 - len(per_length)))
        per_length[num_drafts] += 1

    def num_draft_tokens_per_pos(self) -> list[int]:
        """Return the number of steps that had a draft at each position."""
        counts = list(self.num_drafts_per_length[1:])
        for position in range(len(counts) - 2, -1, -1):
            counts[position] += counts[position + 1]
        return counts


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts that one step verified for one request.

    Attributes:
        token_ids: drafts in the order of the text.
        sources: name of the drafter that proposed each draft.
        num_accepted: number of leading drafts that are tokens of the output.
    """

    token_ids: list[int]
    sources: list[str]
    num_accepted: int


def without_rejected(drafts: StepDrafts, names: Collection[str]) -> StepDrafts:
    """Return the drafts of a step with HIDDEN in place of the rejected drafts of some drafters.

    Args:
        drafts: the drafts.
        names: names of these drafters.
    """
    token_ids = [
        HIDDEN if source in names and place >= drafts.num_accepted else token_id
        for place, (token_id, source) in enumerate(
            zip(drafts.token_ids, drafts.sources, strict=True)
        )
    ]
    return replace(drafts, token_ids=token_ids)


@dataclass(frozen=True)
class RequestOutput:
    """Output that one step added to one request."""

    request_id: str
    token_ids: list[int]  # emitted in this step, in order
    text: str  # new text; text that may still become a stop string is held back
    logprobs: list[TokenLogprob]  # one per token if requested
    finish_reason: str | None  # None, "stop", "length", "abort" or "error"
    drafts: StepDrafts | None = None  # None if there were none or not requested
    # Only in the first output, if requested: one entry per prompt token, None for the first token.
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    error: str | None = None  # what failed, if the request ends with "error"

    @property
    def sources(self) -> list[str]:
        """Source of each token: a drafter's name, or TARGET. Requires `report_drafts`."""
        return sources_of(self.token_ids, self.drafts)


def sources_of(token_ids: Sequence[int], drafts: StepDrafts | None) -> list[str]:
    """Return the source of each token of a step: a drafter's name, or TARGET."""
    sources = [TARGET] * len(token_ids)
    if drafts is not None:
        sources[: drafts.num_accepted] = drafts.sources[: drafts.num_accepted]
    return sources


@dataclass(frozen=True)
class Completion:
    """One finished choice of one prompt."""

    request_id: str
    index: int  # choice index of n > 1
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str
    seed: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    stats: SpeculativeStats
    queue_seconds: float = 0.0  # time from add_request to the first slot
    # The stop string, token or sequence that ended the output, or the reason why a constrained text
    # could not continue. None after an end-of-sequence token, at the length limit, and for a stop
    # token after a complete constrained text.
    stop_reason: int | str | tuple[int, ...] | None = None
    # If requested, one entry per prompt token, None for the first token.
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    error: str | None = None  # what failed, if it ended with "error"; the text may be cut off


@dataclass
class EngineStats:
    """Counters since the engine's start; they never decrease."""

    num_steps: int = 0
    num_rows: int = 0  # rows of all steps: prompt tokens, decode tokens and drafts
    num_preemptions: int = 0
    prompt_tokens: int = 0  # tokens of accepted prompts, each counted once for all its choices
    generation_tokens: int = 0
    # Prompt tokens looked up in the prefix cache; prompts with logprobs are computed, not looked
    # up.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0  # prompt tokens found
    cascade_saved_bytes: int = 0  # bytes of keys and values that shared reads did not read again
    speculative: SpeculativeStats = field(default_factory=SpeculativeStats)
    num_paused_steps: int = 0  # steps that skipped a running request, counted per request
    # Pages received from other engines that were damaged in transfer and were recomputed here.
    num_damaged_kv_pages: int = 0
    # Sums over all steps; 0 if `Engine.times_drafting` is False.
    verify_seconds: float = 0.0  # running the model and choosing tokens
    draft_seconds: float = 0.0
    # Failures of drafters by method, zeros included; "adaptive_verification" counts failures of the
    # selection of drafts. The affected requests continue without drafts.
    drafter_failures: dict[str, int] = field(default_factory=dict)
    # Sentences about drafters whose drafts seem useless, with the number of engines that warn.
    drafter_warnings: dict[str, int] = field(default_factory=dict)
