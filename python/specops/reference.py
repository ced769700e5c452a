# SPDX-License-Identifier: Apache-2.0
"""Every op in plain PyTorch: the executable specification that tests and benches compare with.

Nothing in the package imports this module, and it imports nothing but torch.
"""

import math
from collections.abc import Mapping
from typing import Any

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


def rope_cos_sin(
    max_positions: int, rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> Tensor:
    """The table pair by pair in Python floats, from the published formulas."""
    options = dict(scaling or {})
    kind = options.get("rope_type", options.get("type", "default"))
    amplitude = 1.0
    frequencies = []
    for pair in range(rotary_dim // 2):
        frequency = theta ** (-2.0 * pair / rotary_dim)
        if kind == "linear":
            frequency /= options["factor"]
        elif kind == "llama3":
            turns = options["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = options["low_freq_factor"], options["high_freq_factor"]
            keep = min(max((turns - low) / (high - low), 0.0), 1.0)
            frequency *= keep + (1 - keep) / options["factor"]
        elif kind == "yarn":
            length, factor = options["original_max_position_embeddings"], options["factor"]

            def pair_of(turns: float, length: float = length) -> float:
                return rotary_dim * math.log(length / (2 * math.pi * turns)) / math.log(theta) / 2

            low, high = pair_of(options.get("beta_fast", 32)), pair_of(options.get("beta_slow", 1))
            if options.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, rotary_dim - 1)
            slow = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
            frequency *= 1 - slow + slow / factor
        frequencies.append(frequency)
    if kind == "yarn":
        growth = math.log(max(options["factor"], 1.0)) / 10
        amplitude = 1 + growth
        if options.get("mscale") and options.get("mscale_all_dim"):
            amplitude = (1 + growth * options["mscale"]) / (1 + growth * options["mscale_all_dim"])
        if options.get("attention_factor") is not None:
            amplitude = options["attention_factor"]
    angles = torch.arange(max_positions).double()[:, None] * torch.tensor(frequencies).double()
    return (amplitude * torch.cat([angles.cos(), angles.sin()], dim=1)).float()


def rope_append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """RMSNorm per head, RoPE in fp32 (fp64 for fp64), k and v scattered INTO THE CACHE."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    half = cos_sin.shape[1] // 2
    table = cos_sin.to(wide)[positions.clamp(min=0).long(), None]
    cos, sin = table[..., :half], table[..., half:]

    def turn(x: Tensor, weight: Tensor | None) -> Tensor:
        y = x.to(wide)
        if weight is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm_eps)
            y = (weight * y.to(x.dtype)).to(wide)
        y = y.clone()
        a, b = slice(0, half), slice(half, 2 * half)
        if interleaved:
            a, b = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        even, odd = y[..., a].clone(), y[..., b].clone()
        y[..., a] = even * cos - odd * sin
        y[..., b] = odd * cos + even * sin
        return y.to(x.dtype)

    kept = cache_slots >= 0
    k_cache.flatten(0, 1)[cache_slots[kept]] = turn(k, k_norm_weight)[kept]
    v_cache.flatten(0, 1)[cache_slots[kept]] = v[kept]
    return turn(q, q_norm_weight) * (positions >= 0)[:, None, None]


def append_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_lens: Tensor,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    prefix_leaders: Tensor | None = None,
    prefix_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of each request in fp32 (fp64 for fp64), rounded once; and the lse.

    Shared prefixes change nothing.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    group = q.shape[1] // k_cache.shape[2]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=wide)
    for request, kv_len in enumerate(kv_lens.tolist()):
        begin, end = qo_indptr[request : request + 2].tolist()
        if begin == end:
            continue
        pages = kv_indices[kv_indptr[request] : kv_indptr[request + 1]].long()
        column = torch.arange(kv_len)
        position = torch.arange(kv_len - (end - begin), kv_len)[:, None]
        seen = column <= position
        if sliding_window is not None:
            seen &= column > position - sliding_window
        used = seen.any(0)  # pages before every window may not exist
        page, slot = pages[column // k_cache.shape[1]], column % k_cache.shape[1]
        keys = k_cache[page[used], slot[used]].to(wide).repeat_interleave(group, 1)
        values = v_cache[page[used], slot[used]].to(wide).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->qhk", q[begin:end].to(wide), keys) * scale
        scores = scores.masked_fill(~seen[:, None, used], -torch.inf)
        lse[begin:end] = scores.logsumexp(-1)
        out[begin:end] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`sum_i e^(lse_i - lse) * out_i` and `lse = log sum_i e^lse_i`, rounded once."""
    wide = outs.to(torch.float64 if outs.dtype == torch.float64 else torch.float32)
    lse = lses.to(wide.dtype).logsumexp(0)
    weights = torch.where(lses == -torch.inf, 0.0, (lses - lse).exp())[..., None]
    merged = torch.where(weights > 0, wide * weights, 0.0).sum(0)
    return merged.to(outs.dtype), lse


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


def philox4x32(seed: int, counter: list[int]) -> list[int]:
    """One block of Philox4x32-10: four 32-bit words from a 64-bit seed and four counter words."""
    mask = 0xFFFFFFFF
    k0, k1 = seed & mask, seed >> 32 & mask
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def philox_uniform(
    seed: int,
    position: int,
    purpose: int,
    choice_index: int = 0,
    sub_index: int = 0,
    anchor: int = 0,
) -> float:
    """The uniform in [0, 1) of one decision. Purposes: 0 draft, 1 accept, 2 residual, 3 target."""
    word = philox4x32(seed, [position, purpose | sub_index << 8, choice_index, anchor])[0]
    return (word >> 8) * 2.0**-24


def _clean_logits(logits: Tensor) -> Tensor:
    """Widened to float64; NaN as -inf, +inf as the largest finite float32."""
    top = torch.finfo(torch.float32).max
    return logits.double().nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf)


def kept_tokens(
    row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """The weights of one row (the largest is 1), and which tokens the filters keep."""
    x = _clean_logits(row)
    order = torch.sort(x, descending=True, stable=True).indices
    weights = ((x - x.max()) / temperature).exp()
    kept = torch.zeros_like(x, dtype=torch.bool)
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        running = weights[order].cumsum(0)
        short = int((running < top_p * running[-1]).sum())
        order = order[: short + 1]
    kept[order] = True
    return weights, kept & (weights >= min_p)


def sample(
    logits: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choice_index: Tensor | None = None,
    logprobs: Tensor | None = None,
) -> Tensor:
    """Filters, then inverse CDF in token-id order with the row's own uniform, in float64."""
    out = torch.zeros(logits.shape[0], dtype=torch.int32)
    for i, row in enumerate(logits):
        x = _clean_logits(row)
        if x.max() > -torch.inf:
            if temperature[i] == 0:
                out[i] = int((x == x.max()).nonzero()[0])
            else:
                weights, kept = kept_tokens(
                    row, float(temperature[i]), int(top_k[i]), float(top_p[i]), float(min_p[i])
                )
                running = (weights * kept).cumsum(0)
                choice = 0 if choice_index is None else int(choice_index[i])
                u = philox_uniform(int(seeds[i]), int(positions[i]), 3, choice)
                out[i] = int((running > u * running[-1]).nonzero()[0])
        if logprobs is not None:
            logprobs[i] = _log_softmax(row)[out[i]]
    return out


def _log_softmax(row: Tensor) -> Tensor:
    x = _clean_logits(row)
    if x.max() == -torch.inf:
        return x
    shifted = x - x.max()
    return shifted - shifted.exp().sum().log()


def verify(
    logits: Tensor,
    output_indptr: Tensor,
    draft_token_ids: Tensor,
    *,
    positions: Tensor,
    strategy: Tensor,
    policy: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choice_index: Tensor | None = None,
    logprobs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Per request: sample every row, emit choices up to the first that differs from its draft."""
    batch, k = draft_token_ids.shape
    output_token_ids = torch.full((batch, k + 1), -1, dtype=torch.int32)
    num_accepted_tokens = torch.zeros(batch, dtype=torch.int32)
    if logprobs is not None:
        logprobs.zero_()
    for b in range(batch):
        begin, end = int(output_indptr[b]), int(output_indptr[b + 1])
        n = end - begin
        for i in range(n):
            own = slice(b, b + 1)
            choice = int(
                sample(
                    logits[begin + i : begin + i + 1],
                    positions[own] + i,
                    temperature=temperature[own] * (strategy[own] != 0),
                    top_k=top_k[own],
                    top_p=top_p[own],
                    min_p=min_p[own],
                    seeds=seeds[own],
                    choice_index=None if choice_index is None else choice_index[own],
                )
            )
            draft = int(draft_token_ids[b, i]) if i < n - 1 else -1
            if policy[b] == 1 and draft >= 0:
                choice = draft
            output_token_ids[b, i] = choice
            if logprobs is not None:
                logprobs[b, i] = _log_softmax(logits[begin + i])[choice]
            if policy[b] == 2 or draft < 0 or draft != choice:
                break
            num_accepted_tokens[b] += 1
    return output_token_ids, num_accepted_tokens


def top_logprobs(logits: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first n tokens by (logit descending, id ascending), their log-softmax, and the LSE."""
    x = _clean_logits(logits)
    token_ids = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :n]
    logprobs = torch.stack([_log_softmax(row) for row in logits]) if len(logits) else x
    return (
        token_ids.int(),
        logprobs.gather(1, token_ids).float(),
        torch.logsumexp(x, dim=-1).float(),
    )


def commit_tokens(
    output_token_ids: Tensor, slots: Tensor, token_ids: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Appends the emitted tokens of each request to its row; returns new tensors."""
    token_ids, lens = token_ids.clone(), lens.clone()
    for emitted, slot in zip(output_token_ids.tolist(), slots.tolist(), strict=True):
        for token_id in emitted if slot >= 0 else []:
            if token_id < 0:
                break
            token_ids[slot, lens[slot]] = token_id
            lens[slot] += 1
    return token_ids, lens


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
