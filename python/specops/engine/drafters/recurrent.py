# SPDX-License-Identifier: Apache-2.0
"""Drafting token by token with a head that reads the target's states first and then its own.

This module implements all that does not depend on the kind of head: the progress of requests, rows
that run again, pages, stored target states, and the choice of drafts.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops import batching, sampling
from specops.batching import DraftIndices
from specops.engine.drafters.base import (
    Drafter,
    DrafterContext,
    DrafterStep,
    DrawnFrom,
    Proposals,
    StepResults,
    TargetStep,
    stage_limit,
)
from specops.engine.drafters.draft_arrays import DraftArrays
from specops.engine.drafters.head import DraftHead, DraftRows
from specops.engine.drafters.pass_reports import PassReports
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.memory.step_memory import Layout
from specops.engine.memory.step_shape import StepShape, bucket
from specops.engine.models import CacheCapacity, KvBytes
from specops.engine.plan import Part
from specops.engine.request import Request
from specops.sampling import LogitsProcessors, Purpose, SampleOutputs, SamplingTensors

# Number of a request's last positions whose target states are stored, for heads that lag behind.
# It covers CATCH_UP, and BEGIN_ANEW plus the earlier positions of the same page.
WINDOW = 128
# A head catches up if it lags by at most CATCH_UP positions. If it lags further, it starts over at
# about the last BEGIN_ANEW positions and never attends to earlier ones.
CATCH_UP, BEGIN_ANEW = 64, 32
_ENDLESS = (1 << 31) - 1  # tokens of a page that holds any text


class RecurrentShape(NamedTuple):
    """Parameters of the head's part of a step; steps with equal parameters share launches."""

    rows: int  # rows of the first pass; 0: no pass runs, target states are only stored
    skips_pages: bool  # for some request, the head does not attend to all pages
    draws: bool  # some drafts are sampled, not greedy
    has_own_numbers: bool  # some drafts are sampled with the drafter's own random numbers
    reports_probs: bool  # the probability of each draft is reported to the host


class _Inputs(NamedTuple):
    """Per-request columns of a step; each is a row of one int32 array."""

    slots: Tensor  # -1: the request uses another method
    drafting_slots: Tensor  # -1: the head does not run for the request in this step
    redraft_lens: Tensor  # number of rows before the step's rows that run again
    skipped: Tensor  # number of leading positions that the head does not attend to
    # own_numbers: 1 if drafts are sampled with the drafter's own random numbers, instead of those
    # that the target will use. has_anchors: 1 if these are anchored, as strategy "block" requires.
    own_numbers: Tensor
    has_anchors: Tensor


@dataclass(slots=True)
class _Progress:
    """Progress of the head on the request of a slot."""

    request: Request
    num_drafted: int  # number of leading positions whose draft keys and values are final
    begin: int = 0  # first position that the head attends to
    redraft_len: int = -1  # rows before the step's rows that run again; -1: no row runs


class RecurrentDrafter(Drafter):
    """Drafter that runs a draft head recurrently.

    In every step, the head runs over the rows whose next token the step made known, which replaces
    the keys and values that it wrote there from drafts. Then it continues on its own drafts. While
    a request takes no drafts, the target states of its last positions are stored, and the head runs
    over them in one pass when the request takes drafts again. After a longer pause, the head starts
    over at the last positions and does not attend to earlier ones.

    Args:
        name: name of the method.
        context: the engine's config, target, tokenizer and device.
        head: the model that drafts, on the target's device.
        draws: whether it may sample drafts with its own random numbers.
        max_len: number of positions that the head supports; None: the target's. The head pauses in
            requests that become longer.

    Attributes:
        head: the model that drafts.
        num_passes: passes of the head over the rows of a step.
        max_redrafts: limit on earlier rows that run again in one step, not counting those that a
            head with several passes always runs again.
        max_rows: rows of the longest pass.
        arrays: arrays that all steps share.
        kept: [slots, WINDOW, hidden_size], stored target states of each slot's last positions.
        keeps_states: whether `kept` is used; False for a head that reads no states, or only states
            of the current step.
        window: maximum number of positions before the step's rows that may run again.
        reads_own_tokens: whether a row reads the token at its own position; see `DraftHead`.
    """

    def __init__(
        self,
        name: str,
        context: DrafterContext,
        head: DraftHead,
        *,
        draws: bool,
        max_len: int | None = None,
    ) -> None:
        self._max_len = max_len or context.target.max_model_len
        self._is_short = self._max_len < context.target.max_model_len
        slots, max_rows = context.config.max_num_seqs, context.config.max_num_batched_tokens
        self.name, self.aux_layers = name, head.aux_layers
        self.head, self.num_passes = head, head.num_passes
        self.reads_own_tokens = not head.reads_states
        self.kv_bytes, self.max_drafts = KvBytes(head.kv_bytes_per_token), head.max_drafts
        self.max_redrafts = max(max_rows, WINDOW)
        # Each request may have additional rows: one for its newest token, or one per later pass.
        more = 1 if self.reads_own_tokens else head.num_passes - 1
        self.max_rows = max_rows + self.max_redrafts + slots * more
        # Token id of each draft vocabulary entry, on the host; None: entry i is token i.
        token_map = head.token_map
        self.token_map = None if token_map is None else token_map.cpu().numpy()
        if draws:
            self.drawn_from = DrawnFrom(head.vocab_size, token_map)
        self.page_size = context.config.page_size
        self.slots = slots
        self._device = device = context.device
        self._progress: dict[int, _Progress] = {}  # by slot
        # Sampling parameters of drafts, by slot.
        self.temperatures: NDArray[np.float32] = np.zeros(slots, dtype=np.float32)
        self.own_numbers: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self.has_anchors: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self.num_steps = 0  # maximum number of drafts that a request needs
        head.reserve(self.max_rows)
        self.arrays = DraftArrays(head, slots, self.max_rows, device)
        where, width = device.device, head.hidden_size
        self.window = self.max_redrafts if self.reads_own_tokens else WINDOW
        self.keeps_states = head.kv_bytes_per_token > 0 and not self.reads_own_tokens
        num_kept = WINDOW if self.keeps_states else 0
        self.kept = torch.zeros((slots, num_kept, width), dtype=head.dtype, device=where)

    def allocate(self, capacity: CacheCapacity) -> None:
        """Allocate the head's keys and values on the target's pages."""
        self.head.allocate(capacity)

    def kv_tensors(self) -> Sequence[Tensor]:
        """Return the head's keys and values."""
        return self.head.kv_tensors()

    def draft_kv(self, request: Request) -> DraftKv | None:
        """Return the head's draft KV, which depends on `head.lookahead` later tokens."""
        if not self.kv_bytes.per_token or (self._is_short and request.prompt_len >= self._max_len):
            return None
        return DraftKv(self.name, self.head.lookahead, request.drafts.stages[self.name])

    def start(self, request: Request) -> bool:
        """Set up the sampling parameters and the number of drafts that the request needs."""
        config, slot = request.speculative, request.slot
        self._progress[slot] = _Progress(request, request.num_computed)
        draws = config.draws_drafts or config.drafts_with_target_numbers
        self.temperatures[slot] = request.params.temperature if draws else 0.0
        self.own_numbers[slot] = config.draws_drafts
        self.has_anchors[slot] = config.verify_strategy == "block"
        passes = request.drafts.stages[self.name]
        has_moved = passes > self.num_steps
        self.num_steps = max(self.num_steps, passes)
        return has_moved

    def stop(self, request: Request, slot: int) -> None:
        """Drop the slot's progress; the pages record which draft KV they hold."""
        self._progress.pop(slot, None)

    def plan(self, parts: Sequence[Part], shape: StepShape) -> Hashable | None:
        """Plan over which rows the head runs. Target states are stored for all requests."""
        if not self._progress:
            return None
        ours = [
            (part, progress)
            for part in parts
            if (progress := self._progress.get(part.request.slot)) is not None
        ]
        if not ours:
            return None
        redrafts, room = 0, self.max_redrafts
        runs = draws = own_numbers = skips = reports_probs = False
        for part, progress in ours:
            progress.redraft_len = -1
            slot = part.request.slot
            end = part.request.num_computed + part.num_rows + self.num_steps
            if self._is_short and end > self._max_len:
                continue
            if not self.kv_bytes.per_token and not (part.emits and part.draft_limit):
                continue  # no keys and values to update
            if part.emits:
                draws = draws or bool(self.temperatures[slot] > 0)
                own_numbers = own_numbers or bool(
                    self.own_numbers[slot] and self.temperatures[slot] > 0
                )
                if not part.draft_limit and part.num_rows - part.num_drafts == 1:
                    continue  # no drafts requested; only prompt rows run through the head anyway
            missing = self._redraft_len(progress, room)
            progress.redraft_len = missing
            if missing >= 0:
                runs = True
                reports_probs = reports_probs or part.request.speculative.selects_drafts
                redrafts += missing
                room -= max(missing - (self.num_passes - 1), 0)
                skips = skips or progress.begin > 0
        if not runs:
            return RecurrentShape(0, False, draws, own_numbers, reports_probs=False)
        rows = self.max_rows  # one size on the CPU, so that shapes recur; see `with_rows`
        if self._device.is_async:
            own = shape.batch if self.reads_own_tokens else 0
            rows = min(shape.rows + own + (bucket(redrafts) if redrafts else 0), self.max_rows)
        return RecurrentShape(rows, skips, draws, own_numbers, reports_probs)

    def _begin(self, progress: _Progress) -> int:
        """Return the first position that the head would run over in the next step."""
        begin, end = progress.num_drafted, progress.request.num_computed
        if not self.kv_bytes.per_token:
            return end
        if end - begin <= (self.window if self.reads_own_tokens else CATCH_UP):
            return begin
        return max(begin, (end - BEGIN_ANEW) // self.page_size * self.page_size)

    def _redraft_len(self, progress: _Progress, room: int) -> int:
        """Return how many earlier rows run again in the step; -1: the head cannot run.

        If the head lags too far behind, it starts over at the first position of a page.

        Args:
            progress: progress of the request.
            room: limit on these rows, not counting those that always run again.
        """
        begin = self._begin(progress)
        missing = progress.request.num_computed - begin
        if missing < 0 or missing - (self.num_passes - 1) > room:
            return -1
        if begin > progress.num_drafted:
            progress.num_drafted = begin
            if self.kv_bytes.per_token:  # otherwise there are no keys and values to skip
                progress.begin = begin
        return missing

    def new_step(
        self, key: Hashable, shape: StepShape, inputs: Layout, results: Layout
    ) -> DrafterStep:
        """Make the head's part of the steps of one shape."""
        assert isinstance(key, RecurrentShape)
        return RecurrentStep(self, key, shape, inputs, results)

    def finish(self, results: StepResults) -> None:
        """Record which positions the head has run over, after the step's tokens are committed."""
        if not self._progress:
            return
        for part in results.parts:
            progress = self._progress.get(part.request.slot)
            if progress is None or progress.redraft_len < 0:
                continue
            request = part.request
            known = len(request.token_ids) - self.head.lookahead
            progress.num_drafted = max(progress.num_drafted, min(request.num_computed, known))
            # Rows that do not attend to their whole prefix cannot be shared with other requests.
            request.drafts.num_final_kv = 0 if progress.begin else progress.num_drafted

    def problem(self) -> str | None:
        """Return a sentence if the logits of the latest draft are not finite."""
        if bool(self.arrays.choices.logits[0].isfinite().all()):
            return None
        return "its logits are NaN or infinite, so no draft is meaningful; check its weights"

    def progress_of(self, part: Part) -> _Progress | None:
        """Return the head's progress on a request, or None if the request uses another method."""
        return self._progress.get(part.request.slot)


class RecurrentStep(DrafterStep):
    """The head's part of the steps of one shape.

    Attributes:
        reports: draft probabilities for the host.
        rows: per-request columns that the host fills; set when the step is launched.
        max_draft_tokens: draft limits, int32 [slots].
    """

    def __init__(
        self,
        drafter: RecurrentDrafter,
        shape: RecurrentShape,
        step: StepShape,
        inputs: Layout,
        results: Layout,
    ) -> None:
        self._drafter, self._shape, self._step = drafter, shape, step
        batch = step.batch
        self._ints = inputs.int32(len(_Inputs._fields), batch)
        self._temperatures = inputs.float32(batch)
        self._max_drafts = inputs.int32(drafter.slots)
        self._kv_indptr = inputs.int32(batch + 1 if shape.skips_pages else 0)
        # Row ranges for a head whose rows read the token at their position: they include one more
        # row for the newest token.
        num_ranges = batch if drafter.reads_own_tokens and shape.rows else 0
        self._qo_indptr, self._kv_lens = inputs.int32(num_ranges + 1), inputs.int32(num_ranges)
        passes = min(drafter.num_steps, step.proposals) if shape.reports_probs else 0
        self.reports = PassReports(results, batch, drafter.slots, passes)
        # `target_states` may project the target's states even if no pass runs.
        self.sums_size = drafter.head.sums_size(max(shape.rows, step.rows), batch)
        if shape.rows:
            self.workspace_size = drafter.head.workspace_size(shape.rows, batch, step.pages)
        self.rows: _Inputs
        self.max_draft_tokens: Tensor
        self._sampling: SamplingTensors | None
        # Logits processors of the first draft; None: no changes to the logits.
        self._processors: LogitsProcessors | None
        self._target: TargetStep | None = None

    def fill(self, parts: Sequence[Part]) -> None:
        """Write the per-request columns, draft limits and row ranges of a step."""
        drafter, ints, count = self._drafter, self._ints.host, len(parts)
        slots, drafting, redrafts, skipped, own_numbers, has_anchors = ints
        self._max_drafts.host.fill(0)
        ints.fill(0)
        slots.fill(-1)
        drafting.fill(-1)
        for index, part in enumerate(parts):
            progress = drafter.progress_of(part)
            if progress is None:
                continue
            slot = slots[index] = part.request.slot
            if progress.redraft_len >= 0:
                drafting[index] = slot
                redrafts[index] = progress.redraft_len
                skipped[index] = progress.begin
                self._max_drafts.host[slot] = stage_limit(part, drafter.name)
        if len(self._kv_lens.host):
            self._fill_own_rows(parts)
        if self._shape.draws:
            of_request = [part.request.slot for part in parts]
            own_numbers[:count] = drafter.own_numbers[of_request]
            has_anchors[:count] = drafter.has_anchors[of_request]
            self._temperatures.host[:count] = drafter.temperatures[of_request]
            self._temperatures.host[count:] = 0  # greedy
        if self._shape.skips_pages:
            ends = np.cumsum([0] + [len(part.request.pages) for part in parts])
            indptr = self._kv_indptr.host
            indptr[: count + 1] = ends
            indptr[count + 1 :] = ends[-1]
            # This moves the end of each page list as well, into pages that the next request skips;
            # the KV lengths keep the head from reading these.
            indptr[:-1] += skipped // drafter.page_size

    def _fill_own_rows(self, parts: Sequence[Part]) -> None:
        """Write the row ranges, with one additional row per request for its newest token.

        The row is added if the step emits a token, drafts are requested and a page has space. If
        drafts are rejected, the newest token lies at an earlier position.
        """
        indptr, kv_lens, size = self._qo_indptr.host, self._kv_lens.host, self._drafter.page_size
        kv_lens.fill(0)
        end = 0
        for index, part in enumerate(parts):
            indptr[index] = end
            kv_len = part.request.num_computed + part.num_rows
            has_page = len(part.request.pages) * size > kv_len
            more = int(part.emits and part.draft_limit > 0 and has_page)
            kv_lens[index] = kv_len + more
            end += part.num_rows + more
        indptr[len(parts) :] = end

    def launch(self, target: TargetStep) -> None:
        """Run the head after the target, write the drafts, and store target states."""
        if self._target is not target:
            self._bind(target)
        states = self._drafter.head.target_states(target)
        if self._shape.rows:
            self._draft(target, states)
        self.reports.note_counts(target.num_draft_tokens)
        if not self._drafter.keeps_states:
            return
        # After the passes, since this may overwrite stored states that the passes read.
        rows = self.rows
        batching.keep_hidden_rows(
            states,
            rows.slots,
            target.qo_indptr,
            target.kv_lens,
            target.lens,
            self._drafter.kept,
        )

    def read(self, parts: Sequence[Part], proposals: Proposals) -> None:
        """Read the probabilities of the drafts as confidences."""
        found = [self._drafter.progress_of(part) for part in parts]
        ran = [progress is not None and progress.redraft_len >= 0 for progress in found]
        self.reports.read(parts, ran, proposals)

    def _bind(self, target: TargetStep) -> None:
        """Create the views that launches use, once per target step."""
        self._target = target
        self.rows = _Inputs(*self._ints.device)
        self.max_draft_tokens = self._max_drafts.device
        self._kv_indptr_seen = target.kv_indptr
        if self._shape.skips_pages:
            self._kv_indptr_seen = self._kv_indptr.device
        self._sampling = None
        if self._shape.draws:
            self._sampling = target.sampling._replace(temperature=self._temperatures.device)
        # Logits processors use the target's vocabulary.
        has_processors = self._drafter.head.token_map is None
        self._processors = target.processors if has_processors else None

    @property
    def num_skipped(self) -> Tensor | None:
        """Number of leading positions that the head skips, by request; None: it skips none."""
        return self.rows.skipped if self._shape.skips_pages else None

    def _draft(self, target: TargetStep, states: Tensor) -> None:
        drafter, rows, size = self._drafter, self.rows, self._step.batch
        head, arrays = drafter.head, drafter.arrays
        first = self._first_rows(target)
        indices = arrays.with_rows(0, first)
        if indices is None:
            return
        count = min(drafter.num_steps, target.draft_token_ids.shape[1])
        if self._shape.has_own_numbers:
            anchors = drafter.arrays.choice_view(size).anchors
            torch.add(first.draft_positions, 1, out=anchors)
            anchors.mul_(rows.has_anchors)
        source_rows = indices.source_rows
        # The first pass, and passes whose keys and values later steps read, run in every step. The
        # other passes only draft, so those beyond `count` drafts are skipped.
        num_passes = min(drafter.num_passes, max(count, head.lookahead, 1))
        for index in range(num_passes):
            passed = self._pass(target, indices, source_rows)
            hidden, recycled = head.forward(index, passed, states)
            if head.is_chained:
                states = recycled
                source_rows = arrays.same_rows[: source_rows.shape[0]]
            if index < count:
                self._choose(target, indices, hidden, step=index, count=count)
        for step in range(drafter.num_passes, count):
            which = 1 + step % 2
            indices = arrays.with_rows(which, arrays.index_view(which, size, size))
            if indices is None:
                return
            passed = self._pass(target, indices, indices.source_rows)
            hidden, recycled = head.forward(drafter.num_passes - 1, passed, recycled)
            self._choose(target, indices, hidden, step=step, count=count)

    def _first_rows(self, target: TargetStep) -> DraftIndices:
        """Compute the rows of the first pass."""
        drafter, rows, size = self._drafter, self.rows, self._step.batch
        qo_indptr, kv_lens, lens = target.qo_indptr, target.kv_lens, target.lens
        if drafter.reads_own_tokens:
            # The op assumes that row i reads token i + 1, but here it reads token i. So pretend
            # that one more token is known.
            qo_indptr, kv_lens = self._qo_indptr.device, self._kv_lens.device
            lens = torch.add(target.lens, 1, out=drafter.arrays.lens)
        first = batching.prepare_draft_batch(
            qo_indptr,
            kv_lens,
            rows.drafting_slots,
            target.kv_indptr,
            target.kv_indices,
            lens,
            self.max_draft_tokens,
            page_size=drafter.page_size,
            redraft_lens=rows.redraft_lens,
            window=drafter.window,
            out=drafter.arrays.index_view(0, size, self._shape.rows),
        )
        self._note_positions(first)
        return first

    def _note_positions(self, indices: DraftIndices) -> None:
        """Correct draft positions for the additional token that `_first_rows` treats as known."""
        if self._drafter.reads_own_tokens:
            indices.draft_positions.sub_(1).clamp_(min=0)

    def _pass(self, target: TargetStep, indices: DraftIndices, source_rows: Tensor) -> DraftRows:
        kv_lens, skipped = indices.kv_lens, self.num_skipped
        prefixes = target.prefixes
        if skipped is not None:
            # Some page lists now begin later, so they do not start with the shared prefix.
            prefixes = None
            kv_lens = self._drafter.arrays.kv_lens[: skipped.shape[0]]
            torch.sub(indices.kv_lens, skipped, out=kv_lens)
            kv_lens.clamp_(min=0)  # negative for requests without rows
        return DraftRows(
            positions=indices.positions,
            cache_slots=indices.cache_slots,
            qo_indptr=indices.qo_indptr,
            kv_indptr=self._kv_indptr_seen,
            kv_indices=target.kv_indices,
            kv_lens=kv_lens,
            prefixes=prefixes,
            workspace=target.workspace,
            sums=target.sums,
            row_to_request=indices.row_to_request,
            source_rows=source_rows,
            slots=self.rows.drafting_slots,
            token_ids=target.token_ids,
            lens=target.lens,
            draft_token_ids=target.draft_token_ids,
            kept=self._drafter.kept,
            whole_kv_indptr=target.kv_indptr,
        )

    def _choose(
        self,
        target: TargetStep,
        indices: DraftIndices,
        hidden: Tensor,
        *,
        step: int,
        count: int,
    ) -> None:
        """Choose draft `step` of `count`, and compute the rows of the next pass."""
        drafter, head, size = self._drafter, self._drafter.head, self._step.batch
        choices = drafter.arrays.choice_view(size)
        batching.gather_output_rows(hidden, indices.last_rows, out=choices.states)
        head.logits(step, choices.states, out=choices.logits, sums=target.sums)
        positions = indices.draft_positions
        if 0 < step < drafter.num_passes and (self._sampling or self._processors):
            # All passes share the rows of the first one, but each drafts one position further.
            positions = torch.add(positions, step, out=choices.positions)
            positions.clamp_(max=target.token_ids.shape[1])
        processors = self._processors
        if processors is not None and step:
            processors = later_processors(processors)
        choosing: dict[str, Any] = {
            "sampling": self._sampling,
            "processors": processors,
            "workspace": drafter.arrays.workspace,
        }
        reported = self.reports.logprobs
        logprobs = reported[step].device if reported else None
        outputs = SampleOutputs(choices.sampled, logprobs)
        sampling.sample(choices.logits, positions, **choosing, outputs=outputs)
        if self._shape.has_own_numbers:
            sampling.sample(
                choices.logits,
                positions,
                **choosing,
                anchors=choices.anchors,
                purpose=Purpose.DRAFT,
                outputs=SampleOutputs(
                    choices.drawn, probs=target.draft_probs[drafter.name][:size, step]
                ),
            )
            torch.ne(self.rows.own_numbers, 0, out=choices.is_drawn)
            torch.where(choices.is_drawn, choices.drawn, choices.sampled, out=choices.sampled)
        if head.token_map is not None:
            torch.index_select(head.token_map, 0, choices.sampled, out=choices.token_ids)
        # A head without keys and values needs no pages: all its rows are of one endless page.
        pages = (target.kv_indptr, target.kv_indices)
        page_size = drafter.page_size
        if not drafter.kv_bytes.per_token:
            pages = (drafter.arrays.same_rows[: size + 1], drafter.arrays.no_pages)
            page_size = _ENDLESS
        follows = drafter.num_passes <= step + 1 < count
        which = 1 + (step + 1) % 2
        following = drafter.arrays.index_view(which, size, size) if follows else None
        is_own = drafter.reads_own_tokens
        batching.advance_draft_batch(
            choices.token_ids,
            indices.last_rows,
            self.rows.drafting_slots,
            *pages,
            drafter.arrays.lens if is_own else target.lens,
            self.max_draft_tokens,
            page_size=page_size,
            step=step,
            ahead=drafter.num_passes,
            draft_token_ids=target.draft_token_ids,
            num_draft_tokens=target.num_draft_tokens,
            out=following,
        )
        if following is not None:
            self._note_positions(following)


def later_processors(first: LogitsProcessors) -> LogitsProcessors:
    """Return the logits processors of all drafts after the first one.

    The earlier drafts are not in the token table. So penalties do not count them, and bad words of
    several tokens are left out: they may begin within these drafts.

    Args:
        first: logits processors of the first draft.
    """
    words = first.bad_words
    if words is None or words.shape[2] == 1:
        return first
    single = words[:, :, :1].masked_fill(words[:, :, 1:2] >= 0, -1)
    return first._replace(bad_words=single)
