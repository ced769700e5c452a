# SPDX-License-Identifier: Apache-2.0
"""One request inside the engine: its tokens, its pages, and how far it has come."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from specops.engine.memory.kv_cache import DraftKv
from specops.engine.outputs import SpeculativeStats, TokenLogprob
from specops.engine.prompt_logprobs import PromptLogprobs
from specops.engine.sampling_params import SamplingParams
from specops.engine.speculative_config import SpeculativeConfig
from specops.engine.structured import GrammarState
from specops.engine.tokenizer import TextStream


class Feature:
    """What a request asks of a step beyond the plain ops, as bits; a step has those of all.

    Plain numbers, since they are looked at for every request of every step.
    """

    PROCESSORS = 1  # logits are changed before the filters
    TYPICAL_P = 2
    ENDINGS = 4  # stop sequences, minimum lengths, limits of thinking
    ACCEPT_RATES = 8
    DRAFT_PROBS = 16  # drafts are verified by what they were drawn from


@dataclass(eq=False)
class Request:
    """The state of one choice of one prompt.

    Invariant: keys and values of `token_ids[:num_computed]` are in `pages`. While decoding,
    num_computed is len(token_ids) - 1: the newest token is the next step's first row.
    """

    request_id: str
    arrival: int  # order of arrival; the latest is preempted first
    params: SamplingParams
    speculative: SpeculativeConfig
    seed: int  # as the signed 64-bit integer that carries the bits
    choice_index: int
    prompt_len: int
    max_len: int  # len(token_ids) at which the request ends
    token_ids: list[int]
    stream: TextStream
    owners: tuple[str, ...] = ()  # whom it belongs to, the widest first: they share the slots

    # From params, with what the tokenizer and the model have to say.
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    think_end_token_id: int = -1
    inject_token_ids: tuple[int, ...] = ()
    features: int = 0  # `Feature`
    grammar: GrammarState | None = None  # where the output stands in what constrains it

    # What drafts for it, each up to how many drafts, and what of that lies on its pages.
    draft_stages: dict[str, int] = field(init=False)
    draft_kv: DraftKv | None = None
    num_final_draft_kv: int = 0  # leading tokens of which draft_kv is complete and sees all
    draft_limit: int = field(init=False)  # most drafts to propose at the end of its next step
    num_drafts: int = 0  # of the proposed ones, how many the next step verifies
    # Of these, in preorder, the one that each hangs on; -1: the last token. None: a chain.
    draft_parents: Sequence[int] | None = None

    thinking_state: int = -1  # as `sampling.commit` has it
    added_at: float = 0.0  # time.perf_counter() when it came
    queue_seconds: float = 0.0  # until it got its first slot
    last_step: int = 0  # in which it had rows, by the scheduler's count
    slot: int = -1  # row of the engine's per-request arrays while running
    pages: "array[int]" = field(default_factory=lambda: array("i"))  # an array copies at once
    num_registered_pages: int = 0  # leading pages that the prefix cache knows
    num_computed: int = 0
    num_cached_tokens: int = 0
    was_preempted: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None  # if they are wanted
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    finish_reason: str | None = None
    stop_reason: int | str | tuple[int, ...] | None = None  # the stop that ended it, if one did
    error: str | None = None  # what ended it, where that is a failure

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
    def has_grammar_begun(self) -> bool:
        """Whether the grammar constrains the next token: behind the thinking, if there is one."""
        return self.thinking_state < 0 or self.thinking_state > len(self.inject_token_ids)

    def num_unconstrained(self, count: int) -> int:
        """How many of the `count` tokens that a step committed are not the grammar's affair."""
        if self.grammar is None:
            return count
        if self.thinking_state < 0:
            return 0
        # Behind the thinking the state counts: one for its end, one for each token of the reply.
        in_reply = max(self.thinking_state - len(self.inject_token_ids) - 1, 0)
        return count - min(count, in_reply)

    def take(self, token_id: int, is_end: bool) -> bool:
        """Has the grammar take a committed token, or look at one that ends the output.

        Returns:
            False where it does not fit, since nothing does: that ends the request.
        """
        assert self.grammar is not None
        if is_end and self.grammar.fits_end(token_id):
            # One that is text itself may cut a text; only a whole one ends for no reason.
            self.finish_reason = "stop"
            self.stop_reason = None if self.grammar.may_end else token_id
            return True
        if not is_end and self.grammar.take(token_id):
            return True
        if self.grammar.limit:
            self.finish_reason = "abort"
            self.stop_reason = f"structured_output: {self.grammar.limit}"
        elif self.grammar.may_end:  # only the parameters beside the grammar left no token
            self.finish_reason = "stop"
        else:
            self.finish_reason, self.stop_reason = "abort", "structured_output"
        return False

    @property
    def is_complete(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self.grammar is not None and self.grammar.is_complete

    @property
    def draft_room(self) -> int:
        """Drafts that could still be emitted: the step's own token takes the last place."""
        return self.max_len - len(self.token_ids) - 1

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.prompt_len :]
