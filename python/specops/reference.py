# SPDX-License-Identifier: Apache-2.0
"""Every op in plain PyTorch: the executable specification that tests and benches compare with.

Nothing in the package imports this module, and it imports nothing but torch.
"""

import bisect
import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
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


def build_tree(parents: Tensor, num_draft_tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """The arrays of `batching.DraftTree` by name, from each node's path to the root."""
    batch, nodes = parents.shape
    tree = {
        "depths": torch.full((batch, nodes + 1), -1),
        "row_positions": torch.full((batch, nodes + 1), -1),
        "ancestor_mask": torch.zeros(batch, nodes + 1, nodes // 32 + 1).long(),
        "first_child": torch.full((batch, nodes + 1), -1),
        "next_sibling": torch.full((batch, nodes), -1),
        "sibling_index": torch.full((batch, nodes), -1),
    }
    for b, count in enumerate(num_draft_tokens.tolist()):
        above = parents[b, :count].tolist()
        for row in range(count + 1):
            path = [row]
            while path[-1] != 0:
                path.append(above[path[-1] - 1] + 1)
            tree["depths"][b, row] = len(path) - 1
            tree["row_positions"][b, row] = int(positions[b]) + len(path) - 1
            for ancestor in path:
                tree["ancestor_mask"][b, row, ancestor // 32] += 1 << ancestor % 32
            children = [node for node in range(count) if above[node] == row - 1]
            tree["first_child"][b, row] = children[0] if children else -1
            for index, child in enumerate(children):
                following = children[index + 1 :]
                tree["next_sibling"][b, child] = following[0] if following else -1
                tree["sibling_index"][b, child] = index
    return {name: values.int() for name, values in tree.items()}


def prepare_draft_batch(
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    redraft_lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    page_size: int,
    total_rows: int,
    window: int = 0,
) -> dict[str, Tensor]:
    """The arrays of `batching.DraftIndices` by name: a row per position with a known next token."""
    rows: list[tuple[int, int, int, int]] = []  # request, position, cache slot, source
    indptr, draft_kv_lens, last_rows, draft_positions = [0], [], [], []
    for b, slot in enumerate(slots.tolist()):
        first_row = int(qo_indptr[b])
        qo_len = int(qo_indptr[b + 1]) - first_row
        known = int(lens[slot]) if slot >= 0 and qo_len > 0 else 0
        begin, kv_len = int(kv_lens[b]) - qo_len, int(kv_lens[b])
        positions = range(begin - int(redraft_lens[b]), min(kv_len, known - 1))
        for position in positions:
            page = int(kv_indices[int(kv_indptr[b]) + position // page_size])
            source = first_row + position - begin
            if position < begin:
                source = -2 - (slot * window + position % window)
            rows.append((b, position, page * page_size + position % page_size, source))
        any_rows = len(positions) > 0
        drafts = any_rows and positions[-1] == known - 2 and int(max_draft_tokens[slot]) > 0
        draft_kv_lens.append(positions.stop if any_rows else 0)
        last_rows.append(len(rows) - 1 if drafts else -1)
        draft_positions.append(known if drafts else 0)
        indptr.append(len(rows))
    return _draft_indices(
        rows, indptr, draft_kv_lens, last_rows, draft_positions, total_rows=total_rows
    )


def advance_draft_batch(
    sampled_token_ids: Tensor,
    last_rows: Tensor,
    slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    page_size: int,
    step: int,
    ahead: int,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns (the drafts, their numbers, the next pass as `batching.DraftIndices` by name)."""
    drafts, counts = draft_token_ids.clone(), num_draft_tokens.clone()
    rows: list[tuple[int, int, int, int]] = []
    indptr, draft_kv_lens, next_last_rows, draft_positions = [0], [], [], []
    for b, slot in enumerate(slots.tolist()):
        source, position, page = int(last_rows[b]), -1, -1
        if slot >= 0 and step == 0:
            drafts[slot], counts[slot] = -1, 0
        if slot >= 0 and source >= 0 and step < int(max_draft_tokens[slot]):
            drafts[slot, step], counts[slot] = sampled_token_ids[b], step + 1
            if step + 1 < min(int(max_draft_tokens[slot]), drafts.shape[1]):
                position = int(lens[slot]) + step - ahead
                pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].tolist()
                page = (pages + [-1] * (position + 1))[position // page_size]
        if page >= 0:
            rows.append((b, position, page * page_size + position % page_size, source))
        draft_kv_lens.append(position + 1 if page >= 0 else 0)
        next_last_rows.append(len(rows) - 1 if page >= 0 else -1)
        draft_positions.append(int(lens[slot]) + step + 1 if page >= 0 else 0)
        indptr.append(len(rows))
    following = _draft_indices(
        rows, indptr, draft_kv_lens, next_last_rows, draft_positions, total_rows=len(slots)
    )
    return drafts, counts, following


def _draft_indices(
    rows: list[tuple[int, int, int, int]],
    indptr: list[int],
    kv_lens: list[int],
    last_rows: list[int],
    draft_positions: list[int],
    *,
    total_rows: int,
) -> dict[str, Tensor]:
    padded = torch.tensor(rows + [(-1,) * 4] * (total_rows - len(rows))).reshape(-1, 4)
    return {
        "qo_indptr": torch.tensor(indptr, dtype=torch.int32),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32),
        "last_rows": torch.tensor(last_rows, dtype=torch.int32),
        "draft_positions": torch.tensor(draft_positions, dtype=torch.int32),
        "row_to_request": padded[:, 0].int(),
        "positions": padded[:, 1].int(),
        "cache_slots": padded[:, 2].long(),
        "source_rows": padded[:, 3].int(),
    }


def keep_hidden_rows(
    hidden: Tensor, slots: Tensor, qo_indptr: Tensor, kv_lens: Tensor, lens: Tensor, kept: Tensor
) -> Tensor:
    """`kept` with the states of the positions whose next token is known, in their order."""
    kept = kept.clone()
    for b, slot in enumerate(slots.tolist()):
        first_row = int(qo_indptr[b])
        begin = int(kv_lens[b]) - (int(qo_indptr[b + 1]) - first_row)
        end = min(int(kv_lens[b]), int(lens[slot]) - 1) if slot >= 0 else begin
        for position in range(begin, end):
            kept[slot, position % kept.shape[1]] = hidden[first_row + position - begin]
    return kept


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


def compact_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    accepted_nodes: Tensor,
    num_accepted_tokens: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    """Gathers the slots of each accepted path and writes them behind the root, IN THE CACHES."""
    page_size = k_cache.shape[1]
    for b, count in enumerate(num_accepted_tokens.tolist()):
        first = int(kv_lens[b]) - int(qo_indptr[b + 1] - qo_indptr[b]) + 1
        pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        tokens = first + torch.stack(
            [accepted_nodes[b, :count].long().cpu(), torch.arange(count)]
        ).to(pages.device)
        slots = pages[tokens // page_size] * page_size + tokens % page_size
        for cache in (k_cache, v_cache):
            flat = cache.view(-1, *cache.shape[2:])
            flat[slots[1]] = flat[slots[0]].clone()


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


def mtp_input(
    row_to_request: Tensor,
    positions: Tensor,
    source_rows: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    lens: Tensor,
    draft_token_ids: Tensor,
    embedding: Tensor,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    hidden: Tensor,
    *,
    eps: float,
    ahead: int = 1,
    kept: Tensor | None = None,
    hidden_first: bool = False,
    mask_first_position: bool = False,
) -> Tensor:
    """norm(embedding of the token `ahead` of the row) beside norm(the state at the row)."""
    out = embedding.new_zeros(len(positions), 2, embedding.shape[1])
    for row, request in enumerate(row_to_request.tolist()):
        if request < 0:
            continue
        slot, position, source = int(slots[request]), int(positions[row]), int(source_rows[row])
        text = token_ids[slot, : int(lens[slot])].tolist() + draft_token_ids[slot].tolist()
        token = text[position + ahead] if position + ahead < len(text) else -1
        if token >= 0 and not (mask_first_position and position == 0):
            row_of = embedding[token][None]
            out[row, int(hidden_first)] = rms_norm(row_of, embedding_norm, eps)[0]
        if source >= 0:
            state = hidden[source]
        else:
            assert kept is not None
            state = kept.flatten(0, 1)[-2 - source]
        out[row, 1 - int(hidden_first)] = rms_norm(state[None], hidden_norm, eps)[0]
    return out.flatten(1)


# ---- sampling: one row ----

DRAFT, ACCEPT, RESIDUAL, TARGET = range(4)  # what a uniform decides: its purpose

# (seed, position, purpose, choice_index, sub_index, anchor) -> [0, 1); a test may give another.
Uniform = Callable[[int, int, int, int, int, int], float]


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


def _clean(x: Tensor) -> Tensor:
    """NaN as -inf, +inf as the largest finite float32."""
    top = torch.finfo(torch.float32).max
    return x.nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf)


def _clean_logits(logits: Tensor) -> Tensor:
    return _clean(logits.double())


def kept_tokens(
    row: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float = 1.0,
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
    kept &= weights >= min_p
    if typical_p < 1.0:
        ids = kept.nonzero().flatten()
        probs = weights[ids] / weights[ids].sum()
        surprise = -probs.log()
        entropy = torch.special.entr(probs).sum()
        order = torch.sort((surprise - entropy).abs(), stable=True).indices
        short = int((probs[order].cumsum(0) < typical_p).sum())
        kept[ids[order[short + 1 :]]] = False
    return weights, kept


def target_probs(
    row: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    """The distribution a row's token is drawn from, in float64.

    One-hot at the first of the largest logits under temperature 0, and at token 0 in a row without
    a finite one.
    """
    x = _clean_logits(row)
    if temperature == 0 or x.max() == -torch.inf:
        return torch.nn.functional.one_hot((x == x.max()).nonzero()[0, 0], len(x)).double()
    weights, kept = kept_tokens(row, temperature, top_k, top_p, min_p, typical_p)
    return weights * kept / (weights * kept).sum()


def _draw(weights: Tensor, u: float) -> int:
    """Inverse CDF in token-id order: the first id at which the running weight exceeds u of all."""
    running = weights.cumsum(0)
    return int((running > u * running[-1]).nonzero()[0])


def _log_softmax(row: Tensor) -> Tensor:
    x = _clean_logits(row)
    if x.max() == -torch.inf:
        return x
    shifted = x - x.max()
    return shifted - shifted.exp().sum().log()


def _log_probs(row: Tensor, filters: Mapping[str, Any]) -> Tensor:
    """What processed_logprobs reports: log target_probs, log_softmax under temperature 0."""
    if filters["temperature"] == 0 or _clean_logits(row).max() == -torch.inf:
        return _log_softmax(row)
    return target_probs(row, **filters).log()


def _rank(row: Tensor, token_id: int) -> int:
    x = _clean_logits(row)
    return 1 + int((x > x[token_id]).sum())


_FILTERS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


def _of(column: Tensor | None, i: int, default: float = 0) -> Any:
    return default if column is None else column[i].item()


# ---- sampling: processed logits ----


def process_logits(
    logits: Tensor,
    processors: Any,
    positions: Tensor,
    *,
    output_indptr: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    parents: Tensor | None = None,
) -> Tensor:
    """The logits after mask, bad words, min tokens, bias and penalties, in their own dtype.

    `processors` has the fields of `sampling.LogitsProcessors`, or is None. Without output_indptr
    every row is a request, as in `sample`; with it rows are those of `verify` or, given parents,
    `verify_tree`. The drafts on the path to a row count as tokens of the output.
    """
    out = logits.clone()
    if processors is None:
        return out
    bounds = range(len(logits) + 1) if output_indptr is None else output_indptr.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for r in range(end - begin):
            path = _path(r, None if parents is None else parents[b].tolist())
            in_flight = [] if draft_token_ids is None else draft_token_ids[b, path].tolist()
            out[begin + r] = _process_row(
                logits[begin + r],
                processors,
                _of(processors.slots, b, -1),
                _of(processors.mask_indices, begin + r, -1),
                int(positions[b]),
                in_flight,
            )
    return out


def _path(row: int, parents: list[int] | None) -> list[int]:
    """The nodes from the root (not a node) down to a row, itself included: row r > 0 is node r - 1.

    A chain has no parents: node n hangs on node n - 1.
    """
    if parents is None:
        return list(range(row))
    return [] if row == 0 else [*_path(parents[row - 1] + 1, parents), row - 1]


def _process_row(
    row: Tensor, p: Any, slot: int, mask: int, position: int, in_flight: list[int]
) -> Tensor:
    """One row, in float32 and rounded at every step as written."""
    x = _clean(row.float())
    if mask >= 0:
        ids = torch.arange(len(x))
        words = p.allowed_token_mask[mask].long()
        x[(words[ids // 32] >> ids % 32 & 1) == 0] = -torch.inf
    if slot >= 0:
        if p.bad_words is not None:
            tokens = ([] if position == 0 else p.token_ids[slot, :position].tolist()) + in_flight
            for padded in p.bad_words[slot].tolist():
                *before, last = [t for t in padded if t >= 0] or [-1]
                if last >= 0 and before == tokens[len(tokens) - len(before) :]:
                    x[last] = -torch.inf
        if p.min_tokens is not None and p.stop_token_ids is not None:
            output_len = position - int(p.prompt_lens[slot]) + len(in_flight)
            stops = p.stop_token_ids[slot]
            if output_len < int(p.min_tokens[slot]):
                x[stops[stops >= 0].long()] = -torch.inf
        if p.logit_bias is not None:
            ids = p.logit_bias_token_ids[slot]
            x[ids[ids >= 0].long()] += p.logit_bias[slot][ids >= 0]
        counts = torch.zeros(len(x), dtype=torch.int32)
        in_prompt = torch.zeros(len(x), dtype=torch.bool)
        if p.counted_token_ids is not None:
            ids = p.counted_token_ids[slot]
            packed = p.token_counts[slot][ids >= 0]
            counts[ids[ids >= 0].long()] = packed >> 1
            in_prompt[ids[ids >= 0].long()] = (packed & 1) == 1
        for token_id in in_flight:
            if token_id >= 0:
                counts[token_id] += 1
        if p.repetition_penalty is not None:
            penalty = p.repetition_penalty[slot]
            seen = in_prompt | (counts > 0)
            x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
        if p.frequency_penalty is not None:
            x = torch.where(counts > 0, x - p.frequency_penalty[slot] * counts.float(), x)
        if p.presence_penalty is not None:
            x = torch.where(counts > 0, x - p.presence_penalty[slot], x)
    return _clean(x.to(row.dtype).float()).to(row.dtype)


# ---- sampling: choosing tokens ----


def sample(
    logits: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    typical_p: Tensor | None = None,
    seeds: Tensor | None = None,
    choice_index: Tensor | None = None,
    purpose: int = TARGET,
    anchors: Tensor | None = None,
    processors: Any = None,
    processed_logprobs: bool = False,
    logprobs: Tensor | None = None,
    ranks: Tensor | None = None,
    probs: Tensor | None = None,
    uniform: Uniform = philox_uniform,
) -> Tensor:
    """Filters, then inverse CDF in token-id order with the row's own uniform, in float64.

    logprobs, ranks and probs (the distribution itself) are written where given.
    """
    out = torch.zeros(logits.shape[0], dtype=torch.int32)
    columns = dict(zip(_FILTERS, (temperature, top_k, top_p, min_p, typical_p), strict=True))
    for i, row in enumerate(process_logits(logits, processors, positions)):
        filters = {name: _of(columns[name], i, off) for name, off in _FILTERS.items()}
        distribution = target_probs(row, **filters)
        seed, choice, anchor = _of(seeds, i), _of(choice_index, i), _of(anchors, i)
        out[i] = _draw(distribution, uniform(seed, int(positions[i]), purpose, choice, 0, anchor))
        shown = row if processed_logprobs else logits[i]
        if probs is not None:
            probs[i] = distribution
        if logprobs is not None:
            scores = _log_probs(row, filters) if processed_logprobs else _log_softmax(shown)
            logprobs[i] = scores[out[i]]
        if ranks is not None:
            ranks[i] = _rank(shown, int(out[i]))
    return out


GREEDY, TARGET_MATCH, REJECTION, BLOCK, TOPP = range(5)  # strategies
NORMAL, ACCEPT_ALL, REJECT_ALL, SYNTHETIC = range(4)  # policies


def _residual(target: Tensor, draft: Tensor) -> Tensor:
    """normalise(max(target - draft, 0)); the target itself where rounding leaves nothing."""
    rest = (target - draft).clamp(min=0)
    return target if rest.sum() == 0 else rest / rest.sum()


def _rejection_choice(
    target: Tensor,
    children: list[int],
    draft: Tensor | None,
    coin: Callable[..., float],
) -> int:
    """Accepts one of the tokens drawn from `draft` (None: each by itself), or draws what is left.

    coin(purpose, sub_index) is the row's uniform.
    """
    for i, token_id in enumerate(children):
        given = torch.zeros_like(target) if draft is None else draft
        if draft is None:
            given[token_id] = 1
        if coin(ACCEPT, i) * given[token_id] < target[token_id]:
            return token_id
        target = _residual(target, given)
    return _draw(target, coin(RESIDUAL))


def _block_choices(
    targets: list[Tensor],
    drafts: list[int],
    given: list[Tensor],
    coin: Callable[[int, int], float],
) -> list[int]:
    """The tokens block verification emits: some of the drafts, and one more.

    coin(purpose, row) is a uniform of this step alone.
    """
    n = len(drafts)
    weights, accepted = [1.0], 0
    for i, token_id in enumerate(drafts):
        t, q = float(targets[i][token_id]), float(given[i][token_id])
        weights.append(min(weights[i] * t / q, 1.0) if q > 0 else float(weights[i] * t > 0))
    for i in range(1, n + 1):
        bar = weights[i]
        if i < n:
            left = float((weights[i] * targets[i] - given[i]).clamp(min=0).sum())
            bar = left / (left + 1 - weights[i]) if left + 1 - weights[i] > 0 else 1.0
        if coin(ACCEPT, i - 1) < bar:
            accepted = i
    if accepted == n:
        return [*drafts, _draw(targets[n], coin(TARGET, n))]
    rest = (weights[accepted] * targets[accepted] - given[accepted]).clamp(min=0)
    rest = rest if rest.sum() > 0 else targets[accepted]
    return [*drafts[:accepted], _draw(rest, coin(RESIDUAL, accepted))]


def verify(
    logits: Tensor,
    output_indptr: Tensor,
    draft_token_ids: Tensor,
    *,
    positions: Tensor,
    strategy: Tensor | None = None,
    policy: Tensor | None = None,
    accept_rates: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_prob_token_ids: Tensor | None = None,
    draft_prob_rows: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    typical_p: Tensor | None = None,
    seeds: Tensor | None = None,
    choice_index: Tensor | None = None,
    processors: Any = None,
    processed_logprobs: bool = False,
    logprobs: Tensor | None = None,
    ranks: Tensor | None = None,
    uniform: Uniform = philox_uniform,
) -> tuple[Tensor, Tensor]:
    """Per request: every row's choice, emitted up to the first that differs from its draft."""
    tokens, accepted, _ = _verify(**locals(), parents=None)
    return tokens, accepted


def verify_tree(
    logits: Tensor,
    output_indptr: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    *,
    positions: Tensor,
    strategy: Tensor | None = None,
    policy: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_prob_token_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    typical_p: Tensor | None = None,
    seeds: Tensor | None = None,
    choice_index: Tensor | None = None,
    processors: Any = None,
    processed_logprobs: bool = False,
    logprobs: Tensor | None = None,
    ranks: Tensor | None = None,
    uniform: Uniform = philox_uniform,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per request: from the root to the first child that equals its row's choice, and so on."""
    return _verify(**locals(), accept_rates=None, draft_prob_rows=None)


def _verify(
    *,
    logits: Tensor,
    output_indptr: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor | None,
    positions: Tensor,
    strategy: Tensor | None,
    policy: Tensor | None,
    accept_rates: Tensor | None,
    draft_probs: Tensor | None,
    draft_prob_token_ids: Tensor | None,
    draft_prob_rows: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    typical_p: Tensor | None,
    seeds: Tensor | None,
    choice_index: Tensor | None,
    processors: Any,
    processed_logprobs: bool,
    logprobs: Tensor | None,
    ranks: Tensor | None,
    uniform: Uniform,
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, how many are drafts, their nodes); a chain is a tree without branches."""
    batch, k = draft_token_ids.shape
    output_token_ids = torch.full((batch, k + 1), -1, dtype=torch.int32)
    num_accepted_tokens = torch.zeros(batch, dtype=torch.int32)
    accepted_nodes = torch.full((batch, k), -1, dtype=torch.int32)
    for extra in (logprobs, ranks):
        if extra is not None:
            extra.zero_()
    processed = process_logits(
        logits,
        processors,
        positions,
        output_indptr=output_indptr,
        draft_token_ids=draft_token_ids,
        parents=parents,
    )
    columns = dict(zip(_FILTERS, (temperature, top_k, top_p, min_p, typical_p), strict=True))
    for b, (begin, end) in enumerate(itertools.pairwise(output_indptr.tolist())):
        if begin == end:
            continue
        rule = int(_of(strategy, b, TARGET_MATCH))
        filters = {name: _of(columns[name], b, off) for name, off in _FILTERS.items()}
        if rule == GREEDY:
            filters = dict(_FILTERS)
        given: list[Tensor | None] = [None] * k
        source = int(_of(draft_prob_rows, b, b))
        if draft_probs is not None and source >= 0:
            ids = None if draft_prob_token_ids is None else draft_prob_token_ids[source]
            for r in range(min(end - begin - 1, draft_probs.shape[1])):
                sparse = None if ids is None else ids[r]
                given[r] = _draft_distribution(draft_probs[source, r], sparse, logits.shape[1])
        walk = _walk(
            [target_probs(row, **filters) for row in processed[begin:end]],
            draft_token_ids[b, : end - begin - 1].tolist(),
            list(range(-1, k - 1)) if parents is None else parents[b].tolist(),
            given,
            rule,
            int(_of(policy, b, NORMAL)),
            [1.0] * k if accept_rates is None else accept_rates[b].tolist(),
            int(positions[b]),
            functools.partial(_keyed, uniform, _of(seeds, b), _of(choice_index, b)),
        )
        num_accepted_tokens[b] = len(walk) - 1
        row = 0
        for depth, (choice, node) in enumerate(walk):
            output_token_ids[b, depth] = choice
            shown = (processed if processed_logprobs else logits)[begin + row]
            if logprobs is not None:
                scores = _log_probs(shown, filters) if processed_logprobs else _log_softmax(shown)
                logprobs[b, depth] = scores[choice]
            if ranks is not None:
                ranks[b, depth] = _rank(shown, choice)
            if node >= 0:
                accepted_nodes[b, depth] = node
            row = node + 1
    return output_token_ids, num_accepted_tokens, accepted_nodes


def _draft_distribution(probs: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Dense, in float64 and within [0, 1]; NaN is 0."""
    probs = probs.double().nan_to_num(nan=0.0).clamp(0, 1)
    if token_ids is None:
        return probs
    dense = torch.zeros(vocab_size, dtype=torch.float64)
    dense[token_ids[token_ids >= 0].long()] = probs[token_ids >= 0]
    return dense


def _keyed(
    uniform: Uniform,
    seed: int,
    choice_index: int,
    purpose: int,
    position: int,
    sub_index: int = 0,
    anchor: int = 0,
) -> float:
    """A request's uniform."""
    return uniform(seed, position, purpose, choice_index, sub_index, anchor)


def _walk(
    targets: list[Tensor],
    tokens: list[int],
    parents: list[int],
    given: list[Tensor | None],
    rule: int,
    policy: int,
    accept_rates: list[float],
    start: int,
    coin: Callable[..., float],
) -> list[tuple[int, int]]:
    """What a request emits: (token, the node it is, or -1 for the last, which is none).

    Row r > 0 is node r - 1; targets are the rows' distributions, given[r] that of r's children.
    """
    # the drafts in reach: a -1 is never accepted, and nothing behind it among its siblings is
    children: list[list[int]] = [[] for _ in targets]
    for r in range(len(targets)):
        for node, token_id in enumerate(tokens):
            if parents[node] + 1 == r:
                if token_id < 0:
                    break
                children[r].append(node)
    block: list[int] = []
    if rule == BLOCK and policy == NORMAL and children[0]:
        n = [*tokens, -1].index(-1)
        chosen = torch.nn.functional.one_hot(torch.tensor(tokens[:n]), len(targets[0])).double()
        block = _block_choices(
            targets,
            tokens[:n],
            [one if q is None else q for one, q in zip(chosen, given, strict=False)],
            lambda purpose, i: coin(purpose, start + i, 0, start + 1),
        )
    emitted: list[tuple[int, int]] = []
    row = 0
    while True:
        depth = len(emitted)
        drafts = [tokens[node] for node in children[row]]
        target = targets[row]
        if policy != NORMAL:
            rate = {ACCEPT_ALL: 1.0, REJECT_ALL: 0.0}.get(policy, [*accept_rates, 0.0][row])
            if drafts and coin(ACCEPT, start + depth) < rate:
                choice = drafts[0]
            else:
                drafts, choice = [], _own(target, coin, start + depth)
        elif block:
            choice = block[depth]
            drafts = drafts if depth + 1 < len(block) else []
        elif rule == REJECTION and drafts:
            choice = _rejection_choice(
                target, drafts, given[row], functools.partial(_at, coin, start + depth)
            )
        elif rule == TOPP and drafts and target[drafts[0]] > 0:
            choice = drafts[0]
        else:
            choice = _own(target, coin, start + depth)
        if choice not in drafts:
            return [*emitted, (choice, -1)]
        node = children[row][drafts.index(choice)]
        emitted.append((choice, node))
        row = node + 1


def _at(coin: Callable[..., float], position: int, purpose: int, sub_index: int = 0) -> float:
    return coin(purpose, position, sub_index)


def _own(target: Tensor, coin: Callable[..., float], position: int) -> int:
    """What `sample` chooses: the row's own token."""
    return _draw(target, coin(TARGET, position))


def top_logprobs(
    logits: Tensor,
    n: int,
    *,
    processed_logprobs: bool = False,
    output_indptr: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    parents: Tensor | None = None,
    positions: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    typical_p: Tensor | None = None,
    processors: Any = None,
    ranks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first n tokens by (logit descending, id ascending), their log-softmax, and the LSE.

    Processed: by processed logits, with the logarithm of what `sample` draws from; a token that the
    filters drop keeps its place in the order. The LSE is always that of the untouched logits, and
    so is everything in rows of no request.
    """
    rows = logits
    if processed_logprobs and processors is not None:
        assert positions is not None
        rows = process_logits(
            logits,
            processors,
            positions,
            output_indptr=output_indptr,
            draft_token_ids=draft_token_ids,
            parents=parents,
        )
    token_ids = torch.sort(_clean_logits(rows), dim=-1, descending=True, stable=True).indices[:, :n]
    logprobs = torch.zeros(token_ids.shape)
    columns = dict(zip(_FILTERS, (temperature, top_k, top_p, min_p, typical_p), strict=True))
    bounds = range(len(logits) + 1) if output_indptr is None else output_indptr.tolist()
    for i, row in enumerate(rows):
        b = bisect.bisect_right(bounds, i) - 1
        filters = dict(_FILTERS)
        if b < len(bounds) - 1:
            filters = {name: _of(columns[name], b, off) for name, off in _FILTERS.items()}
        scores = _log_probs(row, filters) if processed_logprobs else _log_softmax(row)
        logprobs[i] = scores[token_ids[i]]
        if ranks is not None:
            ranks[i] = torch.tensor([_rank(row, token_id) for token_id in token_ids[i].tolist()])
    return token_ids.int(), logprobs, torch.logsumexp(_clean_logits(logits), dim=-1).float()


def commit(
    output_token_ids: Tensor, slots: Tensor, token_ids: Tensor, lens: Tensor, **options: Tensor
) -> dict[str, Tensor]:
    """Token by token, on lists; returns all arguments by name, as the op would leave them."""
    after = {
        "output_token_ids": output_token_ids.clone(),
        "slots": slots,
        "token_ids": token_ids.clone(),
        "lens": lens.clone(),
        **{name: tensor.clone() for name, tensor in options.items()},
    }

    def of_slot(name: str, slot: int, absent: int) -> int:
        return int(after[name][slot]) if name in after else absent

    def ids_of(name: str, slot: int) -> list[int]:
        return _before_padding(after[name][slot].tolist()) if name in after else []

    for b, s in enumerate(slots.tolist()):
        tokens: list[int] = []  # committed
        if s >= 0 and of_slot("finish_reasons", s, 0) == 0:
            reason, index, is_injected = 0, -1, False
            row = token_ids[s, : int(lens[s])].tolist()
            prompt_len = of_slot("prompt_lens", s, 0)
            stops, inject = ids_of("stop_token_ids", s), ids_of("inject_token_ids", s)
            state = of_slot("thinking_state", s, -1)
            for token in _before_padding(output_token_ids[b].tolist()):
                n = len(row) + 1 - prompt_len
                may_stop = n >= of_slot("min_tokens", s, 0)
                if state == 0 and token == of_slot("think_end_token_id", s, -1):
                    state = len(inject) + 1
                else:
                    budget = of_slot("thinking_budget", s, -1)
                    if state == 0 and 0 <= budget < n:
                        state = 1
                    if state == 0 and inject and may_stop and token in stops:
                        state = 1
                    if 1 <= state <= len(inject):
                        token, is_injected = inject[state - 1], True
                    if state >= 1:
                        state += 1
                row.append(token)
                tokens.append(token)
                output = row[prompt_len:]
                matches = [
                    i
                    for i, padded in enumerate(
                        after["stop_sequences"][s].tolist() if "stop_sequences" in after else []
                    )
                    if (sequence := _before_padding(padded))
                    and output[-len(sequence) :] == sequence
                ]
                limit, reply = of_slot("max_lens", s, -1), of_slot("reply_budget", s, -1)
                if may_stop and token in stops:
                    reason, index = 1, stops.index(token)
                elif may_stop and matches:
                    reason, index = 2, matches[0]
                elif 0 <= limit <= len(row) or (reply >= 0 and state > len(inject) + reply):
                    reason = 3
                if reason or is_injected:
                    break
            after["token_ids"][s, : len(row)] = torch.tensor(row, dtype=torch.int32)
            after["lens"][s] = len(row)
            if is_injected:
                for name, value in (("logprobs", 0), ("ranks", 1)):
                    if name in after:
                        after[name][b, len(tokens) - 1] = value
            for name, value in (
                ("thinking_state", state),
                ("finish_reasons", reason),
                ("stop_indices", index),
            ):
                if name in after:
                    after[name][s] = value
            if "token_counts" in after:
                table = dict(
                    zip(
                        ids_of("counted_token_ids", s),
                        after["token_counts"][s].tolist(),
                        strict=False,
                    )
                )
                for token in tokens:
                    table[token] = table.get(token, 0) + 2
                places = torch.arange(len(table))
                after["counted_token_ids"][s, places] = torch.tensor(
                    sorted(table), dtype=torch.int32
                )
                after["token_counts"][s, places] = torch.tensor(
                    [table[token] for token in sorted(table)], dtype=torch.int32
                )
        if s >= 0:
            after["output_token_ids"][b, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            for name, value in (("output_token_ids", -1), ("logprobs", 0), ("ranks", 0)):
                if name in after:
                    after[name][b, len(tokens) :] = value
        if "num_committed_tokens" in after:
            after["num_committed_tokens"][b] = len(tokens)
    return after


def _before_padding(ids: list[int]) -> list[int]:
    """Up to the first -1."""
    return ids[: ids.index(-1)] if -1 in ids else ids


# ---- suffix_tree ----


def ngram_propose(
    token_ids: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    k: int,
    min_ngram_size: int | Tensor,
    max_ngram_size: int | Tensor,
    leftmost: bool | Tensor = False,
    given_token_ids: Tensor | None = None,
    num_given_drafts: Tensor | None = None,
    max_total_draft_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Every size, longest first, against every earlier start, latest (or leftmost) first.

    `given_token_ids` [batch, k] holds the given drafts.
    """

    def of(value: int | Tensor, b: int) -> int:
        return int(value[b] if isinstance(value, Tensor) else value)

    batch = len(token_ids)
    rows, given = [], []
    for b in range(batch):
        num_given = 0 if num_given_drafts is None else int(num_given_drafts[b])
        first = [] if given_token_ids is None else given_token_ids[b, :num_given].tolist()
        tokens = token_ids[b, : int(lens[b])].tolist() + first
        step = 1 if of(leftmost, b) else -1
        matches = (
            start + size
            for size in range(of(max_ngram_size, b), of(min_ngram_size, b) - 1, -1)
            for start in range(max(len(tokens) - size, 0))[::step]
            if tokens[start : start + size] == tokens[len(tokens) - size :]
        )
        end = next(matches, len(tokens))
        room = max(min(int(max_draft_tokens[b]), k) - num_given, 0)
        rows.append(first + tokens[end : end + room])
        given.append(num_given)
    counts = [len(row) for row in rows]
    if max_total_draft_tokens is not None:
        counts = _shares(counts, given, max_total_draft_tokens)
    draft_token_ids = torch.full((batch, k), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        draft_token_ids[b, :count] = torch.tensor(rows[b][:count], dtype=torch.int32)
    return draft_token_ids, torch.tensor(counts, dtype=torch.int32)


def _shares(counts: list[int], given: list[int], total: int) -> list[int]:
    """One draft each to all that can have one more, again and again, until nothing is left."""
    shares = list(given)
    left = total - sum(shares)
    for cap in range(1, max(counts, default=0) + 1):
        wanting = [b for b, count in enumerate(counts) if count >= cap > shares[b]]
        for b in wanting[: max(left, 0)]:
            shares[b] += 1
        left -= len(wanting)
    return shares


class _Sequence:
    """Tokens of one sequence; those before `first` were given back after its removal."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first = 0


# Where a string occurs: the sequence, and the position behind the string.
_Occurrence = tuple[_Sequence, int]
# token_ids, parents, probs, score, match_len
_Draft = tuple[list[int], list[int], list[float], float, int]


def _occurrences(sequences: Iterable[_Sequence], string: list[int]) -> list[_Occurrence]:
    """From the oldest to the youngest: by the order of sequences, then along each of them."""
    size = len(string)
    return [
        (sequence, start + size)
        for sequence in sequences
        for start in range(sequence.first, len(sequence.tokens) - size + 1)
        if sequence.tokens[start : start + size] == string
    ]


def _float32(x: float) -> float:
    """x rounded; for sums, products and quotients of two float32 this is float32 arithmetic."""
    return ctypes.c_float(x).value


class SuffixCache:
    """`specops.SuffixCache` by brute force: lists of tokens, all looked at for every answer.

    Two trees, that is two sets of sequences, answer: the request's own (prompt and response in one
    sequence) and the shared one (responses, in the order in which their requests were started).
    What is taken out of the shared tree leaves it at once, unless it is the oldest there: then it
    is given back from its first token on, two tokens for each one that a call adds, and until then
    the rest is found as before.

    Differences: a batch of `step` is a list, budgets in bytes are not kept, nothing is saved.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int = 64,
        max_cached_requests: int = -1,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_cached_tokens: int = -1,
        read_on: bool = True,
    ) -> None:
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_cached_tokens = max_cached_tokens
        self.max_spec_factor = _float32(max_spec_factor)
        self.min_token_prob = _float32(min_token_prob)
        self.read_on = read_on
        self.running: dict[Hashable, _Sequence] = {}  # prompt and response
        self.cached: dict[Hashable, _Sequence] = {}  # responses, oldest first
        self.removed: list[_Sequence] = []  # not yet given back, in the order of their removal
        self.shared: list[_Sequence] = []  # both of these, in the order of their start

    def start(self, request_id: Hashable, prompt: list[int]) -> None:
        self.running[request_id] = _Sequence()
        self.running[request_id].tokens += prompt
        if request_id in self.cached:
            self._remove(request_id)
        if 0 not in (self.max_cached_requests, self.max_cached_tokens):
            self.cached[request_id] = _Sequence()
            self.shared.append(self.cached[request_id])
        self._keep_budgets()

    def extend(self, request_id: Hashable, token_ids: list[int]) -> None:
        self._give_back(2 * self._append(request_id, token_ids))

    def add(self, token_ids: list[int], request_id: Hashable) -> None:
        self.start(request_id, [])
        self.extend(request_id, token_ids)
        self.stop(request_id)

    def stop(self, request_id: Hashable) -> None:
        del self.running[request_id]

    def evict(self, request_id: Hashable) -> None:
        self._remove(request_id)

    def reclaim(self) -> int:
        return self._give_back(sum(len(s.tokens) - s.first for s in self.removed))

    def step(
        self,
        rows: list[tuple[Hashable, list[int], int, list[int]]],
        *,
        use_tree: bool = False,
    ) -> list[_Draft]:
        """Rows of request, new tokens, most draft tokens, and drafts that stand in the row already.

        Parents are places in the row, where the given drafts are a path.
        """
        added = sum(self._append(request_id, new) for request_id, new, _, _ in rows)
        self._give_back(2 * added)
        drafts = []
        for request_id, _, limit, given in rows:
            context = self.running[request_id].tokens + given
            draft = self.speculate(request_id, limit, use_tree=use_tree, context=context)
            parents = [parent + len(given) for parent in draft[1]]
            drafts.append((draft[0], parents, *draft[2:]))
        return drafts

    def speculate(
        self,
        request_id: Hashable,
        max_draft_tokens: int,
        *,
        use_tree: bool = False,
        max_spec_factor: float | None = None,
        min_token_prob: float | None = None,
        context: list[int] | None = None,
    ) -> _Draft:
        """The better of two drafts; the request's own where the scores are equal."""
        own = self.running[request_id]
        factor = self.max_spec_factor if max_spec_factor is None else _float32(max_spec_factor)
        min_prob = self.min_token_prob if min_token_prob is None else _float32(min_token_prob)
        drafts = [
            self._best_draft(
                sequences,
                own.tokens if context is None else context,
                max_draft_tokens,
                factor,
                min_prob,
                use_tree,
            )
            for sequences in ([own], self.shared)
        ]
        return max(drafts, key=lambda draft: draft[3])

    def count(self, token_ids: list[int], request_id: Hashable | None = None) -> int:
        """How often a string occurs; longer ones than the depth are not known."""
        if len(token_ids) > self.max_tree_depth:
            return 0
        sequences = self.shared if request_id is None else [self.running[request_id]]
        return len(_occurrences(sequences, token_ids))

    def _append(self, request_id: Hashable, token_ids: list[int]) -> int:
        """How many tokens went into the shared tree."""
        self.running[request_id].tokens += token_ids
        if request_id not in self.cached:
            return 0
        self.cached[request_id].tokens += token_ids
        return len(token_ids)

    def _keep_budgets(self) -> None:
        """Takes out what was started first, running or not."""
        while 0 < self.max_cached_requests < len(self.cached) or (
            0 <= self.max_cached_tokens < sum(len(s.tokens) for s in self.cached.values())
        ):
            self._remove(next(iter(self.cached)))

    def _remove(self, request_id: Hashable) -> None:
        is_oldest = request_id == next(iter(self.cached))
        sequence = self.cached.pop(request_id)
        if is_oldest:
            self.removed.append(sequence)
        else:
            self.shared.remove(sequence)

    def _give_back(self, max_positions: int) -> int:
        self._keep_budgets()
        given = 0
        while self.removed and given < max_positions:
            removed = self.removed[0]
            positions = min(len(removed.tokens) - removed.first, max_positions - given)
            removed.first += positions
            given += positions
            if removed.first == len(removed.tokens):
                self.shared.remove(self.removed.pop(0))
        return given

    def _best_draft(
        self,
        sequences: list[_Sequence],
        context: list[int],
        max_draft_tokens: int,
        factor: float,
        min_prob: float,
        use_tree: bool,
    ) -> _Draft:
        """Of the drafts after every suffix of the context; the longest where scores are equal."""
        best: _Draft = ([], [], [], 0.0, 0)
        for match_len in range(min(len(context), self.max_tree_depth), 0, -1):
            matches = _occurrences(sequences, context[-match_len:])
            budget = int(min(_float32(match_len * factor) + 1e-6, max_draft_tokens))
            if matches and budget > 0:
                draft = self._draft(matches, match_len, budget, min_prob, use_tree)
                if draft[3] > best[3]:
                    best = draft
        return best

    def _draft(
        self,
        matches: list[_Occurrence],
        match_len: int,
        budget: int,
        min_prob: float,
        use_tree: bool,
    ) -> _Draft:
        """The likeliest path of continuations, or the likeliest continuations as a tree."""
        token_ids: list[int] = []
        parents: list[int] = []
        probs: list[float] = []
        score = 0.0
        # Candidates in the order in which they were found: of equals the first is taken.
        candidates = self._continuations(matches, match_len, -1, 1.0, min_prob)
        while candidates and len(token_ids) < budget:
            if not use_tree:
                candidates = candidates[:1]
            best = max(candidates, key=lambda candidate: candidate[0])
            candidates.remove(best)
            prob, token_id, parent, occurrences, depth = best
            token_ids.append(token_id)
            parents.append(parent)
            probs.append(prob)
            score = _float32(score + prob)
            node = len(token_ids) - 1
            candidates += self._continuations(occurrences, depth, node, prob, min_prob)
        return token_ids, parents, probs, score, match_len

    def _continuations(
        self,
        occurrences: list[_Occurrence],
        depth: int,
        parent: int,
        prob: float,
        min_prob: float,
    ) -> list[tuple[float, int, int, list[_Occurrence], int]]:
        """What may come next, the most frequent first, of equals the youngest.

        Counts are known up to the depth of the tree; from there on only the text of the youngest
        occurrence goes on.
        """
        if depth >= self.max_tree_depth:
            occurrences = occurrences[-1:] if self.read_on else []
        next_of: dict[int, list[_Occurrence]] = {}  # by token, the youngest first
        for sequence, end in reversed(occurrences):
            if end < len(sequence.tokens):
                next_of.setdefault(sequence.tokens[end], []).append((sequence, end + 1))
        found = []
        for token_id, of_token in sorted(next_of.items(), key=lambda item: -len(item[1])):
            share = _float32(len(of_token) / len(occurrences))
            found.append((_float32(prob * share), token_id, parent, of_token[::-1], depth + 1))
        return [candidate for candidate in found if candidate[0] >= min_prob]
