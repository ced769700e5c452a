# SPDX-License-Identifier: Apache-2.0
"""All drafters of an engine in drafting order, and the table of their proposals.

This module catches all exceptions of drafters. No token depends on drafts, so the affected requests
are decoded without drafts from then on; later requests use the drafter again.
"""

import logging
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specops.api.methods import (
    COMPANIONS,
    METHODS,
    NAIVE,
    companion,
    drafting_order,
    method_of,
)
from specops.api.speculative_config import SpeculativeConfig
from specops.engine.drafters.acceptance import RequestAcceptance
from specops.engine.drafters.acceptance_watch import AcceptanceWatch
from specops.engine.drafters.base import (
    Drafter,
    DrafterContext,
    MethodUnavailable,
    Proposals,
    RequestsFailed,
    StepResults,
)
from specops.engine.drafters.draft_probs import DraftProbTable
from specops.engine.drafters.selection import DraftSelector
from specops.engine.drafters.watched_step import WatchedStep
from specops.engine.features import Feature
from specops.engine.memory.step_memory import Layout
from specops.engine.memory.step_shape import StepShape
from specops.engine.models import CacheCapacity, KvBytes, KvCache
from specops.engine.plan import Part, Plan
from specops.engine.request import Request

logger = logging.getLogger(__name__)

# Failures of draft selection are counted under this name, next to the names of the methods.
_SELECTION = "adaptive_verification"

_NOT_LOADED = (
    "its weights were not loaded, since the server's configuration names it neither in "
    "speculative_config nor in methods"
)
_NO_ROOM = (
    "the slots of a model with linear attention have room for the drafts of the server's own "
    "speculative_config, which has none"
)


class Drafting:
    """All drafters of an engine, the requests that use them, and their shared table of proposals.

    Args:
        context: the engine's config, target, tokenizer and device.

    Attributes:
        drafters: the drafters by method name, in drafting order.
        missing: by method name, the reason why it is not in `drafters`, without file paths.
        proposals: drafts for the next step, by slot.
        draft_probs: the distributions that drafts were drawn from.
        parts: parts of the current step.
        num_failures: number of exceptions that drafters have raised. Steps built before a failure
            must not run again: a drafter's part may be missing or incompletely captured.
        failures: number of exceptions by method, including zeros; "adaptive_verification" counts
            failures of draft selection. The keys never change.
        warnings: sentences about drafters whose drafts seem useless; each value is 1.
        with_weights: names of the drafters that run a model whose weights are not random.
        max_num_drafts: limit on drafts if the target stores a state per draft; None: no limit.

    Raises:
        ModelError: a method that the configuration names cannot run.
        ValueError: a file that the configuration names for a method cannot be used, or the
            configuration requests more drafts than the method makes.
    """

    def __init__(self, context: DrafterContext) -> None:
        self.drafters: dict[str, Drafter] = {}
        self.missing: dict[str, str] = {}
        for name in drafting_order():
            method = method_of(name)
            if not context.config.wants_method(method):
                self.missing[name] = _NOT_LOADED
                continue
            try:
                self.drafters[name] = method.load(context)
            except MethodUnavailable as error:
                if context.config.names_method(name):
                    raise
                self.missing[name] = error.reason
        self._companions: list[Drafter] = [companion(name).load(context) for name in COMPANIONS]
        all_drafters = (*self.drafters.values(), *self._companions)
        # Running requests of each drafter.
        self._requests: dict[Drafter, set[Request]] = {one: set() for one in all_drafters}
        self.num_failures = 0
        self.failures = dict.fromkeys((*(one.name for one in all_drafters), _SELECTION), 0)
        self.warnings: dict[str, int] = {}
        self.with_weights = [name for name in self.drafters if method_of(name).needs_weights]
        if context.config.load_format == "dummy":  # random weights are expected to be useless
            self.with_weights = []
        self._watch = AcceptanceWatch(self.with_weights, self.warn)
        self._num_logged: dict[str, int] = {}  # number of failures by description
        self._selector: DraftSelector | None = None
        self._acceptance: dict[Request, RequestAcceptance] = {}  # of requests with draft selection
        self._selected: dict[Request, list[float]] = {}  # confidences of the selected drafts
        self.parts: Sequence[Part] = []
        self._places: dict[int, int] = {}  # index of a request in the last step, by slot
        defaults = context.config.speculative_config
        self.max_num_drafts = (
            defaults.num_speculative_tokens if context.target.keeps_states else None
        )
        if self.max_num_drafts == 0:
            self.missing = dict.fromkeys(METHODS, _NO_ROOM)
        slots = context.config.max_num_seqs
        self.proposals = Proposals.empty(slots, 0)
        drawing = {
            name: one.drawn_from
            for name, one in self.drafters.items()
            if one.drawn_from is not None
        }
        self.draft_probs = DraftProbTable(drawing, slots, context.device.device)
        self._most_drawn = 0  # maximum drafts of a request whose drafter samples
        self._check_lengths(context.config.speculative_config)
        self._check_room(context.config.speculative_config)

    def check(self, config: SpeculativeConfig) -> None:
        """Reject a request's configuration if the drafters do not support it.

        Raises:
            ValueError: the request wants a longer chain than a drafter makes, draft selection
                although step times are unknown, or more drafts than slots have memory for.
        """
        self._check_lengths(config)
        self._check_room(config)
        if config.selects_drafts and self._selector is None:
            raise ValueError(
                "adaptive_verification needs an engine that knows what a row costs: turn it on in "
                "the engine's own speculative_config, got it for a request alone"
            )

    def _check_lengths(self, config: SpeculativeConfig) -> None:
        """Reject chains longer than a drafter makes."""
        for name, count in config.draft_stages:
            most = self.drafters[name].max_drafts
            if most is not None and count > most:
                raise ValueError(
                    f"num_model_steps must be at most {most}, the drafts of a step that the "
                    f'weights of "{name}" make in this engine, got {count}; where it is not '
                    "given, it is num_speculative_tokens"
                )

    def _check_room(self, config: SpeculativeConfig) -> None:
        """Reject more drafts than the server's limit if the target stores a state per draft."""
        most = self.max_num_drafts
        if most is not None and config.num_speculative_tokens > most:
            raise ValueError(
                f"num_speculative_tokens must be at most {most}, the server's own, for a "
                "model with linear attention, whose slots have room for so many drafts; got "
                f"{config.num_speculative_tokens}"
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that requests may choose."""
        if self.max_num_drafts == 0:
            return (NAIVE,)
        return (NAIVE, *(name for name in METHODS if name in self.drafters))

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose auxiliary hidden states drafters read, ascending."""
        return tuple(sorted({layer for one in self.drafters.values() for layer in one.aux_layers}))

    @property
    def width(self) -> int:
        """Number of columns of the proposals: the maximum number of drafts of a request so far."""
        return int(self.proposals.token_ids.shape[1])

    @property
    def kv_bytes(self) -> KvBytes:
        """Bytes that the caches of all drafters take."""
        each = [KvBytes(), *(one.kv_bytes for one in self.drafters.values())]
        return KvBytes(*map(sum, zip(*each, strict=True)))

    @property
    def states(self) -> dict[str, KvCache]:
        """Caches of the drafters whose layers keep recurrent states, by drafter name."""
        found = {name: one.states for name, one in self.drafters.items()}
        return {name: cache for name, cache in found.items() if cache is not None}

    def aux_layers_of(self, shape: StepShape) -> tuple[int, ...]:
        """Return the target layers read by the drafters that run in steps of a shape."""
        return tuple(
            sorted(
                {layer for name, _ in shape.drafters for layer in self.drafters[name].aux_layers}
            )
        )

    def draft_prob_row(self, request: Request) -> int:
        """Return the row of `draft_probs` that holds a request's drafts; -1 if there is none."""
        drafter = next(iter(request.drafts.stages), None)
        return -1 if drafter is None else self.draft_probs.row(drafter, self._places[request.slot])

    @property
    def has_unsaved(self) -> bool:
        """True if a drafter has unsaved data. A drafter that raises counts as saved."""
        for drafter in self.drafters.values():
            try:
                if drafter.is_unsaved:
                    return True
            except Exception as error:
                logger.error("is_unsaved of drafter %s failed", drafter.name, exc_info=error)
        return False

    def save(self) -> None:
        """Save what drafters have learned to their files."""
        for drafter in self.drafters.values():
            if drafter.is_unsaved:
                drafter.save()

    @property
    def of_common_text(self) -> set[str]:
        """Names of the drafters whose drafts may come from text that the server's operator loaded.

        Drafts from such a corpus are not shown to clients. A drafter is included if its
        `drafts_common_text` is True or raises an exception.
        """
        found: set[str] = set()
        for name, drafter in self.drafters.items():
            try:
                is_common = drafter.drafts_common_text
            except Exception as error:
                logger.error("drafts_common_text of drafter %s failed", name, exc_info=error)
                is_common = True
            if is_common:
                found.add(name)
        return found

    @property
    def gauges(self) -> dict[str, int]:
        """Metrics of all drafters by name, without drafters whose `gauges` raise an exception."""
        found: dict[str, int] = {}
        for drafter in self.drafters.values():
            try:
                found |= drafter.gauges()
            except Exception as error:
                logger.error("gauges of drafter %s failed", drafter.name, exc_info=error)
        return found

    def admit(self, request: Request) -> None:
        """Set the draft KV of a new request. At most one of its drafters has draft KV."""
        drafters = self._drafters_of(request)
        found = [one for one in self._ask_each(drafters, "draft_kv", request) if one is not None]
        assert len(found) <= 1, "two drafters of one request keep keys and values on its pages"
        request.drafts.kv = found[0] if found else None

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate the caches of all drafters."""
        for drafter in self.drafters.values():
            drafter.allocate(capacity)

    def start(self, request: Request) -> bool:
        """Start drafting for a request that got its slot.

        Returns:
            Whether memory that captured steps use has moved.
        """
        if not request.drafts.stages:
            return False
        has_moved = request.speculative.num_speculative_tokens > self.width
        if has_moved:
            self.proposals = self.proposals.widened(request.speculative.num_speculative_tokens)
        config = request.speculative
        if self._selector is not None and config.selects_drafts and request not in self._acceptance:
            self._acceptance[request] = self._selector.start(config.drafters_name)
        drafters = self._drafters_of(request)
        for drafter in drafters:
            self._requests[drafter].add(request)
        try:
            has_moved |= self._reserve_draft_probs(request)
        except Exception as error:
            name = next(iter(request.drafts.stages))
            self._lose(name, "memory for draft_probs", error, [request])
            return has_moved
        return any(self._ask_each(drafters, "start", request)) or has_moved

    def _reserve_draft_probs(self, request: Request) -> bool:
        """Grow `draft_probs` for a request if needed; return whether the table has moved."""
        for name, limit in request.drafts.stages.items():
            if self.drafters[name].drawn_from is not None:
                self._most_drawn = max(self._most_drawn, limit)
        # Once the table exists, drafters write the distributions of all their requests to it.
        if not request.speculative.draws_drafts and self.draft_probs.probs is None:
            return False
        return self.draft_probs.reserve(self._most_drawn)

    def stop(self, request: Request, slot: int) -> None:
        """Stop drafting for a request that gave its slot back."""
        self.proposals.counts[slot] = 0
        drafters = [one for one in self._drafters_of(request) if request in self._requests[one]]
        for drafter in drafters:
            self._requests[drafter].remove(request)
        self._ask_each(drafters, "stop", request, slot)

    def leave(self, request: Request) -> None:
        """Drop a request that has ended or continues without drafts."""
        drafters = self._drafters_of(request)
        request.drafts.stages.clear()
        request.drafts.limit = 0
        self._acceptance.pop(request, None)
        self._ask_each(drafters, "leave", request)

    def forget(self) -> None:
        """Drop all proposals, and reset the width of their table."""
        self.proposals = Proposals.empty(len(self.proposals.counts), 0)

    def select_by(self, seconds: Sequence[float]) -> None:
        """Enable draft selection, for requests whose configuration turns it on.

        Args:
            seconds: duration of a step by its number of rows, from 0 rows on.
        """
        self._selector = DraftSelector(seconds)

    def select(self, requests: Sequence[Request], room: int) -> None:
        """Decide how many of its proposed drafts each request verifies; set `num_drafts`.

        Args:
            requests: all requests that decode in the step.
            room: limit on the total number of drafts.
        """
        if not self.width:  # no request has ever drafted
            return
        self._selected.clear()
        selected = [one for one in requests if one in self._acceptance] if self._acceptance else []
        fixed = [one for one in requests if one not in self._acceptance] if selected else requests
        proposed = list(map(self.num_proposed, fixed))
        rows = len(fixed)
        for request, count in zip(fixed, share_out(proposed, room), strict=True):
            request.drafts.num_selected = count
            rows += count
        if selected:
            try:
                self._select(selected, room - (rows - len(fixed)), others=rows)
            except Exception as error:
                for request in selected:
                    request.drafts.num_selected = 0
                self._lose(_SELECTION, "the selection of drafts", error, selected)

    def _select(self, candidates: Sequence[Request], room: int, others: int) -> None:
        """Select the drafts of `candidates`, in a step with `others` rows of other requests."""
        assert self._selector is not None
        requests: list[Request] = []
        confidences: list[list[float]] = []
        for request in candidates:
            count, slot = self.num_proposed(request), request.slot
            own = self.proposals.confidences[slot, :count].tolist()
            if not all(0.0 <= one <= 1.0 for one in own):  # also catches NaN
                request.drafts.num_selected = 0
                others += 1
                message = f"confidences of drafts must be within [0, 1], got {own}"
                self._lose(_SELECTION, "the selection of drafts", ValueError(message), [request])
                continue
            requests.append(request)
            confidences.append(own)
        acceptance = [self._acceptance[request] for request in requests]
        chosen = self._selector.select(acceptance, confidences, room, others)
        for request, count, own in zip(requests, chosen, confidences, strict=True):
            request.drafts.num_selected = count
            if count:
                self._selected[request] = own[:count]

    def observe(self, parts: Sequence[Part], accepted: Sequence[int]) -> None:
        """Update acceptance probabilities and counts with the outcome of a step.

        Args:
            parts: the parts of the step.
            accepted: for each part, the number of its accepted drafts.
        """
        self._watch.observe(parts, accepted)
        if not self._selected or self._selector is None:
            return
        seen = [
            (self._acceptance[part.request], own[: part.num_drafts], count)
            for part, count in zip(parts, accepted, strict=True)
            if part.num_drafts and part.request in self._acceptance  # has not ended meanwhile
            if (own := self._selected.get(part.request))
        ]
        if not seen:
            return
        try:
            self._selector.observe(*zip(*seen, strict=True))
        except Exception as error:
            self._lose(_SELECTION, "the selection of drafts", error, list(self._selected))

    def num_proposed(self, request: Request) -> int:
        """Return how many drafts a request has, up to the number that it may still emit."""
        return max(min(int(self.proposals.counts[request.slot]), request.draft_room), 0)

    def drafts_of(self, slot: int, count: int) -> NDArray[np.int32]:
        """Return the first `count` drafts that a slot's request verifies, int32 [count]."""
        return self.proposals.token_ids[slot, :count]

    def sources_of(self, request: Request, count: int) -> list[str]:
        """Return the name of the drafter that proposed each of the first `count` drafts."""
        places = self.proposals.stages[request.slot, :count].tolist()
        stages = request.speculative.draft_stages  # includes drafters that failed
        names = (*(name for name, _ in stages), *reversed(COMPANIONS))  # -1: the first companion
        return [names[place] for place in places]

    def plan(self, parts: Sequence[Part], shape: StepShape) -> StepShape:
        """Return the shape with the drafters that run after the step."""
        if not self.width:
            return shape
        self.parts = parts
        work: list[tuple[str, Hashable]] = []
        for name, drafter in self.drafters.items():
            key = self._ask(drafter, "plan", parts, shape)
            if key is not None:
                work.append((name, key))
        # If only one drafter runs on the device, the host knows the source of the drafts.
        reports = len(work) > 1 and bool(self._reporting())
        return shape._replace(drafters=tuple(work), reports_stages=reports)

    def new_steps(self, shape: StepShape, inputs: Layout, results: Layout) -> list[WatchedStep]:
        """Make the drafters' parts of the steps of one shape, in drafting order."""
        steps: list[WatchedStep] = []
        for name, key in shape.drafters:
            drafter = self.drafters[name]
            made = self._ask(drafter, "new_step", key, shape, inputs, results)
            if made is not None:
                counts = None
                if shape.reports_stages:
                    counts = results.int32(len(self.proposals.counts))
                lose = partial(self.lose_all_of, drafter)
                steps.append(WatchedStep(made, name, counts, lambda: self.parts, lose))
        return steps

    def read(
        self,
        plan: Plan,
        token_ids: NDArray[np.int32],
        counts: NDArray[np.int32],
        steps: Sequence[WatchedStep],
    ) -> None:
        """Copy the drafts of the drafters on the device, and record the source of each draft.

        Requests that skipped the step keep their proposals, except those whose drafts are verified
        with draft distributions: these last for one step only.

        Args:
            plan: the step's plan.
            token_ids: int32 [slots, k], the drafts; copied, because the next step's inputs may
                reuse the memory.
            counts: int32 [slots], number of drafts.
            steps: the drafters' parts of the step.
        """
        if not self.width:  # no request has ever drafted
            return
        proposals, draws = self.proposals, Feature.DRAFT_PROBS
        paused = [request.slot for request in plan.paused if not request.features & draws]
        before = proposals.of_slots(paused) if paused else None
        proposals.confidences.fill(0)
        proposals.stages.fill(0)
        if steps:
            proposals.token_ids[:] = token_ids
        proposals.counts[:] = counts
        if before is not None:
            proposals.put(paused, before)
        if self.draft_probs.probs is not None:
            self._places = {part.request.slot: place for place, part in enumerate(plan.parts)}
        for step in steps:
            step.read(proposals)
        for request in self._reporting():
            begin = 0
            for step in steps:
                counts = self.proposals.counts if step.counts is None else step.counts.host
                begin = self._attribute(request, step.name, begin, int(counts[request.slot]))

    def _reporting(self) -> list[Request]:
        """Return the requests of the step whose clients requested the sources of drafts."""
        requests = [part.request for part in self.parts]
        return [request for request in requests if request.params.report_drafts]

    def _attribute(self, request: Request, drafter: str, begin: int, end: int) -> int:
        """Record `drafter` as the source of a request's drafts from `begin` to `end`.

        Returns:
            `end`, or `begin` if the request does not use `drafter`.
        """
        if drafter not in request.drafts.stages:
            return begin
        place = list(request.drafts.stages).index(drafter)
        self.proposals.stages[request.slot, begin:end] = place
        return end

    def finish(self, plan: Plan, **results: Any) -> None:
        """Run the host part of all drafters, once all requests have committed the step's tokens.

        Args:
            plan: the step's plan.
            results: fields of `StepResults`, except those that this call sets.
        """
        if not self.width:  # no request has ever drafted
            return
        step = StepResults(
            parts=plan.parts,
            proposals=self.proposals,
            fail=lambda request, error: plan.fail(request.request_id, error),
            **results,
        )
        reporting, counts = self._reporting(), self.proposals.counts
        for drafter in self._requests:
            before = [int(counts[request.slot]) for request in reporting]
            self._ask(drafter, "finish", step)
            for request, begin in zip(reporting, before, strict=True):
                self._attribute(request, drafter.name, begin, int(counts[request.slot]))

    def _drafters_of(self, request: Request) -> list[Drafter]:
        """Return a request's drafters in drafting order; empty if it does not speculate."""
        drafters = [self.drafters[name] for name in request.drafts.stages]
        return drafters + self._companions if drafters else drafters

    def _ask(self, drafter: Drafter, hook: str, *arguments: Any) -> Any:
        """Call a drafter's hook for a step; return None if it has no requests or raises."""
        if not self._requests[drafter]:
            return None
        try:
            return getattr(drafter, hook)(*arguments)
        except Exception as error:
            self.lose_all_of(drafter, hook, error)
            return None

    def _ask_each(
        self, drafters: Sequence[Drafter], hook: str, request: Request, *arguments: Any
    ) -> list[Any]:
        """Call a hook of several drafters for a request.

        If a hook raises, the other drafters' hooks are still called; then the request continues
        without drafts.
        """
        answers, failures = [], []
        for drafter in drafters:
            try:
                answers.append(getattr(drafter, hook)(request, *arguments))
            except Exception as error:
                failures.append((drafter.name, error))
        for name, failure in failures:  # after all hooks have run
            self._lose(name, f"{hook} of drafter {name}", failure, [request])
        return answers

    def warn(self, name: str, sentence: str) -> None:
        """Log and record a warning about a drafter."""
        logger.warning("drafter %s: %s", name, sentence)
        self.warnings[f"drafter {name}: {sentence}"] = 1

    def lose_all_of(self, drafter: Drafter, hook: str, error: Exception) -> None:
        """Decode the requests of a drafter without drafts after its part of a step raised."""
        requests = self._requests[drafter]
        if isinstance(error, RequestsFailed):
            requests = requests.intersection(error.requests)
        self._lose(drafter.name, f"{hook} of drafter {drafter.name}", error, requests)

    def _lose(
        self, method: str, what: str, error: Exception, requests: Collection[Request]
    ) -> None:
        """Record a failure, and decode the affected requests without drafts from now on.

        Args:
            method: the key of `failures` to increment.
            what: description of the part that failed. Failures 1, 10, 100 and so on are logged.
            error: the exception.
            requests: requests that lose their drafts.
        """
        self.num_failures += 1
        self.failures[method] += 1
        times = self._num_logged[what] = self._num_logged.get(what, 0) + 1
        if str(times).rstrip("0") == "1":
            logger.error(
                "%s failed (failure %d of this kind); without drafts: %d requests",
                what,
                times,
                len(requests),
                exc_info=error,
            )
        for request in list(requests):
            if any(request in here for here in self._requests.values()):
                self.stop(request, request.slot)
            self.leave(request)


def share_out(wanted: Sequence[int], total: int) -> list[int]:
    """Return the numbers clipped to the largest common cap that keeps their sum within `total`.

    The rest of the total goes to the first clipped numbers, one each.
    """
    if sum(wanted) <= total:
        return list(wanted)
    left, most = total, len(wanted)
    for count in sorted(wanted):
        if count * most > left:
            break
        left -= count
        most -= 1
    cap, rest = divmod(max(left, 0), most)
    shares = []
    for count in wanted:
        share = min(count, cap)
        if count > cap and rest:
            share += 1
            rest -= 1
        shares.append(share)
    return shares
