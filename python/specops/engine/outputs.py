# SPDX-License-Identifier: Apache-2.0
"""What steps bring, and the engine hands back: deltas of requests, completions, and counts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

HIDDEN = -1  # in place of a rejected draft that is not reported
TARGET = "target"  # proposed by nobody: the model's own token. No drafter has this name


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one emitted token, and its alternatives.

    Under the raw logits, or, as the engine's logprobs_mode may say, under what was drawn from.
    """

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first
    rank: int = 0  # 1 + how many tokens had a greater logit of the same kind


# Of the next tokens of a prompt: logprobs [tokens]; ranks [tokens], 1 + how many logits were
# greater; ids of the likeliest tokens [tokens, at least as many as are kept], and their logprobs.
PromptScores: TypeAlias = Sequence[NDArray[Any]]


class PromptLogprobs(Sequence["TokenLogprob | None"]):
    """What the model made of each token of a prompt, given those before it.

    The first entry is None: nothing stands before the first token. An entry takes 8 bytes and 8
    for each alternative, since prompts are long.

    Args:
        token_ids: the prompt.
        num_alternatives: kept beside each token, the likeliest ones.
    """

    def __init__(self, token_ids: Sequence[int] | NDArray[np.int32], num_alternatives: int) -> None:
        self.token_ids: NDArray[np.int32] = np.array(token_ids, dtype=np.int32)
        self.num_alternatives = num_alternatives
        self.num_scored = 0  # tokens that have one, without the first
        self._scores: tuple[NDArray[np.float32], NDArray[np.int32]] | None = None
        self._tops: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None

    @property
    def num_missing(self) -> int:
        """Tokens that have none yet, without the first."""
        return len(self.token_ids) - 1 - self.num_scored

    def add(self, scores: PromptScores) -> None:
        """Adds those of the next tokens."""
        logprobs, ranks, top_ids, top_logprobs = scores
        count, width = len(self.token_ids) - 1, self.num_alternatives
        if self._scores is None or self._tops is None:  # not before the prompt's turn has come
            self._scores = np.empty(count, np.float32), np.empty(count, np.int32)
            self._tops = np.empty((count, width), np.int32), np.empty((count, width), np.float32)
        new = slice(self.num_scored, self.num_scored + len(logprobs))
        self._scores[0][new], self._scores[1][new] = logprobs, ranks
        self._tops[0][new], self._tops[1][new] = top_ids[:, :width], top_logprobs[:, :width]
        self.num_scored += len(logprobs)

    def packed(self) -> tuple[int, list[bytes]]:
        """All of it as plain data, for `unpacked`."""
        arrays = [self.token_ids, *(self._scores or ()), *(self._tops or ())]
        return self.num_alternatives, [one.tobytes() for one in arrays]

    @classmethod
    def unpacked(cls, packed: tuple[int, list[bytes]]) -> "PromptLogprobs":
        """The same again, of a prompt whose tokens all have one, or none."""
        num_alternatives, arrays = packed
        made = cls(np.frombuffer(arrays[0], np.int32), num_alternatives)
        if len(arrays) > 1:
            made.num_scored = count = len(made.token_ids) - 1
            shape = count, num_alternatives
            made._scores = np.frombuffer(arrays[1], np.float32), np.frombuffer(arrays[2], np.int32)
            ids, logprobs = arrays[3:]
            made._tops = (
                np.frombuffer(ids, np.int32).reshape(shape),
                np.frombuffer(logprobs, np.float32).reshape(shape),
            )
        return made

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, index: slice) -> "list[TokenLogprob | None]": ...

    def __getitem__(self, index: int | slice) -> "TokenLogprob | list[TokenLogprob | None] | None":
        """The entry of a token, or those of several."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = index % len(self) - 1
        if row < 0 or self._scores is None or self._tops is None:
            return None
        logprobs, ranks = self._scores
        ids, values = (one[row].tolist() for one in self._tops)
        return TokenLogprob(
            int(self.token_ids[row + 1]),
            float(logprobs[row]),
            tuple(zip(ids, values, strict=True)),
            int(ranks[row]),
        )


@dataclass
class SpeculativeStats:
    """Counts of one request, or of the engine's whole life.

    A draft is accepted if it was verified and is a token of the output. Drafts behind the token
    that ends a request are not, and neither are those that a limit on the thinking replaces.
    """

    num_steps: int = 0  # steps in which a row of the request was verified or decoded
    num_drafts: int = 0  # steps with at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0  # in steps with drafts, the accepted ones included
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_drafts_per_length: list[int] = field(default_factory=list)  # by the drafts of the step

    def count(self, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """Count a step that verified drafts.

        Args:
            num_drafts: drafts that it verified; 0: it decoded plainly.
            num_accepted: of these, drafts in the output.
            num_emitted: tokens that it added to the output.
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
        """How often there was a draft at each position."""
        counts = list(self.num_drafts_per_length[1:])
        for position in range(len(counts) - 2, -1, -1):
            counts[position] += counts[position + 1]
        return counts


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts that one step verified for one request.

    Attributes:
        token_ids: in the order in which they were verified.
        parents: of each, the place of the one before it that it hangs on; -1: the last token.
        sources: of each, the name of the drafter that proposed it.
        accepted: places of the drafts that are tokens of the output, in the order of the text.
    """

    token_ids: list[int]
    parents: list[int]
    sources: list[str]
    accepted: list[int]


def without_rejected(drafts: StepDrafts, names: Collection[str]) -> StepDrafts:
    """Return the drafts of a step with HIDDEN in place of those that some drafters were wrong with.

    Args:
        drafts: of the step.
        names: of the drafters.
    """
    kept = set(drafts.accepted)
    token_ids = [
        HIDDEN if source in names and node not in kept else token_id
        for node, (token_id, source) in enumerate(
            zip(drafts.token_ids, drafts.sources, strict=True)
        )
    ]
    return replace(drafts, token_ids=token_ids)


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to one request."""

    request_id: str
    token_ids: list[int]  # emitted in this step, in order
    text: str  # newly released text; text that may yet become a stop string is held back
    logprobs: list[TokenLogprob]  # one per token when the request asked for them
    finish_reason: str | None  # None, "stop", "length", "abort" or "error"
    drafts: StepDrafts | None = None  # when there were some, and the request asked for them
    # With its first output, when the request asked for them: one per token of the prompt, and None
    # for the first.
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    error: str | None = None  # what failed; of a step in which the request ends with "error"

    @property
    def sources(self) -> list[str]:
        """Who proposed each token: a drafter's name, or TARGET. Needs `drafts`."""
        return sources_of(self.token_ids, self.drafts)


def sources_of(token_ids: Sequence[int], drafts: StepDrafts | None) -> list[str]:
    """Who proposed each token of a step: a drafter's name, or TARGET."""
    sources = [TARGET] * len(token_ids)
    if drafts is not None:
        for place, node in enumerate(drafts.accepted):
            sources[place] = drafts.sources[node]
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
    queue_seconds: float = 0.0  # from add_request to the first slot
    # The stop string, token or sequence that ended it; None for an end of sequence, no stop, and
    # for a stop token where a constrained text is whole. Why that text cannot go on, if it cannot.
    stop_reason: int | str | tuple[int, ...] | None = None
    # When the request asked for them: one per token of the prompt, and None for the first.
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    error: str | None = None  # what failed, where it ended with "error": the text may lack its end


@dataclass
class EngineStats:
    """Counters over the engine's life; they only ever grow."""

    num_steps: int = 0
    num_rows: int = 0  # of all steps: tokens of prompts, decoding and drafts
    num_preemptions: int = 0
    prompt_tokens: int = 0  # of accepted prompts, each once, however many choices it has
    generation_tokens: int = 0
    # Prompt tokens looked up, but for prompts whose rows are all computed, for their logprobs.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0  # of these, found
    cascade_saved_bytes: int = 0  # of keys and values that were not read again, but shared
    speculative: SpeculativeStats = field(default_factory=SpeculativeStats)
    num_paused_steps: int = 0  # of requests, in which it was not their turn
    # Pages of prompts from other engines that were damaged on the way, and were computed instead.
    num_damaged_kv_pages: int = 0
    # Of all steps; 0 where `Engine.times_drafting` is False.
    verify_seconds: float = 0.0  # the model, and the choice of tokens
    draft_seconds: float = 0.0
    # Failures of drafters by method, with zeros; "adaptive_verification" has those of the selection
    # of drafts. The requests concerned were decoded plainly from there on.
    drafter_failures: dict[str, int] = field(default_factory=dict)
