# SPDX-License-Identifier: Apache-2.0
"""Runner of planned steps: fills a step's arrays, launches it and reads its results."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import specops
from specops.api.config import EngineConfig
from specops.api.outputs import StepDrafts, TokenLogprob
from specops.batching import OutputMode
from specops.engine.device import Device
from specops.engine.drafters.drafting import Drafting
from specops.engine.emitted import Emitted
from specops.engine.features import Feature
from specops.engine.memory.step_memory import StepMemory
from specops.engine.memory.step_shape import StepShape, bucket, page_capacity, rounded
from specops.engine.models import CacheCapacity, Transformer
from specops.engine.models.adapters import Adapter, AdapterRows, adapter_rows
from specops.engine.plan import Part, Plan, PrefixGroups
from specops.engine.prompt_logprobs import PromptScorer
from specops.engine.request import Request
from specops.engine.steps.slot_tables import SlotTables
from specops.engine.steps.step import (
    FILTERS,
    FINISH_REASONS,
    LENS,
    POSITIONS,
    SLOTS,
    STOP_INDICES,
    THINKING_STATE,
    RequestColumns,
    RunnerParts,
    SamplingColumns,
    SlotState,
    Step,
)
from specops.engine.steps.step_masks import StepMasks, TokenRule
from specops.sampling import AcceptPolicy, FinishReason, VerifyStrategy

_STRATEGIES = {strategy.name.lower(): int(strategy) for strategy in VerifyStrategy}
_POLICIES = {policy.name.lower(): int(policy) for policy in AcceptPolicy}
# Plain integers are stored in lists and arrays faster than enum members.
_NONE, _LAST, _ALL = int(OutputMode.NONE), int(OutputMode.LAST), int(OutputMode.ALL)


class Runner:
    """Owner of the model's KV cache and of the per-slot data of running requests.

    Args:
        model: the model, on the device.
        device: the device of the steps.
        drafting: the drafters, with their pages allocated.
        config: the engine's configuration: `max_num_seqs` slots, `max_num_batched_tokens` rows per
            step.
        capacity: capacity of the cache.

    Attributes:
        memory: memory of the steps.
        draft_seconds: time of the drafters within the last step.
    """

    def __init__(
        self,
        model: Transformer,
        device: Device,
        drafting: Drafting,
        config: EngineConfig,
        capacity: CacheCapacity,
    ) -> None:
        self._device = device
        self._drafting = drafting
        self._page_size = page_size = config.page_size
        slots, max_rows = config.max_num_seqs, config.max_num_batched_tokens
        processed_logprobs = config.logprobs_mode == "processed_logprobs"
        model.reserve(max_rows)
        # Per-slot data, gathered into every step: `SamplingColumns` and `SlotState`.
        self._sampling: NDArray[np.int32]
        self._sampling = np.zeros((len(SamplingColumns._fields), slots), dtype=np.int32)
        self._sampled = SamplingColumns.of(self._sampling, np.float32)
        self._seeds: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._state: NDArray[np.int32] = np.zeros((len(SlotState._fields), slots), dtype=np.int32)
        pages = slots * -(-model.max_model_len // page_size)
        self.memory: StepMemory[Step] = StepMemory(
            device, StepShape(slots, max_rows, max_rows, max_rows - 1, pages)
        )
        self._tables = SlotTables(slots, model.max_model_len, model.config.vocab_size, model.device)
        self._masks = StepMasks(model.config.vocab_size, specops.get_num_threads())
        shape = (max_rows, model.config.hidden_size)
        aux_hidden_states = {
            layer: torch.empty(shape, dtype=model.dtype, device=model.device)
            for layer in drafting.aux_layers
        }
        self.parts = RunnerParts(
            model=model,
            cache=model.new_kv_cache(*capacity),
            aux_hidden_states=aux_hidden_states,
            slots=slots,
            tables=self._tables,
            drafting=drafting,
            processed_logprobs=processed_logprobs,
        )
        self._prompt_scorer = PromptScorer(model, device, processed_logprobs=processed_logprobs)
        self._num_failures = 0  # failed drafters at the time when the steps of `memory` were built
        self._step: Step | None = None  # the last launched step, if any
        self.draft_seconds = 0.0

    def start(self, request: Request) -> None:
        """Write a request that got a slot to the per-slot arrays."""
        slot, params, config = request.slot, request.params, request.speculative
        sampled = self._sampled
        for name in FILTERS:
            getattr(sampled, name)[slot] = getattr(params, name)
        sampled.choice_index[slot] = request.choice_index
        sampled.strategy[slot] = _STRATEGIES[config.verify_strategy]
        sampled.policy[slot] = _POLICIES[config.accept_policy]
        self._seeds[slot] = request.seed
        self._state[:, slot] = SlotState(
            prompt_lens=request.prompt_len,
            max_lens=request.max_len,
            lens=len(request.token_ids),
            finish_reasons=FinishReason.RUNNING,
            stop_indices=-1,
            thinking_state=request.output.thinking_state,
        )
        ends = request.think_end_token_id, len(request.inject_token_ids)
        self._masks.start(slot, TokenRule(request.grammar, params.allowed_token_ids, *ends))
        has_moved = True  # assumed if one of these calls raises
        try:
            has_moved = self._tables.start(request) | self._drafting.start(request)
        finally:
            if has_moved:
                self.memory.forget()

    def stop(self, request: Request, slot: int) -> None:
        """Drop the data of a request that loses its slot; it may get one again."""
        self._state[LENS, slot] = 0
        self._drafting.stop(request, slot)

    def leave(self, request: Request) -> None:
        """Drop the data of a request that finished or was aborted, with or without a slot."""
        if request.slot >= 0:
            self.stop(request, request.slot)
        self._drafting.leave(request)

    def launch(self, plan: Plan, *, even_if_idle: bool = False) -> None:
        """Start computing the rows of a step.

        Requests whose part of the step cannot be prepared are removed from the plan, possibly all.

        Args:
            plan: the step's plan.
            even_if_idle: if the plan has no part, run the model on a padding row.

        Raises:
            ValueError: an op met invalid data, such as a page that does not exist.
        """
        self._step = None  # its arrays are overwritten below
        plan.drop_failed()
        while plan.parts or even_if_idle:
            # If a request or a drafter fails here, build the step again without it.
            failures = len(plan.failed), self._drafting.num_failures
            step = self._step_of(plan)
            num_pages = self._fill(step, plan)
            if failures == (len(plan.failed), self._drafting.num_failures):
                step.launch(num_pages, self._adapters_of(plan))
                self._step = step
                return
            plan.drop_failed()

    def collect(self, plan: Plan) -> list[Emitted]:
        """Wait for the step, and return what each request emitted, in the order of the plan.

        Raises:
            ValueError: as for `launch`, on an asynchronous device.
        """
        step, parts = self._step, plan.parts
        if step is None:
            return []
        step.wait()
        self.draft_seconds = step.draft_seconds
        if not parts:
            return []
        emitted = self._emitted(parts, step) if step.shape.outputs else [Emitted() for _ in parts]
        if step.shape.rows != step.shape.outputs:  # the step has prompt chunks
            rows = [(part.num_rows, part.prompt_rows) for part in parts]
            scores = self._prompt_scorer.score(rows, self._sampling_of, plan.fail)
            for part, one in zip(parts, emitted, strict=True) if scores else ():
                one.prompt_scores = scores.get(part.request.request_id, ())
        arrays = step.arrays
        proposed = arrays.proposed_token_ids.host, arrays.num_proposed.host
        self._drafting.read(plan, *proposed, arrays.drafters)
        return emitted

    def commit(self, request: Request) -> None:
        """Record a request's new length; the device has its tokens already."""
        self._state[LENS, request.slot] = len(request.token_ids)

    def finish(self, plan: Plan) -> None:
        """Let the drafters process a step on the host, after all its requests are committed."""
        step = self._step
        assert step is not None, "the step has been run"
        count = len(plan.parts)
        requests, tokens = step.arrays.requests.host, step.arrays.emitted
        self._drafting.finish(
            plan,
            slots=requests[SLOTS, :count],
            token_ids=tokens if count == step.shape.batch else tokens[:count],
            lens_before=requests[POSITIONS, :count],
            lens=self._state[LENS],
        )

    def _sampling_of(self, slots: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return the sampling parameters of some slots, by name."""
        names = (*FILTERS, "strategy")
        return {name: getattr(self._sampled, name)[list(slots)] for name in names}

    def _step_of(self, plan: Plan) -> Step:
        """Return the step for the plan's shape, rounded up where steps are captured."""
        if self._num_failures != self._drafting.num_failures:
            self._num_failures = self._drafting.num_failures
            self.memory.forget()
        shape = self._shape_of(plan)
        step = self.memory.find(shape)
        if step is None:
            step = Step(shape, self.memory, self.parts)
            # Prefill chunks come in every size: they must not evict captured steps.
            if shape.rows == shape.outputs or not self._device.captures:
                self.memory.keep(shape, step)
        return step

    def _adapters_of(self, plan: Plan) -> list[AdapterRows]:
        """Return the rows of each LoRA adapter in a step."""
        ranges: dict[Adapter, list[range]] = {}
        begin = 0
        for part in plan.parts:
            adapter, end = part.request.adapter, begin + part.num_rows
            if adapter is not None:
                ranges.setdefault(adapter, []).append(range(begin, end))
            begin = end
        return adapter_rows(ranges, self._device.device) if ranges else []

    def _shape_of(self, plan: Plan) -> StepShape:
        parts = plan.parts
        rows = outputs = width = pages = features = 0
        logprobs = -1
        for part in parts:
            rows += part.num_rows
            request = part.request
            pages += len(request.pages)
            if part.emits:
                outputs += 1 + part.num_drafts
                width = max(width, part.num_drafts)
                features |= request.features
                if request.params.logprobs is not None:
                    logprobs = max(logprobs, request.params.logprobs)
        if features & Feature.DRAFT_PROBS and self._drafting.draft_probs.probs is None:
            features &= ~Feature.DRAFT_PROBS  # the drafter that fills draft_probs has failed
        proposals = self._drafting.width
        if outputs:  # independent of the drafts found, so that shapes recur
            width = max(width, proposals)
        levels = 0 if plan.prefixes is None else bucket(len(plan.prefixes.leaders))
        shape = StepShape(
            len(parts), rows, outputs, width, pages, logprobs, proposals, features, levels
        )
        if features & Feature.PROCESSORS and (masks := self._masks.num_rows(parts)):
            shape = shape._replace(masks=bucket(masks))
        most = self.memory.most
        if rows == outputs and (self._device.captures or not parts):
            shape = rounded(shape, most)
        else:
            shape = shape._replace(pages=page_capacity(pages, most.pages))
        return self._drafting.plan(parts, shape)

    def _fill(self, step: Step, plan: Plan) -> int:
        """Write the plan to a step's input arrays; return the total length of its page lists."""
        arrays, parts, drafting = step.arrays, plan.parts, self._drafting
        row, page = 0, 0
        columns: list[tuple[int, int, int, int, int, int]] = []
        page_ends = [0]
        token_ids, page_ids = arrays.token_ids.host, arrays.kv_indices.host
        for index, part in enumerate(parts):
            request, count = part.request, part.num_rows
            known, slot, pages = request.token_ids, request.slot, request.pages
            mode = _LAST if part.emits else _NONE
            if count == 1:
                token_ids[row] = known[part.begin]
            elif part.num_drafts:
                mode = _ALL
                drafts = drafting.drafts_of(slot, part.num_drafts)
                token_ids[row] = known[part.begin]
                token_ids[row + 1 : row + count] = drafts
                arrays.draft_token_ids.host[index, : part.num_drafts] = drafts
            else:
                token_ids[row : row + count] = known[part.begin : part.begin + count]
            row += count
            changes = slot if request.features & Feature.PROCESSORS else -1
            # The order of `RequestColumns`.
            columns.append((count, part.begin + count, mode, len(known), slot, changes))
            page_ids[page : page + len(pages)] = pages
            page += len(pages)
            page_ends.append(page)
        self._fill_requests(step, columns, page_ends)
        if plan.prefixes is not None:
            _fill_prefixes(step, plan.prefixes)
        if step.shape.features & (Feature.PROCESSORS | Feature.ACCEPT_RATES | Feature.DRAFT_PROBS):
            self._fill_features(step, plan)
        if step.shape.rows > row:  # padding rows hold a valid token
            token_ids[row:] = 0
        for drafter in arrays.drafters:
            drafter.fill()
        return page

    def _fill_requests(
        self, step: Step, columns: Sequence[tuple[int, ...]], page_ends: Sequence[int]
    ) -> None:
        """Write the columns of every request, and of padding requests."""
        arrays, batch = step.arrays, len(columns)
        requests = arrays.requests.host
        requests[:, :batch] = np.array(columns, dtype=np.int32).T
        arrays.kv_indptr.host[: batch + 1] = page_ends
        slots = requests[SLOTS, :batch]
        arrays.sampling.host[:, :batch] = self._sampling[:, slots]
        arrays.seeds.host[:batch] = self._seeds[slots]
        arrays.slot_state.host[:] = self._state
        arrays.num_proposed.host.fill(0)
        if step.shape.batch > batch:  # padding requests without rows
            requests[:, batch:] = 0
            padding = RequestColumns(*requests[:, batch:])
            padding.slots.fill(-1)
            padding.processor_slots.fill(-1)
            sampled = arrays.sampling.host[:, batch:]
            sampled.fill(0)
            # Drafters choose a token in these rows too, and a typical_p of 0 is out of range.
            SamplingColumns.of(sampled, np.float32).typical_p.fill(1)
            arrays.kv_indptr.host[batch + 1 :] = page_ends[-1]

    def _fill_features(self, step: Step, plan: Plan) -> None:
        """Write the inputs of optional features."""
        arrays, parts = step.arrays, plan.parts
        arrays.mask_indices.host.fill(-1)
        arrays.accept_rates.host.fill(0)
        arrays.draft_prob_rows.host.fill(-1)
        if step.shape.masks:
            arrays.draft_mask_indices.host.fill(-1)
            thinking = self._state[THINKING_STATE]
            self._masks.fill(
                plan,
                self._drafting.drafts_of,
                thinking,
                arrays.token_masks.host,
                arrays.mask_indices.host,
                arrays.draft_mask_indices.host,
            )
        for index, part in enumerate(parts):
            if not part.emits:
                continue
            request = part.request
            if request.features & Feature.ACCEPT_RATES:
                rates = request.speculative.conditional_acceptance_rates()[: step.shape.width]
                arrays.accept_rates.host[index, : len(rates)] = rates
            if request.features & Feature.DRAFT_PROBS and part.num_drafts:
                arrays.draft_prob_rows.host[index] = self._drafting.draft_prob_row(request)

    def _emitted(self, parts: Sequence[Part], step: Step) -> list[Emitted]:
        """Return what each request of a plan emitted, from a step's results."""
        arrays, count = step.arrays, len(parts)
        tokens = arrays.output_token_ids.host[:count].tolist()
        accepted = arrays.num_accepted.host[:count].tolist()
        counts = arrays.num_committed.host[:count].tolist()
        state = arrays.slot_state.host
        reasons, stops = state[FINISH_REASONS].tolist(), state[STOP_INDICES].tolist()
        thinks = bool(step.shape.features & Feature.ENDINGS)
        if thinks:
            self._state[THINKING_STATE] = state[THINKING_STATE]
        emitted = []
        for index, part in enumerate(parts):
            request, slot = part.request, part.request.slot
            one = Emitted(tokens[index][: counts[index]], accepted[index])
            if part.num_drafts:
                drafts = arrays.draft_token_ids.host[index, : part.num_drafts].tolist()
                one.num_from_drafts = _num_equal(one.token_ids, drafts[: one.num_accepted])
            if thinks:
                one.thinking_state = int(state[THINKING_STATE, slot])
            if reason := reasons[slot]:
                one.finish_reason, one.stop_index = FinishReason(reason), stops[slot]
            if part.num_drafts and request.params.report_drafts:
                sources = self._drafting.sources_of(request, part.num_drafts)
                one.drafts = StepDrafts(drafts, sources, one.num_accepted)
            emitted.append(one)
        if step.shape.logprobs >= 0:
            self._attach_logprobs(parts, emitted, step)
        return emitted

    def _attach_logprobs(
        self, parts: Sequence[Part], emitted: Sequence[Emitted], step: Step
    ) -> None:
        """Add log-probabilities, and alternatives if requested, to the emitted tokens."""
        arrays, count = step.arrays, len(parts)
        chosen = arrays.logprobs.host[:count].tolist()
        ranks = arrays.ranks.host[:count].tolist()
        ids, values = arrays.top_ids.host.tolist(), arrays.top_logprobs.host.tolist()
        first = 0  # first output row of the request
        for index, (part, result) in enumerate(zip(parts, emitted, strict=True)):
            wanted = part.request.params.logprobs
            if wanted is not None:
                for column, token_id in enumerate(result.token_ids):
                    row = first + column
                    top = zip(ids[row][:wanted], values[row][:wanted], strict=True)
                    logprob, rank = chosen[index][column], ranks[index][column]
                    result.logprobs.append(TokenLogprob(token_id, logprob, tuple(top), rank))
            first += 1 + part.num_drafts if part.emits else 0


def _num_equal(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """Return the number of leading tokens that are drafts.

    Tokens that end the thinking by force may have replaced accepted drafts.
    """
    count = min(len(tokens), len(drafts))
    return next((i for i in range(count) if tokens[i] != drafts[i]), count)


def _fill_prefixes(step: Step, prefixes: PrefixGroups) -> None:
    """Write shared prefixes; padding levels and padding requests share nothing."""
    leaders, lens = step.arrays.prefix_leaders.host, step.arrays.prefix_lens.host
    levels, count = prefixes.leaders.shape
    leaders[:] = np.arange(leaders.shape[1])
    lens.fill(0)
    leaders[:levels, :count] = prefixes.leaders
    lens[:levels, :count] = prefixes.lens
