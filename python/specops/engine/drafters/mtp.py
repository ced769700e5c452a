# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: the target's own drafting modules, fed with its hidden states."""

import os
from collections.abc import Hashable, Mapping, Sequence
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
    MethodUnavailable,
    Proposals,
    StepResults,
    TargetStep,
    stage_limit,
)
from specops.engine.errors import ModelError
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.memory.step_memory import Layout
from specops.engine.memory.step_shape import StepShape, rung
from specops.engine.models import KvCache, MtpBatch, MtpModules, load_mtp
from specops.engine.plan import Scheduled
from specops.engine.request import Request
from specops.sampling import Purpose

# Positions of a request whose states are kept, for modules that have been behind: as many as they
# catch up with, and as they begin anew with, what is before these on their page included.
WINDOW = 128
# Longest lag that runs again; behind a longer one modules begin anew, with so many positions.
CATCH_UP, BEGIN_ANEW = 64, 32

# The target agrees with what its modules hold likeliest more often than they say. Of powers 1 to 3
# the last brought most on the bundled model: 1 to 3 % more tokens a step than the first.
_SHARPNESS = 3.0

_MAX_KEPT_VIEWS = 64  # of the index arrays, by their sizes


def load(context: DrafterContext) -> Drafter:
    """Makes the drafter of the modules in the target's checkpoint, or in a directory of their own.

    Raises:
        MethodUnavailable: the checkpoint has none that can run.
        ModelError: those that the configuration names cannot be used.
    """
    config, speculative = context.config, context.config.speculative_config
    try:
        modules = load_mtp(
            context.target,
            config.model_dir,
            draft_directory=speculative.model,
            draft_vocab=speculative.draft_vocab,
            load_format=config.load_format,
        )
    except ModelError as error:
        if speculative.model is not None or speculative.draft_vocab is not None:
            raise
        where = str(config.model_dir)
        reason = str(error).removeprefix(f"{where}: ").removeprefix(f"{where}{os.sep}")
        raise MethodUnavailable(str(error), reason) from error
    return MtpDrafter(context, modules)


class MtpShape(NamedTuple):
    """What the modules' part of a step depends on."""

    rows: int  # of the first pass; 0: they only keep the target's states
    skips_pages: bool  # modules of a request do not see all of its pages
    draws: bool  # some drafts are drawn, not all the likeliest tokens
    has_own_numbers: bool  # some of those with numbers of their own
    tells: bool  # how likely each draft is
    branches: bool  # and which token is the likeliest beside it, for trees


class _Inputs(NamedTuple):
    """Per request of a step; names of the rows of one int32 array."""

    slots: Tensor  # -1: a request of another method
    drafting_slots: Tensor  # -1: or one whose modules do not run
    redraft_lens: Tensor  # rows before the step's that run again
    skipped: Tensor  # positions before the first that its modules see
    # Drafts are drawn with numbers of their own, not with those that the target will draw with; and
    # these are anchored, as BLOCK wants them. 0 or 1.
    own_numbers: Tensor
    has_anchors: Tensor


@dataclass(slots=True)
class _Progress:
    """How far the modules are with the request of a slot."""

    request: Request
    num_drafted: int  # leading positions whose draft keys and values are final
    begin: int = 0  # what is before it is not there for the modules
    redraft_len: int = -1  # of this step: rows before its own that run again; -1: none runs


@dataclass(frozen=True)
class _Choices:
    """Per request of a step: what a draft is chosen from, and the choice."""

    states: Tensor  # [batch, hidden_size]
    logits: Tensor  # float32 [batch, draft vocabulary]
    sampled: Tensor  # int32 [batch]
    drawn: Tensor  # int32 [batch]; the same with numbers of its own
    token_ids: Tensor  # int32 [batch]; the same but for a reduced draft vocabulary
    positions: Tensor  # int32 [batch]; of the tokens, where the pass is of a second module or later
    anchors: Tensor  # int32 [batch]
    is_drawn: Tensor  # bool [batch]; with numbers of its own
    lse: Tensor  # float32 [batch]


class MtpDrafter(Drafter):
    """Drafts with a checkpoint's MTP modules; docs/mtp.md states what meets what.

    In every step the modules run over the rows whose next token the step made known, in place of
    what they drafted there before, and then on into the drafts. While a request wants no drafts the
    target's states of its last positions are kept; they run again, in one go, when it wants some.
    After a longer pause the modules begin anew with the last of them, and see nothing before.

    Args:
        context: of the engine.
        modules: of the target.

    Attributes:
        num_modules: how many modules there are.
        max_redrafts: rows before the step's that may run again in one step, but for those that
            several modules always run again.
        max_rows: rows of the longest pass.
    """

    name = "mtp"

    def __init__(self, context: DrafterContext, modules: MtpModules) -> None:
        slots, max_rows = context.config.max_num_seqs, context.config.max_num_batched_tokens
        self.num_modules = modules.num_modules
        self.kv_bytes_per_token = modules.kv_bytes_per_token()
        self.max_redrafts = max(max_rows, WINDOW)
        self.max_rows = max_rows + self.max_redrafts + slots * (modules.num_modules - 1)
        self.cache: KvCache
        self.modules = modules
        # From the drafts' vocabulary to the target's, on the host; None: they are the same.
        token_map = modules.token_map
        self.token_map = None if token_map is None else token_map.cpu().numpy()
        self.page_size = context.config.page_size
        self.slots = slots
        self._target = context.target
        self._device = device = context.device
        self._progress: dict[int, _Progress] = {}  # by slot
        # By slot: what drafts are drawn with.
        self.temperatures: NDArray[np.float32] = np.zeros(slots, dtype=np.float32)
        self.own_numbers: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self.has_anchors: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self.num_steps = 0  # passes that any request has asked for
        modules.reserve(self.max_rows)
        where, width = device.device, modules.hidden_size
        vocab_size = modules.lm_head.num_outputs
        self.kept = torch.zeros((slots, WINDOW, width), dtype=modules.dtype, device=where)
        # The first pass of a step, and those behind it, which read one and write the other.
        sizes = (self.max_rows, slots, slots)
        self._indices = [DraftIndices.empty(slots, total_rows=n, device=where) for n in sizes]
        # Read between passes where the host may look: numpy is the quickest way to do it.
        self._row_ends = [] if device.is_async else [one.qo_indptr.numpy() for one in self._indices]
        self.same_rows = torch.arange(self.max_rows, dtype=torch.int32, device=where)
        self.module_kv_lens = torch.zeros(slots, dtype=torch.int32, device=where)
        ints = torch.zeros((5, slots), dtype=torch.int32, device=where)
        self.choices = _Choices(
            torch.empty((slots, width), dtype=modules.dtype, device=where),
            torch.empty((slots, vocab_size), dtype=torch.float32, device=where),
            ints[0],
            ints[1],
            ints[0] if modules.token_map is None else ints[2],
            ints[3],
            ints[4],
            torch.zeros(slots, dtype=torch.bool, device=where),
            torch.empty(slots, dtype=torch.float32, device=where),
        )
        workspace = sampling.sampling_workspace(self.choices.logits)
        if workspace is None:  # given, so that no call has to find out
            workspace = torch.empty(0, dtype=torch.uint8, device=where)
        self.workspace = workspace
        self._index_views: dict[tuple[int, int, int], DraftIndices] = {}
        self._choice_views: dict[int, _Choices] = {}

    def allocate(self, num_pages: int) -> None:
        """Allocates the modules' keys and values, on the target's pages."""
        self.cache = self.modules.new_kv_cache(num_pages, self.page_size)

    def draft_kv(self, request: Request) -> DraftKv | None:
        """The modules' keys and values, which depend on as many tokens as there are modules."""
        return DraftKv(self.name, self.num_modules, request.draft_stages[self.name])

    def start(self, request: Request) -> bool:
        """Makes room for what the request asks of its drafts."""
        config, slot = request.speculative, request.slot
        self._progress[slot] = _Progress(request, request.num_computed)
        draws = config.draws_drafts or config.drafts_with_target_numbers
        self.temperatures[slot] = request.params.temperature if draws else 0.0
        self.own_numbers[slot] = config.draws_drafts
        self.has_anchors[slot] = config.verify_strategy == "block"
        passes = request.draft_stages[self.name]
        has_moved = passes > self.num_steps
        self.num_steps = max(self.num_steps, passes)
        probs = self.draft_probs
        have = 0 if probs is None else probs.shape[1]
        # Once they are there every pass writes them, whoever asked for it.
        if (config.draws_drafts or have) and have < self.num_steps:
            shape = (self.slots, self.num_steps, self.modules.lm_head.num_outputs)
            self.draft_probs = torch.zeros(shape, dtype=torch.float32, device=self._device.device)
            if probs is not None:  # those of drafts that the next step verifies
                self.draft_probs[:, : probs.shape[1]] = probs
            has_moved = True
        return has_moved

    def stop(self, request: Request, slot: int) -> None:
        """Forgets how far the modules are: what they have on shared pages says so itself."""
        self._progress.pop(slot, None)

    def plan(self, parts: Sequence[Scheduled], shape: StepShape) -> Hashable | None:
        """Decides whose modules run, and over what; all keep the target's states."""
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
        runs = draws = own_numbers = skips = tells = branches = False
        for part, progress in ours:
            progress.redraft_len = -1
            slot = part.request.slot
            if part.emits:
                draws = draws or bool(self.temperatures[slot] > 0)
                own_numbers = own_numbers or bool(
                    self.own_numbers[slot] and self.temperatures[slot] > 0
                )
                if not part.draft_limit and part.num_rows - part.num_drafts == 1:
                    continue  # no drafts are wanted; but prompts go through the modules in any case
            missing = self._redraft_len(progress, room)
            progress.redraft_len = missing
            if missing >= 0:
                runs = True
                branches = branches or part.request.speculative.tree
                tells = tells or branches or part.request.speculative.selects_drafts
                redrafts += missing
                room -= max(missing - (self.num_modules - 1), 0)
                skips = skips or progress.begin > 0
        if not runs:
            return MtpShape(0, False, draws, own_numbers, tells=False, branches=False)
        rows = self.max_rows  # on the CPU one size, so that shapes come again: see `with_rows`
        if self._device.is_async:
            rows = min(shape.rows + (rung(redrafts) if redrafts else 0), self.max_rows)
        return MtpShape(rows, skips, draws, own_numbers, tells, branches)

    def _begin(self, progress: _Progress) -> int:
        """The first position that runs when the modules run in the next step."""
        begin, end = progress.num_drafted, progress.request.num_computed
        if end - begin <= CATCH_UP:
            return begin
        return max(begin, (end - BEGIN_ANEW) // self.page_size * self.page_size)

    def _redraft_len(self, progress: _Progress, room: int) -> int:
        """How many rows before the step's run over again; -1: the modules cannot run.

        Where they are far behind, they begin anew, on a page's first position.

        Args:
            progress: of a request.
            room: rows that may run again in the step, but for those that always do.
        """
        begin = self._begin(progress)
        missing = progress.request.num_computed - begin
        if missing < 0 or missing - (self.num_modules - 1) > room:
            return -1
        if begin > progress.num_drafted:
            progress.num_drafted = progress.begin = begin
        return missing

    def new_step(
        self, key: Hashable, shape: StepShape, inputs: Layout, results: Layout
    ) -> DrafterStep:
        """Makes the modules' part of the steps of one shape."""
        assert isinstance(key, MtpShape)
        return MtpStep(self, key, shape, inputs, results)

    def finish(self, results: StepResults) -> None:
        """Takes note of what the modules have run over, after a step and its commit."""
        if not self._progress:
            return
        for part in results.parts:
            progress = self._progress.get(part.request.slot)
            if progress is None or progress.redraft_len < 0:
                continue
            request = part.request
            known = len(request.token_ids) - self.num_modules
            progress.num_drafted = max(progress.num_drafted, min(request.num_computed, known))
            # Rows that do not see all before them are nobody else's.
            request.num_final_draft_kv = 0 if progress.begin else progress.num_drafted

    def progress_of(self, part: Scheduled) -> _Progress | None:
        """How far the modules are with a request; None: it is of another method."""
        return self._progress.get(part.request.slot)

    def sums_size(self, rows: int, batch: int) -> int:
        """Returns the floats that projections of `rows` rows split their sums with."""
        return self.modules.sums_size(rows, batch)

    def with_rows(self, which: int, indices: DraftIndices) -> DraftIndices | None:
        """The rows there are, where the host may look; None: there are none."""
        if not self._row_ends:
            return indices
        size = indices.kv_lens.shape[0]
        rows = int(self._row_ends[which][size])
        return self.index_view(which, size, rows) if rows else None

    def index_view(self, which: int, size: int, rows: int) -> DraftIndices:
        """The first requests and rows of the index arrays."""
        view = self._index_views.get((which, size, rows))
        if view is None:
            if len(self._index_views) >= _MAX_KEPT_VIEWS:
                self._index_views.clear()
            whole = self._indices[which]
            view = self._index_views[which, size, rows] = DraftIndices(
                qo_indptr=whole.qo_indptr[: size + 1],
                kv_lens=whole.kv_lens[:size],
                last_rows=whole.last_rows[:size],
                draft_positions=whole.draft_positions[:size],
                row_to_request=whole.row_to_request[:rows],
                positions=whole.positions[:rows],
                cache_slots=whole.cache_slots[:rows],
                source_rows=whole.source_rows[:rows],
            )
        return view

    def choice_view(self, size: int) -> _Choices:
        """The first requests of what drafts are chosen from."""
        view = self._choice_views.get(size)
        if view is None:
            whole = self.choices
            view = self._choice_views[size] = _Choices(
                whole.states[:size],
                whole.logits[:size],
                whole.sampled[:size],
                whole.drawn[:size],
                whole.token_ids[:size],
                whole.positions[:size],
                whole.anchors[:size],
                whole.is_drawn[:size],
                whole.lse[:size],
            )
        return view


class MtpStep(DrafterStep):
    """What the modules do behind the steps of one shape.

    Attributes:
        rows: per request, what the host says of it; bound when the step is launched.
        max_draft_tokens: [slots], int32.
    """

    def __init__(
        self,
        drafter: MtpDrafter,
        shape: MtpShape,
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
        passes = min(drafter.num_steps, step.proposals) if shape.tells else 0
        self._logprobs = [results.float32(batch) for _ in range(passes)]  # of the drafts, by pass
        passes = passes if shape.branches else 0
        self._likeliest = [results.int32(batch, 2) for _ in range(passes)]
        self._their_logprobs = [results.float32(batch, 2) for _ in range(passes)]
        self.num_rows = shape.rows
        self.sums_size = drafter.sums_size(shape.rows, batch) if shape.rows else 0
        self.rows: _Inputs
        self.max_draft_tokens: Tensor
        self._choosing: Mapping[str, Tensor]
        self._target: TargetStep | None = None

    def fill(self, parts: Sequence[Scheduled]) -> None:
        """Writes which requests' modules run, and over what."""
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
            # A list that is too long at its end, by what the next request skips, is not read there.
            indptr[:-1] += skipped // drafter.page_size

    def launch(self, target: TargetStep) -> None:
        """Runs the modules behind the target's step and fills the drafts."""
        if self._target is not target:
            self._bind(target)
        if self._shape.rows:
            self._draft(target)
        # After the passes: these rows may take the place of some that ran again.
        rows = self.rows
        batching.keep_hidden_rows(
            target.hidden,
            rows.slots,
            target.qo_indptr,
            target.kv_lens,
            target.lens,
            self._drafter.kept,
        )

    def read(self, parts: Sequence[Scheduled], proposals: Proposals) -> None:
        """Takes over how likely the modules hold their drafts, and marks who continues them."""
        for part in parts:
            if part.request.params.report_drafts:
                self._mark(part, proposals)
        if not self._logprobs:
            return
        # Those of requests that did not draft may be anything.
        probs = np.exp(np.minimum([array.host for array in self._logprobs], 0)).clip(1e-6, 1)
        for index, part in enumerate(parts):
            progress = self._drafter.progress_of(part)
            if progress is not None and progress.redraft_len >= 0:
                slot = part.request.slot
                count = min(stage_limit(part, self._drafter.name), len(probs))
                proposals.confidences[slot, :count] = probs[:count, index]
                if self._likeliest and part.request.speculative.tree:
                    self._branch(part, index, proposals)

    def _mark(self, part: Scheduled, proposals: Proposals) -> None:
        """Marks the drafts behind the modules' own, of whoever continues these."""
        name, progress = self._drafter.name, self._drafter.progress_of(part)
        if progress is not None and len(part.request.draft_stages) > 1:
            own = stage_limit(part, name) if progress.redraft_len >= 0 else 0
            place = list(part.request.draft_stages).index(name)
            proposals.stages[part.request.slot, own:] = place + 1

    def _branch(self, part: Scheduled, index: int, proposals: Proposals) -> None:
        """Makes a tree of a request's chain: with a second token for each of its drafts."""
        slot, token_map = part.request.slot, self._drafter.token_map
        count = int(proposals.counts[slot])
        tokens = proposals.token_ids[slot, :count].tolist()
        chances = proposals.confidences[slot, :count].tolist()
        candidates: list[tuple[float, float, int, int]] = []  # path's chance, its own, depth, token
        path = 1.0
        for depth, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            likeliest = self._likeliest[depth].host[index]
            likeliest = likeliest if token_map is None else token_map[likeliest]
            place = int(likeliest[0] == token)
            other = min(float(np.exp(self._their_logprobs[depth].host[index, place])), 1.0)
            first, second = _sharpened(chance, other)
            candidates.append((path * second, other, depth, int(likeliest[place])))
            path *= first
            candidates.append((path, chance, depth, token))
        # Chances fall along a path, and the chain's own come first: parents precede.
        order = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0], 1 - i % 2))
        on_chain = {-1: -1}  # by depth, the places of the chain's drafts
        for place, i in enumerate(order[: part.draft_limit]):
            _, chance, depth, token = candidates[i]
            if i % 2:
                on_chain[depth] = place
            proposals.token_ids[slot, place] = token
            proposals.confidences[slot, place] = chance
            proposals.parents[slot, place] = on_chain[depth - 1]
        proposals.counts[slot] = min(len(order), part.draft_limit)
        proposals.are_trees[slot] = True

    def _bind(self, target: TargetStep) -> None:
        """Makes the views that launches take, once."""
        self._target = target
        self.rows = _Inputs(*self._ints.device)
        self.max_draft_tokens = self._max_drafts.device
        self._module_kv_indptr = target.kv_indptr
        if self._shape.skips_pages:
            self._module_kv_indptr = self._kv_indptr.device
        self._choosing = {}
        if self._shape.draws:
            self._choosing = {
                "temperature": self._temperatures.device,
                "top_k": target.top_k,
                "top_p": target.top_p,
                "min_p": target.min_p,
                "seeds": target.seeds,
                "choice_index": target.choice_index,
            }

    @property
    def num_skipped(self) -> Tensor | None:
        """Positions that modules do not see, by request; None: they see all."""
        return self.rows.skipped if self._shape.skips_pages else None

    def _draft(self, target: TargetStep) -> None:
        drafter, rows, size = self._drafter, self.rows, self._step.batch
        modules, num_modules = drafter.modules, drafter.num_modules
        first = batching.prepare_draft_batch(
            rows.drafting_slots,
            target.qo_indptr,
            target.kv_lens,
            rows.redraft_lens,
            target.kv_indptr,
            target.kv_indices,
            target.lens,
            self.max_draft_tokens,
            page_size=drafter.page_size,
            total_rows=self._shape.rows,
            window=WINDOW,
            out=drafter.index_view(0, size, self._shape.rows),
        )
        indices = drafter.with_rows(0, first)
        if indices is None:
            return
        num_passes = min(drafter.num_steps, target.draft_token_ids.shape[1])
        if self._shape.has_own_numbers:
            anchors = drafter.choice_view(size).anchors
            torch.add(first.draft_positions, 1, out=anchors)
            anchors.mul_(rows.has_anchors)
        hidden, source_rows = target.hidden, indices.source_rows
        for index in range(num_modules):
            passed = self._pass(target, indices, source_rows)
            output = modules.forward(index, passed, hidden, drafter.cache)
            if modules.convention.chained:
                hidden = output.recycled
                source_rows = drafter.same_rows[: source_rows.shape[0]]
            if index < num_passes:
                self._choose(target, indices, output.hidden, step=index, num_passes=num_passes)
        for step in range(num_modules, num_passes):
            which = 1 + step % 2
            indices = drafter.with_rows(which, drafter.index_view(which, size, size))
            if indices is None:
                return
            passed = self._pass(target, indices, indices.source_rows)
            output = modules.forward(num_modules - 1, passed, output.recycled, drafter.cache)
            self._choose(target, indices, output.hidden, step=step, num_passes=num_passes)

    def _pass(self, target: TargetStep, indices: DraftIndices, source_rows: Tensor) -> MtpBatch:
        kv_lens, skipped = indices.kv_lens, self.num_skipped
        prefix_leaders, prefix_lens = target.prefix_leaders, target.prefix_lens
        if skipped is not None:
            # Some lists begin later here, and then not with what they share.
            prefix_leaders = prefix_lens = None
            kv_lens = self._drafter.module_kv_lens[: skipped.shape[0]]
            torch.sub(indices.kv_lens, skipped, out=kv_lens)
            kv_lens.clamp_(min=0)  # without rows
        return MtpBatch(
            positions=indices.positions,
            cache_slots=indices.cache_slots,
            qo_indptr=indices.qo_indptr,
            kv_indptr=self._module_kv_indptr,
            kv_indices=target.kv_indices,
            kv_lens=kv_lens,
            prefix_leaders=prefix_leaders,
            prefix_lens=prefix_lens,
            workspace=target.workspace,
            sums=target.sums,
            row_to_request=indices.row_to_request,
            source_rows=source_rows,
            slots=self.rows.drafting_slots,
            token_ids=target.token_ids,
            lens=target.lens,
            draft_token_ids=target.draft_token_ids,
            kept=self._drafter.kept,
        )

    def _note_likeliest(self, choices: _Choices, step: int) -> None:
        """Notes the two likeliest tokens of a pass, for trees."""
        sampling.top_logprobs(
            choices.logits,
            2,
            token_ids=self._likeliest[step].device,
            logprobs=self._their_logprobs[step].device,
            lse=choices.lse,
            workspace=self._drafter.workspace,
        )

    def _choose(
        self,
        target: TargetStep,
        indices: DraftIndices,
        hidden: Tensor,
        *,
        step: int,
        num_passes: int,
    ) -> None:
        """Chooses draft `step` of every request, and makes the rows of the pass behind it."""
        drafter, modules, size = self._drafter, self._drafter.modules, self._step.batch
        choices = drafter.choice_view(size)
        batching.gather_output_rows(hidden, indices.last_rows, out=choices.states)
        modules.logits(choices.states, out=choices.logits, sums=target.sums)
        positions = indices.draft_positions
        if 0 < step < drafter.num_modules and self._choosing:
            # The rows are the first module's, and the token is one further on for each module.
            positions = torch.add(positions, step, out=choices.positions)
        choosing: dict[str, Any] = {**self._choosing, "workspace": drafter.workspace}
        logprobs = self._logprobs[step].device if self._logprobs else None
        sampling.sample(
            choices.logits, positions, **choosing, logprobs=logprobs, out=choices.sampled
        )
        if self._likeliest:
            self._note_likeliest(choices, step)
        if self._shape.has_own_numbers:
            assert drafter.draft_probs is not None
            sampling.sample(
                choices.logits,
                positions,
                **choosing,
                anchors=choices.anchors,
                purpose=Purpose.DRAFT,
                probs=drafter.draft_probs[:size, step],
                out=choices.drawn,
            )
            torch.ne(self.rows.own_numbers, 0, out=choices.is_drawn)
            torch.where(choices.is_drawn, choices.drawn, choices.sampled, out=choices.sampled)
        if modules.token_map is not None:
            torch.index_select(modules.token_map, 0, choices.sampled, out=choices.token_ids)
        follows = drafter.num_modules <= step + 1 < num_passes
        which = 1 + (step + 1) % 2
        batching.advance_draft_batch(
            choices.token_ids,
            indices.last_rows,
            self.rows.drafting_slots,
            target.kv_indptr,
            target.kv_indices,
            target.lens,
            self.max_draft_tokens,
            page_size=drafter.page_size,
            step=step,
            ahead=drafter.num_modules,
            draft_token_ids=target.draft_token_ids,
            num_draft_tokens=target.num_draft_tokens,
            out=drafter.index_view(which, size, size) if follows else None,
        )


def _sharpened(first: float, second: float) -> tuple[float, float]:
    """The chances of two tokens by which a tree's nodes are chosen, all others being one third."""
    others = max(1.0 - first - second, 0.0)
    weights = [chance**_SHARPNESS for chance in (first, second, others)]
    return weights[0] / sum(weights), weights[1] / sum(weights)
