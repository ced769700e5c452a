# SPDX-License-Identifier: Apache-2.0
"""Engine without a model, for tests of the server: it repeats the prompt, at any speed."""

import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specops.api.outputs import EngineStats, SpeculativeStats
from specops.api.tokenizer import TextStream, Tokenizer
from specops.engine import (
    Completion,
    ContextOverflow,
    EngineConfig,
    EngineError,
    QueueFull,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
    StepDrafts,
    TokenLogprob,
)
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

CHAT = "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
CHAT += "{{ raise_exception('no such role') }}{% endif %}{{ m.content }}<|end|>{% endfor %}"


def byte_tokenizer(special: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with one token per byte, its value plus 1; token 0 is the end.

    Further special tokens follow.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = sorted(c for c in alphabet if ord(c) < 256)
    others = iter(sorted(c for c in alphabet if ord(c) >= 256))
    by_byte = [chr(b) if chr(b) in printable else next(others) for b in range(256)]
    vocab = {"<|end|>": 0} | {char: byte + 1 for byte, char in enumerate(by_byte)}
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", *special)])
    return Tokenizer(tokenizer, eos_token_ids=[0])


@dataclass(eq=False)
class _Request:
    id: str
    prompt: list[int]
    params: SamplingParams
    index: int
    limit: int
    method: str
    k: int
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    pages: int = 0
    cached: int = 0
    reason: str | None = None


class FakeEngine:
    """Stand-in with the part of the interface of `specops.engine.Engine` that the server uses."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        step_seconds: float = 0.0,
        methods: tuple[str, ...] = ("naive", "ngram"),
        most_accepted: int | None = None,
        flaw: int | None = None,
        times_drafting: bool = True,
    ) -> None:
        """Create an engine whose drafts are all right, or only the first `most_accepted` per step.

        With `flaw`, speculation changes the output token at that index, which is an error.
        """
        self.config = config or EngineConfig(
            speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=3),
            served_model_name="fake",
            max_num_seqs=4,
            max_waiting=64,
            max_model_len=256,
            seed=0,
        )
        self.tokenizer = byte_tokenizer()
        self.model_name = self.config.model_name
        self.model_dtype, self.device = "bfloat16", "cpu"
        self.max_model_len = self.config.max_model_len or 256
        self.vocab_size = 257
        self.max_num_drafts = self.config.max_num_batched_tokens - 1
        self.runnable_methods = methods
        self.missing_methods: dict[str, str] = {}
        self.stats = EngineStats()
        names = [f"suffix_cache_{what}" for what in ("requests", "tokens", "bytes")]
        self.drafter_gauges = dict.fromkeys(names, 0)
        self.has_unsaved_drafters = False
        self.drafters_of_common_text: set[str] = set()
        self.adapters: dict[str, str] = {}
        self.salts: list[str | None] = []  # cache salts of all requests so far
        self.times_drafting = times_drafting
        self.num_pages = 1000
        self.step_seconds = step_seconds
        self.most_accepted, self.flaw = most_accepted, flaw
        self.num_failures = 0  # number of coming steps that fail
        self.keeps_failed = False  # whether a failed step keeps its requests
        self.holds_at: int | None = None  # requests stop at this number of tokens
        self.owners: set[tuple[str, ...]] = set()  # owners of all requests so far
        self._running: list[_Request] = []
        self._waiting: list[_Request] = []
        self._done: dict[str, _Request] = {}
        self._seen: set[tuple[int, ...]] = set()  # prefilled prompts
        self._owner: int | None = None
        self._random = random.Random(self.config.seed)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_pages(self) -> int:
        return self.num_pages - sum(request.pages for request in self._running)

    @property
    def num_uncollected(self) -> int:
        return len(self._done)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        choice_index: int = 0,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None = None,
        owners: Sequence[str] = (),
        adapter: None = None,
    ) -> str:
        self._check_thread()
        self.require_room(1)
        assert not isinstance(prompt, str) and request_id is not None and params.seed is not None
        if not prompt:
            raise ValueError("prompt must hold at least one token, got none")
        for token in prompt:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"prompt: token id {token} is outside the vocabulary")
        space = self.max_model_len - len(prompt)
        if (1 if params.max_tokens is None else params.max_tokens) > space:
            raise ContextOverflow(f"a prompt of {len(prompt)} tokens exceeds the context")
        self.owners.add(tuple(owners))
        self.salts.append(params.cache_salt)
        config = self.config.speculative_config
        if speculative_config is not None:
            config = self.config.speculative_for(speculative_config, self.runnable_methods)
        self._waiting.append(
            _Request(
                id=request_id,
                prompt=list(prompt),
                params=params,
                index=choice_index,
                limit=space if params.max_tokens is None else params.max_tokens,
                method=config.method,
                k=config.num_speculative_tokens,
                stream=TextStream(self.tokenizer, params.stop),
            )
        )
        if choice_index == 0:
            self.stats.prompt_tokens += len(prompt)
        return request_id

    def require_room(self, count: int) -> None:
        if self.num_waiting + count > self.config.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests are waiting already")

    def draw_seed(self, bits: int) -> int:
        return self._random.getrandbits(bits)

    def abort(self, request_id: str) -> bool:
        self._check_thread()
        for where in (self._running, self._waiting):
            for request in where:
                if request.id == request_id:
                    where.remove(request)
                    return True
        return self._done.pop(request_id, None) is not None

    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> list[RequestOutput]:
        self._check_thread()
        time.sleep(self.step_seconds)
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            request = self._waiting[0]
            request.pages = math.ceil((len(request.prompt) + request.limit) / 16)
            key = tuple(request.prompt)
            request.cached = (len(key) - 1) // 16 * 16 if key in self._seen else 0
            self._running.append(request)
            del self._waiting[0]  # removed last, because other threads read these lists at any time
        if self.num_failures:
            self.num_failures -= 1
            return self._fail()
        outputs = [
            self._advance(request) for request in self._running if self._may_continue(request)
        ]
        if not outputs:
            time.sleep(0.001)  # all requests are held
        for request in [one for one in self._running if one.reason is not None]:
            self._done[request.id] = request
            self._running.remove(request)
        self.stats.num_steps += 1
        self.stats.num_rows += len(self._running)
        self.stats.verify_seconds += 0.7 * self.step_seconds
        self.stats.draft_seconds += 0.2 * self.step_seconds
        return outputs

    def completion(self, request_id: str) -> Completion:
        request = self._done.pop(request_id)
        assert request.reason is not None and request.params.seed is not None
        return Completion(
            request_id=request_id,
            index=request.index,
            prompt_token_ids=request.prompt,
            token_ids=request.token_ids,
            text=request.stream.text,
            logprobs=request.logprobs,
            finish_reason=request.reason,
            seed=request.params.seed,
            num_cached_tokens=request.cached,
            stats=request.stats,
            prompt_logprobs=_prompt_logprobs(request),
        )

    def _fail(self) -> list[RequestOutput]:
        """Fail the step and end the running requests."""
        message = "a step failed: as the test wished"
        ids = [request.id for request in self._running]
        if not self.keeps_failed:
            self._running.clear()
        raise EngineError(
            message, [RequestOutput(name, [], "", [], "error", error=message) for name in ids]
        )

    def _advance(self, request: _Request) -> RequestOutput:
        first = not request.token_ids
        self._seen.add(tuple(request.prompt))
        drafts = 0 if first else request.k
        right = drafts if self.most_accepted is None else min(drafts, self.most_accepted)
        tokens: list[int] = []
        if not request.limit:
            request.reason = "length"
        proposed = [self._next_token(request, j) + (j >= right) for j in range(drafts)]
        for _ in range(1 + right if request.limit else 0):
            token = self._next_token(request, 0)
            request.token_ids.append(token)
            tokens.append(token)
            ended = token in request.params.stop_token_ids or (
                not request.params.ignore_eos and token == 0
            )
            if ended or request.stream.push(token):
                request.reason = "stop"
            elif len(request.token_ids) == request.limit:
                request.reason = "length"
            if request.reason is not None:
                break
        logprobs = []
        if request.params.logprobs is not None:
            count = request.params.logprobs
            logprobs = [
                TokenLogprob(t, -0.5, tuple(((t + j) % 257, -0.5 - j) for j in range(count)))
                for t in tokens
            ]
        request.logprobs += logprobs
        for stats in (request.stats, self.stats.speculative):
            stats.num_steps += 1
            if drafts:
                stats.num_drafts += 1
                stats.num_draft_tokens += drafts
                stats.num_accepted_tokens += len(tokens) - 1
                stats.num_emitted_tokens += len(tokens)
                per_pos = stats.num_accepted_tokens_per_pos
                per_pos.extend([0] * (drafts - len(per_pos)))
                for position in range(len(tokens) - 1):
                    per_pos[position] += 1
                per_length = stats.num_drafts_per_length
                per_length.extend([0] * (drafts + 1 - len(per_length)))
                per_length[drafts] += 1
        self.stats.generation_tokens += len(tokens)
        text = request.stream.take()
        if request.reason is not None:
            text += request.stream.finish()
        report = None
        if drafts and request.params.report_drafts:
            report = StepDrafts(proposed, [request.method] * drafts, min(right, len(tokens)))
        of_prompt = _prompt_logprobs(request) if first else None
        return RequestOutput(request.id, tokens, text, logprobs, request.reason, report, of_prompt)

    def _may_continue(self, request: _Request) -> bool:
        return self.holds_at is None or len(request.token_ids) < self.holds_at

    def _next_token(self, request: _Request, ahead: int) -> int:
        """Return the token after the next `ahead` ones; choices begin at different places."""
        place = len(request.token_ids) + ahead
        token = request.prompt[(place + request.index) % len(request.prompt)]
        return token + 1 if place == self.flaw and request.k else token

    def _check_thread(self) -> None:
        if self._owner is None:
            self._owner = threading.get_ident()
        assert self._owner == threading.get_ident(), "one thread owns the engine"


def _prompt_logprobs(request: _Request) -> list[TokenLogprob | None] | None:
    count = request.params.prompt_logprobs
    if count is None:
        return None
    tops = tuple((j, -0.5 - j) for j in range(count))
    return [None, *(TokenLogprob(token, -0.25, tops) for token in request.prompt[1:])]
