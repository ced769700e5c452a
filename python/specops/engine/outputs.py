# SPDX-License-Identifier: Apache-2.0
"""What steps bring, and the engine hands back: deltas of requests, completions, and counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specops.sampling import FinishReason

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


@dataclass
class SpeculativeStats:
    """Counts of one request, or of the engine's whole life."""

    num_steps: int = 0  # steps in which a row of the request was verified or decoded
    num_drafts: int = 0  # steps with at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_drafts_per_length: list[int] = field(default_factory=list)  # by the drafts of the step

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a step that verified so many drafts."""
        self.num_steps += 1
        if not num_drafts:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
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
        accepted: the places of those that were accepted, in the order of the text. A stop may cut
            the text before the last of them.
    """

    token_ids: list[int]
    parents: list[int]
    sources: list[str]
    accepted: list[int]


@dataclass(slots=True)
class Emitted:
    """What a step committed for one request; stop strings are yet to be looked for."""

    token_ids: Sequence[int] = ()
    accepted: Sequence[int] = ()  # which of its drafts
    logprobs: list[TokenLogprob] = field(default_factory=list)  # if the request asks for them
    drafts: StepDrafts | None = None  # likewise
    finish_reason: FinishReason = FinishReason.RUNNING
    stop_index: int = -1  # of the stop token or sequence that ended it
    thinking_state: int | None = None  # as `sampling.commit` left it; None: as it was
    prompt_scores: Sequence[Any] = ()  # of tokens of its prompt, as `PromptLogprobs.add` has them


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
        for place, node in enumerate(drafts.accepted[: len(sources)]):
            # A limit on the thinking may put another token in the place of an accepted draft.
            if drafts.token_ids[node] == token_ids[place]:
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
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # of these, found
    cascade_saved_bytes: int = 0  # of keys and values that were not read again, but shared
    speculative: SpeculativeStats = field(default_factory=SpeculativeStats)
    num_paused_steps: int = 0  # of requests, in which it was not their turn
    num_suspended_steps: int = 0  # of requests, in which drafting would not have paid
    # Of all steps; 0 where `Engine.times_drafting` is False.
    verify_seconds: float = 0.0  # the model, and the choice of tokens
    draft_seconds: float = 0.0
