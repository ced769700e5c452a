# SPDX-License-Identifier: Apache-2.0
"""Attention, RoPE and the KV cache in plain PyTorch."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specops.argument_groups import AttentionMask, PagedBatch, PagedKv, PrefixTensors


def rope_cos_sin(
    max_positions: int, rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> Tensor:
    """Return the RoPE table (cosines | sines) in float32, from the published formulas."""
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
        elif kind == "proportional":
            turns_all = 2 * (pair + 1) <= rotary_dim * options.get("partial_rotary_factor", 1)
            frequency *= turns_all / options.get("factor", 1)
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


# Largest finite value of each 8-bit cache dtype.
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize heads [.., head_dim] to an 8-bit dtype; return elements and float32 scales [..]."""
    scales = x.float().abs().amax(-1) / _LARGEST[dtype]
    scales = torch.where(scales < 2.0**-126, 0.0, scales)
    scales = torch.where(x.isfinite().all(-1), scales, torch.nan)
    shares = torch.where(scales[..., None] > 0, x.float() / scales[..., None], 0.0)
    return (shares.round() if dtype == torch.int8 else shares).to(dtype), scales


def _as_bits(cache: Tensor) -> Tensor:
    """Flatten a cache to slots, as uint8 if 8-bit: torch cannot index float8_e4m3fn."""
    flat = cache.flatten(0, 1)
    return flat.view(torch.uint8) if flat.element_size() == 1 else flat


def _elements(cache: Tensor, slots: Tensor, wide: torch.dtype) -> Tensor:
    """Return the elements in `slots`; a float8_e4m3fn NaN is read as 480 or -480."""
    if cache.dtype != torch.float8_e4m3fn:
        return cache.flatten(0, 1)[slots].to(wide)
    bits = _as_bits(cache)[slots]
    values = bits.view(torch.float8_e4m3fn).to(wide)
    return torch.where(values.isnan(), 480.0 - 960.0 * (bits >> 7).to(wide), values)


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm in fp32 (fp64 for fp64) and round, then multiply by weight and round."""
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _turned(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Apply RoPE to heads [rows, heads, head_dim] in fp32 (fp64 for fp64)."""
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32, copy=True)
    half = cos_sin.shape[1] // 2
    table = cos_sin.to(y.dtype)[positions.clamp(min=0).long(), None]
    cos, sin = table[..., :half], table[..., half:]
    a, b = slice(0, half), slice(half, 2 * half)
    if interleaved:
        a, b = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    even, odd = y[..., a].clone(), y[..., b].clone()
    y[..., a] = even * cos - odd * sin
    y[..., b] = odd * cos + even * sin
    return y.to(x.dtype)


def rope_append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: PagedKv,
    cache_slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Apply RMSNorm per head and RoPE to q and k; return q and write k and v to the cache.

    Computed in fp32 (fp64 for fp64). The cache and its scales are changed in place.
    """
    assert cache.v is not None

    def turn(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x if weight is None else _normalized(x, weight, norm_eps)
        return _turned(x, positions, cos_sin, interleaved)

    kept = cache_slots >= 0
    slots = cache_slots[kept]
    for written, scales, x in (
        (cache.k, cache.k_scales, turn(k, k_norm_weight)[kept]),
        (cache.v, cache.v_scales, v[kept]),
    ):
        if scales is None:
            written.flatten(0, 1)[slots] = x
            continue
        elements, of_heads = quantized(x, written.dtype)
        _as_bits(written)[slots] = elements.view(torch.uint8)
        scales.flatten(0, 1)[slots] = of_heads
    return turn(q, q_norm_weight) * (positions >= 0)[:, None, None]


LATENT_DIM = 512  # elements of a token's key that are also its value


def rope_append_latent(
    q: Tensor,
    kv: Tensor,
    latent_cache: Tensor,
    cache_slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Normalize latents, apply RoPE to the rest of q and kv; write kv to the cache, return q."""
    latents, heads = kv[:, None, :LATENT_DIM], torch.cat([q, kv[:, None]], 1)
    if norm_weight is not None:
        latents = _normalized(latents, norm_weight, norm_eps)
    turned = _turned(heads[..., LATENT_DIM:], positions, cos_sin, interleaved)
    kept = cache_slots >= 0
    rows = torch.cat([latents, turned[:, -1:]], -1)
    latent_cache.flatten(0, 1)[cache_slots[kept]] = rows[kept]
    out = torch.cat([q[..., :LATENT_DIM], turned[:, :-1]], -1)
    return out * (positions >= 0)[:, None, None]


def expanded_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    latent_cache: Tensor,
    batch: PagedBatch,
    *,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute latent attention without absorption, by the model's definition; return out and lse.

    Every head has its own keys and values, computed from the latents: k = (w_uk latent, rotated
    key), v = w_uv latent. q_nope: [rows, num_qo_heads, nope]; q_rope: [rows, num_qo_heads, 64],
    rotated; w_uk: [num_qo_heads, nope, 512]; w_uv: [num_qo_heads, v_head_dim, 512]. The output is
    [rows, num_qo_heads, v_head_dim]. Computed in fp64 if `q_nope` is fp64, else in fp32.
    """
    qo_indptr, kv_indptr, kv_indices, kv_lens = batch
    wide = torch.float64 if q_nope.dtype == torch.float64 else torch.float32
    out = q_nope.new_zeros(*q_nope.shape[:2], w_uv.shape[1])
    lse = torch.full(q_nope.shape[:2], -torch.inf, dtype=wide)
    page_size = latent_cache.shape[1]
    for request, kv_len in enumerate(kv_lens.tolist()):
        begin, end = qo_indptr[request : request + 2].tolist()
        if begin == end:
            continue
        token = torch.arange(kv_len)
        pages = kv_indices[kv_indptr[request] : kv_indptr[request + 1]].long()
        cached = latent_cache[pages[token // page_size], token % page_size, 0].to(wide)
        latents, shared = cached[:, :LATENT_DIM], cached[:, LATENT_DIM:]
        keys = torch.cat(
            [
                torch.einsum("hdc,tc->thd", w_uk.to(wide), latents),
                shared[:, None].expand(-1, w_uk.shape[0], -1),
            ],
            -1,
        )
        values = torch.einsum("hdc,tc->thd", w_uv.to(wide), latents)
        queries = torch.cat([q_nope, q_rope], -1)[begin:end].to(wide)
        scores = torch.einsum("qhd,thd->qht", queries, keys) * sm_scale
        position = torch.arange(kv_len - (end - begin), kv_len)[:, None, None]
        scores = scores.masked_fill(token > position, -torch.inf)
        lse[begin:end] = scores.logsumexp(-1)
        out[begin:end] = torch.einsum("qht,thd->qhd", scores.softmax(-1), values).to(out.dtype)
    return out, lse


def append_attention(
    q: Tensor,
    cache: PagedKv,
    batch: PagedBatch,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool = True,
    sinks: Tensor | None = None,
    mask: AttentionMask | None = None,
    prefixes: PrefixTensors | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of each request in fp32 (fp64 for fp64), rounded once; return out and lse.

    A score is multiplied by the scale of its key, and a probability by the scale of its value. A
    sink is an extra logit in the softmax denominator. `prefixes` is ignored: shared prefixes change
    no result. Without `cache.v`, the values are the first LATENT_DIM elements of the keys;
    `expanded_attention` computes that case without absorption.
    """
    k_cache, v_cache, k_scales, v_scales = cache
    qo_indptr, kv_indptr, kv_indices, kv_lens = batch
    if v_cache is None:
        v_cache = k_cache[..., :LATENT_DIM]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    group, page_size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]

    def of_heads(scales: Tensor, slots: Tensor) -> Tensor:  # [query heads, tokens]
        return scales.flatten(0, 1)[slots].to(wide).repeat_interleave(group, 1).T

    out = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide)
    for request, kv_len in enumerate(kv_lens.tolist()):
        begin, end = qo_indptr[request : request + 2].tolist()
        if begin == end:
            continue
        pages = kv_indices[kv_indptr[request] : kv_indptr[request + 1]].long()
        column = torch.arange(kv_len)
        position = torch.arange(kv_len - (end - begin), kv_len)[:, None]
        seen = column <= (position if is_causal else position.clamp(min=kv_len - 1))
        if sliding_window is not None:
            seen &= column > position - sliding_window
        if mask is not None:
            start = int(position[0]) if mask.starts is None else int(mask.starts[request])
            bits = (mask.bits[begin:end, :, None] >> torch.arange(32)) & 1
            allowed = torch.nn.functional.pad(bits.flatten(1).bool(), (0, kv_len))
            place = column - start
            seen &= (place < 0) | allowed[:, place.clamp(0, allowed.shape[1] - 1)]
        used = seen.any(0)  # pages that no row sees may not exist
        slots = pages[column // page_size] * page_size + column % page_size
        keys = _elements(k_cache, slots[used], wide).repeat_interleave(group, 1)
        values = _elements(v_cache, slots[used], wide).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->qhk", q[begin:end].to(wide), keys) * scale
        if k_scales is not None:
            scores = scores * of_heads(k_scales, slots[used])
        hidden = ~seen[:, None, used]
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            of_rows = sinks.to(wide)[None, :, None].expand(end - begin, -1, 1)
            scores = torch.cat([scores, of_rows], -1)
        lse[begin:end] = scores.logsumexp(-1)
        weights = scores.softmax(-1)[..., : int(used.sum())]
        if v_scales is not None:
            weights = weights * of_heads(v_scales, slots[used])
        weights = weights.masked_fill(hidden, 0.0)
        out[begin:end] = torch.einsum("qhk,khd->qhd", weights, values).to(q.dtype)
    return out, lse


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return `sum_i e^(lse_i - lse) * out_i` and `lse = log sum_i e^lse_i`, rounded once."""
    wide = outs.to(torch.float64 if outs.dtype == torch.float64 else torch.float32)
    lse = lses.to(wide.dtype).logsumexp(0)
    weights = torch.where(lses == -torch.inf, 0.0, (lses - lse).exp())[..., None]
    merged = torch.where(weights > 0, wide * weights, 0.0).sum(0)
    return merged.to(outs.dtype), lse


def compact_kv(
    k_cache: Tensor,
    v_cache: Tensor | None,
    accepted_nodes: Tensor,
    num_accepted_tokens: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None:
    """Copy the KV of each accepted path to the slots after the root, in place in the caches."""
    page_size = k_cache.shape[1]
    for b, count in enumerate(num_accepted_tokens.tolist()):
        first = int(kv_lens[b]) - int(qo_indptr[b + 1] - qo_indptr[b]) + 1
        pages = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        tokens = first + torch.stack(
            [accepted_nodes[b, :count].long().cpu(), torch.arange(count)]
        ).to(pages.device)
        slots = pages[tokens // page_size] * page_size + tokens % page_size
        for cache in (k_cache, v_cache):
            if cache is not None:
                flat = _as_bits(cache)
                flat[slots[1]] = flat[slots[0]].clone()


def copy_kv(k_cache: Tensor, v_cache: Tensor | None, from_slots: Tensor, to_slots: Tensor) -> None:
    """Copy KV slots in place in the caches; read all of them before any write."""
    used = to_slots >= 0
    for cache in (k_cache, v_cache):
        if cache is None:
            continue
        flat = _as_bits(cache)
        flat[to_slots[used]] = flat[from_slots[used]].clone()
