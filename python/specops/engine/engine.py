# SPDX-License-Identifier: Apache-2.0
"""The engine: requests in, tokens out. One step drafts, verifies, accepts and commits."""

import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import specops
from specops.engine.config import EngineConfig
from specops.engine.device import open_device
from specops.engine.errors import ContextOverflow, ModelError, QueueFull
from specops.engine.kv_cache import PagePool
from specops.engine.models import MtpModules, Transformer, load_model, load_mtp
from specops.engine.outputs import (
    Completion,
    RequestOutput,
    SpeculativeStats,
)
from specops.engine.request import Feature, Request
from specops.engine.runner import Emitted, Runner
from specops.engine.sampling_params import SamplingParams, check_sequences
from specops.engine.scheduler import Scheduled, Scheduler
from specops.engine.speculative_config import METHODS, SpeculativeConfig
from specops.engine.suffix_store import SuffixStore
from specops.engine.tokenizer import TextStream, Tokenizer
from specops.sampling import FinishReason
from specops.suffix_tree import SuffixCache

logger = logging.getLogger(__name__)

# Of a GPU's memory beside the weights, for keys and values; activations, logits and graphs are the
# rest.
_GPU_SHARE = 0.85

MAX_COUNTED_LENGTH = 32  # drafts, in the statistics


@dataclass
class EngineStats:
    """Counters over the engine's life; they only ever grow."""

    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # of these, found
    speculative: SpeculativeStats = field(default_factory=SpeculativeStats)
    # Steps of requests whose draft lengths adapt: by the drafts that they verified, of which the
    # last number stands for more, too; and those in which their drafter had a rest.
    num_steps_per_length: list[int] = field(default_factory=lambda: [0] * (MAX_COUNTED_LENGTH + 1))
    num_suspended_steps: int = 0


class Engine:
    """Runs requests on one model. Not thread-safe: one thread owns it.

    Args:
        config: how it is set up; the default serves the bundled model.
        clock: seconds, from which adaptive draft lengths learn what steps cost.

    Raises:
        ModelError: the model cannot be loaded.
        ValueError: the configuration contradicts itself or the model; `suffix_corpus` or
            `suffix_cache` cannot be used.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config = config or EngineConfig()
        self._clock = clock
        if config.num_threads is not None:
            specops.set_num_threads(config.num_threads)
        self._device = open_device(config.device, graphs=not config.enforce_eager)
        model = load_model(
            config.model_dir,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            device=self._device.device,
            load_format=config.load_format,
        )
        self._missing: dict[str, str] = {}
        modules = self._load_modules(model)
        self.model_name = config.model_name
        self.max_model_len = model.max_model_len
        self.vocab_size = model.config.vocab_size
        self.tokenizer = Tokenizer.from_dir(config.model_dir)
        if self.tokenizer.vocab_size > self.vocab_size:
            raise ModelError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model {self.vocab_size}"
            )
        self._suffix_store = SuffixStore(config, self.tokenizer, self.vocab_size)
        kv_bytes = model.kv_bytes_per_token()
        if modules is not None:
            kv_bytes += modules.kv_bytes_per_token()
        self.num_pages = self._choose_num_pages(kv_bytes)
        self._pool = PagePool(
            self.num_pages, config.page_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_total_draft_tokens=config.speculative_config.max_total_draft_tokens,
            lookahead=0 if modules is None else modules.num_modules,
        )
        self._runner = Runner(
            model,
            self._device,
            num_pages=self.num_pages,
            page_size=config.page_size,
            slots=config.max_num_seqs,
            max_rows=config.max_num_batched_tokens,
            speculative=config.speculative_config,
            suffix_cache=self.suffix_cache,
            modules=modules,
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
            clock=clock,
        )
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._random = (
            random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        )
        self.stats = EngineStats()
        self._learn_seconds = 0.0  # of the last step

    @property
    def runnable_methods(self) -> tuple[str, ...]:
        """The methods a request's own speculative_config may name."""
        return tuple(method for method in METHODS if method not in self._missing)

    @property
    def missing_methods(self) -> Mapping[str, str]:
        """Why the other methods cannot run, in words that name no path."""
        return self._missing

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or "cuda:N"."""
        return str(self._device.device)

    @property
    def num_captures(self) -> int:
        """CUDA graphs captured so far."""
        return self._runner.num_captures

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot or for pages."""
        return len(self._scheduler.waiting)

    @property
    def num_free_pages(self) -> int:
        """KV pages that no request holds."""
        return self._pool.num_available

    @property
    def suffix_cache(self) -> SuffixCache:
        """What suffix decoding drafts from; other threads may use it, too."""
        return self._suffix_store.cache

    @property
    def has_unsaved_suffixes(self) -> bool:
        """Whether `save_suffix_cache` would write something that is not in the file."""
        return self._suffix_store.is_unsaved

    def save_suffix_cache(self) -> None:
        """Writes the responses that suffix decoding drafts from to `config.suffix_cache`.

        The next engine with this file drafts from them from its start. The file is replaced as a
        whole or not at all.

        Raises:
            ValueError: there is none, or it cannot be written.
        """
        self._suffix_store.save()

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        choice_index: int = 0,
        speculative_config: Mapping[str, object] | None = None,
    ) -> str:
        """Queues one choice of one prompt.

        Args:
            prompt: text, or token ids.
            params: its sampling parameters; `n` is the caller's affair (one call per choice).
            request_id: a name for it; made up when absent.
            choice_index: which of `n` choices this is; part of the key of its random numbers.
            speculative_config: the request's own method, k, steps, strategy or policy.

        Returns:
            The request's id.

        Raises:
            ContextOverflow: prompt and max_tokens do not fit the context.
            QueueFull: as many requests wait as the engine may hold.
            ValueError: an argument is invalid.
        """
        if self.num_waiting >= self.config.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests are waiting already")
        token_ids = self._prompt_token_ids(prompt)
        room = self.max_model_len - len(token_ids)
        if room < 1 or (params.max_tokens or 1) > room:
            asked = "" if params.max_tokens is None else f" and max_tokens {params.max_tokens}"
            raise ContextOverflow(
                f"a prompt of {len(token_ids)} tokens{asked} exceed the context of "
                f"{self.max_model_len} tokens"
            )
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise ValueError(
                f"logprobs must be at most the vocabulary's {self.vocab_size}, "
                f"got {params.logprobs}"
            )
        name, largest = params.largest_token_id()
        if largest >= self.vocab_size:
            raise ValueError(
                f"{name} must hold token ids of the vocabulary of {self.vocab_size}, got {largest}"
            )
        speculative = self.config.speculative_for(
            speculative_config, self.runnable_methods, self._missing
        )
        think_end, inject = self._thinking(params)
        if not 0 <= choice_index < 2**31:
            raise ValueError(f"choice_index must be in [0, 2^31), got {choice_index}")
        if request_id is None:
            request_id = f"request-{self._arrivals}"
            while request_id in self._requests:  # a caller may have chosen such a name
                request_id += "-"
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        request = Request(
            request_id=request_id,
            arrival=self._arrivals,
            params=params,
            speculative=speculative,
            seed=_signed64(seed),
            choice_index=choice_index,
            prompt_len=len(token_ids),
            max_len=len(token_ids) + (params.max_tokens or room),
            token_ids=token_ids,
            stream=TextStream(self.tokenizer, params.stop),
            stop_token_ids=self._stop_token_ids(params),
            bad_words=self._bad_words(params),
            think_end_token_id=think_end,
            inject_token_ids=inject,
            features=_features(params, speculative),
            thinking_state=0 if params.thinks else -1,
            added_at=time.perf_counter(),
        )
        self._arrivals += 1
        self._requests[request_id] = request
        self._scheduler.waiting.append(request)
        self.stats.prompt_tokens += len(token_ids)
        return request_id

    def abort(self, request_id: str) -> bool:
        """Drops a request at once, whatever it is doing; False if there is none of that name."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._leave(request)
        return True

    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def step(self) -> list[RequestOutput]:
        """Drafts, verifies, accepts and commits once; returns what it added to each request."""
        # Learning from the last step took time, which counts as a part of this one.
        begun = self._clock() - self._learn_seconds
        before = self._scheduler.num_preemptions
        plan = self._scheduler.schedule(
            self._runner.num_drafts,
            self._runner.draft_limit,
            on_start=self._start,
            on_stop=self._runner.stop,
        )
        self.stats.num_preemptions += self._scheduler.num_preemptions - before
        if not plan:
            return []
        emitted = self._runner.execute(plan)
        self.stats.num_steps += 1
        outputs: list[RequestOutput] = []
        finished: list[Request] = []
        for part, result in zip(plan, emitted, strict=True):
            request = part.request
            # What was accepted but not committed was computed from tokens that are not there.
            kept_drafts = max(len(result.token_ids) - 1, 0)
            request.num_computed += part.num_rows - part.num_drafts + kept_drafts
            if part.emits:
                self._count(request, part.num_drafts, result.num_accepted)
                outputs.append(self._commit(request, result))
            if part.redraft_len >= 0:
                self._runner.note_drafted(part)
            self._scheduler.register_full_pages(request)
            if request.finish_reason is not None:
                finished.append(request)
        self._runner.propose()
        for request in finished:
            self._leave(request)
        self._learn(plan, emitted, begun)
        return outputs

    def completion(self, request_id: str) -> Completion:
        """Returns a finished request as a whole, and forgets it."""
        request = self._requests[request_id]
        if request.finish_reason is None:
            raise ValueError(f"request {request_id!r} is not finished")
        del self._requests[request_id]
        return Completion(
            request_id=request_id,
            index=request.choice_index,
            prompt_token_ids=request.token_ids[: request.prompt_len],
            token_ids=request.output_token_ids,
            text=request.stream.text,
            logprobs=request.logprobs,
            finish_reason=request.finish_reason,
            seed=request.seed,
            num_cached_tokens=request.num_cached_tokens,
            stats=request.stats,
            queue_seconds=request.queue_seconds,
            stop_reason=request.stop_reason,
        )

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        speculative_config: Mapping[str, object] | None = None,
    ) -> list[Completion]:
        """Completes prompts and waits for all of them.

        Args:
            prompts: texts, or lists of token ids.
            params: one for all prompts, or one per prompt.
            speculative_config: overrides the engine's for these requests.

        Returns:
            `n` completions per prompt, in the order of the prompts, then of the choices.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of texts or of token ids, got one text")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params must be one or {len(prompts)}, got {len(each)}")
        pending = [
            (prompt, one, index)
            for prompt, one in zip(prompts, each, strict=True)
            for index in range(one.n)
        ]
        ids: list[str] = []
        try:
            for prompt, one, index in pending:
                while self.num_waiting >= self.config.max_waiting:
                    self.step()
                ids.append(
                    self.add_request(
                        prompt, one, choice_index=index, speculative_config=speculative_config
                    )
                )
            while any(self._requests[name].finish_reason is None for name in ids):
                self.step()
        except BaseException:
            for name in ids:
                self.abort(name)
            raise
        return [self.completion(name) for name in ids]

    def _commit(self, request: Request, result: Emitted) -> RequestOutput:
        """Appends the committed tokens one by one, unless a stop string cuts the rest."""
        kept: list[int] = []
        num_output = len(request.token_ids) - request.prompt_len
        min_tokens = request.params.min_tokens
        ends_with_token = result.finish_reason is FinishReason.STOP_TOKEN
        for token_id in result.token_ids:
            kept.append(token_id)
            if ends_with_token and len(kept) == len(result.token_ids):
                break  # it is no part of the text
            if request.stream.push(token_id, may_stop=num_output + len(kept) >= min_tokens):
                request.finish_reason, request.stop_reason = "stop", request.stream.stopped_by
                break
        request.token_ids.extend(kept)
        logprobs = result.logprobs[: len(kept)]
        if request.finish_reason is None and result.finish_reason is not FinishReason.RUNNING:
            self._note_end(request, result)
        request.logprobs.extend(logprobs)
        self._runner.commit(request)
        self.stats.generation_tokens += len(kept)
        text = request.stream.take()
        if request.finish_reason is not None:
            text += request.stream.finish()
            # Keys and values of tokens that were cut are never read again.
            request.num_computed = min(request.num_computed, len(request.token_ids) - 1)
        return RequestOutput(request.request_id, kept, text, logprobs, request.finish_reason)

    def _note_end(self, request: Request, result: Emitted) -> None:
        """Notes why `commit` ended a request."""
        if result.finish_reason is FinishReason.LENGTH:
            request.finish_reason = "length"
            return
        request.finish_reason = "stop"
        if result.finish_reason is FinishReason.STOP_SEQUENCE:
            request.stop_reason = request.params.stop_token_sequences[result.stop_index]
        elif result.token_ids[-1] in request.params.stop_token_ids:
            request.stop_reason = result.token_ids[-1]

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The request's own, and the model's end of sequence."""
        eos = () if params.ignore_eos else sorted(self.tokenizer.eos_token_ids)
        return tuple(
            dict.fromkeys((*params.stop_token_ids, *(i for i in eos if i < self.vocab_size)))
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The sequences that spell a bad word, inside a text and after a space."""
        sequences = list(params.bad_words_token_ids)
        for word in params.bad_words:
            stem = word.lstrip(" ") or word
            bare = tuple(self.tokenizer.encode(stem, add_special_tokens=False))
            spaced = tuple(self.tokenizer.encode(" " + stem, add_special_tokens=False))
            sequences.append(bare)
            # A space and then the bare word is refused with the bare word already.
            if spaced[-len(bare) :] != bare:
                sequences.append(spaced)
        check_sequences("bad_words", tuple(sequences))
        return tuple(dict.fromkeys(sequences))

    def _thinking(self, params: SamplingParams) -> tuple[int, tuple[int, ...]]:
        """The token that ends thinking, and those that end it by force."""
        if not params.thinks:
            return -1, ()
        think_end = params.think_end_token_id
        if think_end is None:
            ids = self.tokenizer.encode("</think>", add_special_tokens=False)
            if len(ids) != 1:
                raise ValueError(
                    "think_end_token_id must be given: the tokenizer has no token </think>"
                )
            (think_end,) = ids
        inject = params.think_inject_token_ids
        return think_end, (think_end,) if inject is None else inject

    def _count(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        for stats in (request.stats, self.stats.speculative):
            stats.num_steps += 1
            if num_drafts:
                stats.num_drafts += 1
                stats.num_draft_tokens += num_drafts
                stats.num_accepted_tokens += num_accepted
                per_pos = stats.num_accepted_tokens_per_pos
                per_pos.extend([0] * (num_drafts - len(per_pos)))
                for position in range(num_accepted):
                    per_pos[position] += 1
                per_length = stats.num_drafts_per_length
                per_length.extend([0] * (num_drafts + 1 - len(per_length)))
                per_length[num_drafts] += 1

    def _learn(self, plan: Sequence[Scheduled], emitted: Sequence[Emitted], begun: float) -> None:
        """Lets the draft lengths know what came of a step."""
        self._learn_seconds = 0.0
        states = [part.request.drafting for part in plan if part.emits]
        num_adaptive = len(states) - states.count(None)
        if not num_adaptive:
            return
        ended = self._clock()
        runner, lengths = self._runner, self._runner.lengths
        seconds = ended - begun - runner.build_seconds if runner.was_ordinary else None
        counts = self.stats.num_steps_per_length
        # In the first step of a rest there may be drafts from before.
        has_drafts = any([part.num_drafts for part in plan if part.request.drafting is not None])
        if lengths.is_resting and not has_drafts:
            counts[0] += num_adaptive
            self.stats.num_suspended_steps += num_adaptive
            lengths.pass_by(states, seconds)
            if lengths.is_resting:
                return
        else:
            drafts = [part.num_drafts for part in plan if part.emits]
            for state, count in zip(states, drafts, strict=True):
                if state is not None:
                    counts[min(count, MAX_COUNTED_LENGTH)] += 1
                    self.stats.num_suspended_steps += not lengths.limit(state)
            lengths.observe(
                states,
                drafts,
                [one.num_accepted for one, part in zip(emitted, plan, strict=True) if part.emits],
                seconds=seconds,
                build_seconds=runner.build_seconds,
            )
        self._learn_seconds = self._clock() - ended

    def _start(self, request: Request) -> None:
        self._runner.start(request)
        if not request.was_preempted:
            request.queue_seconds = time.perf_counter() - request.added_at
            self.stats.prefix_cache_queries += request.prompt_len
            self.stats.prefix_cache_hits += request.num_cached_tokens

    def _leave(self, request: Request) -> None:
        self._runner.leave(request)
        self._scheduler.finish(request)

    def _load_modules(self, model: Transformer) -> MtpModules | None:
        """The checkpoint's MTP modules; requests may ask for them whatever the server's method."""
        config, speculative = self.config, self.config.speculative_config
        try:
            return load_mtp(
                model,
                config.model_dir,
                draft_directory=speculative.model,
                draft_vocab=speculative.draft_vocab,
                load_format=config.load_format,
            )
        except ModelError as error:
            asked = speculative.model is not None or speculative.draft_vocab is not None
            if speculative.method == "mtp" or asked:
                raise
            where = str(config.model_dir)
            reason = str(error).removeprefix(f"{where}: ").removeprefix(f"{where}{os.sep}")
            self._missing["mtp"] = reason
            logger.info("method mtp is not available: %s", error)
            return None

    def _prompt_token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
        else:
            if isinstance(prompt, (bytes, bytearray)):
                raise ValueError("prompt must be text or token ids, got bytes")
            token_ids = list(prompt)
            for token_id in token_ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int):
                    raise ValueError(f"prompt must be text or token ids, got {token_id!r} in it")
                if not 0 <= token_id < self.vocab_size:
                    raise ValueError(
                        f"prompt: token id {token_id} is outside the vocabulary of "
                        f"{self.vocab_size}"
                    )
        if not token_ids:
            raise ValueError("prompt must hold at least one token, got none")
        return token_ids

    def _choose_num_pages(self, bytes_per_token: int) -> int:
        config = self.config
        per_request = -(-self.max_model_len // config.page_size)
        page_bytes = bytes_per_token * config.page_size
        free = self._device.free_bytes()
        if config.num_pages is not None:
            pages = config.num_pages
            if pages * page_bytes > free:
                raise ValueError(
                    f"num_pages must fit the memory of {self.device}: {pages} pages take "
                    f"{_gib(pages * page_bytes)}, and {_gib(free)} are free"
                )
        else:
            budget = config.kv_cache_bytes
            if budget is None:
                budget = 4 << 30 if self.device == "cpu" else int(free * _GPU_SHARE)
            pages = min(per_request * config.max_num_seqs, min(budget, free) // page_bytes)
        if pages < per_request:
            raise ValueError(
                f"num_pages must be at least {per_request} so that one request of max_model_len="
                f"{self.max_model_len} tokens fits, got {pages}; lower max_model_len or raise it"
            )
        return pages


def _features(params: SamplingParams, speculative: SpeculativeConfig) -> int:
    """What the request asks of steps beyond the plain ops."""
    wanted = {
        Feature.PROCESSORS: params.has_penalties
        or bool(params.logit_bias or params.bad_words or params.bad_words_token_ids)
        or params.allowed_token_ids is not None
        or params.min_tokens > 0,
        Feature.TYPICAL_P: params.typical_p < 1,
        Feature.ENDINGS: params.thinks
        or params.min_tokens > 0
        or bool(params.stop_token_sequences),
        Feature.ACCEPT_RATES: speculative.accept_policy == "synthetic",
        Feature.DRAFT_PROBS: speculative.draws_drafts and params.temperature > 0,
        Feature.TARGET_NUMBERS: speculative.drafts_with_target_numbers and params.temperature > 0,
    }
    features = 0
    for feature, is_wanted in wanted.items():
        if is_wanted:
            features |= feature
    return features


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _signed64(seed: int) -> int:
    """The signed integer with the same 64 bits."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
