# SPDX-License-Identifier: Apache-2.0
"""The engine. Each step selects drafts, plans rows, runs the model, commits tokens and drafts."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

import specops
from specops._garbage import garbage_collection_paused
from specops.api.config import EngineConfig
from specops.api.errors import EngineError, ModelError, QueueFull, UnknownAdapter, described
from specops.api.methods import method_of
from specops.api.methods.checks import adapter_name
from specops.api.outputs import Completion, EngineStats, RequestOutput
from specops.api.sampling_params import SamplingParams
from specops.api.speculative_config import SpeculativeConfig
from specops.api.structured import StructuredOutput
from specops.engine.admission import Admission
from specops.engine.device import open_device
from specops.engine.drafters.base import Drafter, DrafterContext
from specops.engine.drafters.drafting import Drafting
from specops.engine.emitted import Emitted
from specops.engine.machine import (
    FREE_ROWS,
    ROW_COSTS,
    capacity_of,
    free_rows_of,
    one_rank,
    prefix_finder_of,
    tokenizer_of,
    warn_of_more_tokens,
)
from specops.engine.memory.kv_cache import DraftKv, PagePool, PrefixListener
from specops.engine.models import PrefixStates, WeightCache, load_model
from specops.engine.models.adapter_files import read_adapter
from specops.engine.models.adapters import Adapter, put_into_one_bank
from specops.engine.parallel.ranks import Ranks
from specops.engine.plan import Part, Plan
from specops.engine.prompt_pages import PromptPages
from specops.engine.request import Request
from specops.engine.scheduling.prompt_rows import PROMPT_ROWS_BESIDE
from specops.engine.scheduling.scheduler import Scheduler
from specops.engine.sharing.row_costs import RowCosts
from specops.engine.step_costs import known_steps, measure_row_costs, measure_steps
from specops.engine.steps.runner import Runner
from specops.engine.structured import Grammar

logger = logging.getLogger(__name__)

_CHECKED_PROMPT, _CHECKED_TOKENS = 4, 4  # tokens of the requests of `check_drafters`
_TOKENS_BEFORE = 512  # context length at which the costs of rows are measured


def _isa_of(config: EngineConfig) -> str:
    """Return the instruction set that a configuration asks for.

    Raises:
        ValueError: this build or this CPU lacks it.
    """
    isa = config.isa or specops.get_isa()
    portable = specops.portable_isas()
    if config.numerics == "native" or isa in portable:
        return isa
    if config.isa is not None:
        raise ValueError(
            f"isa must be one of {', '.join(portable)} with portable numerics, got {isa}"
        )
    if portable == ["portable"]:
        raise ValueError(
            f"portable numerics need avx512, avx2 or neon on a CPU with {isa}, and this build has "
            "none of them: build with SPECOPS_ISAS=all (make setup ISAS=all), or set isa to "
            "portable, which is slow"
        )
    return portable[-1]


class Engine:
    """Engine that runs requests on one model. Not thread-safe: one thread owns it.

    Args:
        config: the configuration; the default serves the bundled model.
        ranks: tensor-parallel group of this engine; None for a single rank.
        on_prefix: listener for changes of the prefix cache, or None.

    Attributes:
        ranks: tensor-parallel group of this engine.
        pages: access to the pages of prompts, for KV transfer to and from other engines.
        device: device of the model: "cpu" or "cuda:N".
        drafters: drafters by method; some have public state, such as a cache.
        runnable_methods: methods that a request's speculative_config may name.
        missing_methods: reason why each of the other methods cannot run, without file paths.
        times_drafting: whether drafting and verification are timed separately (CPU only).

    Raises:
        ModelError: the model cannot be loaded.
        ValueError: the configuration contradicts itself or the model, or names something that
            cannot be used.
    """

    @garbage_collection_paused()
    def __init__(
        self,
        config: EngineConfig | None = None,
        ranks: Ranks | None = None,
        on_prefix: PrefixListener | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.ranks = ranks = ranks or one_rank(config)
        # These reject an invalid SPECOPS_NUM_THREADS or SPECOPS_ISA before any file is read.
        specops.set_num_threads(config.num_threads or specops.get_num_threads())
        num_cpus = len(os.sched_getaffinity(0))
        if config.num_threads is not None and config.num_threads > num_cpus:
            logger.warning(
                "num_threads %d exceeds the %d CPUs of this process, so only %d threads run",
                config.num_threads,
                num_cpus,
                num_cpus,
            )
        specops.set_isa(_isa_of(config))
        self._device = device = open_device(config.device, graphs=not config.enforce_eager)
        load = partial(
            load_model,
            config.model_dir,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            device=device.device,
            load_format=config.load_format,
            kv_cache_dtype=config.kv_cache_dtype,
            quantization=config.quantization,
            quantize_head=config.quantize_head,
            weight_cache=WeightCache.of_setting(config.weight_cache, config.weight_cache_bytes),
            ranks=ranks,
            is_adaptable=config.uses_adapters,
        )
        # The tokenizer first: reading it takes memory that is then free for the weights.
        try:
            self.tokenizer = tokenizer_of(config)
        except ModelError:
            load()  # report an error of the model instead, if there is one
            raise
        model = load()
        self.config = config = config.decided_for(model.device.type)
        self.model_name = config.model_name
        self.model_dtype = str(model.dtype).removeprefix("torch.")
        self.max_model_len, self.vocab_size = model.max_model_len, model.config.vocab_size
        warn_of_more_tokens(self.tokenizer, self.vocab_size)
        self._drafting = Drafting(DrafterContext(config, model, self.tokenizer, device))
        self.device, self.times_drafting = str(device.device), not device.is_async
        self.drafters: Mapping[str, Drafter] = self._drafting.drafters
        self.runnable_methods, self.missing_methods = self._drafting.methods, self._drafting.missing
        capacity = capacity_of(config, device, model, self._drafting.kv_bytes)
        self.num_pages = capacity.num_pages
        self._drafting.allocate(capacity)
        self._pool = PagePool(
            self.num_pages,
            config.page_size,
            enable_prefix_caching=config.enable_prefix_caching,
            listener=on_prefix,
        )
        self._cascade_bytes_per_token = model.bytes_of_whole_layers()
        finder, costs = prefix_finder_of(config, model, self._pool), ROW_COSTS[model.device.type]
        sharing = free_rows_of(config, device), finder, costs
        self._runner = Runner(model, device, self._drafting, config, capacity)
        states = PrefixStates(self._pool, capacity, self._runner.parts.cache, self._drafting.states)
        self._scheduler = Scheduler(self._pool, config, states, *sharing)
        shared = self.tokenizer, self._drafting, self.max_model_len
        if config.speculative_config.adaptive_verification:  # needed by its requests
            measure = partial(self._measure_steps, model.bytes_read)
            count = config.max_num_batched_tokens + 1
            self._drafting.select_by(known_steps(model.cached, config, measure, count))
        self._cached = model.cached
        self._admission = Admission(config, *shared, self.vocab_size)
        self._requests: dict[str, Request] = {}
        self._model = model
        self._adapters: dict[str, Adapter] = {}
        for name, path in config.lora_modules:
            self._adapters[name] = self._read_adapter(name, path)
        for adapter in self._adapters.values():
            if adapter.bank.size == 1:  # it is not in a bank with others yet
                put_into_one_bank(self._adapters_like(adapter))
        self.pages = PromptPages(self._pool, states, self._runner.parts.cache, self.drafters)
        self._plan: Plan | None = None  # plan of the step in flight
        # On a CPU, this thread's processor time; with a GPU, the wall clock.
        self._timer = time.perf_counter if self._device.is_async else time.thread_time
        self._spent = 0.0, 0.0  # time to launch this step, by `_timer` and by the wall clock
        self._aborted: list[Request] = []  # requests that may have rows in the step in flight
        self.stats = self._new_stats()

    def _new_stats(self) -> EngineStats:
        drafting = self._drafting
        return EngineStats(drafter_failures=drafting.failures, drafter_warnings=drafting.warnings)

    def _measure_steps(self, bytes_read: Callable[[int], float]) -> list[float]:
        return measure_steps(
            self.tokenizer,
            self._runner,
            self._drafting,
            self._pool,
            self._device,
            bytes_read,
            ranks=self.ranks,
            vocab_size=self.vocab_size,
            max_rows=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )

    def measure_row_costs(self) -> None:
        """Measure the costs of rows, for fair scheduling. Call this before any request is added.

        Without a measurement, the costs are constants that depend on the kind of device.
        """
        num_before = min(_TOKENS_BEFORE, self.max_model_len // 2)
        most = min(self.config.max_num_batched_tokens, self.max_model_len - num_before - 2)
        num_rows = min(PROMPT_ROWS_BESIDE * FREE_ROWS[torch.device(self.device).type], most)
        if num_rows < 2:
            return

        def measure() -> list[float]:
            return measure_row_costs(
                self.tokenizer,
                self._runner,
                self._drafting,
                self._pool,
                num_rows=num_rows,
                num_before=num_before,
                ranks=self.ranks,
            )

        count = len(fields(RowCosts))
        costs = known_steps(self._cached, self.config, measure, count, what="rows")
        self._scheduler.costs = RowCosts(*costs)
        logger.info(
            "a step takes %.3g s, a row %.3g s, a row of prompt_logprobs %.3g s more", *costs
        )

    def check_drafters(self) -> None:
        """Draft once with each drafter that runs a model, and warn of useless drafts.

        Call this before any request is added. It leaves no trace in other statistics.
        """
        num_tokens = _CHECKED_TOKENS + _CHECKED_PROMPT
        if num_tokens > self.max_model_len or self.vocab_size < _CHECKED_PROMPT:
            return
        for name in self._drafting.with_weights if len(self.runnable_methods) > 1 else ():
            try:
                problem = self._problem_of(name)
            except Exception as error:
                problem = f"its check failed: {described(error)}"
            if problem is not None:
                self._drafting.warn(name, problem)
        self.stats = self._new_stats()
        self._runner.memory.forget()
        self._drafting.forget()

    def _problem_of(self, name: str) -> str | None:
        """Run a request with one drafter; return a sentence if its drafts are useless."""
        drafter, failures = self.drafters[name], self._drafting.failures[name]
        count = (
            self.config.speculative_config.num_speculative_tokens or method_of(name).default_tokens
        )
        if drafter.max_drafts is not None:
            count = min(count, drafter.max_drafts)
        before = self.stats.speculative.num_draft_tokens
        self.generate(
            [list(range(_CHECKED_PROMPT))],
            SamplingParams(max_tokens=_CHECKED_TOKENS, temperature=0, seed=0, ignore_eos=True),
            speculative_config={
                "method": name,
                "num_speculative_tokens": count,
                "adaptive_verification": False,
            },
        )
        if self._drafting.failures[name] > failures:
            return "it failed in its first step (see the log), so requests are decoded without it"
        if self.stats.speculative.num_draft_tokens == before:
            return "it drafted nothing in its first steps"
        return drafter.problem()

    @property
    def drafter_gauges(self) -> dict[str, int]:
        """Current values of `Method.gauges`, by name."""
        return self._drafting.gauges

    @property
    def has_unsaved_drafters(self) -> bool:
        """True if drafters hold data that `save_drafters` has not written yet.

        All ranks hold the same data, and only rank 0 saves it.
        """
        return self.ranks.rank == 0 and self._drafting.has_unsaved

    def save_drafters(self) -> None:
        """Write the data that drafters have collected to the files named in the configuration.

        An engine that is started with such a file drafts from it at once. Each file is replaced
        atomically.

        Raises:
            ValueError: a file cannot be written.
        """
        self._drafting.save()

    @property
    def drafters_of_common_text(self) -> set[str]:
        """Names of the drafters that may draft from an operator's text, such as a corpus.

        A server does not show clients the rejected drafts of these drafters.
        """
        return self._drafting.of_common_text

    @property
    def max_num_drafts(self) -> int:
        """Maximum number of drafts of a request in a step."""
        limit = self._drafting.max_num_drafts
        most = self.config.max_num_batched_tokens - 1
        return most if limit is None else min(most, limit)

    @property
    def num_captures(self) -> int:
        """Number of CUDA graphs captured so far."""
        return self._runner.memory.num_captures

    @property
    def num_running(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot or for pages."""
        return len(self._scheduler.waiting)

    @property
    def num_free_pages(self) -> int:
        """Number of KV pages that no request holds."""
        return self._pool.num_available

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        choice_index: int = 0,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None = None,
        owners: Sequence[str] = (),
        adapter: str | Adapter | None = None,
    ) -> str:
        """Queue one choice of one prompt.

        Args:
            prompt: text, or token ids.
            params: sampling parameters; `n` is ignored: call once per choice.
            request_id: id of the request; None: generate one.
            choice_index: index of the choice among `n`; part of the key of its random numbers.
            speculative_config: options that override the engine's, or a `SpeculativeConfig`; None:
                use the engine's.
            owners: the request's owners, outermost first, such as a client and one of its calls.
                When slots are short, each outer owner gets an equal share of them, and divides its
                share equally among its inner owners. Requests without owners are served in order
                of arrival.
            adapter: name of a LoRA adapter, or result of `adapter`; None: the model alone.

        Returns:
            The request's id.

        Raises:
            ContextOverflow: prompt and max_tokens do not fit the context.
            QueueFull: `max_waiting` requests are waiting already.
            UnknownAdapter: no adapter with this name is loaded.
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
            adapter=self.adapter(adapter) if isinstance(adapter, str) else adapter,
            taken=self._requests.keys() | {one.request_id for one in self._aborted},
        )
        self._requests[request.request_id] = request
        self._scheduler.waiting.append(request)
        if choice_index == 0:
            self.stats.prompt_tokens += request.prompt_len
        return request.request_id

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter, which requests may then choose by its name.

        Args:
            name: name of the adapter; it must not be in use.
            path: directory in PEFT's format.

        Raises:
            ModelError: a file is missing or damaged, or the adapter is not supported.
            ValueError: the engine takes no adapters or no further one, or the name is in use.
        """
        adapter = self._read_adapter(name, path)
        put_into_one_bank([*self._adapters_like(adapter), adapter])
        self._adapters[name] = adapter

    def _read_adapter(self, name: str, path: str | Path) -> Adapter:
        if not self.config.uses_adapters:
            raise ValueError("adapters need an engine with enable_lora, got one without it")
        adapter_name(name)
        if len(self._adapters) >= self.config.max_loras:
            raise ValueError(
                f"{self.config.max_loras} adapters are loaded, as many as max_loras allows; unload "
                "one first"
            )
        if name in (*self._adapters, self.model_name):
            raise ValueError(f"the name of an adapter must be free, got {name!r}, which is in use")
        digest = bytearray(16)
        try:
            adapter = read_adapter(path, name, self._model, max_rank=self.config.max_lora_rank)
            digest[:] = adapter.digest.encode()
        finally:  # all ranks load it, or none does
            self.ranks.check(torch.frombuffer(digest, dtype=torch.uint8), len(digest))
        logger.info("read adapter %s of %s (digest %s)", name, path, adapter.digest)
        return adapter

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Requests that use it finish; new ones are refused.

        Raises:
            UnknownAdapter: no adapter with this name is loaded.
        """
        adapter = self.adapter(name)
        del self._adapters[name]
        if alike := self._adapters_like(adapter):  # its memory is freed after its last request
            put_into_one_bank(alike)
        logger.info("unloaded adapter %s", name)

    def _adapters_like(self, adapter: Adapter) -> list[Adapter]:
        """Return the loaded adapters with the layout of an adapter."""
        layout = adapter.bank.layout
        return [one for one in self._adapters.values() if one.bank.layout == layout]

    @property
    def adapters(self) -> dict[str, str]:
        """Digests of the loaded LoRA adapters, by name."""
        return {name: adapter.digest for name, adapter in self._adapters.items()}

    def adapter(self, name: str) -> Adapter:
        """Return a loaded LoRA adapter, which requests may use even if it is unloaded later.

        Raises:
            UnknownAdapter: no adapter with this name is loaded.
        """
        if name not in self._adapters:
            loaded = ", ".join(map(repr, self._adapters)) or "none"
            raise UnknownAdapter(f"adapter must be one that is loaded ({loaded}), got {name!r}")
        return self._adapters[name]

    def require_room(self, count: int) -> None:
        """Check that `count` more requests fit the waiting queue.

        Raises:
            QueueFull: more than `max_waiting` requests would wait.
        """
        if self.num_waiting + count > self.config.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests are waiting already")

    def compile_structured_output(
        self, wanted: StructuredOutput, overdue: Callable[[], None] | None = None
    ) -> Grammar:
        """Compile the constraint of an output; any thread may call this.

        While the caller holds the grammar, requests with the same constraint reuse it, so the
        thread that owns the engine does not have to compile it.

        Args:
            wanted: the constraint to compile.
            overdue: called from the calling thread if compilation takes more than 10 seconds of
                processor time. Compilation cannot be interrupted, and continues.

        Raises:
            ValueError: the constraint is not valid, too large or not supported.
        """
        return self._admission.compile(wanted, overdue)

    def draft_kv_of(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None = None,
    ) -> DraftKv | None:
        """Return the draft KV that a request's drafters would keep on the pages of its prompt.

        Raises:
            ValueError: no request could have this prompt or these arguments.
        """
        plain = replace(
            params,
            n=1,
            seed=0,
            structured_output=None,
            prompt_logprobs=None,
            prompt_logprobs_start=0,
        )
        request = self._admission.make(
            token_ids,
            plain,
            request_id=None,
            choice_index=0,
            speculative_config=speculative_config,
            owners=(),
            adapter=None,
            taken=self._requests.keys(),
        )
        return request.drafts.kv

    def draw_seed(self, bits: int = 64) -> int:
        """Draw a seed of `bits` bits, as `add_request` does for a request without a seed."""
        return self._admission.draw_seed(bits)

    def abort(self, request_id: str) -> bool:
        """Drop a request in any state at once; return False if no request has this id."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if self._plan is None:
            self._leave(request)
        else:  # it may have rows in the step in flight
            self._aborted.append(request)
        return True

    def has_unfinished(self) -> bool:
        """Return whether any request is running or waiting."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def step(self, *, even_if_idle: bool = False) -> list[RequestOutput]:
        """Run one step: select drafts, plan, run, commit and draft. Return the new output.

        A failure confined to one request ends only that request, with `finish_reason` "error" and
        a message in `RequestOutput.error`. A failing drafter ends no request. Details are logged.

        Args:
            even_if_idle: run an empty step when idle, so that collectives with other engines do
                not hang.

        Raises:
            EngineError: the whole step failed, for example on the device. Its requests are removed;
                other requests go on.
        """
        self.launch(even_if_idle=even_if_idle)
        return self.collect()

    @torch.no_grad()
    def launch(self, *, even_if_idle: bool = False) -> None:
        """Plan a step and launch it. A GPU then runs it asynchronously; a CPU runs it here.

        Until `collect` is called, requests may be added and aborted.

        Args:
            even_if_idle: as in `step`.

        Raises:
            EngineError: as in `step`, or the last step launched was not collected.
        """
        if self._plan is not None:
            raise EngineError("a step is under way: collect it before the next one")
        begun = self._timer(), time.perf_counter()
        plan = self._plan = self._planned()
        try:
            self._change_slots(plan)
            self._runner.launch(plan, even_if_idle=even_if_idle)
        except BaseException as error:
            self._end_all(plan, error)
        self._spent = self._timer() - begun[0], time.perf_counter() - begun[1]

    @torch.no_grad()
    def collect(self) -> list[RequestOutput]:
        """Wait for the launched step, commit its tokens and draft.

        Returns:
            The outputs as from `step`; an empty list if no step was launched.

        Raises:
            EngineError: as in `step`.
        """
        plan = self._plan
        if plan is None:
            return []
        begun = self._timer()
        try:
            outputs = self._commit_and_draft(plan)
            self._scheduler.take_back()
            if plan.parts:
                self._scheduler.note_step(plan, self._spent[0] + self._timer() - begun)
            self._release(plan)
        except BaseException as error:
            self._end_all(plan, error)
        self._plan = None
        return self._end_failed(plan, outputs)

    def _planned(self) -> Plan:
        """Plan a step. If that raises, end all requests that run now or ran before the call."""
        before = [(request, request.slot) for request in self._scheduler.running]
        try:
            self._drafting.select(*self._scheduler.decoding(self._drafting.num_proposed))
            return self._scheduler.schedule()
        except BaseException as error:
            for request, slot in before:
                if request.slot != slot:
                    self._runner.stop(request, slot)
            requests = [*(request for request, _ in before), *self._scheduler.running]
            ended = {request.request_id: described(error) for request in requests}
            self._end_all(Plan(failed=ended), error)

    def _change_slots(self, plan: Plan) -> None:
        """Notify the runner of the requests that lost or got a slot for a step."""
        self.stats.num_preemptions += len(plan.stopped)
        for request, slot in plan.stopped:
            self._runner.stop(request, slot)
        for request in plan.started:
            if not request.placement.was_preempted:
                reads_cache = request.params.prompt_logprobs is None or request.num_reusable
                if self.config.enable_prefix_caching and reads_cache:
                    self.stats.prefix_cache_queries += request.prompt_len
                self.stats.prefix_cache_hits += request.placement.num_cached_tokens
            try:
                self._runner.start(request)
            except Exception as error:
                plan.fail(request.request_id, error)

    def _commit_and_draft(self, plan: Plan) -> list[RequestOutput]:
        """Commit the tokens of each request of a step, then let the drafters draft."""
        begun = time.perf_counter()
        emitted = self._runner.collect(plan)
        if not plan.parts:
            return []
        executed = self._spent[1] + time.perf_counter() - begun
        outputs: list[RequestOutput] = []
        for part, result in zip(plan.parts, emitted, strict=True):
            request = part.request
            if request.request_id in plan.failed or request in self._aborted:
                continue
            try:
                outputs += self._take_over(part, result)
            except Exception as error:
                plan.fail(request.request_id, error)
        self.stats.num_steps += 1
        self.stats.num_rows += plan.num_rows
        self.stats.num_paused_steps += len(plan.paused)
        if plan.prefixes is not None:
            saved = plan.prefixes.num_saved_tokens
            self.stats.cascade_saved_bytes += saved * self._cascade_bytes_per_token
        self._drafting.observe(plan.parts, [one.num_accepted for one in emitted])
        begun = time.perf_counter()
        self._runner.finish(plan)
        if self.times_drafting:
            within = self._runner.draft_seconds
            self.stats.verify_seconds += executed - within
            self.stats.draft_seconds += time.perf_counter() - begun + within
        return outputs

    def _take_over(self, part: Part, result: Emitted) -> list[RequestOutput]:
        """Commit a step's result to a request; return its output, if it is past its prompt."""
        request = part.request
        for scores in result.prompt_scores:
            assert request.prompt_logprobs is not None
            request.prompt_logprobs.add(scores)
        # Drafts that were accepted but not committed are not part of the text, so they do not
        # count.
        computed = part.begin + part.num_rows - part.num_drafts + max(len(result.token_ids) - 1, 0)
        outputs: list[RequestOutput] = []
        if part.emits:
            outputs = [request.commit(result, part.num_drafts, self.stats.speculative)]
            self._runner.commit(request)
            self.stats.generation_tokens += len(outputs[0].token_ids)
            # A stop string may have removed tokens whose keys and values are computed.
            computed = min(computed, len(request.token_ids) - 1)
        elif request.has_no_output and computed == request.prompt_len:
            outputs = [request.end_without_output()]
        self._scheduler.advance(request, computed)
        return outputs

    def _release(self, plan: Plan) -> None:
        """Register full pages in the prefix cache, and remove the requests that have ended."""
        for part in plan.parts:
            request = part.request
            if request.request_id in plan.failed:
                continue
            try:
                self._scheduler.register_full_pages(part)
            except Exception as error:
                plan.fail(request.request_id, error)
                continue
            if request.output.finish_reason is not None:
                self._leave(request)

    def _end_all(self, plan: Plan, error: BaseException) -> NoReturn:
        """End all requests of a failed step with its error, and raise that error."""
        self._scheduler.take_back()
        plan.fail_all(error)
        self._plan = None
        outputs = self._end_failed(plan, [])
        for output in outputs:
            del self._requests[output.request_id]
        if not isinstance(error, Exception):
            raise error
        raise EngineError(f"a step failed: {described(error)}", outputs) from error

    def _end_failed(self, plan: Plan, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Remove the requests that failed in a step; replace their outputs by one with the error.

        Also remove requests that were aborted while the step was in flight; they get no output.
        """
        for request in self._aborted:
            self._leave(request)
        gone = {request.request_id for request in self._aborted}
        self._aborted.clear()
        if not plan.failed:
            return outputs
        kept = [one for one in outputs if one.request_id not in plan.failed]
        for request_id, error in plan.failed.items():
            if request_id not in gone:
                request = self._requests[request_id]
                self._leave(request)
                kept.append(request.fail(error))
        return kept

    def completion(self, request_id: str) -> Completion:
        """Return the completion of a finished request, and forget the request."""
        completion = self._requests[request_id].completion()
        del self._requests[request_id]
        return completion

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        speculative_config: Mapping[str, object] | None = None,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Complete prompts and wait for all of them.

        Args:
            prompts: texts, or lists of token ids.
            params: sampling parameters of all prompts, or a list with those of each prompt.
            speculative_config: options that override the engine's for these requests.
            adapter: name of a LoRA adapter; None: the model alone.

        Returns:
            `n` completions per prompt, ordered by prompt, then by choice.

        Raises:
            EngineError: a step or one of the requests failed; all these requests are removed.
            ValueError: an argument is invalid.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of texts or of token ids, got one text")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params must be one or {len(prompts)}, got {len(each)}")
        ids: list[str] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                for index in range(one.n):
                    while self.num_waiting >= self.config.max_waiting:
                        self.step()
                    name = self.add_request(
                        prompt,
                        one,
                        choice_index=index,
                        speculative_config=speculative_config,
                        adapter=adapter,
                    )
                    ids.append(name)
            while any(self._requests[name].output.finish_reason is None for name in ids):
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

    def _leave(self, request: Request) -> None:
        self._runner.leave(request)
        self._scheduler.finish(request)
