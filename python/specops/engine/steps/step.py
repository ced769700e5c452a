# SPDX-License-Identifier: Apache-2.0
"""A step as the device sees it: its arrays, and the ops that it runs, in their order.

Everything an op reads or writes lies in blocks that all steps share, so a step of a shape that was
there before allocates nothing and can be replayed. Where steps are captured, shapes are rounded up
to a few; a padding request has no rows, and a padding row belongs to no request.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specops
from specops import batching, sampling
from specops.batching import BatchIndices
from specops.engine.drafters.base import TargetStep
from specops.engine.drafters.drafting import Drafting
from specops.engine.memory.device import raise_reported
from specops.engine.memory.step_memory import Array, Layout, StepMemory
from specops.engine.memory.step_shape import StepShape
from specops.engine.models import KvCache, StepBatch, Transformer
from specops.engine.request import Feature
from specops.engine.steps.slot_tables import SlotTables
from specops.engine.steps.step_trees import StepTrees


class RequestRow(NamedTuple):
    """Of every request of a step; int32."""

    qo_lens: Any
    kv_lens: Any
    output_modes: Any
    positions: Any  # of the token that it chooses first: the tokens that it has
    slots: Any  # -1: a padding request
    processor_slots: Any  # -1: nothing changes its logits


class SamplingFloats(NamedTuple):
    """Sampling parameters of a request, as `sampling.verify` has them; float32."""

    temperature: Any
    top_p: Any
    min_p: Any
    typical_p: Any


class SamplingInts(NamedTuple):
    """The others; int32."""

    top_k: Any
    choice_index: Any
    strategy: Any
    policy: Any


class SlotState(NamedTuple):
    """What `sampling.commit` has of every slot; int32. It writes the last four."""

    prompt_lens: Any
    max_lens: Any
    lens: Any
    finish_reasons: Any
    stop_indices: Any
    thinking_state: Any


# Rows of their arrays, where making views of all of them would take longer.
SLOTS, POSITIONS = map(RequestRow._fields.index, ("slots", "positions"))
LENS, FINISH_REASONS, STOP_INDICES, THINKING_STATE = map(
    SlotState._fields.index, ("lens", "finish_reasons", "stop_indices", "thinking_state")
)


@dataclass(frozen=True, kw_only=True)
class RunnerParts:
    """What all steps of a runner share."""

    model: Transformer
    cache: KvCache
    taps: Mapping[int, Tensor]  # by layer, the states that leave it; [rows, hidden_size]
    slots: int
    tables: SlotTables
    drafting: Drafting
    processed_logprobs: bool


class Exchange:
    """The arrays that pass between host and device: results, what goes both ways, inputs.

    They lie in one block and in this order, so that each way is one copy.
    """

    def __init__(self, shape: StepShape, parts: RunnerParts) -> None:
        batch, width, slots = shape.batch, shape.width, parts.slots
        alternatives = max(shape.logprobs, 0)
        self.results = results = Layout()
        self.error = results.int32(1)
        self.num_accepted = results.int32(batch)
        self.num_committed = results.int32(batch)
        self.output_token_ids = results.int32(batch, width + 1)
        self.logprobs = results.float32(batch, width + 1)
        self.ranks = results.int32(batch, width + 1)
        self.proposed_token_ids = results.int32(slots, shape.proposals)
        # What depends on the rows comes last: then all else lies where other shapes have it.
        drafters_inputs = Layout()
        self.drafters = parts.drafting.new_steps(shape, drafters_inputs, results)
        self.top_ids = results.int32(shape.outputs, alternatives)
        self.top_logprobs = results.float32(shape.outputs, alternatives)
        self.trees_scratch, trees_inputs = Layout(), Layout()
        self.trees = None
        if shape.trees is not None:
            page_size = parts.cache.page_size
            self.trees = StepTrees(shape, page_size, results, trees_inputs, self.trees_scratch)
        self.shared = shared = Layout(results.end)
        self.slot_state = shared.int32(len(SlotState._fields), slots)
        self.num_proposed = shared.int32(slots)  # zeros go in
        self.inputs = inputs = Layout(shared.end)
        self.requests = inputs.int32(len(RequestRow._fields), batch)
        self.sampling_floats = inputs.float32(len(SamplingFloats._fields), batch)
        self.sampling_ints = inputs.int32(len(SamplingInts._fields), batch)
        self.seeds = inputs.int64(batch)
        self.kv_indptr = inputs.int32(batch + 1)
        chains = batch if shape.trees is None else shape.trees.chains
        self.prefix_leaders = inputs.int32(shape.prefix_levels, chains)
        self.prefix_lens = inputs.int32(shape.prefix_levels, chains)
        self.draft_token_ids = inputs.int32(batch, width)
        has_rates = bool(shape.features & Feature.ACCEPT_RATES)
        self.accept_rates = inputs.float32(batch, width if has_rates else 0)
        has_probs = bool(shape.features & Feature.DRAFT_PROBS)
        self.draft_prob_rows = inputs.int32(batch if has_probs else 0)
        inputs.append(drafters_inputs)
        inputs.append(trees_inputs)
        is_processed = bool(shape.features & Feature.PROCESSORS)
        self.mask_indices = inputs.int32(shape.outputs if is_processed else 0)
        words = -(-parts.model.config.vocab_size // 32)
        self.token_masks = inputs.int32(shape.masks, words)
        self.token_ids = inputs.int32(shape.rows)
        self.kv_indices = inputs.int32(shape.pages)  # last: only what is used of it is copied

    def place(self, memory: "StepMemory[Step]") -> None:
        """Gives the arrays their memory."""
        block = memory.block("exchange", self.inputs.end)
        for layout in (self.results, self.shared, self.inputs):
            layout.place(block)
        host, device = block.host, block.device
        assert host is not None
        begin, end = self.shared.begin, self.shared.end
        self.host_in, self.device_in = host[begin:], device[begin:]
        self.host_out, self.device_out = host[:end], device[:end]
        self.pages_offset = self.kv_indices.offset - begin
        self.token_tensor = self.output_token_ids.host_tensor(block)


class Scratch:
    """The arrays that only the device sees, but for the ops' workspaces."""

    def __init__(self, shape: StepShape, parts: RunnerParts, trees: Layout) -> None:
        model, batch, rows, outputs = parts.model, shape.batch, shape.rows, shape.outputs
        self.layout = layout = Layout()
        self.indices = {
            "qo_indptr": layout.int32(batch + 1),
            "output_indptr": layout.int32(batch + 1),
            "row_to_request": layout.int32(rows),
            "positions": layout.int32(rows),
            "cache_slots": layout.int64(rows),
            "output_rows": layout.int32(outputs),
            "output_row_to_request": layout.int32(outputs),
        }
        gathered = 0 if outputs == rows else outputs
        self.gathered = layout.add(model.dtype, gathered, model.config.hidden_size)
        self.logits = layout.float32(outputs, model.config.vocab_size)
        self.lse = layout.float32(outputs if shape.logprobs > 0 else 0)
        layout.append(trees)


class Step:
    """One shape's arrays and the ops over them.

    Attributes:
        shape: the sizes.
        arrays: for the host to fill, and to read.
        replay: starts it again, once it is captured.
        draft_seconds: that drafters took in the last run; 0 on an asynchronous device, which runs
            a step as a whole.
    """

    def __init__(self, shape: StepShape, memory: "StepMemory[Step]", parts: RunnerParts) -> None:
        self.shape = shape
        self._memory = memory
        self._parts = parts
        self.replay: Any = None
        self._runs = 0
        self.draft_seconds = 0.0
        self.arrays = arrays = Exchange(shape, parts)
        drafters, model = arrays.drafters, parts.model
        sums_size = max(
            model.sums_size(shape.rows, shape.outputs), *[one.sums_size for one in drafters], 0
        )
        scratch = Scratch(shape, parts, arrays.trees_scratch)
        batch = max(shape.batch, shape.trees.chains if shape.trees else 0)
        pages = max(shape.pages, shape.trees.pages if shape.trees else 0)
        sizes = [model.workspace_size(shape.rows, batch, pages, parts.cache)]
        floats = Layout()
        workspace = floats.float32(max(sizes + [one.workspace_size for one in drafters]))
        leaves = Layout()
        sums = leaves.float32(sums_size)
        # All blocks before any view: one that grows forgets the steps, this one among them.
        memory.block("exchange", arrays.inputs.end)
        memory.block("scratch", scratch.layout.end)
        memory.block("workspace", floats.end)
        memory.block("sums", leaves.end)
        model.reserve(shape.rows)
        arrays.place(memory)
        self._floats = SamplingFloats(*arrays.sampling_floats.device)
        self._ints = SamplingInts(*arrays.sampling_ints.device)
        self._state = SlotState(*arrays.slot_state.device)
        scratch.layout.place(memory.block("scratch", 0))
        floats.place(memory.block("workspace", 0))
        leaves.place(memory.block("sums", 0))
        self._bind_model(scratch, workspace, sums)
        self._bind_sampling(scratch)
        self._bind_commit()
        self._drafters = drafters
        if drafters:
            self._target = self._target_step()

    def _bind_model(self, scratch: Scratch, workspace: Array, sums: Array) -> None:
        """Notes the tensors that the model takes."""
        arrays = self.arrays
        self._row = row = RequestRow(*arrays.requests.device)
        indices = {name: array.device for name, array in scratch.indices.items()}
        has_prefixes = self.shape.prefix_levels > 0
        self._indices = BatchIndices(**indices)
        self._batch = StepBatch(
            token_ids=arrays.token_ids.device,
            positions=indices["positions"],
            cache_slots=indices["cache_slots"],
            qo_indptr=indices["qo_indptr"],
            kv_indptr=arrays.kv_indptr.device,
            kv_indices=arrays.kv_indices.device,
            kv_lens=row.kv_lens,
            prefix_leaders=arrays.prefix_leaders.device if has_prefixes else None,
            prefix_lens=arrays.prefix_lens.device if has_prefixes else None,
            workspace=workspace.device,
            sums=sums.device if sums.device.numel() else None,
        )
        # Attention sees chains where others see requests.
        self._attended = self._batch
        if arrays.trees is not None:
            num_accepted = arrays.num_accepted.device
            self._attended = arrays.trees.bind(self._batch, num_accepted, row.qo_lens)
        taps = self._parts.drafting.taps_of(self.shape)
        self._taps = {layer: self._parts.taps[layer][: self.shape.rows] for layer in taps}
        self._gathered, self._logits = scratch.gathered.device, scratch.logits.device

    def _choosing(self) -> dict[str, Any]:
        """What a token is drawn from, beside the logits."""
        arrays, features, tables = self.arrays, self.shape.features, self._parts.tables
        floats = self._floats
        choosing: dict[str, Any] = {
            "positions": self._row.positions,
            "temperature": floats.temperature,
            "top_k": self._ints.top_k,
            "top_p": floats.top_p,
            "min_p": floats.min_p,
        }
        if features & Feature.TYPICAL_P:
            choosing["typical_p"] = floats.typical_p
        if features & Feature.PROCESSORS:
            choosing["processors"] = tables.processors(
                self._row.processor_slots,
                self._state.prompt_lens,
                arrays.mask_indices.device,
                arrays.token_masks.device if self.shape.masks else None,
            )
        if arrays.trees is not None:
            choosing["parents"] = arrays.trees.parents.device
        return choosing

    def _bind_sampling(self, scratch: Scratch) -> None:
        """Notes the tensors that choosing tokens takes."""
        arrays, features, parts = self.arrays, self.shape.features, self._parts
        ints, choosing = self._ints, self._choosing()
        # Zeros before and after every call, so it lies in no block that steps share.
        workspace = sampling.sampling_workspace(self._logits, self.shape.batch)
        if workspace is None:  # none is needed: given, so that no call has to find out
            workspace = self._logits.new_empty(0, dtype=torch.uint8)
        has_rates = features & Feature.ACCEPT_RATES
        self._verify_args: dict[str, Any] = {
            **choosing,
            **self._told(),
            "strategy": ints.strategy,
            "policy": ints.policy,
            "accept_rates": arrays.accept_rates.device if has_rates else None,
            "seeds": arrays.seeds.device,
            "choice_index": ints.choice_index,
            "processed_logprobs": parts.processed_logprobs,
            "output_token_ids": arrays.output_token_ids.device,
            "num_accepted_tokens": arrays.num_accepted.device,
            "workspace": workspace,
        }
        if arrays.trees is not None:
            self._verify_args["accepted_nodes"] = arrays.trees.accepted_nodes.device
        if features & Feature.DRAFT_PROBS:
            self._verify_args |= self._parts.drafting.draft_probs.arguments(self.shape.width)
            self._verify_args["draft_prob_rows"] = arrays.draft_prob_rows.device
        self._tops: dict[str, Any] = {
            "workspace": workspace,
            "token_ids": arrays.top_ids.device,
            "logprobs": arrays.top_logprobs.device,
            "lse": scratch.lse.device,
        }
        if parts.processed_logprobs:
            self._tops |= {
                **choosing,
                "processed_logprobs": True,
                "output_indptr": self._indices.output_indptr,
                "draft_token_ids": arrays.draft_token_ids.device,
            }

    def _bind_commit(self) -> None:
        """Notes the tensors that committing tokens takes."""
        arrays, features, tables = self.arrays, self.shape.features, self._parts.tables
        self._commit_args: dict[str, Any] = {
            **self._state._asdict(),
            **self._told(),
            **tables.endings(
                all_rules=bool(features & Feature.ENDINGS),
                counts=bool(features & Feature.PROCESSORS),
            ),
            "output_token_ids": arrays.output_token_ids.device,
            "slots": self._row.slots,
            "token_ids": tables.token_ids,
            "num_committed_tokens": arrays.num_committed.device,
        }

    def _told(self) -> dict[str, Tensor | None]:
        """What is told of every emitted token, if anybody asked for it."""
        if self.shape.logprobs < 0:
            return {"logprobs": None, "ranks": None}
        return {"logprobs": self.arrays.logprobs.device, "ranks": self.arrays.ranks.device}

    def _target_step(self) -> TargetStep:
        """The tensors that drafters read."""
        arrays, batch, indices = self.arrays, self._batch, self._indices
        floats, ints = self._floats, self._ints
        return TargetStep(
            shape=self.shape,
            hidden=self._parts.model.states(self.shape.rows),
            taps=self._taps,
            positions=indices.positions,
            cache_slots=indices.cache_slots,
            row_to_request=indices.row_to_request,
            slots=self._row.slots,
            qo_indptr=batch.qo_indptr,
            kv_lens=batch.kv_lens,
            kv_indptr=batch.kv_indptr,
            kv_indices=batch.kv_indices,
            # Where there are trees these are of their chains, which drafters know nothing of.
            prefix_leaders=None if arrays.trees else batch.prefix_leaders,
            prefix_lens=None if arrays.trees else batch.prefix_lens,
            token_ids=self._parts.tables.token_ids,
            lens=self._state.lens,
            top_k=ints.top_k,
            top_p=floats.top_p,
            min_p=floats.min_p,
            seeds=arrays.seeds.device,
            choice_index=ints.choice_index,
            draft_probs=self._parts.drafting.draft_probs.views(),
            draft_token_ids=arrays.proposed_token_ids.device,
            num_draft_tokens=arrays.num_proposed.device,
            workspace=batch.workspace,
            sums=batch.sums,
        )

    def launch(self, num_pages: int) -> None:
        """Begins to copy the inputs in, to run the ops and to copy the results out.

        Args:
            num_pages: entries of `kv_indices` in use.

        Raises:
            ValueError: wrong data was met, such as a page id out of range.
        """
        device, arrays = self._memory.device, self.arrays
        num_bytes = arrays.pages_offset + 4 * num_pages
        self._parts.model.ranks.check(arrays.host_in[:num_bytes])
        device.copy_in(arrays.device_in, arrays.host_in, num_bytes)
        if self.replay is not None:
            self.replay()
        elif self._runs and device.captures and self.shape.rows == self.shape.outputs:
            # The first run loaded the kernels, which must not happen in a capture.
            self.replay = device.capture(self._launch)
            self._memory.num_captures += 1
            self.replay()
        else:
            self._launch()
        self._runs += 1
        device.copy_out(arrays.host_out, arrays.device_out, len(arrays.host_out))

    def wait(self) -> None:
        """Waits for the results.

        Raises:
            ValueError: as `launch`, on a device that works meanwhile.
        """
        self._memory.device.wait()
        if self._memory.device.is_async:
            raise_reported(int(self.arrays.error.host[0]))

    def _launch(self) -> None:
        """Runs the ops; everything they use is an attribute, and nothing is allocated."""
        shape, indices, parts, row = self.shape, self._indices, self._parts, self._row
        batching.prepare_batch(
            row.qo_lens,
            row.kv_lens,
            row.output_modes,
            self._batch.kv_indptr,
            self._batch.kv_indices,
            page_size=parts.cache.page_size,
            total_rows=shape.rows,
            num_output_rows=shape.outputs,
            out=indices,
        )
        trees = self.arrays.trees
        if trees is not None:
            trees.prepare()
        hidden = parts.model.forward(self._attended, parts.cache, self._taps)
        if shape.outputs:
            if shape.outputs != shape.rows:
                hidden = batching.gather_output_rows(
                    hidden, indices.output_rows, out=self._gathered
                )
            logits = parts.model.logits(hidden, out=self._logits, sums=self._batch.sums)
            sampling.verify(
                logits,
                indices.output_indptr,
                self.arrays.draft_token_ids.device,
                **self._verify_args,
            )
            if shape.logprobs > 0:
                sampling.top_logprobs(logits, shape.logprobs, **self._tops)
            sampling.commit(**self._commit_args)
            if trees is not None:
                model = parts.model
                states = (model.states(shape.rows), *self._taps.values()) if self._drafters else ()
                trees.keep_accepted(parts.cache, states, model.row_numbers(shape.rows))
        begun = time.perf_counter()
        for drafter in self._drafters:
            drafter.launch(self._target)
        if self._memory.device.is_async:
            specops.take_error(self.arrays.error.device)
        else:
            self.draft_seconds = time.perf_counter() - begun
