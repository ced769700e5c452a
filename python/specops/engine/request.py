# SPDX-License-Identifier: Apache-2.0
"""One request inside the engine: its tokens, its pages, its progress, and its end."""

from array import array
from dataclasses import dataclass, field, replace

from specops.api.outputs import (
    Completion,
    PromptLogprobs,
    RequestOutput,
    SpeculativeStats,
    TokenLogprob,
)
from specops.api.sampling_params import SamplingParams
from specops.api.speculative_config import SpeculativeConfig
from specops.api.tokenizer import TextStream
from specops.engine.emitted import Emitted
from specops.engine.memory.kv_cache import DraftKv, Salt, adapted_salt
from specops.engine.models.adapters import Adapter
from specops.engine.structured import GrammarState, num_unconstrained
from specops.sampling import FinishReason


@dataclass
class Placement:
    """A request's slot, pages and computed tokens. Scheduling writes it."""

    slot: int = -1  # index into the per-slot arrays while running
    pages: "array[int]" = field(default_factory=lambda: array("i"))  # an array is copied quickly
    num_registered_pages: int = 0  # leading pages that are in the prefix cache
    num_computed: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache when it got its first slot
    was_preempted: bool = False
    queue_seconds: float = 0.0  # wait for its first slot
    last_step: int = 0  # number of the last step in which it had rows


@dataclass
class DraftState:
    """A request's drafters, draft counts and draft KV. `Drafting` and the drafters write it."""

    stages: dict[str, int]  # drafters, each with its limit of drafts
    limit: int  # maximum number of drafts to propose at the end of its next step
    num_selected: int = 0  # number of proposed drafts that the next step verifies
    kv: DraftKv | None = None  # draft KV that its drafter keeps on its pages
    # Leading tokens whose draft KV is complete and final. When the request gets a slot, scheduling
    # sets it to the cached tokens; from then on the drafter that owns `kv` updates it.
    num_final_kv: int = 0

    @classmethod
    def of(cls, config: SpeculativeConfig) -> "DraftState":
        """Return the state at admission, before any draft."""
        return cls(dict(config.draft_stages), config.num_speculative_tokens)


@dataclass
class Output:
    """Results of a request besides its tokens. `Request` writes them."""

    thinking_state: int = -1  # as in `sampling.commit`
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    finish_reason: str | None = None
    stop_reason: int | str | tuple[int, ...] | None = None  # the stop that ended it, if any
    error: str | None = None  # the failure that ended it, if any


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """One choice of one prompt: facts that admission fixes, and objects that hold its state.

    Each of `placement`, `drafts` and `output` names its writer; all other code only reads it.

    Invariant: keys and values of `token_ids[:num_computed]` are in `pages`. While decoding,
    num_computed is len(token_ids) - 1: the newest token is the next step's first row.
    """

    request_id: str
    arrival: int  # order of arrival; the latest is preempted first
    params: SamplingParams
    speculative: SpeculativeConfig
    seed: int  # the 64 bits as a signed integer
    choice_index: int
    prompt_len: int
    max_len: int  # len(token_ids) at which the request ends
    adapter: Adapter | None = None  # LoRA adapter of its rows
    owners: tuple[str, ...] = ()  # outermost first, for fair scheduling
    added_at: float = 0.0  # time.perf_counter() on arrival
    # Derived from params, the tokenizer and the model.
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    think_end_token_id: int = -1
    inject_token_ids: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
    features: int = 0  # bits of `Feature`

    # The objects stay the same; their contents change while the request runs.
    token_ids: list[int]  # the prompt; `commit` appends the output
    stream: TextStream
    drafts: DraftState
    placement: Placement = field(default_factory=Placement)
    output: Output = field(default_factory=Output)
    grammar: GrammarState | None = None  # state of the output's constraint
    prompt_logprobs: PromptLogprobs | None = None  # if requested

    @property
    def slot(self) -> int:
        """Index into the per-slot arrays while running; -1 without a slot."""
        return self.placement.slot

    @property
    def pages(self) -> "array[int]":
        """Pages of the request, in order."""
        return self.placement.pages

    @property
    def salt(self) -> Salt:
        """Salt of its pages: requests with other adapters share no pages with it."""
        adapter = self.adapter
        key = None if adapter is None else (adapter.name, adapter.digest)
        return adapted_salt(self.params.cache_salt, key)

    @property
    def num_computed(self) -> int:
        """Number of leading tokens whose keys and values are in the pages."""
        return self.placement.num_computed

    @property
    def is_decoding(self) -> bool:
        """True if all tokens but the newest have been computed."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_computed >= self.prompt_len

    @property
    def num_reusable(self) -> int:
        """Number of leading tokens that need no rows if their keys and values are cached."""
        if self.prompt_logprobs is not None and self.prompt_logprobs.num_missing:
            return self.prompt_logprobs.num_scored
        return len(self.token_ids) - 1

    @property
    def has_no_output(self) -> bool:
        """True if the request generates no tokens."""
        return self.max_len == self.prompt_len

    @property
    def draft_room(self) -> int:
        """Number of drafts that may still be emitted; the step's own token takes the last place."""
        return self.max_len - len(self.token_ids) - 1

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[self.prompt_len :]

    def commit(self, emitted: Emitted, num_drafts: int, totals: SpeculativeStats) -> RequestOutput:
        """Append the tokens that a step emitted, up to a stop string or the end of the grammar.

        Args:
            emitted: the step's results for this request.
            num_drafts: drafts that the step verified.
            totals: counts over all requests, updated as well.
        """
        if emitted.thinking_state is not None:
            self.output.thinking_state = emitted.thinking_state
        num_output = len(self.token_ids) - self.prompt_len
        kept = self._keep(emitted, num_output)
        self.token_ids.extend(kept)
        num_accepted = min(emitted.num_from_drafts, len(kept))
        for stats in (self.output.stats, totals):
            stats.count(num_drafts, num_accepted, len(kept))
        drafts = emitted.drafts
        if drafts is not None:
            drafts = replace(drafts, num_accepted=num_accepted)
        logprobs = emitted.logprobs[: len(kept)]
        self.output.logprobs.extend(logprobs)
        if self.output.finish_reason is None and emitted.finish_reason is not FinishReason.RUNNING:
            self._note_end(emitted)
        text = self.stream.take()
        if self.output.finish_reason is not None:
            text += self.stream.finish()
        return RequestOutput(
            self.request_id,
            kept,
            text,
            logprobs,
            self.output.finish_reason,
            drafts,
            None if num_output else self.prompt_logprobs,  # only in the first output
        )

    def _keep(self, emitted: Emitted, num_output: int) -> list[int]:
        """Return the tokens up to the one that ends the text or does not fit the grammar."""
        kept: list[int] = []
        token_ids, min_tokens = emitted.token_ids, self.params.min_tokens
        ends_with_token = emitted.finish_reason is FinishReason.STOP_TOKEN
        injected = len(self.inject_token_ids)
        unconstrained = num_unconstrained(self.output.thinking_state, injected, len(token_ids))
        for token_id in token_ids:
            is_end = ends_with_token and len(kept) + 1 == len(token_ids)
            fits, end = True, None
            if self.grammar is not None and len(kept) >= unconstrained:
                fits, end = self.grammar.judge(token_id, is_end)
            if fits:
                kept.append(token_id)
                may_stop = num_output + len(kept) >= min_tokens
                # A token that ends the output is not part of the text.
                if not is_end and self.stream.push(token_id, may_stop=may_stop):
                    end = "stop", self.stream.stopped_by
            if end is not None:
                self.output.finish_reason, self.output.stop_reason = end
                break
        return kept

    def _note_end(self, emitted: Emitted) -> None:
        """Record why `sampling.commit` ended the request."""
        if emitted.finish_reason is FinishReason.LENGTH:
            self.output.finish_reason = "length"
            return
        self.output.finish_reason = "stop"
        if emitted.finish_reason is FinishReason.STOP_SEQUENCE:
            self.output.stop_reason = self.params.stop_token_sequences[emitted.stop_index]
        elif emitted.token_ids[-1] in self.params.stop_token_ids:
            self.output.stop_reason = emitted.token_ids[-1]

    def end_without_output(self) -> RequestOutput:
        """End a request that only computes its prompt, and return its output."""
        self.output.finish_reason = "length"
        return RequestOutput(
            self.request_id, [], "", [], "length", prompt_logprobs=self.prompt_logprobs
        )

    def fail(self, error: str) -> RequestOutput:
        """End the request with an error message, and return its output."""
        self.output.finish_reason, self.output.error = "error", error
        return RequestOutput(self.request_id, [], "", [], "error", error=error)

    def completion(self) -> Completion:
        """Return the completion of a finished request.

        Raises:
            ValueError: the request is not finished.
        """
        if self.output.finish_reason is None:
            raise ValueError(f"request {self.request_id!r} is not finished")
        return Completion(
            request_id=self.request_id,
            index=self.choice_index,
            prompt_token_ids=self.token_ids[: self.prompt_len],
            token_ids=self.output_token_ids,
            text=self.stream.text,
            logprobs=self.output.logprobs,
            finish_reason=self.output.finish_reason,
            seed=self.seed,
            num_cached_tokens=self.placement.num_cached_tokens,
            stats=self.output.stats,
            queue_seconds=self.placement.queue_seconds,
            stop_reason=self.output.stop_reason,
            prompt_logprobs=self.prompt_logprobs,
            error=self.output.error,
        )
