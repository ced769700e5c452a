# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of vLLM's V2 model runner, in torch and numpy.

vLLM's V2 model runner prepares every step by Triton kernels, and Triton has no CPU driver. The
plug-in registers these functions in their place (`vllm.triton_utils.dispatcher.register_kernels`).
Each function has the parameters of its kernel; a grid is not passed, so sizes come from tensors.
The kernels of vLLM's sampler and rejection sampler are not needed: `v2_sampler` replaces both.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GPU = "vllm.v1.worker.gpu"


def kernels() -> dict[str, Callable[..., None]]:
    """Return the functions by the full name of the kernel that each replaces."""
    functions: dict[str, Callable[..., None]] = {
        "input_batch._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
        "input_batch._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
        "input_batch._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
        "input_batch._post_update_kernel": post_update,
        "input_batch._expand_idx_mapping_kernel": expand_idx_mapping,
        "block_table._gather_block_tables_kernel": gather_block_tables,
        "block_table._compute_slot_mappings_kernel": compute_slot_mappings,
        "buffer_utils._apply_write_kernel": apply_write,
        "structured_outputs._apply_grammar_bitmask_kernel": apply_grammar_bitmask,
        "sample.prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_logprobs_token_ids,
        "sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
        "sample.logprob._ranks_kernel": ranks,
    }
    return {f"{_GPU}.{name}": _launched(function) for name, function in functions.items()}


def _launched(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with Triton's launch options, which are ignored."""

    @functools.wraps(function)
    def launched(*args: Any, num_warps: int = 4, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return launched


def prepare_prefill_inputs(
    input_ids_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy each request's scheduled prompt tokens to the step's input.

    The prompt tokens after them go to `next_prefill_tokens_ptr`, padded with 0.
    """
    starts = query_start_loc_ptr.tolist()
    for row, index in enumerate(idx_mapping_ptr.tolist()):
        done, end = int(num_computed_tokens_ptr[index]), int(prefill_lens_ptr[index])
        if done >= end:
            continue
        tokens = all_token_ids_ptr[index]
        first, last = starts[row], starts[row + 1]
        done += last - first
        input_ids_ptr[first:last] = tokens[done - (last - first) : done]
        ahead = tokens[done : min(done + num_lookahead, end)]
        next_prefill_tokens_ptr[:num_lookahead, index] = 0
        next_prefill_tokens_ptr[: len(ahead), index] = ahead


def prepare_pos_seq_lens(
    pos_ptr: Tensor,
    seq_lens_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the positions of the step's tokens, and each request's length after the step."""
    count = len(idx_mapping_ptr)
    starts = query_start_loc_ptr[: count + 1].long()
    lens = starts.diff()
    done = num_computed_tokens_ptr[idx_mapping_ptr].long()
    seq_lens_ptr[:count] = done + lens
    seq_lens_ptr[count:max_num_reqs] = 0
    total = int(starts[-1])
    pos_ptr[:total] = torch.arange(total) + (done - starts[:-1]).repeat_interleave(lens)


def combine_sampled_and_draft_tokens(
    input_ids_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    prefill_len_ptr: Tensor,
    draft_tokens_ptr: Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: Tensor,
    logits_indices_ptr: Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write last tokens and drafts to the step's input, and the rows that need logits."""
    ends = query_start_loc_ptr.tolist()[1:]
    logits = cu_num_logits_ptr.tolist()
    for row, index in enumerate(idx_mapping_ptr.tolist()):
        end, count = ends[row], logits[row + 1] - logits[row]
        logits_indices_ptr[logits[row] : logits[row + 1]] = torch.arange(end - count, end)
        seq_len, prefill_len = int(seq_lens_ptr[row]), int(prefill_len_ptr[index])
        if seq_len <= prefill_len:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_len - count >= prefill_len:
            input_ids_ptr[end - count] = last_sampled_tokens_ptr[index].item()
        num_drafts = count - NUM_NEW_SAMPLED_TOKENS
        if num_drafts > 0:
            input_ids_ptr[end - num_drafts : end] = draft_tokens_ptr[index, :num_drafts]


def post_update(
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    output_bin_counts_ptr: Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    query_start_loc_ptr: Tensor | None,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    total_len_ptr: Tensor,
) -> None:
    """Append each request's sampled tokens to its text and advance its computed tokens.

    Token counts for vLLM's penalties are not updated, since vLLM's sampler is not used.
    """
    starts = None if query_start_loc_ptr is None else query_start_loc_ptr.tolist()
    sampled, rejected = num_sampled_ptr.tolist(), num_rejected_ptr.tolist()
    for row, index in enumerate(idx_mapping_ptr.tolist()):
        if index < 0:
            continue
        count = sampled[row]
        if count > 0:
            tokens = sampled_tokens_ptr[row, :count]
            length = int(total_len_ptr[index])
            all_token_ids_ptr[index, length : length + count] = tokens
            last_sampled_tokens_ptr[index] = tokens[-1]
            total_len_ptr[index] = length + count
        num_tokens = 0 if starts is None else starts[row + 1] - starts[row]
        num_computed_tokens_ptr[index] += num_tokens - rejected[row]


def expand_idx_mapping(
    idx_mapping_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Write the request of each row of logits, and the row's number within the request."""
    starts = cu_num_logits_ptr[: len(idx_mapping_ptr) + 1].long()
    lens = starts.diff()
    total = int(starts[-1])
    expanded_idx_mapping_ptr[:total] = idx_mapping_ptr.repeat_interleave(lens)
    expanded_local_pos_ptr[:total] = torch.arange(total) - starts[:-1].repeat_interleave(lens)


def gather_block_tables(
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    num_blocks_ptr: Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy each request's block ids to its row of the step's block tables."""
    indices = batch_idx_to_req_idx[:num_reqs].tolist()
    for group, width in enumerate(block_table_strides.tolist()):
        source = _table(src_block_table_ptrs, group, width, max(indices) + 1)
        target = _table(dst_block_table_ptrs, group, width, len(indices))
        for row, index in enumerate(indices):
            count = int(num_blocks_ptr[group, index])
            target[row, :count] = source[index, :count]


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings_ptr: Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Write the cache slot of each token of the step, and PAD_ID after them."""
    starts = query_start_loc[: len(idx_mapping) + 1].long()
    total = int(starts[-1])
    rows = idx_mapping.long().repeat_interleave(starts.diff()).numpy()
    positions = pos[:total].numpy()
    slots = slot_mappings_ptr.numpy()
    for group, width in enumerate(block_table_strides.tolist()):
        slots[group, :max_num_tokens] = PAD_ID
        if slot_mapping_enabled[group]:
            size = int(block_sizes[group])
            table = _table(block_table_ptrs, group, width, int(rows.max()) + 1)
            blocks = table[rows, positions // size].astype(np.int64)
            slots[group, :total] = blocks * size + positions % size


def _table(pointers: Tensor, group: int, width: int, num_rows: int) -> Any:
    """Return a view of the int32 block table at an address, [num_rows, width]."""
    address = int(pointers[group])
    memory = (ctypes.c_int32 * (num_rows * width)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(num_rows, width)


def apply_write(
    output_ptr: Tensor,
    output_stride: int | Tensor,
    write_indices_ptr: Tensor,
    write_starts_ptr: Tensor,
    write_contents_ptr: Tensor,
    write_cu_lens_ptr: Tensor,
    write_group_ids_ptr: Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Write staged pieces to rows of a table, or of one table per group."""
    groups = [0] * len(write_indices_ptr) if write_group_ids_ptr is None else write_group_ids_ptr
    at = 0
    for group, index, start, end in zip(
        groups,
        write_indices_ptr.tolist(),
        write_starts_ptr.tolist(),
        write_cu_lens_ptr.tolist(),
        strict=True,
    ):
        piece = write_contents_ptr[at:end]
        if MULTI_GROUP:
            assert isinstance(output_stride, Tensor)
            table = _table(output_ptr, int(group), int(output_stride[group]), index + 1)
            table[index, start : start + end - at] = piece
        else:
            row = output_ptr[index:] if output_ptr.dim() == 1 else output_ptr[index]
            row[start : start + end - at] = piece
        at = end


def apply_grammar_bitmask(
    logits_ptr: Tensor,
    logits_stride: int,
    logits_indices_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    bitmask_ptr: Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Set the logits of tokens that a grammar forbids to -inf."""
    starts = cu_num_logits_ptr.tolist()
    octets = bitmask_ptr.contiguous().numpy().view(np.uint8)
    allowed = torch.from_numpy(np.unpackbits(octets, 1, vocab_size, bitorder="little"))
    for index, mask in zip(logits_indices_ptr.tolist(), allowed, strict=True):
        request, position = divmod(index, MASK_STRIDE)
        row = starts[request] + position
        if row < starts[request + 1]:
            logits_ptr[row, :vocab_size].masked_fill_(mask == 0, float("-inf"))


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the token that follows each token of the step."""
    starts = query_start_loc_ptr.tolist()
    for row, index in enumerate(idx_mapping_ptr.tolist()):
        first, last = starts[row], starts[row + 1]
        after = int(num_computed_tokens_ptr[index]) + 1
        tokens = all_token_ids_ptr[index, after : after + last - first]
        prompt_logprobs_token_ids_ptr[first : first + len(tokens)] = tokens


def topk_log_softmax(
    output_ptr: Tensor,
    logits_ptr: Tensor,
    logits_stride: int,
    topk_ids_ptr: Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Write the logprobs of each row's chosen tokens."""
    for row, ids in enumerate(topk_ids_ptr):  # one row at a time: bits must not depend on others
        output_ptr[row] = logits_ptr[row].float().log_softmax(-1)[ids.long()]


def ranks(
    output_ptr: Tensor,
    logits_ptr: Tensor,
    logits_stride: int,
    token_ids_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the number of tokens in each row that are at least as probable as the chosen one."""
    chosen = logits_ptr.gather(1, token_ids_ptr[:, None].long())
    output_ptr[:] = (logits_ptr >= chosen).sum(1)
