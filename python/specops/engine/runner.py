# SPDX-License-Identifier: Apache-2.0
"""Runs planned steps: fills a step's arrays, has it run, and reads what came of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specops.batching import OutputMode
from specops.engine.device import Device
from specops.engine.draft_length import DraftLengths
from specops.engine.drafters import (
    BEGIN_ANEW,
    CATCH_UP,
    LONG_REST,
    Drafter,
    HostDrafts,
    MtpDrafter,
    make_drafter,
    make_host_drafter,
)
from specops.engine.errors import EngineError
from specops.engine.models import MtpModules, Transformer
from specops.engine.outputs import TokenLogprob
from specops.engine.request import Feature, Request
from specops.engine.scheduler import Scheduled
from specops.engine.slot_tables import SlotTables
from specops.engine.speculative_config import SpeculativeConfig
from specops.engine.step import (
    CHOICE,
    DRAFT_PROB_ROW,
    DRAFT_TEMPERATURE,
    DRAFTING_SLOT,
    FINISH_REASON,
    HAS_ANCHORS,
    LEN,
    MAX_LEN,
    MIN_P,
    MTP_SLOT,
    NUM_PARAMS,
    OWN_NUMBERS,
    POLICY,
    POSITION,
    PROCESSOR_SLOT,
    PROMPT_LEN,
    REDRAFT_LEN,
    SKIPPED,
    SLOT,
    STOP_INDEX,
    STRATEGY,
    TEMPERATURE,
    THINKING_STATE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    Step,
    StepMemory,
    StepShape,
    page_capacity,
    rounded,
)
from specops.sampling import AcceptPolicy, FinishReason, VerifyStrategy
from specops.suffix_tree import SuffixCache

_STRATEGIES = {strategy.name.lower(): int(strategy) for strategy in VerifyStrategy}
_POLICIES = {policy.name.lower(): int(policy) for policy in AcceptPolicy}
# As plain numbers, which lists and arrays take sooner.
_NONE, _LAST, _ALL = int(OutputMode.NONE), int(OutputMode.LAST), int(OutputMode.ALL)


@dataclass(slots=True)
class Emitted:
    """What a step committed for one request; stop strings are yet to be looked for."""

    request: Request
    token_ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprob]  # filled when the request asks for them
    finish_reason: FinishReason = FinishReason.RUNNING
    stop_index: int = -1  # of the stop token or sequence that ended it


class Runner:
    """Owns the model, its cache and what the steps need to know of every running request.

    Args:
        model: on the device.
        device: where steps run.
        num_pages: pages of the KV cache.
        page_size: tokens of a page.
        slots: requests that run at once.
        max_rows: rows of a step.
        speculative: of the server.
        suffix_cache: what suffix decoding drafts from.
        modules: of the model, which method "mtp" drafts with; None: no request has that method.
        processed_logprobs: logprobs are those of what was drawn from, not of the raw logits.
        clock: seconds.
    """

    def __init__(
        self,
        model: Transformer,
        device: Device,
        *,
        num_pages: int,
        page_size: int,
        slots: int,
        max_rows: int,
        speculative: SpeculativeConfig,
        suffix_cache: SuffixCache,
        modules: MtpModules | None = None,
        processed_logprobs: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self._clock = clock
        self._device = device
        self._slots = slots
        self._page_size = page_size
        self._speculative = speculative
        self._processed_logprobs = processed_logprobs
        self._cache = model.new_kv_cache(num_pages, page_size)
        model.reserve(max_rows)
        # By slot, gathered into every step.
        self._params: NDArray[np.int32] = np.zeros((NUM_PARAMS, slots), dtype=np.int32)
        self._seeds: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._state: NDArray[np.int32] = np.zeros((6, slots), dtype=np.int32)
        self._rates: dict[int, list[float]] = {}
        self.lengths = DraftLengths()
        self.lengths.has_few_totals = not device.captures
        # Of the last step: whether its time tells what others like it take, and if a drafter ran.
        self.was_ordinary = self.was_drafting = False
        self.build_seconds = 0.0  # for a step of a new shape
        self._mtp = None
        if modules is not None:
            self._mtp = MtpDrafter(
                modules,
                modules.new_kv_cache(num_pages, page_size),
                slots=slots,
                max_rows=max_rows,
                device=device,
                make_ngram_drafter=lambda: self._make_drafter("ngram"),
            )
        pages = slots * -(-model.max_model_len // page_size)
        draft_rows = -1 if self._mtp is None else self._mtp.max_rows
        most = StepShape(
            slots, max_rows, max_rows, max_rows - 1, pages, 0, (), draft_rows=draft_rows
        )
        self._memory = StepMemory(device, most)
        self._tables = SlotTables(slots, model.max_model_len, model.config.vocab_size, model.device)
        # There once a request drafts.
        self._drafters: dict[str, Drafter] = {}
        self._widths: dict[str, int] = {}
        # What the last step proposed, by method.
        self._counts: dict[str, list[int]] = {}
        self._drafts: dict[str, NDArray[np.int32]] = {}
        self._rows: dict[int, int] = {}  # its requests' places, by slot
        self._suffix_cache = suffix_cache
        self._host_drafts = HostDrafts(slots)
        self._executed: Step | None = None  # the last step, if it emitted anything
        self._host_limits: list[int] = []  # by request of it, the drafts that it may get
        # Its requests whose MTP drafts the host continues: place and slot.
        self._continued: list[tuple[int, int]] = []

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""
        return self._memory.num_captures

    def start(self, request: Request) -> None:
        """Writes a request that got a slot into the per-slot arrays."""
        slot, params, config = request.slot, request.params, request.speculative
        floats = self._params.view(np.float32)
        floats[TEMPERATURE, slot] = params.temperature
        floats[TOP_P, slot] = params.top_p
        floats[MIN_P, slot] = params.min_p
        floats[TYPICAL_P, slot] = params.typical_p
        self._params[TOP_K, slot] = params.top_k
        self._params[CHOICE, slot] = request.choice_index
        self._params[STRATEGY, slot] = _STRATEGIES[config.verify_strategy]
        self._params[POLICY, slot] = _POLICIES[config.accept_policy]
        draws = config.draws_drafts or config.drafts_with_target_numbers
        floats[DRAFT_TEMPERATURE, slot] = params.temperature if draws else 0.0
        self._params[OWN_NUMBERS, slot] = config.draws_drafts
        self._params[HAS_ANCHORS, slot] = config.verify_strategy == "block"
        self._seeds[slot] = request.seed
        state = self._state[:, slot]
        state[PROMPT_LEN], state[MAX_LEN] = request.prompt_len, request.max_len
        state[LEN] = len(request.token_ids)
        state[THINKING_STATE] = request.thinking_state
        state[FINISH_REASON], state[STOP_INDEX] = FinishReason.RUNNING, -1
        self._rates[slot] = config.conditional_acceptance_rates()
        if self._tables.start(request):
            self._memory.forget()
        if config.method == "naive":
            return
        if config.host_method:
            if config.host_method not in self._host_drafts:
                host_drafter = make_host_drafter(
                    config.host_method, self._slots, self._suffix_cache
                )
                self._host_drafts.add(config.host_method, host_drafter)
            self._host_drafts.start(request)
        if config.method != config.host_method:
            if config.method not in self._drafters:
                self._drafters[config.method] = self._make_drafter(config.method)
            width = max(self._widths.get(config.method, 1), config.num_speculative_tokens)
            self._widths[config.method] = width
            if self._drafters[config.method].start(request):
                self._memory.forget()
        if config.has_adaptive_lengths and request.drafting is None:
            request.drafting = self.lengths.start(config.method, config.num_speculative_tokens)

    def _make_drafter(self, method: str) -> Drafter:
        """The drafter of a method, or its part of a hybrid."""
        if method == "mtp":
            assert self._mtp is not None
            return self._mtp
        return make_drafter(
            method, self._speculative, self._slots, self.model.max_model_len, self.model.device
        )

    def stop(self, request: Request) -> None:
        """Forgets a request that loses its slot; it may come back."""
        self._state[LEN, request.slot] = 0
        if request.speculative.method in self._drafters:
            self._drafters[request.speculative.method].stop(request)
        self._host_drafts.stop(request)

    def leave(self, request: Request) -> None:
        """Forgets a request that finished or was aborted, with a slot or without."""
        if request.slot >= 0:
            self.stop(request)
        self._host_drafts.leave(request)

    def num_drafts(self, requests: Sequence[Request], room: int) -> list[int]:
        """How many drafts each of the requests verifies in the next step.

        Args:
            requests: all that decode.
            room: rows of the step beside one for each.
        """
        if not self.was_drafting:
            return [0] * len(requests)
        states = [request.drafting for request in requests]
        return self.lengths.allocate(states, list(map(self._num_proposed, requests)), room)

    def draft_limit(self, request: Request) -> int:
        """Most drafts to propose at the end of a step for the one after it."""
        wanted = request.speculative.num_speculative_tokens
        if request.drafting is not None:
            wanted = self.lengths.limit(request.drafting)
        # This step emits a token at least, and so will the one that verifies.
        return max(min(wanted, request.draft_limit - 1), 0) if wanted else 0

    def _num_proposed(self, request: Request) -> int:
        """How many drafts the last step proposed for a request, as far as they could be emitted."""
        if request.speculative.host_method:
            count = self._host_drafts.num_drafts(request)
        else:
            counts = self._counts.get(request.speculative.method)
            count = 0 if counts is None else counts[request.slot]
        return max(min(count, request.draft_limit), 0) if count else 0

    def execute(self, plan: Sequence[Scheduled]) -> list[Emitted]:
        """Computes the rows of a step and returns what each request emitted, in plan order.

        Raises:
            EngineError: an op met wrong data, such as a page that does not exist.
        """
        self._executed = None
        step = self._step_of(plan)
        num_pages = self._fill(step, plan)
        captures = self._memory.num_captures
        try:
            step.run(num_pages, drafting=self.was_drafting)
        except ValueError as error:
            raise EngineError(f"a step failed: {error}") from error
        self.was_ordinary &= self._memory.num_captures == captures
        # Copies: the next step's inputs may lie where these do.
        self._counts, self._drafts = {}, {}
        if self.was_drafting:
            self._drafts = {name: drafts.copy() for name, drafts in step.drafts.items()}
            self._counts = {name: counts.tolist() for name, counts in step.counts.items()}
            if "mtp" in self._counts:  # of which the others are not written
                counts = self._counts["mtp"]
                self._counts["mtp"] = [0] * self._slots
                for part in plan:
                    if part.redraft_len >= 0 and part.emits:
                        self._counts["mtp"][part.request.slot] = counts[part.request.slot]
        if step.shape.features & Feature.DRAFT_PROBS:
            self._rows = {part.request.slot: row for row, part in enumerate(plan)}
        self._executed = step if step.shape.outputs else None
        if step.shape.outputs == 0:
            return [Emitted(part.request, [], 0, []) for part in plan]
        if step.shape.features & Feature.ENDINGS:
            self._state[THINKING_STATE] = step.slot_state[THINKING_STATE]
            for part in plan:
                part.request.thinking_state = int(self._state[THINKING_STATE, part.request.slot])
        return _emitted(plan, step)

    def commit(self, request: Request) -> None:
        """Takes note of a request's length; the device has its tokens already."""
        self._state[LEN, request.slot] = len(request.token_ids)

    def note_drafted(self, part: Scheduled) -> None:
        """Takes note of what MTP modules have run over, after a step and its commit."""
        assert self._mtp is not None
        request = part.request
        known = len(request.token_ids) - self._mtp.num_modules
        request.num_drafted = max(request.num_drafted, min(request.num_computed, known))

    def propose(self) -> None:
        """Has the drafters on the host draft, when all requests of a step are committed."""
        step, limits = self._executed, self._host_limits
        if step is None or not self._host_drafts:
            return
        if not any(limits):
            self._host_drafts.propose_nothing()
            return
        batch = len(limits)
        self._host_drafts.propose(
            step.ints[SLOT, :batch],
            step.token_tensor if batch == step.shape.batch else step.token_tensor[:batch],
            lens_before=step.ints[POSITION, :batch],
            lens=self._state[LEN],
            limits=limits,
            given={row: self._mtp_drafts(slot) for row, slot in self._continued},
        )
        self.was_drafting = True

    def _mtp_drafts(self, slot: int) -> NDArray[np.int32]:
        """What MTP modules drafted for a slot in the last step."""
        return self._drafts["mtp"][slot, : self._counts["mtp"][slot]]

    def _step_of(self, plan: Sequence[Scheduled]) -> Step:
        """The step of the plan's shape, or of the shape that is rounded up to."""
        rows = outputs = width = pages = 0
        logprobs = -1
        features = 0
        is_resting = self.lengths.is_resting
        methods = set()  # that draft for the next step
        for part in plan:
            rows += part.num_rows
            pages += len(part.request.pages)
            if part.emits:
                outputs += 1 + part.num_drafts
                width = max(width, part.num_drafts)
                features |= part.request.features
                config = part.request.speculative
                if config.num_speculative_tokens and not (is_resting and part.request.drafting):
                    part.draft_limit = self.draft_limit(part.request)
                    if part.draft_limit:
                        methods.add(config.method)
                wanted = part.request.params.logprobs
                if wanted is not None and wanted > logprobs:
                    logprobs = wanted
        draft_rows = -1
        if self._mtp is not None and any(part.request.has_draft_kv for part in plan):
            # Prompts go through the modules whether these have a rest or not.
            if rows > outputs or "mtp" in methods:
                draft_rows = self._plan_modules(plan, rows)
            elif not self._forget_states(plan):
                draft_rows = 0
        kept = methods if self._device.captures else set(self._widths)
        if not outputs:
            kept = set()
        # Modules run wherever a request has them, and nowhere else.
        kept = kept - {"mtp"} if draft_rows < 0 else kept | {"mtp"}
        drafting = tuple(one for one in self._widths.items() if one[0] in kept)
        if outputs:  # the same whatever was found, so that shapes come again
            width = max([width, self._host_drafts.width, *self._widths.values()])
        shape = StepShape(
            len(plan),
            rows,
            outputs,
            width,
            pages,
            logprobs,
            drafting,
            features,
            draft_rows,
            draft_rows > 0 and any(part.request.draft_begin for part in plan),
        )
        repeats = rows == outputs
        most = self._memory.most
        if repeats and self._device.captures:
            shape = rounded(shape, most)
        else:
            shape = shape._replace(pages=page_capacity(pages, most.pages))
        step = self._memory.find(shape)
        # What a shape's first steps cost on a GPU, nothing tells; elsewhere they are as any other.
        self.was_ordinary = repeats and (step is not None or not self._device.captures)
        self.build_seconds = 0.0
        self.was_drafting = not methods.isdisjoint(self._drafters)
        if step is None:
            begun = self._clock()
            step = Step(
                shape,
                self._memory,
                self.model,
                self._cache,
                slots=self._slots,
                tables=self._tables,
                drafters=self._drafters,
                mtp=self._mtp,
                processed_logprobs=self._processed_logprobs,
            )
            self.build_seconds = self._clock() - begun
            # Prefill chunks come in every size: they must not crowd out what was captured.
            if repeats or not self._device.captures:
                self._memory.keep(shape, step)
        return step

    def _fill(self, step: Step, plan: Sequence[Scheduled]) -> int:
        """Writes the plan into a step's input arrays; returns the pages in its lists."""
        batch, row, page = len(plan), 0, 0
        columns: list[tuple[int, int, int, int, int, int]] = []
        self._host_limits = host_limits = []
        self._continued = []
        page_ends = [0]
        token_ids, page_ids = step.token_ids, step.kv_indices
        for limits in step.max_drafts.values():
            limits.fill(0)
        step.max_continued_drafts.fill(0)
        for index, part in enumerate(plan):
            request, count = part.request, part.num_rows
            known, begin, pages = request.token_ids, request.num_computed, request.pages
            method = request.speculative.method
            if count == 1:
                token_ids[row] = known[begin]
            elif part.num_drafts:
                if request.speculative.host_method:
                    drafts = self._host_drafts.drafts(request, part.num_drafts)
                else:
                    drafts = self._drafts[method][request.slot, : part.num_drafts]
                token_ids[row] = known[begin]
                token_ids[row + 1 : row + count] = drafts
                step.draft_token_ids[index, : part.num_drafts] = drafts
            else:
                token_ids[row : row + count] = known[begin : begin + count]
            row += count
            mode, host_limit = _NONE, 0
            if part.emits:
                mode = _ALL if part.num_drafts else _LAST
                if part.draft_limit:
                    if method == "mtp":
                        host_limit = self._fill_limits(step, part, index)
                    elif method in step.max_drafts:
                        step.max_drafts[method][request.slot] = part.draft_limit
                    else:
                        host_limit = part.draft_limit
            host_limits.append(host_limit)
            slot = request.slot
            changes = slot if request.features & Feature.PROCESSORS else -1
            columns.append((count, begin + count, mode, len(known), slot, changes))
            page_ids[page : page + len(pages)] = pages
            page += len(pages)
            page_ends.append(page)
        ints = step.ints
        ints[:, :batch] = np.array(columns, dtype=np.int32).T
        step.kv_indptr[: batch + 1] = page_ends
        slots = ints[SLOT, :batch]
        step.params[:, :batch] = self._params[:, slots]
        step.seeds[:batch] = self._seeds[slots]
        step.slot_state[:] = self._state
        if step.shape.features & (Feature.PROCESSORS | Feature.ACCEPT_RATES):
            self._fill_features(step, plan)
        if step.shape.rows > row:  # rows of nobody, with a token that there is
            token_ids[row:] = 0
        if step.shape.batch > batch:  # requests without rows
            ints[:, batch:] = 0
            ints[SLOT, batch:] = -1
            ints[PROCESSOR_SLOT, batch:] = -1
            step.params[:, batch:] = 0  # greedy, where drafts are drawn
            step.kv_indptr[batch + 1 :] = page
        if step.shape.draft_rows >= 0:
            self._fill_modules(step, plan)
        return page

    def _plan_modules(self, plan: Sequence[Scheduled], rows: int) -> int:
        """Decides whose MTP modules run in a step; returns its `StepShape.draft_rows`."""
        assert self._mtp is not None
        redrafts, room = 0, self._mtp.max_redrafts
        has_rows = False
        for part in plan:
            if not part.request.has_draft_kv:
                continue
            if part.emits and part.draft_limit == 0 and part.num_rows - part.num_drafts == 1:
                continue  # a rest, but not from prompts
            part.redraft_len = self._redraft_len(part, room)
            if part.redraft_len >= 0:
                has_rows = True
                redrafts += part.redraft_len
                room -= max(part.redraft_len - (self._mtp.num_modules - 1), 0)
        if not has_rows:
            return 0
        # On the CPU one size, so that shapes come again: rows that are not there cost nothing.
        return rows + redrafts if self._device.is_async else self._mtp.max_rows

    def _forget_states(self, plan: Sequence[Scheduled]) -> bool:
        """Keeps no states where all modules have a long rest; returns whether they have."""
        if self.lengths.rest <= LONG_REST:
            return False
        requests = [part.request for part in plan if part.request.has_draft_kv]
        if any(request.drafting is None for request in requests):
            return False
        for part in plan:
            part.request.kept_from = part.request.num_computed + part.num_rows
        return True

    def _redraft_len(self, part: Scheduled, room: int) -> int:
        """How many rows before the step's MTP modules run over again; -1: they cannot run.

        Where they are far behind, they begin anew, on a page's first position.

        Args:
            part: of a request that has modules.
            room: rows that may run again in the step, but for those that always do.
        """
        assert self._mtp is not None
        request = part.request
        begin, end = request.num_drafted, request.num_computed
        if begin < request.kept_from or end - begin > CATCH_UP:
            size = self._page_size
            begin = max(begin, (end - BEGIN_ANEW) // size * size)
            begin = max(begin, -(-request.kept_from // size) * size)
        missing = end - begin
        if missing < 0 or missing - (self._mtp.num_modules - 1) > room:
            return -1
        if begin > request.num_drafted:
            request.num_drafted = request.draft_begin = begin
        return missing

    def _fill_limits(self, step: Step, part: Scheduled, index: int) -> int:
        """Writes how many drafts a request with MTP modules gets; returns the host's part."""
        config, slot, limit = part.request.speculative, part.request.slot, part.draft_limit
        if part.redraft_len < 0:
            return 0
        step.max_drafts["mtp"][slot] = min(limit, config.num_model_steps)
        if config.mtp_strategy == "with_ngram":
            step.max_continued_drafts[slot] = limit
        elif config.mtp_strategy == "with_suffix":
            self._continued.append((index, slot))
            return limit
        return 0

    def _fill_modules(self, step: Step, plan: Sequence[Scheduled]) -> None:
        """Writes which requests' MTP modules run, and over what."""
        ints = step.mtp_ints
        ints[MTP_SLOT] = step.ints[SLOT]
        for index, part in enumerate(plan):
            if not part.request.has_draft_kv:
                ints[MTP_SLOT, index] = -1
        if step.shape.features & Feature.DRAFT_PROBS:
            ints[DRAFT_PROB_ROW] = -1
            for index, part in enumerate(plan):
                if part.num_drafts and part.request.features & Feature.DRAFT_PROBS:
                    ints[DRAFT_PROB_ROW, index] = self._rows[part.request.slot]
        ints[DRAFTING_SLOT] = -1
        if step.shape.draft_rows == 0:  # nobody reads the others
            return
        ints[REDRAFT_LEN:] = 0
        for index, part in enumerate(plan):
            if part.redraft_len >= 0:
                ints[DRAFTING_SLOT, index] = part.request.slot
                ints[REDRAFT_LEN, index] = part.redraft_len
                ints[SKIPPED, index] = part.request.draft_begin
        if step.shape.skips_pages:
            # A list that is too long at its end, by what the next request skips, is not read there.
            skipped = ints[SKIPPED] // self._page_size
            step.module_kv_indptr[:-1] = step.kv_indptr[:-1] + skipped
            step.module_kv_indptr[-1] = step.kv_indptr[-1]

    def _fill_features(self, step: Step, plan: Sequence[Scheduled]) -> None:
        """Writes what only some requests ask for."""
        step.mask_indices[:] = -1
        step.accept_rates[:] = 0
        row = 0  # with logits
        for index, part in enumerate(plan):
            if not part.emits:
                continue
            request, count = part.request, 1 + part.num_drafts
            if request.params.allowed_token_ids is not None:
                step.mask_indices[row : row + count] = request.slot
            if request.features & Feature.ACCEPT_RATES:
                rates = self._rates[request.slot][: step.accept_rates.shape[1]]
                step.accept_rates[index, : len(rates)] = rates
            row += count


def _emitted(plan: Sequence[Scheduled], step: Step) -> list[Emitted]:
    """What each request of a plan emitted, from a step's results."""
    tokens, accepted = step.tokens[: len(plan)].tolist(), step.accepted[: len(plan)].tolist()
    counts = step.committed[: len(plan)].tolist()
    reasons, stops = step.slot_state[FINISH_REASON : STOP_INDEX + 1].tolist()
    emitted = []
    for index, part in enumerate(plan):
        request = part.request
        one = Emitted(request, tokens[index][: counts[index]], accepted[index], [])
        reason = reasons[request.slot]
        if reason:
            one.finish_reason, one.stop_index = FinishReason(reason), stops[request.slot]
        emitted.append(one)
    if step.shape.logprobs >= 0:
        _attach_logprobs(plan, emitted, step)
    return emitted


def _attach_logprobs(plan: Sequence[Scheduled], emitted: Sequence[Emitted], step: Step) -> None:
    """Adds the log-probabilities (and alternatives, if any are wanted) to what was emitted."""
    chosen, ranks = step.logprobs[: len(plan)].tolist(), step.ranks[: len(plan)].tolist()
    ids, values = step.top_ids.tolist(), step.top_logprobs.tolist()
    first = 0  # of the request's output rows
    for index, (part, result) in enumerate(zip(plan, emitted, strict=True)):
        wanted = part.request.params.logprobs
        if wanted is not None:
            for column, token_id in enumerate(result.token_ids):
                top = zip(
                    ids[first + column][:wanted], values[first + column][:wanted], strict=True
                )
                logprob, rank = chosen[index][column], ranks[index][column]
                result.logprobs.append(TokenLogprob(token_id, logprob, tuple(top), rank))
        first += 1 + part.num_drafts if part.emits else 0
