# SPDX-License-Identifier: Apache-2.0
"""One request inside the engine: its tokens, its pages, how far it has come, and how it ends."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specops.engine.emitted import Emitted
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.outputs import (
    Completion,
    PromptLogprobs,
    RequestOutput,
    SpeculativeStats,
    TokenLogprob,
)
from specops.engine.sampling_params import SamplingParams
from specops.engine.speculative_config import SpeculativeConfig
from specops.engine.structured import GrammarState, num_unconstrained
from specops.sampling import FinishReason
from specops.tokenizer import TextStream


@dataclass(eq=False)
class Request:
    """The state of one choice of one prompt.

    Invariant: keys and values of `token_ids[:num_computed]` are in `pages`. While decoding,
    num_computed is len(token_ids) - 1: the newest token is the next step's first row.

    Each field has one writer, under whose name it stands here; all others only read it
    (`test_each_field_of_a_request_has_one_writer`).
    """

    # Admission, once.
    request_id: str
    arrival: int  # order of arrival; the latest is preempted first
    params: SamplingParams
    speculative: SpeculativeConfig
    seed: int  # as the signed 64-bit integer that carries the bits
    choice_index: int
    prompt_len: int
    max_len: int  # len(token_ids) at which the request ends
    token_ids: list[int]  # the prompt; this class appends the output
    stream: TextStream
    owners: tuple[str, ...] = ()  # whom it belongs to, the widest first: they share the slots
    # From params, with what the tokenizer and the model have to say.
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    think_end_token_id: int = -1
    inject_token_ids: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
    features: int = 0  # `Feature`
    grammar: GrammarState | None = None  # where the output stands in what constrains it
    draft_kv: DraftKv | None = None  # what its drafters keep on its pages
    added_at: float = 0.0  # time.perf_counter() when it came

    # This class, as steps commit.
    thinking_state: int = -1  # as `sampling.commit` has it
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None  # if they are wanted
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    finish_reason: str | None = None
    stop_reason: int | str | tuple[int, ...] | None = None  # the stop that ended it, if one did
    error: str | None = None  # what ended it, where that is a failure

    # Scheduling (slots.py).
    slot: int = -1  # row of the engine's per-request arrays while running
    pages: "array[int]" = field(default_factory=lambda: array("i"))  # an array copies at once
    num_registered_pages: int = 0  # leading pages that the prefix cache knows
    num_computed: int = 0
    num_cached_tokens: int = 0
    was_preempted: bool = False
    queue_seconds: float = 0.0  # until it got its first slot
    last_step: int = 0  # in which it had rows, by the scheduler's count
    # Leading tokens of which draft_kv is complete and sees all. Scheduling says how many a slot
    # begins with; from then on the drafter that draft_kv is of counts them.
    num_final_draft_kv: int = 0

    # Drafting.
    draft_stages: dict[str, int] = field(init=False)  # what drafts for it, up to how many drafts
    draft_limit: int = field(init=False)  # most drafts to propose at the end of its next step
    num_drafts: int = 0  # of the proposed ones, how many the next step verifies
    # Of these, in preorder, the one that each hangs on; -1: the last token. None: a chain.
    draft_parents: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.draft_stages = dict(self.speculative.draft_stages)
        self.draft_limit = self.speculative.num_speculative_tokens
        if (wanted := self.params.prompt_logprobs) is not None:
            self.prompt_logprobs = PromptLogprobs(self.token_ids, wanted)

    @property
    def is_decoding(self) -> bool:
        """Whether everything but the newest token has been computed."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_computed >= self.prompt_len

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose rows nobody needs, where their keys and values are there already."""
        if self.prompt_logprobs is not None and self.prompt_logprobs.num_missing:
            return self.prompt_logprobs.num_scored
        return len(self.token_ids) - 1

    @property
    def has_no_output(self) -> bool:
        """Whether no token is to follow the prompt."""
        return self.max_len == self.prompt_len

    @property
    def draft_room(self) -> int:
        """Drafts that could still be emitted: the step's own token takes the last place."""
        return self.max_len - len(self.token_ids) - 1

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.prompt_len :]

    def commit(self, emitted: Emitted, num_drafts: int, totals: SpeculativeStats) -> RequestOutput:
        """Append the tokens that a step emitted one by one, unless a stop string cuts the rest.

        Args:
            emitted: the step's results for this request.
            num_drafts: drafts that the step verified.
            totals: counts of all requests, which count the step, too.
        """
        if emitted.thinking_state is not None:
            self.thinking_state = emitted.thinking_state
        num_output = len(self.token_ids) - self.prompt_len
        kept = self._keep(emitted, num_output)
        self.token_ids.extend(kept)
        num_accepted = min(emitted.num_from_drafts, len(kept))
        for stats in (self.stats, totals):
            stats.count(num_drafts, num_accepted, len(kept))
        drafts = emitted.drafts
        if drafts is not None:
            drafts = replace(drafts, accepted=drafts.accepted[:num_accepted])
        logprobs = emitted.logprobs[: len(kept)]
        self.logprobs.extend(logprobs)
        if self.finish_reason is None and emitted.finish_reason is not FinishReason.RUNNING:
            self._note_end(emitted)
        text = self.stream.take()
        if self.finish_reason is not None:
            text += self.stream.finish()
        return RequestOutput(
            self.request_id,
            kept,
            text,
            logprobs,
            self.finish_reason,
            drafts,
            None if num_output else self.prompt_logprobs,  # told once
        )

    def _keep(self, emitted: Emitted, num_output: int) -> list[int]:
        """The tokens up to the one that ends the text or its grammar, which may be the last."""
        kept: list[int] = []
        token_ids, min_tokens = emitted.token_ids, self.params.min_tokens
        ends_with_token = emitted.finish_reason is FinishReason.STOP_TOKEN
        injected = len(self.inject_token_ids)
        unconstrained = num_unconstrained(self.thinking_state, injected, len(token_ids))
        for token_id in token_ids:
            is_end = ends_with_token and len(kept) + 1 == len(token_ids)
            fits, end = True, None
            if self.grammar is not None and len(kept) >= unconstrained:
                fits, end = self.grammar.judge(token_id, is_end)
            if fits:
                kept.append(token_id)
                may_stop = num_output + len(kept) >= min_tokens
                # A token that ends the output is no part of the text.
                if not is_end and self.stream.push(token_id, may_stop=may_stop):
                    end = "stop", self.stream.stopped_by
            if end is not None:
                self.finish_reason, self.stop_reason = end
                break
        return kept

    def _note_end(self, emitted: Emitted) -> None:
        """Notes why `sampling.commit` ended the request."""
        if emitted.finish_reason is FinishReason.LENGTH:
            self.finish_reason = "length"
            return
        self.finish_reason = "stop"
        if emitted.finish_reason is FinishReason.STOP_SEQUENCE:
            self.stop_reason = self.params.stop_token_sequences[emitted.stop_index]
        elif emitted.token_ids[-1] in self.params.stop_token_ids:
            self.stop_reason = emitted.token_ids[-1]

    def end_without_output(self) -> RequestOutput:
        """Ends a request of which only the prompt is wanted."""
        self.finish_reason = "length"
        return RequestOutput(
            self.request_id, [], "", [], "length", prompt_logprobs=self.prompt_logprobs
        )

    def fail(self, error: str) -> RequestOutput:
        """Ends the request with a sentence that says what has failed."""
        self.finish_reason, self.error = "error", error
        return RequestOutput(self.request_id, [], "", [], "error", error=error)

    def completion(self) -> Completion:
        """Returns a request that has finished as a whole.

        Raises:
            ValueError: it has not.
        """
        if self.finish_reason is None:
            raise ValueError(f"request {self.request_id!r} is not finished")
        return Completion(
            request_id=self.request_id,
            index=self.choice_index,
            prompt_token_ids=self.token_ids[: self.prompt_len],
            token_ids=self.output_token_ids,
            text=self.stream.text,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            seed=self.seed,
            num_cached_tokens=self.num_cached_tokens,
            stats=self.stats,
            queue_seconds=self.queue_seconds,
            stop_reason=self.stop_reason,
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
        )
