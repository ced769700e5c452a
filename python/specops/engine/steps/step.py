# SPDX-License-Identifier: Apache-2.0
"""A step on the device: its arrays, and the sequence of ops that it runs.

Everything an op reads or writes lies in buffers that all steps share. A step of a known shape
therefore allocates nothing and can be replayed. If steps are captured, shapes are rounded up to a
few buckets; a padding request has no rows, and a padding row belongs to no request.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specops
from specops import batching, sampling
from specops.attention import PrefixTensors
from specops.batching import BatchIndices
from specops.engine.device import raise_reported
from specops.engine.drafters.base import TargetStep
from specops.engine.drafters.drafting import Drafting
from specops.engine.features import Feature
from specops.engine.memory.step_memory import Buffer, Layout, StepMemory
from specops.engine.memory.step_shape import StepShape
from specops.engine.models import KvCache, StepBatch, Transformer
from specops.engine.models.adapters import AdapterRows
from specops.engine.steps.slot_tables import SlotTables
from specops.sampling import (
    Drafts,
    EmittedTokens,
    LogitsProcessors,
    RequestStatus,
    SamplingTensors,
    TopLogprobsOutputs,
    VerifyOutputs,
)


class RequestColumns(NamedTuple):
    """Per-request int32 columns of a step."""

    qo_lens: Any
    kv_lens: Any
    output_modes: Any
    positions: Any  # position of the first token it chooses: its length
    slots: Any  # -1: a padding request
    processor_slots: Any  # -1: nothing changes its logits


class SamplingColumns(NamedTuple):
    """Per-request sampling parameters, as fields and arguments of `sampling.verify`.

    They are rows of one int32 array; the first `_NUM_FLOATS` rows hold the bits of float32 values.
    """

    temperature: Any
    top_p: Any
    min_p: Any
    typical_p: Any
    top_k: Any
    choice_index: Any
    strategy: Any
    policy: Any

    @classmethod
    def of(cls, array: Any, float32: Any) -> "SamplingColumns":
        """Return the rows of such a numpy or torch array; `float32` is that library's dtype."""
        return cls(*array[:_NUM_FLOATS].view(float32), *array[_NUM_FLOATS:])


_NUM_FLOATS = 4
FILTERS = SamplingColumns._fields[: _NUM_FLOATS + 1]  # parameters that choose a token


class SlotState(NamedTuple):
    """Per-slot int32 arrays for `sampling.commit`, which updates the last four fields."""

    prompt_lens: Any
    max_lens: Any
    lens: Any
    finish_reasons: Any
    stop_indices: Any
    thinking_state: Any


# Row numbers, for code where a view of one row is faster than views of all.
SLOTS, POSITIONS = map(RequestColumns._fields.index, ("slots", "positions"))
LENS, FINISH_REASONS, STOP_INDICES, THINKING_STATE = map(
    SlotState._fields.index, ("lens", "finish_reasons", "stop_indices", "thinking_state")
)


@dataclass(frozen=True, kw_only=True)
class RunnerParts:
    """Objects shared by all steps of a runner."""

    model: Transformer
    cache: KvCache
    aux_hidden_states: Mapping[int, Tensor]  # auxiliary hidden states by layer; [rows, hidden_size]
    slots: int
    tables: SlotTables
    drafting: Drafting
    processed_logprobs: bool


class StepArrays:
    """Arrays of a step that host and device share: results, arrays copied both ways, and inputs.

    They lie in one buffer in this order, so that each direction is one copy. An array that only
    some steps need is declared with its condition (`when`).
    """

    def __init__(self, shape: StepShape, parts: RunnerParts) -> None:
        batch, width, slots = shape.batch, shape.width, parts.slots
        features, alternatives = shape.features, max(shape.logprobs, 0)
        self.results = results = Layout()
        self.error = results.int32(1)
        self.num_accepted = results.int32(batch)
        self.num_committed = results.int32(batch)
        self.output_token_ids = results.int32(batch, width + 1)
        self.logprobs = results.float32(batch, width + 1, when=shape.logprobs >= 0)
        self.ranks = results.int32(batch, width + 1, when=shape.logprobs >= 0)
        self.proposed_token_ids = results.int32(slots, shape.proposals)
        # Sizes that depend on the rows come last, so that other shapes share all earlier offsets.
        drafters_inputs = Layout()
        self.drafters = parts.drafting.new_steps(shape, drafters_inputs, results)
        self.top_ids = results.int32(shape.outputs, alternatives)
        self.top_logprobs = results.float32(shape.outputs, alternatives)
        self.shared = shared = Layout(results.end)
        self.slot_state = shared.int32(len(SlotState._fields), slots)
        self.num_proposed = shared.int32(slots)  # zeros on input
        self.inputs = inputs = Layout(shared.end)
        self.requests = inputs.int32(len(RequestColumns._fields), batch)
        self.sampling = inputs.int32(len(SamplingColumns._fields), batch)
        self.seeds = inputs.int64(batch)
        self.kv_indptr = inputs.int32(batch + 1)
        self.prefix_leaders = inputs.int32(shape.prefix_levels, batch, when=shape.prefix_levels)
        self.prefix_lens = inputs.int32(shape.prefix_levels, batch, when=shape.prefix_levels)
        self.draft_token_ids = inputs.int32(batch, width)
        self.accept_rates = inputs.float32(batch, width, when=features & Feature.ACCEPT_RATES)
        self.draft_prob_rows = inputs.int32(batch, when=features & Feature.DRAFT_PROBS)
        inputs.append(drafters_inputs)
        self.mask_indices = inputs.int32(shape.outputs, when=features & Feature.PROCESSORS)
        words = -(-parts.model.config.vocab_size // 32)
        self.token_masks = inputs.int32(shape.masks, words, when=shape.masks)
        self.draft_mask_indices = inputs.int32(batch, when=shape.masks)
        self.token_ids = inputs.int32(shape.rows)
        self.kv_indices = inputs.int32(shape.pages)  # last: only its used part is copied

    def bind(self, buffer: Buffer) -> None:
        """Store views of the ranges to copy, once the arrays are placed in a buffer."""
        host, device = buffer.host, buffer.device
        assert host is not None
        begin, end = self.shared.begin, self.shared.end
        self.host_in, self.device_in = host[begin:], device[begin:]
        self.host_out, self.device_out = host[:end], device[:end]
        self.pages_offset = self.kv_indices.offset - begin
        self.emitted = torch.from_numpy(self.output_token_ids.host)


class Scratch:
    """Arrays that only the device uses."""

    def __init__(self, shape: StepShape, parts: RunnerParts, arrays: StepArrays) -> None:
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
        self.lse = layout.float32(outputs, when=shape.logprobs > 0)
        # Ops rely on the contents that they left here, so these lie in buffers of their own.
        drafters = arrays.drafters
        needed = [model.workspace_size(rows, batch, shape.pages, parts.cache)]
        self.floats, self.leaves = Layout(), Layout()
        self.workspace = self.floats.float32(
            max(needed + [drafter.workspace_size for drafter in drafters])
        )
        sums_size = max(model.sums_size(rows, outputs), *(one.sums_size for one in drafters), 0)
        self.sums = self.leaves.float32(sums_size, when=sums_size)


class Step:
    """Arrays of one step shape, and the ops on them.

    Attributes:
        shape: the sizes.
        arrays: arrays that the host fills and reads.
        replay: replays the captured graph; None before the capture.
        draft_seconds: time of the drafters in the last run; 0 on an asynchronous device, where it
            cannot be separated.
    """

    def __init__(self, shape: StepShape, memory: "StepMemory[Step]", parts: RunnerParts) -> None:
        self.shape = shape
        self._memory = memory
        self._parts = parts
        self.replay: Any = None
        self._runs = 0
        self.draft_seconds = 0.0
        self.arrays = arrays = StepArrays(shape, parts)
        scratch = Scratch(shape, parts, arrays)
        parts.model.reserve(shape.rows)
        memory.place(
            arrays=(arrays.results, arrays.shared, arrays.inputs),
            scratch=(scratch.layout,),
            workspace=(scratch.floats,),
            sums=(scratch.leaves,),
        )
        arrays.bind(memory.buffer("arrays", 0))
        self._columns = RequestColumns(*arrays.requests.device)
        self._sampling = SamplingColumns.of(arrays.sampling.device, torch.float32)
        self._state = SlotState(*arrays.slot_state.device)
        self._indices = BatchIndices(
            **{name: array.device for name, array in scratch.indices.items()}
        )
        self._bind_model(scratch)
        self._bind_sampling(scratch)
        self._drafters = arrays.drafters
        if self._drafters:
            self._target = self._target_step()

    def _bind_model(self, scratch: Scratch) -> None:
        """Collect the tensors that the model takes."""
        arrays, indices = self.arrays, self._indices
        prefixes = None
        if self.shape.prefix_levels > 0:
            prefixes = PrefixTensors(arrays.prefix_leaders.device, arrays.prefix_lens.device)
        self._rows: dict[str, Any] = {
            "positions": indices.positions,
            "cache_slots": indices.cache_slots,
            "qo_indptr": indices.qo_indptr,
            "kv_indptr": arrays.kv_indptr.device,
            "kv_indices": arrays.kv_indices.device,
            "kv_lens": self._columns.kv_lens,
            "slots": self._columns.slots,
            "prefixes": prefixes,
            "workspace": scratch.workspace.device,
            "sums": scratch.sums.optional,
        }
        self._batch = StepBatch(token_ids=arrays.token_ids.device, **self._rows)
        layers = self._parts.drafting.aux_layers_of(self.shape)
        self._aux_hidden_states = {
            layer: self._parts.aux_hidden_states[layer][: self.shape.rows] for layer in layers
        }
        self._gathered, self._logits = scratch.gathered.device, scratch.logits.device

    def _choosing(self) -> dict[str, Any]:
        """Return the arguments that choose a token, besides the logits."""
        arrays, features = self.arrays, self.shape.features
        has_processors = features & Feature.PROCESSORS
        return {
            "drafts": Drafts(self._indices.output_indptr, arrays.draft_token_ids.device),
            "positions": self._columns.positions,
            "sampling": self._sampling_tensors(),
            "processors": self._processors(arrays.mask_indices.device) if has_processors else None,
        }

    def _sampling_tensors(self) -> SamplingTensors:
        sampled = self._sampling
        return SamplingTensors(
            temperature=sampled.temperature,
            top_k=sampled.top_k,
            top_p=sampled.top_p,
            min_p=sampled.min_p,
            typical_p=sampled.typical_p if self.shape.features & Feature.TYPICAL_P else None,
            seeds=self.arrays.seeds.device,
            choice_index=sampled.choice_index,
        )

    def _processors(self, mask_indices: Tensor) -> LogitsProcessors:
        """Return the logits processors, with the mask index of each row of logits."""
        return self._parts.tables.processors(
            self._columns.processor_slots,
            self._state.prompt_lens,
            mask_indices,
            self.arrays.token_masks.optional,
        )

    def _bind_sampling(self, scratch: Scratch) -> None:
        """Collect the arguments of the ops that choose and commit tokens."""
        arrays, features, parts = self.arrays, self.shape.features, self._parts
        choosing, tables, state = self._choosing(), parts.tables, self._state
        # It must be zero before every call, and is zero after it, so steps do not share it.
        workspace = sampling.sampling_workspace(self._logits, self.shape.batch)
        if workspace is None:  # an empty tensor, so that no call checks the need again
            workspace = self._logits.new_empty(0, dtype=torch.uint8)
        # Logprobs and ranks are outputs of both ops; None if no request wants them.
        outputs = VerifyOutputs(
            arrays.output_token_ids.device,
            arrays.num_accepted.device,
            logprobs=arrays.logprobs.optional,
            ranks=arrays.ranks.optional,
        )
        self._verify_args: dict[str, Any] = {
            **choosing,
            "strategy": self._sampling.strategy,
            "policy": self._sampling.policy,
            "accept_rates": arrays.accept_rates.optional,
            "processed_logprobs": parts.processed_logprobs,
            "outputs": outputs,
            "workspace": workspace,
        }
        if features & Feature.DRAFT_PROBS:
            self._verify_args["draft_probs"] = parts.drafting.draft_probs.of_step(
                self.shape.width, arrays.draft_prob_rows.device
            )
        self._tops: dict[str, Any] = {
            **(choosing if parts.processed_logprobs else {}),
            "processed_logprobs": parts.processed_logprobs,
            "outputs": TopLogprobsOutputs(
                arrays.top_ids.device, arrays.top_logprobs.device, lse=scratch.lse.device
            ),
            "workspace": workspace,
        }
        self._commit_args: dict[str, Any] = {
            "emitted": EmittedTokens(
                arrays.output_token_ids.device, outputs.logprobs, outputs.ranks
            ),
            "slots": self._columns.slots,
            "token_ids": tables.token_ids,
            "lens": state.lens,
            "prompt_lens": state.prompt_lens,
            "rules": tables.endings(state.max_lens, all_rules=bool(features & Feature.ENDINGS)),
            "counts": tables.counts() if features & Feature.PROCESSORS else None,
            "status": RequestStatus(state.finish_reasons, state.stop_indices, state.thinking_state),
            "num_committed_tokens": arrays.num_committed.device,
        }

    def _target_step(self) -> TargetStep:
        """Return the tensors that drafters read."""
        arrays = self.arrays
        features, processors = self.shape.features, None
        if features & Feature.PROCESSORS:
            processors = self._processors(arrays.draft_mask_indices.device)
        return TargetStep(
            **self._rows,
            shape=self.shape,
            cache=self._parts.cache,
            hidden=self._parts.model.states(self.shape.rows),
            aux_hidden_states=self._aux_hidden_states,
            row_to_request=self._indices.row_to_request,
            token_ids=self._parts.tables.token_ids,
            lens=self._state.lens,
            sampling=self._sampling_tensors(),
            processors=processors,
            draft_probs=self._parts.drafting.draft_probs.views(),
            draft_token_ids=arrays.proposed_token_ids.device,
            num_draft_tokens=arrays.num_proposed.device,
        )

    def launch(self, num_pages: int, adapters: Sequence[AdapterRows] = ()) -> None:
        """Start copying the inputs in, running the ops and copying the results out.

        Args:
            num_pages: entries of `kv_indices` in use.
            adapters: rows with LoRA adapters. A step that has some is neither captured nor
                replayed, and allocates memory.

        Raises:
            ValueError: an op met invalid data, such as a page id out of range.
        """
        device, arrays = self._memory.device, self.arrays
        num_bytes = arrays.pages_offset + 4 * num_pages
        self._parts.model.ranks.check(arrays.host_in, num_bytes)
        device.copy_in(arrays.device_in, arrays.host_in, num_bytes)
        self._batch.adapters = adapters
        if self.replay is not None and not adapters:
            self.replay()
        elif (
            not adapters
            and self._runs
            and device.captures
            and self.shape.rows == self.shape.outputs
        ):
            # The first run has loaded the kernels, which must not happen during a capture.
            self.replay = device.capture(self._launch)
            self._memory.num_captures += 1
            self.replay()
        else:
            self._launch()
        self._runs += 1
        device.copy_out(arrays.host_out, arrays.device_out, len(arrays.host_out))

    def wait(self) -> None:
        """Wait for the results.

        Raises:
            ValueError: as for `launch`, on an asynchronous device.
        """
        self._memory.device.wait()
        if self._memory.device.is_async:
            raise_reported(int(self.arrays.error.host[0]))

    def _launch(self) -> None:
        """Run the ops. Their arguments are attributes of this step, and nothing is allocated."""
        shape, indices, parts, columns = self.shape, self._indices, self._parts, self._columns
        batching.prepare_batch(
            columns.qo_lens,
            columns.kv_lens,
            columns.output_modes,
            self._batch.kv_indptr,
            self._batch.kv_indices,
            page_size=parts.cache.page_size,
            out=indices,
        )
        hidden = parts.model.forward(self._batch, parts.cache, self._aux_hidden_states)
        if shape.outputs:
            if shape.outputs != shape.rows:
                hidden = batching.gather_output_rows(
                    hidden, indices.output_rows, out=self._gathered
                )
            logits = parts.model.logits(hidden, out=self._logits, sums=self._batch.sums)
            sampling.verify(logits, **self._verify_args)
            if shape.logprobs > 0:
                sampling.top_logprobs(logits, shape.logprobs, **self._tops)
            sampling.commit(**self._commit_args)
        begun = time.perf_counter()
        for drafter in self._drafters:
            drafter.launch(self._target)
        if self._memory.device.is_async:
            specops.take_error(self.arrays.error.device)
        else:
            self.draft_seconds = time.perf_counter() - begun
