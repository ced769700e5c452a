# SPDX-License-Identifier: Apache-2.0
"""Runs planned steps: fills a step's arrays, has it run, and reads what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import specops
from specops.batching import OutputMode
from specops.engine.config import EngineConfig
from specops.engine.drafters.base import Proposals
from specops.engine.drafters.drafting import Drafting
from specops.engine.emitted import Emitted
from specops.engine.memory.device import Device
from specops.engine.memory.step_memory import StepMemory
from specops.engine.memory.step_shape import StepShape, page_capacity, rounded, rung
from specops.engine.models import Transformer
from specops.engine.outputs import PromptScores, StepDrafts, TokenLogprob
from specops.engine.plan import Part, Plan, PrefixGroups
from specops.engine.prompt_logprobs import PromptScorer
from specops.engine.request import Feature, Request
from specops.engine.steps.slot_tables import SlotTables
from specops.engine.steps.step import (
    FINISH_REASONS,
    LENS,
    POSITIONS,
    SLOTS,
    STOP_INDICES,
    THINKING_STATE,
    RequestRow,
    RunnerParts,
    SamplingFloats,
    SamplingInts,
    SlotState,
    Step,
)
from specops.engine.steps.step_trees import tree_shape
from specops.engine.structured.step_masks import StepMasks, TokenRule
from specops.sampling import AcceptPolicy, FinishReason, VerifyStrategy

_STRATEGIES = {strategy.name.lower(): int(strategy) for strategy in VerifyStrategy}
_POLICIES = {policy.name.lower(): int(policy) for policy in AcceptPolicy}
# As plain numbers, which lists and arrays take sooner.
_NONE, _LAST, _ALL = int(OutputMode.NONE), int(OutputMode.LAST), int(OutputMode.ALL)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request asks of its steps, beside what is in arrays."""

    features: int
    logprobs: int  # alternatives beside each token; -1: no logprobs
    reports_drafts: bool
    has_mask: bool  # of allowed tokens, in the tables
    rates: list[float]  # of forced acceptance


class Runner:
    """Owns the model's cache and what the steps need to know of every running request.

    Args:
        model: on the device.
        device: where steps run.
        drafting: the drafters, with their pages allocated.
        config: of the engine; `max_num_seqs` slots, `max_num_batched_tokens` rows a step.
        num_pages: pages of the KV cache.
    """

    def __init__(
        self,
        model: Transformer,
        device: Device,
        drafting: Drafting,
        config: EngineConfig,
        num_pages: int,
    ) -> None:
        self._device = device
        self._drafting = drafting
        self._page_size = page_size = config.page_size
        slots, max_rows = config.max_num_seqs, config.max_num_batched_tokens
        processed_logprobs = config.logprobs_mode == "processed_logprobs"
        model.reserve(max_rows)
        # By slot, gathered into every step; `SamplingFloats`, `SamplingInts` and `SlotState`.
        self._floats: NDArray[np.float32]
        self._floats = np.zeros((len(SamplingFloats._fields), slots), dtype=np.float32)
        self._ints: NDArray[np.int32]
        self._ints = np.zeros((len(SamplingInts._fields), slots), dtype=np.int32)
        self._seeds: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._state: NDArray[np.int32] = np.zeros((len(SlotState._fields), slots), dtype=np.int32)
        self._asked: dict[int, _Asked] = {}
        pages = slots * -(-model.max_model_len // page_size)
        self._memory: StepMemory[Step] = StepMemory(
            device, StepShape(slots, max_rows, max_rows, max_rows - 1, pages)
        )
        self._tables = SlotTables(slots, model.max_model_len, model.config.vocab_size, model.device)
        self._masks = StepMasks(model.config.vocab_size, specops.get_num_threads())
        shape = (max_rows, model.config.hidden_size)
        taps = {
            layer: torch.empty(shape, dtype=model.dtype, device=model.device)
            for layer in drafting.taps
        }
        self._parts = RunnerParts(
            model=model,
            cache=model.new_kv_cache(num_pages, page_size),
            taps=taps,
            slots=slots,
            tables=self._tables,
            drafting=drafting,
            processed_logprobs=processed_logprobs,
        )
        self._prompt_scorer = PromptScorer(model, device, processed_logprobs=processed_logprobs)
        self._num_failures = 0  # of drafters, when the steps of `_memory` were made
        self._step: Step | None = None  # the last one that was launched, if one was
        self._places: dict[int, int] = {}  # in it, of requests that may draw drafts, by slot
        self._sources: dict[int, list[str]] = {}  # in it, of drafts that are reported, by slot

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""
        return self._memory.num_captures

    @property
    def draft_seconds(self) -> float:
        """What drafters took within the last step."""
        return self._step.draft_seconds if self._step else 0.0

    def start(self, request: Request) -> None:
        """Writes a request that got a slot into the per-slot arrays."""
        slot, params, config = request.slot, request.params, request.speculative
        self._floats[:, slot] = SamplingFloats(
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            typical_p=params.typical_p,
        )
        self._ints[:, slot] = SamplingInts(
            top_k=params.top_k,
            choice_index=request.choice_index,
            strategy=_STRATEGIES[config.verify_strategy],
            policy=_POLICIES[config.accept_policy],
        )
        self._seeds[slot] = request.seed
        self._state[:, slot] = SlotState(
            prompt_lens=request.prompt_len,
            max_lens=request.max_len,
            lens=len(request.token_ids),
            finish_reasons=FinishReason.RUNNING,
            stop_indices=-1,
            thinking_state=request.thinking_state,
        )
        self._asked[slot] = _Asked(
            features=request.features,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            reports_drafts=params.report_drafts,
            has_mask=params.allowed_token_ids is not None,
            rates=config.conditional_acceptance_rates(),
        )
        ends = request.think_end_token_id, len(request.inject_token_ids)
        self._masks.start(slot, TokenRule(request.grammar, params.allowed_token_ids, *ends))
        has_moved = True  # perhaps, where one of these raises
        try:
            has_moved = self._tables.start(request) | self._drafting.start(request)
        finally:
            if has_moved:
                self._memory.forget()

    def stop(self, request: Request, slot: int) -> None:
        """Forgets a request that loses its slot; it may come back."""
        self._state[LENS, slot] = 0
        self._drafting.stop(request, slot)

    def leave(self, request: Request) -> None:
        """Forgets a request that finished or was aborted, with a slot or without."""
        if request.slot >= 0:
            self.stop(request, request.slot)
        self._drafting.leave(request)

    def forget(self) -> None:
        """Forgets the steps made so far and what drafters have proposed."""
        self._memory.forget()
        self._drafting.forget()

    def launch(self, plan: Plan, *, even_if_idle: bool = False) -> None:
        """Begins to compute the rows of a step.

        Requests whose own part of the step cannot be made leave the plan; there may be none left.

        Args:
            plan: of the step.
            even_if_idle: run the model over a row that is nobody's where the plan has no part.

        Raises:
            ValueError: an op met wrong data, such as a page that does not exist.
        """
        self._step = None  # what it had is overwritten
        plan.drop_failed()
        while plan.parts or even_if_idle:
            # What fails in this, a request or a drafter, has no part in the step: it is made anew.
            failures = len(plan.failed), self._drafting.num_failures
            step = self._step_of(plan)
            num_pages = self._fill(step, plan)
            if failures == (len(plan.failed), self._drafting.num_failures):
                step.launch(num_pages)
                self._step = step
                return
            plan.drop_failed()

    def collect(self, plan: Plan) -> list[Emitted]:
        """Waits for the step, and returns what each request emitted, in the order of its plan.

        Raises:
            ValueError: as `launch`, on a device that works meanwhile.
        """
        step, parts = self._step, plan.parts
        if step is None:
            return []
        step.wait()
        if not parts:
            return []
        scores: dict[str, list[PromptScores]] = {}
        if step.shape.rows != step.shape.outputs:  # there are chunks of prompts
            scores = self._score_prompts(plan)
        self._take_proposals(step, plan)
        emitted = self._emitted(parts, step) if step.shape.outputs else [Emitted() for _ in parts]
        for part, one in zip(parts, emitted, strict=True) if scores else ():
            one.prompt_scores = scores.get(part.request_id, ())
        if step.shape.features & Feature.DRAFT_PROBS:
            self._places = {part.slot: place for place, part in enumerate(parts)}
        if step.shape.features & Feature.ENDINGS:
            state = step.arrays.slot_state.host[THINKING_STATE]
            self._state[THINKING_STATE] = state
            for part, one in zip(parts, emitted, strict=True):
                one.thinking_state = int(state[part.slot])
        return emitted

    def commit(self, request: Request) -> None:
        """Takes note of a request's length; the device has its tokens already."""
        self._state[LENS, request.slot] = len(request.token_ids)

    def finish(self, plan: Plan) -> None:
        """Has the drafters go on when all requests of a step are committed."""
        step = self._step
        assert step is not None, "the step has been run"
        if not self._drafting.width:  # nobody has ever drafted
            return
        count = len(plan.parts)
        requests, tokens = step.arrays.requests.host, step.arrays.token_tensor
        self._drafting.finish(
            plan,
            slots=requests[SLOTS, :count],
            token_ids=tokens if count == step.shape.batch else tokens[:count],
            lens_before=requests[POSITIONS, :count],
            lens=self._state[LENS],
        )

    def _score_prompts(self, plan: Plan) -> dict[str, list[PromptScores]]:
        """What a step's rows say of prompts, by request."""
        first, wanted = 0, []
        for part in plan.parts:
            if part.prompt_rows is not None:
                wanted.append(replace(part.prompt_rows, row=first + part.prompt_rows.row))
            first += part.num_rows
        if not wanted:
            return {}
        return self._prompt_scorer.score(wanted, first, self._sampling_of, plan.fail)

    def _sampling_of(self, slots: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The sampling parameters of some slots, by name."""
        places = list(slots)
        floats = SamplingFloats(*self._floats[:, places])._asdict()
        ints = SamplingInts(*self._ints[:, places])
        return {**floats, "top_k": ints.top_k, "strategy": ints.strategy}

    def _take_proposals(self, step: Step, plan: Plan) -> None:
        """Copies what drafters on the device proposed: the next step's inputs may lie there.

        What there is for requests that were not in the step stays. But what drafts were drawn from
        is known for one step only, so where that matters they are gone.
        """
        proposals: Proposals = self._drafting.proposals
        if not step.shape.proposals:
            return
        draws = Feature.DRAFT_PROBS
        kept = [slot for slot in plan.paused if not self._asked[slot].features & draws]
        before = proposals.of_slots(kept) if kept else None
        proposals.confidences.fill(0)
        proposals.are_trees.fill(False)
        proposals.stages.fill(0)
        if step.shape.drafters:
            proposals.token_ids[:] = step.arrays.proposed_token_ids.host
            proposals.counts[:] = step.arrays.num_proposed.host
        else:
            proposals.counts.fill(0)
        if before is not None:
            proposals.put(kept, before)
        self._drafting.read(step.arrays.drafters)

    def _step_of(self, plan: Plan) -> Step:
        """The step of the plan's shape, or of the shape that is rounded up to."""
        if self._num_failures != self._drafting.num_failures:
            self._num_failures = self._drafting.num_failures
            self._memory.forget()
        shape = self._shape_of(plan)
        step = self._memory.find(shape)
        if step is None:
            step = Step(shape, self._memory, self._parts)
            # Prefill chunks come in every size: they must not crowd out what was captured.
            if shape.rows == shape.outputs or not self._device.captures:
                self._memory.keep(shape, step)
        return step

    def _shape_of(self, plan: Plan) -> StepShape:
        parts = plan.parts
        rows = outputs = width = pages = features = 0
        logprobs = -1
        for part in parts:
            rows += part.num_rows
            pages += len(part.pages)
            if part.emits:
                asked = self._asked[part.slot]
                outputs += 1 + part.num_drafts
                width = max(width, part.num_drafts)
                features |= asked.features
                logprobs = max(logprobs, asked.logprobs)
        if features & Feature.DRAFT_PROBS and self._drafting.draft_probs.probs is None:
            features &= ~Feature.DRAFT_PROBS  # whoever would have written them has failed
        proposals = self._drafting.width
        if outputs:  # the same whatever was found, so that shapes come again
            width = max(width, proposals)
        levels = 0 if plan.prefixes is None else rung(len(plan.prefixes.leaders))
        shape = StepShape(
            len(parts), rows, outputs, width, pages, logprobs, proposals, features, levels
        )
        if any(part.draft_parents is not None for part in parts):
            shape = shape._replace(trees=tree_shape(parts, self._page_size))
        if features & Feature.PROCESSORS and (masks := self._masks.num_rows(parts)):
            shape = shape._replace(masks=rung(masks))
        most = self._memory.most
        if rows == outputs and (self._device.captures or not parts):
            shape = rounded(shape, most)
        else:
            shape = shape._replace(pages=page_capacity(pages, most.pages))
        return self._drafting.plan(parts, shape)

    def _fill(self, step: Step, plan: Plan) -> int:
        """Writes the plan into a step's input arrays; returns the pages in its lists."""
        arrays, parts, drafting = step.arrays, plan.parts, self._drafting
        row, page = 0, 0
        columns: list[tuple[int, int, int, int, int, int]] = []
        page_ends = [0]
        token_ids, page_ids = arrays.token_ids.host, arrays.kv_indices.host
        self._sources.clear()
        for index, part in enumerate(parts):
            count, slot, asked = part.num_rows, part.slot, self._asked[part.slot]
            mode = _LAST if part.emits else _NONE
            if count == 1:
                token_ids[row] = part.token_ids[0]
            elif part.num_drafts:
                mode = _ALL
                drafts = drafting.drafts_of(slot, part.num_drafts)
                token_ids[row] = part.token_ids[0]
                token_ids[row + 1 : row + count] = drafts
                arrays.draft_token_ids.host[index, : part.num_drafts] = drafts
                if asked.reports_drafts:
                    self._sources[slot] = drafting.sources_of(slot, part.num_drafts)
            else:
                token_ids[row : row + count] = part.token_ids
            row += count
            changes = slot if asked.features & Feature.PROCESSORS else -1
            # The order of `RequestRow`.
            columns.append((count, part.begin + count, mode, part.num_tokens, slot, changes))
            page_ids[page : page + len(part.pages)] = part.pages
            page += len(part.pages)
            page_ends.append(page)
        self._fill_requests(step, columns, page_ends)
        if plan.prefixes is not None:
            _fill_prefixes(step, plan.prefixes)
        if arrays.trees is not None:
            lens = RequestRow(*arrays.requests.host)
            lists = arrays.kv_indptr.host, arrays.kv_indices.host
            arrays.trees.fill(parts, lens.qo_lens, lens.kv_lens, *lists)
        if step.shape.features & (Feature.PROCESSORS | Feature.ACCEPT_RATES | Feature.DRAFT_PROBS):
            self._fill_features(step, plan)
        if step.shape.rows > row:  # rows of no request, with a token that there is
            token_ids[row:] = 0
        for drafter in arrays.drafters:
            drafter.fill()
        return page

    def _fill_requests(
        self, step: Step, columns: Sequence[tuple[int, ...]], page_ends: Sequence[int]
    ) -> None:
        """Writes what there is of every request, and of those that pad the step."""
        arrays, batch = step.arrays, len(columns)
        requests = arrays.requests.host
        requests[:, :batch] = np.array(columns, dtype=np.int32).T
        arrays.kv_indptr.host[: batch + 1] = page_ends
        slots = requests[SLOTS, :batch]
        arrays.sampling_floats.host[:, :batch] = self._floats[:, slots]
        arrays.sampling_ints.host[:, :batch] = self._ints[:, slots]
        arrays.seeds.host[:batch] = self._seeds[slots]
        arrays.slot_state.host[:] = self._state
        arrays.num_proposed.host.fill(0)
        if step.shape.batch > batch:  # requests without rows
            requests[:, batch:] = 0
            padding = RequestRow(*requests[:, batch:])
            padding.slots.fill(-1)
            padding.processor_slots.fill(-1)
            arrays.sampling_floats.host[:, batch:] = 0
            arrays.sampling_ints.host[:, batch:] = 0
            arrays.kv_indptr.host[batch + 1 :] = page_ends[-1]

    def _fill_features(self, step: Step, plan: Plan) -> None:
        """Writes what only some requests ask for."""
        arrays, parts = step.arrays, plan.parts
        arrays.mask_indices.host.fill(-1)
        arrays.accept_rates.host.fill(0)
        arrays.draft_prob_rows.host.fill(-1)
        if step.shape.masks:
            masks, indices = arrays.token_masks.host, arrays.mask_indices.host
            thinking = self._state[THINKING_STATE]
            self._masks.fill(plan, self._drafting.drafts_of, thinking, masks, indices)
        row = 0  # with logits
        for index, part in enumerate(parts):
            if not part.emits:
                continue
            asked, slot, count = self._asked[part.slot], part.slot, 1 + part.num_drafts
            if asked.has_mask and not step.shape.masks:
                arrays.mask_indices.host[row : row + count] = slot
            if asked.features & Feature.ACCEPT_RATES:
                rates = asked.rates[: step.shape.width]
                arrays.accept_rates.host[index, : len(rates)] = rates
            if asked.features & Feature.DRAFT_PROBS and part.num_drafts:
                place = self._places[slot]
                arrays.draft_prob_rows.host[index] = self._drafting.draft_prob_row(slot, place)
            row += count

    def _emitted(self, parts: Sequence[Part], step: Step) -> list[Emitted]:
        """What each request of a plan emitted, from a step's results."""
        arrays, count = step.arrays, len(parts)
        tokens = arrays.output_token_ids.host[:count].tolist()
        accepted = arrays.num_accepted.host[:count].tolist()
        counts = arrays.num_committed.host[:count].tolist()
        state = arrays.slot_state.host
        reasons, stops = state[FINISH_REASONS].tolist(), state[STOP_INDICES].tolist()
        emitted = []
        for index, part in enumerate(parts):
            path: Sequence[int] = range(accepted[index])
            if part.draft_parents is not None and arrays.trees is not None:
                path = arrays.trees.accepted_nodes.host[index, : len(path)].tolist()
            one = Emitted(tokens[index][: counts[index]], path, [])
            if reason := reasons[part.slot]:
                one.finish_reason, one.stop_index = FinishReason(reason), stops[part.slot]
            if sources := self._sources.get(part.slot):
                drafts = arrays.draft_token_ids.host[index, : part.num_drafts].tolist()
                parents = list(part.draft_parents or range(-1, part.num_drafts - 1))
                one.drafts = StepDrafts(drafts, parents, sources, list(path))
            emitted.append(one)
        if step.shape.logprobs >= 0:
            self._attach_logprobs(parts, emitted, step)
        return emitted

    def _attach_logprobs(
        self, parts: Sequence[Part], emitted: Sequence[Emitted], step: Step
    ) -> None:
        """Adds the log-probabilities (and alternatives, if any are wanted) to what was emitted."""
        arrays, count = step.arrays, len(parts)
        chosen = arrays.logprobs.host[:count].tolist()
        ranks = arrays.ranks.host[:count].tolist()
        ids, values = arrays.top_ids.host.tolist(), arrays.top_logprobs.host.tolist()
        first = 0  # of the request's output rows
        for index, (part, result) in enumerate(zip(parts, emitted, strict=True)):
            wanted = self._asked[part.slot].logprobs
            if wanted >= 0:
                # Each token was chosen by the row of the draft before it, the first by the root.
                rows = [first, *(first + 1 + node for node in result.accepted)]
                for column, token_id in enumerate(result.token_ids):
                    row = rows[column]
                    top = zip(ids[row][:wanted], values[row][:wanted], strict=True)
                    logprob, rank = chosen[index][column], ranks[index][column]
                    result.logprobs.append(TokenLogprob(token_id, logprob, tuple(top), rank))
            first += 1 + part.num_drafts if part.emits else 0


def _fill_prefixes(step: Step, prefixes: PrefixGroups) -> None:
    """Writes what requests share; on levels and of requests that pad the step, nothing."""
    leaders, lens = step.arrays.prefix_leaders.host, step.arrays.prefix_lens.host
    levels, count = prefixes.leaders.shape
    leaders[:] = np.arange(leaders.shape[1])
    lens.fill(0)
    leaders[:levels, :count] = prefixes.leaders
    lens[:levels, :count] = prefixes.lens
