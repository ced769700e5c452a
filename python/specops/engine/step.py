# SPDX-License-Identifier: Apache-2.0
"""A step as the device sees it: its shape, its memory, and the ops that it runs, in their order.

Everything an op reads or writes lies in blocks that all steps share, so a step of a shape that was
there before allocates nothing and can be replayed. Where steps are captured, shapes are rounded up
to a few; a padding request has no rows, and a padding row belongs to no request.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specops
from specops import batching, sampling
from specops.batching import BatchIndices
from specops.engine.device import Device
from specops.engine.drafters import DraftBatch, Drafter, MtpDrafter, TargetRows
from specops.engine.models import KvCache, StepBatch, Transformer
from specops.engine.request import Feature
from specops.engine.slot_tables import SlotTables

# Shapes whose views, or graphs, are kept; the one not used for longest goes first.
_MAX_KEPT_STEPS, _MAX_KEPT_GRAPHS = 1024, 128
_ALIGNMENT = 128  # of every array in a block, in bytes
_NUMPY: dict[torch.dtype, Any] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}

# Rows of the integers that a step has per request, in its input block.
QO_LEN, KV_LEN, OUTPUT_MODE, POSITION, SLOT, PROCESSOR_SLOT = range(6)
# Rows of the sampling parameters, the first five of them float32.
TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, DRAFT_TEMPERATURE = range(5)
TOP_K, CHOICE, STRATEGY, POLICY, OWN_NUMBERS, HAS_ANCHORS = range(5, 11)
NUM_PARAMS = 11
# Rows of what a step has per request for its MTP modules.
MTP_SLOT, DRAFTING_SLOT, DRAFT_PROB_ROW, REDRAFT_LEN, SKIPPED = range(5)
# Rows of what a step has per slot. It returns all of them; `commit` writes the last four.
PROMPT_LEN, MAX_LEN, LEN, FINISH_REASON, STOP_INDEX, THINKING_STATE = range(6)


class StepShape(NamedTuple):
    """All sizes of a step. What is not a size of it is data and may differ in every step."""

    batch: int  # requests
    rows: int
    outputs: int  # rows with logits
    width: int  # most drafts a request verifies
    pages: int  # entries of the page lists
    logprobs: int  # -1: none; otherwise the alternatives beside each emitted token
    drafting: tuple[tuple[str, int], ...]  # methods that draft for the next step, and their width
    features: int = 0  # `Feature`, of its requests
    # Of the first pass of MTP modules; 0: they have a rest; -1: no request has any.
    draft_rows: int = -1
    skips_pages: bool = False  # modules of a request do not see all of its pages


def rounded(shape: StepShape, most: StepShape) -> StepShape:
    """Rounds a step that only decodes and verifies up to one of a few shapes.

    Rows have a ladder of their own, and the rung of a full verification of every request is always
    on it: so every number of drafts has graphs of its size, whatever its relation to the ladder.

    Args:
        shape: of the step; all its rows have logits.
        most: the largest step there is.
    """
    batch = min(_rung(shape.batch, finest=1), most.batch)
    width = max((width for _, width in shape.drafting), default=0)
    width = max(width, shape.width)
    rows = min(_rung(shape.rows, finest=16), batch * (1 + width), most.rows)
    pages = page_capacity(shape.pages, most.pages)
    draft_rows = shape.draft_rows
    if draft_rows > 0:
        redrafts = _rung(draft_rows - shape.rows, finest=1) if draft_rows > shape.rows else 0
        draft_rows = min(rows + redrafts, most.draft_rows)
    return shape._replace(
        batch=batch, rows=rows, outputs=rows, width=width, pages=pages, draft_rows=draft_rows
    )


def page_capacity(pages: int, most: int) -> int:
    """Rounds a number of pages up, so that it changes rarely while requests grow."""
    return min(max(_rung(pages, finest=1), 64), max(most, pages))


def _rung(value: int, finest: int) -> int:
    """The next power of two, or above `finest` the next of 8 steps between powers of two."""
    power = 1 << (value - 1).bit_length() if value > 1 else 1
    if value <= finest or finest == 1:
        return power
    step = max(power // 8, 8)
    return -(-value // step) * step


class _Layout:
    """Where named arrays lie in a block of bytes."""

    def __init__(self, **arrays: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self.arrays = arrays
        self.offsets: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in arrays.items():
            self.offsets[name] = end = -(-end // _ALIGNMENT) * _ALIGNMENT
            end += dtype.itemsize * math.prod(shape)
        self.num_bytes = end

    def tensors(self, block: Tensor) -> dict[str, Tensor]:
        found = {}
        bases = {dtype: block.view(dtype) for dtype in {dtype for dtype, _ in self.arrays.values()}}
        for name, (dtype, shape) in self.arrays.items():
            strides = [1] * len(shape)
            for axis in range(len(shape) - 2, -1, -1):
                strides[axis] = strides[axis + 1] * shape[axis + 1]
            offset = self.offsets[name] // dtype.itemsize
            found[name] = torch.as_strided(bases[dtype], shape, strides, offset)
        return found

    def numpy(self, block: Tensor) -> dict[str, NDArray[Any]]:
        memory = block.numpy()
        return {
            name: np.ndarray(shape, _NUMPY[dtype], buffer=memory, offset=self.offsets[name])
            for name, (dtype, shape) in self.arrays.items()
        }


class StepMemory:
    """The blocks that the steps use one after the other, and the steps made so far.

    Args:
        device: where the blocks live.
        most: the largest step there is.
    """

    def __init__(self, device: Device, most: StepShape) -> None:
        self.device = device
        self.most = most
        self.num_captures = 0
        self._blocks: dict[str, tuple[Tensor, Tensor]] = {}  # host and device; the same on the CPU
        self._steps: dict[StepShape, Step] = {}  # least recently used first
        self._last: Step | None = None  # of these, the one used most recently

    def find(self, shape: StepShape) -> "Step | None":
        """Returns the step of a shape if it is there."""
        if self._last is not None and self._last.shape == shape:  # as it mostly is
            return self._last
        step = self._steps.pop(shape, None)
        if step is not None:
            self._steps[shape] = self._last = step
        return step

    def keep(self, shape: StepShape, step: "Step") -> None:
        """Keeps a step for the next of its shape."""
        most = _MAX_KEPT_GRAPHS if self.device.captures else _MAX_KEPT_STEPS
        while len(self._steps) >= most:
            del self._steps[next(iter(self._steps))]
        self._steps[shape] = self._last = step

    def forget(self) -> None:
        """Drops all steps: what they use has moved."""
        self._steps.clear()
        self._last = None

    def block(self, name: str, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Returns a block's host and device sides, of at least so many bytes.

        A block grows when it must, and then all steps are dropped.

        Args:
            name: "exchange" has two sides. "scratch" and "workspace" are the device's alone; ops
                find their workspace as they left it, and zeros in the beginning.
            num_bytes: bytes needed.
        """
        have = self._blocks.get(name)
        if have is None or have[1].numel() < num_bytes:
            old = 0 if have is None else have[1].numel()
            # Ahead of the need, so that it seldom grows.
            size = max(num_bytes, old + min(old, 64 << 20), 4096)
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
            self.forget()
            if name == "exchange":
                host = self.device.host_block(size)
                have = host, self.device.device_block(size, host)
            elif name == "workspace":
                have = (self.device.workspace(size),) * 2
            else:
                have = (self.device.device_block(size),) * 2
            self._blocks[name] = have
        return have


class Step:
    """One shape's arrays and the ops over them.

    Attributes:
        ints: [6, batch], int32, for the host to fill; rows QO_LEN and so on.
        params: [11, batch], int32; rows TEMPERATURE and so on.
        seeds: [batch], int64.
        token_ids: [rows], int32.
        kv_indptr: [batch + 1], int32.
        kv_indices: [pages], int32.
        draft_token_ids: [batch, width], int32.
        accept_rates: [batch, width], float32, where a request has them.
        mask_indices: [outputs], int32, where a request changes logits.
        max_drafts: by method, [slots], int32.
        mtp_ints: [5, batch], int32; rows MTP_SLOT and so on, where a request has MTP modules.
        module_kv_indptr: [batch + 1], int32, where modules skip pages.
        max_continued_drafts: [slots], int32, likewise.
        slot_state: [6, slots], int32, for the host to fill and to read; rows PROMPT_LEN and so on.
        tokens: [batch, width + 1], int32, for the host to read, as are those below.
        token_tensor: the same memory, as a tensor.
        committed: [batch], int32. How many of them.
        accepted: [batch], int32.
        logprobs: [batch, width + 1], float32.
        ranks: [batch, width + 1], int32.
        top_ids: [outputs, alternatives], int32.
        top_logprobs: [outputs, alternatives], float32.
        counts: by method, [slots], int32. Drafts for the next step.
        drafts: by method, [slots, their width], int32.
    """

    def __init__(
        self,
        shape: StepShape,
        memory: StepMemory,
        model: Transformer,
        cache: KvCache,
        *,
        slots: int,
        tables: SlotTables,
        drafters: Mapping[str, Drafter],
        mtp: MtpDrafter | None,
        processed_logprobs: bool,
    ) -> None:
        self.shape = shape
        self._memory = memory
        self._model = model
        self._cache = cache
        self._replay: Any = None
        self._runs = 0
        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        batch, rows, outputs, width = shape.batch, shape.rows, shape.outputs, shape.width
        methods = [method for method, _ in shape.drafting]
        alternatives = max(shape.logprobs, 0)
        drafts = {f"drafts_{name}": (i32, (slots, width)) for name, width in shape.drafting}
        masked = outputs if shape.features & Feature.PROCESSORS else 0
        rated = width if shape.features & Feature.ACCEPT_RATES else 0
        has_mtp = shape.draft_rows >= 0
        # One block: results, what goes both ways, inputs. So each way is one copy.
        self._exchange = _Layout(
            error=(i32, (1,)),
            accepted=(i32, (batch,)),
            committed=(i32, (batch,)),
            tokens=(i32, (batch, width + 1)),
            logprobs=(f32, (batch, width + 1)),
            ranks=(i32, (batch, width + 1)),
            top_ids=(i32, (outputs, alternatives)),
            top_logprobs=(f32, (outputs, alternatives)),
            counts=(i32, (len(methods), slots)),
            **drafts,
            slot_state=(i32, (6, slots)),
            ints=(i32, (6, batch)),
            params=(i32, (NUM_PARAMS, batch)),
            seeds=(i64, (batch,)),
            token_ids=(i32, (rows,)),
            kv_indptr=(i32, (batch + 1,)),
            draft_token_ids=(i32, (batch, width)),
            accept_rates=(f32, (batch, rated)),
            mask_indices=(i32, (masked,)),
            max_drafts=(i32, (len(methods), slots)),
            mtp_ints=(i32, (5, batch if has_mtp else 0)),
            module_kv_indptr=(i32, (batch + 1 if shape.skips_pages else 0,)),
            max_continued_drafts=(i32, (slots if has_mtp else 0,)),
            kv_indices=(i32, (shape.pages,)),  # last, because only what is used of it is copied
        )
        sums = model.sums_size(rows, outputs)
        if shape.draft_rows > 0 and mtp is not None:
            sums = max(sums, mtp.sums_size(shape.draft_rows, batch))
        scratch = _Layout(
            qo_indptr=(i32, (batch + 1,)),
            row_to_request=(i32, (rows,)),
            positions=(i32, (rows,)),
            cache_slots=(i64, (rows,)),
            output_indptr=(i32, (batch + 1,)),
            output_rows=(i32, (outputs,)),
            output_row_to_request=(i32, (outputs,)),
            gathered=(model.dtype, (0 if outputs == rows else outputs, model.config.hidden_size)),
            logits=(f32, (outputs, model.config.vocab_size)),
            lse=(f32, (outputs if alternatives else 0,)),
            sums=(f32, (sums,)),
        )
        most_rows = max(rows, shape.draft_rows)
        workspace = _Layout(
            workspace=(f32, (model.workspace_size(most_rows, batch, shape.pages, cache),))
        )
        # All blocks before any view: one that grows forgets the steps, this one among them.
        host_block, device_block = memory.block("exchange", self._exchange.num_bytes)
        begin, end = self._exchange.offsets["slot_state"], self._exchange.offsets["ints"]
        self._host_in, self._in = host_block[begin:], device_block[begin:]
        self._host_out, self._out = host_block[:end], device_block[:end]
        self._pages_offset = self._exchange.offsets["kv_indices"] - begin
        _, scratch_block = memory.block("scratch", scratch.num_bytes)
        _, workspace_block = memory.block("workspace", workspace.num_bytes)
        model.reserve(rows)

        host = self._exchange.numpy(host_block)
        self.ints: NDArray[np.int32] = host["ints"]
        self.params: NDArray[np.int32] = host["params"]
        self.seeds: NDArray[np.int64] = host["seeds"]
        self.token_ids: NDArray[np.int32] = host["token_ids"]
        self.kv_indptr: NDArray[np.int32] = host["kv_indptr"]
        self.kv_indices: NDArray[np.int32] = host["kv_indices"]
        self.draft_token_ids: NDArray[np.int32] = host["draft_token_ids"]
        self.accept_rates: NDArray[np.float32] = host["accept_rates"]
        self.mask_indices: NDArray[np.int32] = host["mask_indices"]
        self.slot_state: NDArray[np.int32] = host["slot_state"]
        self.max_drafts: dict[str, NDArray[np.int32]] = dict(
            zip(methods, host["max_drafts"], strict=True)
        )
        self.mtp_ints: NDArray[np.int32] = host["mtp_ints"]
        self.module_kv_indptr: NDArray[np.int32] = host["module_kv_indptr"]
        self.max_continued_drafts: NDArray[np.int32] = host["max_continued_drafts"]
        self.tokens: NDArray[np.int32] = host["tokens"]
        self.committed: NDArray[np.int32] = host["committed"]
        self.accepted: NDArray[np.int32] = host["accepted"]
        self.logprobs: NDArray[np.float32] = host["logprobs"]
        self.ranks: NDArray[np.int32] = host["ranks"]
        self.top_ids: NDArray[np.int32] = host["top_ids"]
        self.top_logprobs: NDArray[np.float32] = host["top_logprobs"]
        self.counts: dict[str, NDArray[np.int32]] = dict(zip(methods, host["counts"], strict=True))
        self.drafts: dict[str, NDArray[np.int32]] = {
            name: host[f"drafts_{name}"] for name in methods
        }
        self._error: NDArray[np.int32] = host["error"]
        self.token_tensor = self._exchange.tensors(host_block)["tokens"]

        given = self._exchange.tensors(device_block)
        inner = scratch.tensors(scratch_block) | workspace.tensors(workspace_block)
        self._bind(given, inner)
        self._bind_sampling(given, inner, tables, mtp, processed_logprobs=processed_logprobs)
        self._drafts = [
            (
                drafters[name],
                DraftBatch(
                    token_ids=tables.token_ids,
                    lens=given["slot_state"][LEN],
                    max_draft_tokens=given["max_drafts"][index],
                    draft_token_ids=given[f"drafts_{name}"],
                    num_draft_tokens=given["counts"][index],
                    target=self._target_rows(given) if name == "mtp" else None,
                ),
            )
            for index, name in enumerate(methods)
        ]

    def _bind(self, given: Mapping[str, Tensor], inner: Mapping[str, Tensor]) -> None:
        """Notes the tensors that the model takes."""
        ints = given["ints"]
        self._qo_lens, self._kv_lens, self._modes = ints[QO_LEN], ints[KV_LEN], ints[OUTPUT_MODE]
        self._indices = BatchIndices(
            **{
                name: inner[name]
                for name in (
                    "qo_indptr",
                    "row_to_request",
                    "positions",
                    "cache_slots",
                    "output_indptr",
                    "output_rows",
                    "output_row_to_request",
                )
            }
        )
        self._batch = StepBatch(
            token_ids=given["token_ids"],
            positions=inner["positions"],
            cache_slots=inner["cache_slots"],
            qo_indptr=inner["qo_indptr"],
            kv_indptr=given["kv_indptr"],
            kv_indices=given["kv_indices"],
            kv_lens=self._kv_lens,
            workspace=inner["workspace"],
            sums=inner["sums"] if inner["sums"].numel() else None,
        )
        self._gathered, self._logits = inner["gathered"], inner["logits"]
        self._error_out = given["error"]

    def _target_rows(self, given: Mapping[str, Tensor]) -> TargetRows:
        """The tensors that MTP modules take."""
        batch, params, ints = self._batch, given["params"], given["mtp_ints"]
        skips = self.shape.skips_pages
        choosing = None
        draws_with_own = bool(self.shape.features & Feature.DRAFT_PROBS)
        if self.shape.features & (Feature.DRAFT_PROBS | Feature.TARGET_NUMBERS):
            floats = params.view(torch.float32)
            choosing = {
                "temperature": floats[DRAFT_TEMPERATURE],
                "top_k": params[TOP_K],
                "top_p": floats[TOP_P],
                "min_p": floats[MIN_P],
                "seeds": given["seeds"],
                "choice_index": params[CHOICE],
            }
        return TargetRows(
            hidden=self._model.states(self.shape.rows),
            slots=ints[MTP_SLOT],
            drafting_slots=ints[DRAFTING_SLOT],
            redraft_lens=ints[REDRAFT_LEN],
            qo_indptr=batch.qo_indptr,
            kv_lens=batch.kv_lens,
            kv_indptr=batch.kv_indptr,
            kv_indices=batch.kv_indices,
            module_kv_indptr=given["module_kv_indptr"] if skips else batch.kv_indptr,
            skipped=ints[SKIPPED] if skips else None,
            max_continued_drafts=given["max_continued_drafts"],
            total_rows=self.shape.draft_rows,
            choosing=choosing,
            has_own_numbers=params[OWN_NUMBERS] if draws_with_own else None,
            has_anchors=params[HAS_ANCHORS] if draws_with_own else None,
            workspace=batch.workspace,
            sums=batch.sums,
        )

    def _bind_sampling(
        self,
        given: Mapping[str, Tensor],
        inner: Mapping[str, Tensor],
        tables: SlotTables,
        mtp: MtpDrafter | None,
        *,
        processed_logprobs: bool,
    ) -> None:
        """Notes the tensors that choosing and committing tokens take."""
        ints, params, state = given["ints"], given["params"], given["slot_state"]
        floats, features = params.view(torch.float32), self.shape.features
        changes_logits = bool(features & Feature.PROCESSORS)
        choosing: dict[str, Any] = {
            "positions": ints[POSITION],
            "temperature": floats[TEMPERATURE],
            "top_k": params[TOP_K],
            "top_p": floats[TOP_P],
            "min_p": floats[MIN_P],
        }
        if features & Feature.TYPICAL_P:
            choosing["typical_p"] = floats[TYPICAL_P]
        if changes_logits:
            choosing["processors"] = tables.processors(
                ints[PROCESSOR_SLOT], state[PROMPT_LEN], given["mask_indices"]
            )
        # Zeros before and after every call, so it lies in no block that steps share.
        workspace = sampling.sampling_workspace(self._logits, self.shape.batch)
        if workspace is None:  # none is needed: given, so that no call has to find out
            workspace = self._logits.new_empty(0, dtype=torch.uint8)
        has_logprobs = self.shape.logprobs >= 0
        told = {
            "logprobs": given["logprobs"] if has_logprobs else None,
            "ranks": given["ranks"] if has_logprobs else None,
        }
        self._draft_token_ids = given["draft_token_ids"]
        if features & Feature.DRAFT_PROBS:
            assert mtp is not None and mtp.draft_probs is not None
            choosing_drafts = {
                "draft_probs": mtp.draft_probs[:, : self.shape.width],
                "draft_prob_rows": given["mtp_ints"][DRAFT_PROB_ROW],
            }
        else:
            choosing_drafts = {}
        self._verify_args: dict[str, Any] = {
            **choosing,
            **choosing_drafts,
            **told,
            "strategy": params[STRATEGY],
            "policy": params[POLICY],
            "accept_rates": given["accept_rates"] if features & Feature.ACCEPT_RATES else None,
            "seeds": given["seeds"],
            "choice_index": params[CHOICE],
            "processed_logprobs": processed_logprobs,
            "output_token_ids": given["tokens"],
            "num_accepted_tokens": given["accepted"],
            "workspace": workspace,
        }
        self._tops: dict[str, Any] = {
            "workspace": workspace,
            "token_ids": given["top_ids"],
            "logprobs": given["top_logprobs"],
            "lse": inner["lse"],
        }
        if processed_logprobs:
            self._tops |= {
                **choosing,
                "processed_logprobs": True,
                "output_indptr": inner["output_indptr"],
                "draft_token_ids": given["draft_token_ids"],
            }
        self._commit_args: dict[str, Any] = {
            **told,
            **tables.endings(all_rules=bool(features & Feature.ENDINGS), counts=changes_logits),
            "output_token_ids": given["tokens"],
            "slots": ints[SLOT],
            "token_ids": tables.token_ids,
            "lens": state[LEN],
            "prompt_lens": state[PROMPT_LEN],
            "max_lens": state[MAX_LEN],
            "thinking_state": state[THINKING_STATE],
            "finish_reasons": state[FINISH_REASON],
            "stop_indices": state[STOP_INDEX],
            "num_committed_tokens": given["committed"],
        }

    def run(self, num_pages: int, *, drafting: bool = True) -> None:
        """Copies the inputs in, runs the ops, copies the results out and waits for them.

        Args:
            num_pages: entries of `kv_indices` in use.
            drafting: run the drafters; where steps are captured, their shape says so. MTP modules
                run in any case: a request's own rows say whether they have a rest.

        Raises:
            ValueError: wrong data was met, such as a page id out of range.
        """
        device = self._memory.device
        device.copy_in(self._in, self._host_in, self._pages_offset + 4 * num_pages)
        if self._replay is not None:
            self._replay()
        elif self._runs and device.captures and self.shape.rows == self.shape.outputs:
            # The first run loaded the kernels, which must not happen in a capture.
            self._replay = device.capture(self._launch)
            self._memory.num_captures += 1
            self._replay()
        else:
            self._launch(drafting=drafting or device.captures)
        self._runs += 1
        device.copy_out(self._host_out, self._out, len(self._host_out))
        device.wait()
        if device.is_async and self._error[0]:
            code = int(self._error[0])
            raise ValueError(specops.error_sentence(code) or f"a kernel reported code {code}")

    @property
    def is_captured(self) -> bool:
        """Whether it is replayed."""
        return self._replay is not None

    def _launch(self, *, drafting: bool = True) -> None:
        """Runs the ops; everything they use is an attribute, and nothing is allocated."""
        shape, indices = self.shape, self._indices
        batching.prepare_batch(
            self._qo_lens,
            self._kv_lens,
            self._modes,
            self._batch.kv_indptr,
            self._batch.kv_indices,
            page_size=self._cache.k[0].shape[1],
            total_rows=shape.rows,
            num_output_rows=shape.outputs,
            out=indices,
        )
        hidden = self._model.forward(self._batch, self._cache)
        if shape.outputs:
            if shape.outputs != shape.rows:
                hidden = batching.gather_output_rows(
                    hidden, indices.output_rows, out=self._gathered
                )
            logits = self._model.logits(hidden, out=self._logits, sums=self._batch.sums)
            sampling.verify(
                logits, indices.output_indptr, self._draft_token_ids, **self._verify_args
            )
            if shape.logprobs > 0:
                sampling.top_logprobs(logits, shape.logprobs, **self._tops)
            sampling.commit(**self._commit_args)
        if self._drafts and (drafting or shape.draft_rows >= 0):
            for drafter, batch in self._drafts:
                if drafting or batch.target is not None:
                    drafter.propose(batch)
        if self._memory.device.is_async:
            specops.take_error(self._error_out)
