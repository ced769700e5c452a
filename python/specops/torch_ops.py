# SPDX-License-Identifier: Apache-2.0
"""The ops as torch sees them: `torch.ops.specops.*`, and their way through `torch.compile`.

Importing this module is all there is to it, and only those who compile or export need to. Each op
is registered with a schema that says what it writes, kernels for cpu and cuda that are the compiled
module's own functions, and a fake kernel. After the import, Dynamo takes a call of `specops.dense`,
`specops.attention` and so on as a call of the registered op: the documented functions work inside
`torch.compile(fullgraph=True)` as they stand. Eager calls never come through here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from specops import _C

# Every op but `take_error`: no argument ties it to the ops before it, so a graph could move it.
# Arguments are those of _C, in its order: every output and workspace is the caller's, so nothing is
# returned. Sizes are SymInt, for shapes that torch.compile leaves open.
_SCHEMAS = (
    # batching
    "prepare_batch(Tensor qo_lens, Tensor kv_lens, Tensor output_modes, Tensor? kv_indptr, "
    "Tensor? kv_indices, int? page_size, SymInt total_rows, SymInt num_output_rows, "
    "SymInt? max_seq_len, Tensor(a!) qo_indptr, Tensor(b!) row_to_request, Tensor(c!) positions, "
    "Tensor(d!) cache_slots, Tensor(e!) output_indptr, Tensor(f!) output_rows, "
    "Tensor(g!) output_row_to_request, Tensor(h!)? output_padding_offset, "
    "Tensor(i!)? output_cum_offsets) -> ()",
    "gather_input_ids(Tensor row_to_request, Tensor positions, Tensor slots, Tensor token_ids, "
    "Tensor lens, Tensor? draft_token_ids, Tensor(a!) out) -> ()",
    "gather_output_rows(Tensor hidden, Tensor output_rows, Tensor(a!) out) -> ()",
    "build_tree(Tensor parents, Tensor num_draft_tokens, Tensor positions, Tensor(a!) depths, "
    "Tensor(b!) row_positions, Tensor(c!) ancestor_mask, Tensor(d!) first_child, "
    "Tensor(e!) next_sibling, Tensor(f!) sibling_index) -> ()",
    "prepare_draft_batch(Tensor slots, Tensor qo_indptr, Tensor kv_lens, Tensor redraft_lens, "
    "Tensor kv_indptr, Tensor kv_indices, Tensor lens, Tensor max_draft_tokens, int page_size, "
    "int window, SymInt total_rows, Tensor(a!) draft_qo_indptr, Tensor(b!) draft_kv_lens, "
    "Tensor(c!) last_rows, Tensor(d!) draft_positions, Tensor(e!) row_to_request, "
    "Tensor(f!) positions, Tensor(g!) cache_slots, Tensor(h!) source_rows) -> ()",
    "advance_draft_batch(Tensor sampled_token_ids, Tensor last_rows, Tensor slots, "
    "Tensor kv_indptr, Tensor kv_indices, Tensor lens, Tensor max_draft_tokens, int page_size, "
    "int step, int ahead, Tensor(a!) draft_token_ids, Tensor(b!) num_draft_tokens, "
    "Tensor(c!)? draft_qo_indptr, Tensor(d!)? draft_kv_lens, Tensor(e!)? next_last_rows, "
    "Tensor(f!)? draft_positions, Tensor(g!)? row_to_request, Tensor(h!)? positions, "
    "Tensor(i!)? cache_slots, Tensor(j!)? source_rows) -> ()",
    "keep_hidden_rows(Tensor hidden, Tensor slots, Tensor qo_indptr, Tensor kv_lens, "
    "Tensor lens, Tensor(a!) kept) -> ()",
    # attention
    "rope_append_kv(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor cache_slots, Tensor positions, Tensor cos_sin, bool interleaved, "
    "Tensor? q_norm_weight, Tensor? k_norm_weight, float norm_eps, Tensor(c!) q_out) -> ()",
    "append_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, "
    "Tensor kv_indptr, Tensor kv_indices, Tensor kv_lens, float sm_scale, int sliding_window, "
    "Tensor? prefix_leaders, Tensor? prefix_lens, Tensor(a!) out, Tensor(b!)? lse, "
    "Tensor(c!)? workspace) -> ()",
    "merge_states(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "compact_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor accepted_nodes, "
    "Tensor num_accepted_tokens, Tensor qo_indptr, Tensor kv_lens, Tensor kv_indptr, "
    "Tensor kv_indices) -> ()",
    # dense
    "silu_mul(Tensor gate_up, Tensor(a!) out) -> ()",
    "pack_weight(Tensor weight, Tensor(a!) packed) -> ()",
    "linear(Tensor x, Tensor packed, SymInt packed_outputs, SymInt packed_inputs, Tensor? bias, "
    "Tensor(a!) out, Tensor(b!)? workspace) -> ()",
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual, Tensor(b!) out) -> ()",
    "embedding(Tensor token_ids, Tensor weight, Tensor(a!) out) -> ()",
    "mtp_input(Tensor row_to_request, Tensor positions, Tensor source_rows, Tensor slots, "
    "Tensor token_ids, Tensor lens, Tensor draft_token_ids, Tensor embedding, "
    "Tensor embedding_norm, Tensor hidden_norm, Tensor hidden, Tensor? kept, float eps, "
    "int ahead, bool hidden_first, bool mask_first_position, Tensor(a!) out) -> ()",
    # sampling
    "sample(Tensor logits, Tensor positions, Tensor? temperature, Tensor? top_k, Tensor? top_p, "
    "Tensor? min_p, Tensor? typical_p, Tensor? seeds, Tensor? choice_index, Tensor?[] processors, "
    "int purpose, Tensor? anchors, bool processed_logprobs, Tensor(a!)? logprobs, Tensor(b!)? "
    "ranks, Tensor(c!)? probs, Tensor(d!) out, Tensor(e!)? workspace) -> ()",
    "verify(Tensor logits, Tensor output_indptr, Tensor draft_token_ids, Tensor positions, "
    "Tensor? parents, Tensor? strategy, Tensor? policy, Tensor? temperature, Tensor? top_k, "
    "Tensor? top_p, Tensor? min_p, Tensor? typical_p, Tensor? seeds, Tensor? choice_index, "
    "Tensor?[] processors, Tensor? draft_probs, Tensor? draft_prob_token_ids, Tensor? "
    "draft_prob_rows, Tensor? accept_rates, bool processed_logprobs, Tensor(a!)? logprobs, "
    "Tensor(b!)? ranks, Tensor(c!) output_token_ids, Tensor(d!) num_accepted_tokens, "
    "Tensor(e!)? accepted_nodes, Tensor(f!)? workspace) -> ()",
    "top_logprobs(Tensor logits, bool processed_logprobs, Tensor? output_indptr, Tensor? "
    "draft_token_ids, Tensor? parents, Tensor? positions, Tensor? temperature, Tensor? top_k, "
    "Tensor? top_p, Tensor? min_p, Tensor? typical_p, Tensor?[] processors, Tensor(a!) token_ids, "
    "Tensor(b!) logprobs, Tensor(c!)? ranks, Tensor(d!) lse, Tensor(e!)? workspace) -> ()",
    "commit(Tensor(a!) output_token_ids, Tensor slots, Tensor(b!) token_ids, Tensor(c!) lens, "
    "Tensor(d!)? logprobs, Tensor(e!)? ranks, Tensor? prompt_lens, Tensor? max_lens, "
    "Tensor? min_tokens, Tensor? stop_token_ids, Tensor? stop_sequences, "
    "Tensor(f!)? counted_token_ids, Tensor(g!)? token_counts, Tensor? think_end_token_id, "
    "Tensor? thinking_budget, Tensor? reply_budget, Tensor? inject_token_ids, "
    "Tensor(h!)? thinking_state, Tensor(i!)? finish_reasons, Tensor(j!)? stop_indices, "
    "Tensor(k!)? num_committed_tokens) -> ()",
    # suffix_tree; its sizes are ints, or one per request
    "ngram_propose(Tensor token_ids, Tensor lens, Tensor max_draft_tokens, int min_ngram_size, "
    "int max_ngram_size, bool leftmost, Tensor? num_given_drafts, int max_total_draft_tokens, "
    "Tensor(a!)? table, Tensor(b!)? state, int scan_tokens, int index_tokens, "
    "Tensor(c!) draft_token_ids, Tensor(d!) num_draft_tokens, Tensor(e!)? match_lens) -> ()",
    "ngram_propose.per_request(Tensor token_ids, Tensor lens, Tensor max_draft_tokens, "
    "Tensor min_ngram_size, Tensor max_ngram_size, Tensor leftmost, "
    "Tensor? num_given_drafts, int max_total_draft_tokens, Tensor(a!)? table, "
    "Tensor(b!)? state, int scan_tokens, int index_tokens, "
    "Tensor(c!) draft_token_ids, Tensor(d!) num_draft_tokens, Tensor(e!)? match_lens) -> ()",
)

_LIBRARY: Any = torch.library.Library("specops", "DEF")  # type: ignore[no-untyped-call]


def _fake(*args: Any) -> None:
    """Outputs come from the caller, and nothing of theirs changes but their contents."""


def _register(schema: str) -> OpOverload:
    """Defines one op and hands it the compiled module's function on both devices."""
    overload = schema.partition("(")[0]
    name, _, kind = overload.partition(".")
    # Strides as the caller made them: the ops refuse others rather than copy.
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(overload, getattr(_C, name), key)
    torch.library.register_fake(f"specops::{overload}", _fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops.specops, name), kind or "default")  # type: ignore[no-any-return]


def _trace_as(function: Callable[..., None]) -> Callable[[Callable[..., None]], object]:
    """Makes Dynamo inline the decorated function wherever it meets a call of `function`."""
    return torch.compiler.substitute_in_graph(function, skip_signature_check=True)


def _trace_as_op(function: Callable[..., None], op: OpOverload, kinds: dict[str, str]) -> None:
    names = list(kinds)
    numbers = {
        names.index(name): _NUMBERS[kinds[name]] for name in names if kinds[name] in _NUMBERS
    }
    requests = [names.index(name) for name in ("positions", "output_indptr") if name in names]

    @_trace_as(function)
    def call(*args: Any) -> None:
        if any(isinstance(args[place], int | float) for place in numbers):
            count, device = args[0].shape[0], args[0].device
            for place in requests:
                if args[place] is not None:
                    count = args[place].shape[0] - (names[place] == "output_indptr")
            given = list(args)
            for place, dtype in numbers.items():
                if isinstance(given[place], int | float):
                    given[place] = torch.full((count,), given[place], dtype=dtype, device=device)
            args = tuple(given)
        op(*args)


# Every overload of torch.ops.specops, by name.
OPS: dict[str, OpOverload] = {}
for _name, _kinds in _ops():
    OPS[_name] = _register(_schema(_name, _kinds))
    if any(_kind.endswith("| Tensor") for _kind in _kinds.values()):
        _overload = f"{_name}.per_request"
        OPS[_overload] = _register(_schema(_overload, _kinds, per_request=True))
    else:
        _trace_as_op(getattr(_C, _name), OPS[_name], _kinds)


@_trace_as(_C.ngram_propose)
def _ngram_propose(
    token_ids: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    min_ngram_size: int | Tensor,
    max_ngram_size: int | Tensor,
    leftmost: bool | Tensor,
    *rest: Any,
) -> None:
    choices = (min_ngram_size, max_ngram_size, leftmost)
    if not any(isinstance(choice, Tensor) for choice in choices):
        OPS["ngram_propose"](token_ids, lens, max_draft_tokens, *choices, *rest)
        return
    each = [
        choice if isinstance(choice, Tensor) else torch.full_like(lens, choice)
        for choice in choices
    ]
    OPS["ngram_propose.per_request"](token_ids, lens, max_draft_tokens, *each, *rest)


@_trace_as(_C.sampling_workspace_bytes)  # type: ignore[arg-type]
def _sampling_workspace_bytes(
    rows: int, vocab_size: int, element_bytes: int, batch: int, device_index: int
) -> int:
    """An upper bound for any device, of shapes that the compiler may leave open."""
    if device_index < 0:
        return 0
    leaves = (vocab_size * element_bytes + 2047) // 2048
    return 16 + 4 * (batch + rows) + rows * (24 * leaves + 8)


@_trace_as(_C.attention_workspace_size)  # type: ignore[arg-type]
def _attention_workspace_size(
    rows: int,
    num_qo_heads: int,
    head_dim: int,
    num_kv_heads: int,
    tokens: int,
    batch: int,
    device_index: int,
) -> tuple[int, int]:
    """Bounds for any device, of shapes that the compiler may leave open."""
    if device_index < 0:
        return (tokens // 512 + 32) * min(rows * num_qo_heads, 64 * num_kv_heads) * (
            head_dim + 2
        ), 0
    sms, counters = 160, 8192
    totals = sms * 128 * head_dim * 2
    states = (8 * sms * 64 * 5 // 4 + (tokens // 2048 + 1 + batch) * num_qo_heads * 8) * (
        head_dim + 2
    )
    return counters + totals + states, counters
