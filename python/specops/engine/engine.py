# SPDX-License-Identifier: Apache-2.0
"""The engine: requests in, tokens out. One step drafts, verifies, accepts and commits."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

import specops
from specops.engine.admission import Admission
from specops.engine.config import EngineConfig
from specops.engine.drafters import Drafter, DrafterContext
from specops.engine.drafting import Drafting
from specops.engine.errors import EngineError, ModelError, QueueFull
from specops.engine.memory.device import open_device
from specops.engine.memory.kv_cache import PagePool
from specops.engine.models import Transformer, load_model
from specops.engine.outputs import (
    Completion,
    RequestOutput,
    SpeculativeStats,
)
from specops.engine.plan import Plan, Scheduled, described
from specops.engine.request import Request
from specops.engine.sampling_params import SamplingParams
from specops.engine.scheduling.prefixes import PrefixFinder
from specops.engine.scheduling.scheduler import Scheduler
from specops.engine.step_costs import measure_steps
from specops.engine.steps.runner import Emitted, Runner
from specops.engine.structured import Grammar, StructuredOutput
from specops.engine.tokenizer import Tokenizer
from specops.sampling import FinishReason

logger = logging.getLogger(__name__)

# Of a GPU's memory beside the weights, for keys and values; activations, logits and graphs are the
# rest.
_GPU_SHARE = 0.85
_CPU_BYTES = 4 << 30  # for keys and values, where nothing else is said

# Attention shares whole leaves of so many tokens. On a GPU declaring adds two launches to each
# layer, in the time of which so many bytes are read.
LEAF_TOKENS = {"cpu": 64, "cuda": 256}
_LEAST_SAVED_BYTES = {"cpu": 0, "cuda": 16 << 20}

# Rows that a step computes in about the time in which it reads the weights and starts its ops. Of
# the bundled model on two cores of a Zen 5: 0.33 ms a step, and 0.07 to 0.11 ms a row.
_FREE_ROWS = {"cpu": 4, "cuda": 64}


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
    # Of all steps; 0 where `Engine.times_drafting` is False.
    verify_seconds: float = 0.0  # the model, and the choice of tokens
    draft_seconds: float = 0.0


class Engine:
    """Runs requests on one model. Not thread-safe: one thread owns it.

    Args:
        config: how it is set up; the default serves the bundled model.

    Raises:
        ModelError: the model cannot be loaded.
        ValueError: the configuration contradicts itself or the model, or names something that
            cannot be used.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config = config or EngineConfig()
        # A wrong SPECOPS_NUM_THREADS is refused here, before a file is read.
        specops.set_num_threads(config.num_threads or specops.get_num_threads())
        # Other backends ask the device for lengths in every layer, which no graph can hold.
        graphs = config.has_exact_attention and not config.enforce_eager
        self._device = open_device(config.device, graphs=graphs)
        self.config = config = config.decided_for(self._device.device.type)
        model = self._load_model()
        self.model_name = config.model_name
        self.model_dtype = str(model.dtype).removeprefix("torch.")
        self.max_model_len = model.max_model_len
        self.vocab_size = model.config.vocab_size
        self.tokenizer = _tokenizer_of(config, self.vocab_size)
        self._drafting = Drafting(
            DrafterContext(
                config=config, target=model, tokenizer=self.tokenizer, device=self._device
            )
        )
        kv_bytes = model.kv_bytes_per_token() + self._drafting.kv_bytes_per_token
        self.num_pages = self._choose_num_pages(kv_bytes)
        self._drafting.allocate(self.num_pages)
        self._pool = PagePool(
            self.num_pages, config.page_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_total_draft_tokens=config.speculative_config.max_total_draft_tokens,
            free_rows=_FREE_ROWS[self._device.device.type],
            prefix_finder=self._new_prefix_finder(model),
        )
        self._runner = Runner(
            model,
            self._device,
            self._drafting,
            num_pages=self.num_pages,
            page_size=config.page_size,
            slots=config.max_num_seqs,
            max_rows=config.max_num_batched_tokens,
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
        )
        if config.speculative_config.selects_drafts:
            self._drafting.select_by(self._measure_steps())
        self._admission = Admission(
            config,
            self.tokenizer,
            self._drafting,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        )
        self._requests: dict[str, Request] = {}
        self.stats = EngineStats()

    def _measure_steps(self) -> list[float]:
        return measure_steps(
            self.tokenizer,
            self._runner,
            self._drafting,
            self._pool,
            self._device,
            max_rows=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )

    def _load_model(self) -> Transformer:
        config = self.config
        if not config.has_exact_attention:
            logger.warning(
                "not exact: with attention by %s, speculation and batching may change tokens",
                config.attention_backend,
            )
        return load_model(
            config.model_dir,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            device=self._device.device,
            load_format=config.load_format,
            kv_cache_dtype=config.kv_cache_dtype,
            attention_backend=config.attention_backend,
        )

    @property
    def runnable_methods(self) -> tuple[str, ...]:
        """The methods a request's own speculative_config may name."""
        return self._drafting.methods

    @property
    def missing_methods(self) -> Mapping[str, str]:
        """Why the other methods cannot run, in words that name no path."""
        return self._drafting.missing

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        """The drafters, by method; some have a public state of their own, such as a cache."""
        return self._drafting.drafters

    @property
    def has_unsaved_drafters(self) -> bool:
        """Whether `save_drafters` would write something that is in no file."""
        return self._drafting.has_unsaved

    def save_drafters(self) -> None:
        """Writes what drafters learnt to the files that the configuration names for it.

        The next engine with such a file drafts from it from its start. A file is replaced as a
        whole or not at all.

        Raises:
            ValueError: one cannot be written.
        """
        for drafter in self.drafters.values():
            if drafter.is_unsaved:
                drafter.save()

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or "cuda:N"."""
        return str(self._device.device)

    @property
    def times_drafting(self) -> bool:
        """Whether a step's time is known by its parts: a GPU runs it as a whole."""
        return not self._device.is_async

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

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        choice_index: int = 0,
        speculative_config: Mapping[str, object] | None = None,
        owners: Sequence[str] = (),
    ) -> str:
        """Queues one choice of one prompt.

        Args:
            prompt: text, or token ids.
            params: its sampling parameters; `n` is the caller's affair (one call per choice).
            request_id: a name for it; made up when absent.
            choice_index: which of `n` choices this is; part of the key of its random numbers.
            speculative_config: the request's own method, k, steps, strategy or policy.
            owners: whom it belongs to, the widest first, such as a client and one of its calls.
                Where slots are short, each owner gets an equal share of them, and of a share the
                owners within it. Requests without owners are served in the order of arrival.

        Returns:
            The request's id.

        Raises:
            ContextOverflow: prompt and max_tokens do not fit the context.
            QueueFull: as many requests wait as the engine may hold.
            ValueError: an argument is invalid.
        """
        self.require_room(1)
        request = self._admission.make(
            prompt,
            params,
            request_id=request_id,
            choice_index=choice_index,
            speculative_config=speculative_config,
            owners=owners,
            taken=self._requests,
        )
        self._requests[request.request_id] = request
        self._scheduler.waiting.append(request)
        if choice_index == 0:
            self.stats.prompt_tokens += request.prompt_len
        return request.request_id

    def require_room(self, count: int) -> None:
        """Refuses so many further requests where they would not find room to wait.

        Raises:
            QueueFull: more would wait than the engine may hold.
        """
        if self.num_waiting + count > self.config.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests are waiting already")

    def compile_structured_output(self, wanted: StructuredOutput) -> Grammar:
        """Compiles what constrains an output, on any thread.

        Requests that ask for the same find it for as long as the caller holds it, so that the
        thread that owns the engine need not compile it.

        Raises:
            ValueError: it is not valid, too large, or says what is not supported.
        """
        return self._admission.compile(wanted)

    def draw_seed(self, bits: int = 64) -> int:
        """Draws a seed, as `add_request` does for a request that came without one."""
        return self._admission.draw_seed(bits)

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

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """Drafts, verifies, accepts and commits once; returns what it added to each request.

        A request of which something fails, and nothing else, ends with `finish_reason` "error" and
        a sentence in `RequestOutput.error`; a drafter that fails ends nothing. The log says more.

        Raises:
            EngineError: the step failed, as on the device. Its requests are gone then; others go
                on.
        """
        self._drafting.select(*self._scheduler.decoding(self._drafting.num_proposed))
        before = self._scheduler.num_preemptions
        plan = self._scheduler.schedule()
        self.stats.num_preemptions += self._scheduler.num_preemptions - before
        self._note_starts(plan)
        try:
            outputs = self._run(plan)
        except BaseException as error:
            self._scheduler.return_pages_of_trees()
            plan.fail_all(error)
            outputs = self._end_failed(plan, [])
            for output in outputs:
                del self._requests[output.request_id]
            if not isinstance(error, Exception):
                raise
            raise EngineError(f"a step failed: {described(error)}", outputs) from error
        return self._end_failed(plan, outputs)

    def _run(self, plan: Plan) -> list[RequestOutput]:
        # What grammars take is the time of this thread, which waits while a GPU works.
        timer = time.perf_counter if self._device.is_async else time.thread_time
        step_begun, begun = timer(), time.perf_counter()
        emitted = self._runner.execute(plan)
        if not plan.parts:
            self._scheduler.return_pages_of_trees()
            return []
        executed = time.perf_counter() - begun
        self.stats.num_steps += 1
        self.stats.num_rows += sum(part.num_rows for part in plan.parts)
        self.stats.num_paused_steps += len(plan.paused)
        if plan.prefixes is not None:
            saved = plan.prefixes.num_saved_tokens
            self.stats.cascade_saved_bytes += saved * self._cascade_bytes_per_token
        outputs: list[RequestOutput] = []
        for part, result in zip(plan.parts, emitted, strict=True):
            if part.request.error is not None:
                continue
            try:
                outputs += self._take_over(part, result)
            except Exception as error:
                plan.fail(part.request, error)
        self._drafting.observe(plan.parts, [one.accepted for one in emitted])
        begun = time.perf_counter()
        self._runner.finish()
        if self.times_drafting:
            within = self._runner.draft_seconds
            self.stats.verify_seconds += executed - within
            self.stats.draft_seconds += time.perf_counter() - begun + within
        self._scheduler.return_pages_of_trees()
        self._scheduler.grammar_turns.note(plan, timer() - step_begun)
        for part in plan.parts:
            request = part.request
            try:
                if request.error is None:
                    self._scheduler.register_full_pages(request)
            except Exception as error:
                plan.fail(request, error)
            if request.finish_reason is not None and request.error is None:
                self._leave(request)
        return outputs

    def _end_failed(self, plan: Plan, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Takes out the requests that a step has failed for; of each, the only output says so."""
        if not plan.failed:
            return outputs
        failed = {request.request_id: request.error for request in plan.failed}
        for request in plan.failed:
            self._leave(request)
        return [one for one in outputs if one.request_id not in failed] + [
            RequestOutput(name, [], "", [], "error", error=error) for name, error in failed.items()
        ]

    def _note_starts(self, plan: Plan) -> None:
        for request in plan.started:
            if not request.was_preempted:
                request.queue_seconds = time.perf_counter() - request.added_at
                if request.prompt_logprobs is None:  # whose rows are all computed
                    self.stats.prefix_cache_queries += request.prompt_len
                self.stats.prefix_cache_hits += request.num_cached_tokens

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
            prompt_logprobs=request.prompt_logprobs,
            error=request.error,
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

        Raises:
            EngineError: a step or one of the requests failed; none is left then.
            ValueError: an argument is invalid.
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
        completions = [self.completion(name) for name in ids]
        for done in completions:
            if done.error is not None:
                raise EngineError(f"a request failed: {done.error}")
        return completions

    def _take_over(self, part: Scheduled, result: Emitted) -> list[RequestOutput]:
        """Takes over what a step has brought a request: one output, or none within its prompt."""
        request = part.request
        # What was accepted but not committed was computed from tokens that are not there.
        kept_drafts = max(len(result.token_ids) - 1, 0)
        request.num_computed += part.num_rows - part.num_drafts + kept_drafts
        if part.emits:
            self._count(request, part.num_drafts, len(result.accepted))
            return [self._commit(request, result)]
        if request.has_no_output and request.num_computed == request.prompt_len:
            return [self._end_without_output(request)]
        return []

    def _commit(self, request: Request, result: Emitted) -> RequestOutput:
        """Appends the committed tokens one by one, unless a stop string cuts the rest."""
        kept: list[int] = []
        num_output = len(request.token_ids) - request.prompt_len
        min_tokens = request.params.min_tokens
        ends_with_token = result.finish_reason is FinishReason.STOP_TOKEN
        unconstrained = request.num_unconstrained(len(result.token_ids))
        for token_id in result.token_ids:
            kept.append(token_id)
            is_constrained = len(kept) > unconstrained
            is_end = ends_with_token and len(kept) == len(result.token_ids)
            if is_constrained and not request.take(token_id, is_end):
                kept.pop()
                break
            if is_end:
                break  # it is no part of the text
            if request.stream.push(token_id, may_stop=num_output + len(kept) >= min_tokens):
                request.finish_reason, request.stop_reason = "stop", request.stream.stopped_by
                break
            if is_constrained and request.is_complete:
                request.finish_reason = "stop"
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
        reason, prompt_logprobs = request.finish_reason, None
        if not num_output:  # not told again
            prompt_logprobs = request.prompt_logprobs
        return RequestOutput(
            request.request_id, kept, text, logprobs, reason, result.drafts, prompt_logprobs
        )

    def _end_without_output(self, request: Request) -> RequestOutput:
        """Ends a request of which only the prompt is wanted."""
        request.finish_reason = "length"
        return RequestOutput(
            request.request_id, [], "", [], "length", prompt_logprobs=request.prompt_logprobs
        )

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

    def _leave(self, request: Request) -> None:
        self._runner.leave(request)
        self._scheduler.finish(request)

    def _new_prefix_finder(self, model: Transformer) -> PrefixFinder | None:
        if not (self.config.enable_cascade_attention and self.config.has_exact_attention):
            return None
        kind = self._device.device.type
        layer_bytes = model.kv_bytes_per_token() // model.config.num_layers
        # Layers with a window see no prefix that lies behind it: they are not counted.
        windows = model.config.sliding_windows
        num_whole = sum(one is None or one >= model.max_model_len for one in windows)
        self._cascade_bytes_per_token = layer_bytes * num_whole
        return PrefixFinder(
            self._pool,
            leaf_tokens=LEAF_TOKENS[kind],
            least_saved_tokens=-(-_LEAST_SAVED_BYTES[kind] // layer_bytes),
        )

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
                budget = _CPU_BYTES if self.device == "cpu" else int(free * _GPU_SHARE)
            pages = min(per_request * config.max_num_seqs, min(budget, free) // page_bytes)
        if pages < per_request:
            raise ValueError(
                f"num_pages must be at least {per_request} so that one request of max_model_len="
                f"{self.max_model_len} tokens fits, got {pages}; lower max_model_len or raise it"
            )
        return pages


def _tokenizer_of(config: EngineConfig, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(config.model_dir)
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}")
    return tokenizer


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
