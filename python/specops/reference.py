# SPDX-License-Identifier: Apache-2.0
"""Every op in plain PyTorch: the executable specification that tests and benches compare with.

Nothing in the package imports this module, and it imports nothing but torch.
"""

import torch
from torch import Tensor

# ---- batching ----


def prepare_batch(
    qo_lens: Tensor,
    kv_lens: Tensor,
    output_modes: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    page_size: int,
    total_rows: int,
    num_output_rows: int,
    max_seq_len: int | None = None,
) -> dict[str, Tensor]:
    """The arrays of `batching.BatchIndices` by name, built row by row."""
    row_to_request: list[int] = []
    positions: list[int] = []
    cache_slots: list[int] = []
    output_rows: list[int] = []
    output_row_to_request: list[int] = []
    output_padding_offset: list[int] = []
    output_cum_offsets: list[int] = []
    qo_indptr, output_indptr = [0], [0]
    for request, (qo_len, kv_len, mode) in enumerate(
        zip(qo_lens.tolist(), kv_lens.tolist(), output_modes.tolist(), strict=True)
    ):
        first_row = len(row_to_request)
        for position in range(kv_len - qo_len, kv_len):
            page = int(kv_indices[int(kv_indptr[request]) + position // page_size])
            row_to_request.append(request)
            positions.append(position)
            cache_slots.append(page * page_size + position % page_size)
        rows = list(range(first_row, first_row + qo_len))
        rows = {0: [], 1: rows[-1:], 2: rows}[mode]
        padding = request * (max_seq_len or 0) - len(output_rows)
        output_cum_offsets.append(padding)
        output_rows += rows
        output_row_to_request += [request] * len(rows)
        output_padding_offset += [padding] * len(rows)
        qo_indptr.append(len(row_to_request))
        output_indptr.append(len(output_rows))

    def padded(values: list[int], size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values + [-1] * (size - len(values)), dtype=dtype)

    indices = {
        "qo_indptr": torch.tensor(qo_indptr, dtype=torch.int32),
        "row_to_request": padded(row_to_request, total_rows),
        "positions": padded(positions, total_rows),
        "cache_slots": padded(cache_slots, total_rows, torch.int64),
        "output_indptr": torch.tensor(output_indptr, dtype=torch.int32),
        "output_rows": padded(output_rows, num_output_rows),
        "output_row_to_request": padded(output_row_to_request, num_output_rows),
    }
    if max_seq_len is not None:
        indices["output_padding_offset"] = padded(output_padding_offset, num_output_rows)
        indices["output_cum_offsets"] = torch.tensor(output_cum_offsets, dtype=torch.int32)
    return indices


def gather_output_rows(hidden: Tensor, output_rows: Tensor) -> Tensor:
    """`hidden[output_rows]`, with zeros where the index is -1."""
    padded = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])])
    return padded[output_rows.long()]


# ---- attention ----

# ---- dense ----


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` in fp32 (fp64 for fp64 input), rounded once."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias` in fp32 (fp64 for fp64 input), rounded once to out_dtype."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(out_dtype or x.dtype)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (the normalised rows, the new residual, which is x where there was none).

    hidden = residual + x, in the dtype; hidden / sqrt(mean(hidden^2) + eps) in fp32 (fp64 for fp64
    input), rounded to the dtype, then times weight in the dtype.
    """
    hidden = x if residual is None else residual + x
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), hidden


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Row token_ids[i] of weight."""
    return weight[token_ids.long()]


# ---- sampling ----

# ---- suffix_tree ----


def ngram_propose(
    token_ids: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    k: int,
    min_ngram_size: int | Tensor,
    max_ngram_size: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """Every size, longest first, against every earlier start, latest first."""
    batch = len(token_ids)
    draft_token_ids = torch.full((batch, k), -1, dtype=torch.int32)
    num_draft_tokens = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        tokens = token_ids[b, : int(lens[b])].tolist()
        low = int(min_ngram_size[b] if isinstance(min_ngram_size, Tensor) else min_ngram_size)
        high = int(max_ngram_size[b] if isinstance(max_ngram_size, Tensor) else max_ngram_size)
        matches = (
            start + size
            for size in range(high, low - 1, -1)
            for start in range(len(tokens) - size - 1, -1, -1)
            if tokens[start : start + size] == tokens[-size:]
        )
        end = next(matches, len(tokens))
        drafts = tokens[end : end + min(int(max_draft_tokens[b]), k)]
        draft_token_ids[b, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        num_draft_tokens[b] = len(drafts)
    return draft_token_ids, num_draft_tokens
