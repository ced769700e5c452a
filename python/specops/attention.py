# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache: rotary embedding with cache append, attention, state merging.

The bits of an output row depend only on its request: the KV cache is reduced in leaves (blocks of
tokens) at fixed positions, and the leaves are folded in one fixed order. Therefore a row of a
verification step has the same bits as in plain decoding.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from specops import _C
from specops._checks import check_int, describe, empty, try_or_none
from specops.argument_groups import (
    AttentionMask as AttentionMask,
)
from specops.argument_groups import (
    PagedBatch as PagedBatch,
)
from specops.argument_groups import (
    PagedKv as PagedKv,
)
from specops.argument_groups import (
    PrefixTensors as PrefixTensors,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SCALING_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "proportional": {"factor", "partial_rotary_factor"},
}
_MAX_HEAD_DIM = 512  # limit of `rope_append_kv`
LATENT_DIM = 512  # latent attention: leading elements of a token's key that are also its value

# Keys of a checkpoint's rope_parameters that are not part of the scaling.
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rope_cos_sin(
    max_positions: int,
    rotary_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
) -> Tensor:
    """Tabulate the cosines and sines of the rotary embedding.

    Same as `reference.rope_cos_sin`. Position p and pair i have the angle
    p * theta^(-2i / rotary_dim), with its frequency changed by `scaling`.

    Args:
        max_positions: number of positions.
        rotary_dim: number of rotated elements of a head, even, 2 to 512.
        theta: base of the frequencies; finite, above 0.
        scaling: the rope_scaling or rope_parameters mapping of a checkpoint's config: rope_type
            "default", "linear", "llama3", "yarn" or "proportional" with its keys. None: default.

    Returns:
        [max_positions, rotary_dim], float32: the cosine of every pair, then the sine; yarn
        multiplies both by its attention factor. With "proportional", only the first pairs turn: a
        share partial_rotary_factor of them; the others have the angle 0.

    Raises:
        ValueError: the rope_type is unknown, a key is missing or unknown, or the sizes are wrong.

    Source: Su et al. 2021 (RoPE), Peng et al. 2023 (YaRN), Llama 3.1, Gemma 4 (proportional).
    """
    check_int("rope_cos_sin", "max_positions", max_positions)
    check_int("rope_cos_sin", "rotary_dim", rotary_dim, least=2)
    if rotary_dim % 2 or rotary_dim > _MAX_HEAD_DIM:
        raise ValueError(
            f"rope_cos_sin: rotary_dim must be even and at most {_MAX_HEAD_DIM}, got {rotary_dim}"
        )
    _check_positive("theta", theta)
    theta = float(theta)
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ValueError(
            f"rope_cos_sin: scaling must be a mapping, or None, got {describe(scaling)}"
        )
    options = dict(scaling or {})
    kind = options.get("rope_type", options.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        names = ", ".join(sorted(_SCALING_KEYS))
        raise ValueError(f"rope_cos_sin: rope_type must be one of {names}, got {kind!r}")
    unknown = sorted(set(options) - _SCALING_KEYS[kind] - _COMMON_KEYS, key=str)
    if unknown:
        raise ValueError(f"rope_cos_sin: rope_type {kind!r} has no key {unknown[0]!r}")
    if options.get("rope_theta", theta) != theta:
        raise ValueError(
            f"rope_cos_sin: theta must be the rope_theta={options['rope_theta']} of scaling, "
            f"got {theta}"
        )
    for key in _SCALING_KEYS[kind] - {"truncate"}:
        is_unused = not options.get(key) and key.startswith("mscale")
        if options.get(key) is not None and not is_unused:
            _check_positive(key, options[key])

    if kind == "proportional" and (options.get("partial_rotary_factor") or 1) > 1:
        raise ValueError(
            "rope_cos_sin: partial_rotary_factor must be at most 1, "
            f"got {options['partial_rotary_factor']}"
        )

    def option(key: str) -> float:
        if options.get(key) is None:
            raise ValueError(f"rope_cos_sin: rope_type {kind!r} needs the key {key!r}")
        return float(options[key])

    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    # In double precision and rounded once, so that no CPU's approximations show in the table.
    powers = torch.tensor([float(theta) ** e for e in exponents.tolist()], dtype=torch.float32)
    inv_freq = 1.0 / powers
    attention_factor = 1.0
    if kind == "linear":
        inv_freq = inv_freq / option("factor")
    elif kind == "llama3":
        inv_freq = _llama3_frequencies(
            inv_freq,
            option("factor"),
            option("low_freq_factor"),
            option("high_freq_factor"),
            option("original_max_position_embeddings"),
        )
    elif kind == "yarn":
        factor = option("factor")
        inv_freq = _yarn_frequencies(
            powers,
            theta,
            factor,
            option("original_max_position_embeddings"),
            float(options.get("beta_fast") or 32),
            float(options.get("beta_slow") or 1),
            bool(options.get("truncate", True)),
        )
        attention_factor = _yarn_attention_factor(factor, options)
    elif kind == "proportional":
        inv_freq = inv_freq / float(options.get("factor") or 1)
        inv_freq[int(float(options.get("partial_rotary_factor") or 1) * rotary_dim) // 2 :] = 0.0
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
    wide = angles.double()
    table = torch.cat([wide.cos(), wide.sin()], dim=1).float()
    return table if attention_factor == 1.0 else table.mul_(attention_factor)


def _check_positive(name: str, value: Any) -> None:
    """Check that a factor of frequencies or angles is a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ValueError(
            f"rope_cos_sin: {name} must be a finite number above 0, got {describe(value)}"
        )


def _llama3_frequencies(
    inv_freq: Tensor, factor: float, low_factor: float, high_factor: float, old_len: float
) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between them."""
    wavelength = 2 * math.pi / inv_freq
    smooth = (old_len / wavelength - low_factor) / (high_factor - low_factor)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    kept_or_between = torch.where(wavelength < old_len / high_factor, inv_freq, between)
    return torch.where(wavelength > old_len / low_factor, inv_freq / factor, kept_or_between)


def _yarn_frequencies(
    freq: Tensor,
    theta: float,
    factor: float,
    old_len: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Tensor:
    """Divide the frequencies of slow pairs by `factor`, keep fast ones, and interpolate between.

    The speed of a pair is its number of rotations within the original context length `old_len`.
    """
    rotary_dim = 2 * freq.numel()

    def pair_with(rotations: float) -> float:
        turns = math.log(old_len / (rotations * 2 * math.pi))
        return rotary_dim * turns / (2 * math.log(theta))

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(freq.numel(), dtype=torch.float32)
    slowed = ((index - low) / (high - low)).clamp(0, 1)
    kept = 1 - slowed
    return 1.0 / (factor * freq) * (1 - kept) + 1.0 / freq * kept


def _yarn_attention_factor(factor: float, options: Mapping[str, Any]) -> float:
    """Return the scale of the cosines and sines: from `options`, or derived from `factor`."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])
    if options.get("mscale") and options.get("mscale_all_dim"):
        return mscale(options["mscale"]) / mscale(options["mscale_all_dim"])
    return mscale(1.0)


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
    q_out: Tensor | None = None,
) -> Tensor:
    """Rotate q and k by their positions and write k and v INTO THE CACHE, in one pass.

    Same as `reference.rope_append_kv`. Per head: optional RMSNorm (rounded to the dtype, times the
    weight, rounded), then RoPE of the first rotary_dim elements in fp32, rounded once.

    A cache of the dtype of `q` stores the results unchanged. An int8 or float8_e4m3fn cache stores
    them quantized, with one scale per token and head x::

        scale = max |x| / 127              float8_e4m3fn: / 448, its largest number
        elements = round(x / scale)        to the nearest element, ties to even

    all in fp32. If that scale is no normal float32 (below 2^-126), as for zeros, the elements and
    the scale are 0. If x has a NaN or an infinity, the elements are 0 and the scale is NaN, so
    every row that sees the token becomes NaN.

    Args:
        q: [rows, num_qo_heads, head_dim], float32, bfloat16 or float16. Rows may be strided, as in
            views of one packed qkv; each row is contiguous. head_dim is at most 512.
        k: [rows, num_kv_heads, head_dim], dtype of `q`.
        v: [rows, num_kv_heads, head_dim], dtype of `q`.
        cache: keys and values, dtype of `q`, int8 or float8_e4m3fn; on CUDA the last two require a
            bfloat16 `q`. Written, scales included.
        cache_slots: [rows], int64. Slot page * page_size + offset of each row; -1 writes nothing.
        positions: [rows], int32. Absolute position of each row; -1 is a padding row, whose slot
            must be -1 as well: its q_out is zero.
        cos_sin: [max_positions, rotary_dim], float32, from `rope_cos_sin`.
        interleaved: rotate neighbors (2i, 2i + 1) instead of halves (i, i + rotary_dim / 2).
        q_norm_weight: [head_dim], dtype of `q`. None: q is not normalized.
        k_norm_weight: [head_dim], dtype of `q`. None: k is not normalized.
        norm_eps: added to the mean square of a head; finite, at least 0.
        q_out: [rows, num_qo_heads, head_dim], dtype of `q`. May be `q`. Allocated when absent.

    Returns:
        `q_out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or a slot or a position
            is out of range; nothing has been written then.

    Note:
        Deterministic; a row depends only on itself. If two rows have the same slot, either may win.
        The contents of an 8-bit cache are the same on every device and instruction set.

    Source: Su et al. 2021, "RoFormer".
    """
    if q_out is None:
        q_out = empty(lambda: (q.shape, None, q))
    _C.rope_append_kv(
        q,
        k,
        v,
        cache,
        cache_slots,
        positions,
        cos_sin,
        interleaved,
        q_norm_weight,
        k_norm_weight,
        norm_eps,
        q_out,
    )
    return q_out


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
    q_out: Tensor | None = None,
) -> Tensor:
    """Rotate q and k of latent attention (MLA) and write latents and keys INTO THE CACHE.

    Same as `reference.rope_append_latent`. `kv` is the output of DeepSeek-V2's and V3's
    `kv_a_proj_with_mqa` for a token: its latent, and a key that all heads share. The latent gets an
    RMSNorm (rounded to the dtype, times the weight, rounded). The last 64 elements of `kv` and of
    each head of `q` get RoPE in fp32, rounded once.

    Args:
        q: [rows, num_qo_heads, 576], float32, bfloat16 or float16. For each head, the absorbed
            query, which stays unchanged, and 64 elements to be rotated. Rows may be strided; each
            row is contiguous.
        kv: [rows, 576], dtype of `q`. Latent and key. Rows may be strided.
        latent_cache: [num_pages, page_size, 1, 576], dtype of `q`. Written.
        cache_slots: [rows], int64. Slot page * page_size + offset of each row; -1 writes nothing.
        positions: [rows], int32. Absolute position of each row; -1 is a padding row, whose slot
            must be -1 as well: its q_out is zero.
        cos_sin: [max_positions, 64], float32, from `rope_cos_sin`.
        interleaved: rotate neighbors (2i, 2i + 1), as DeepSeek's checkpoints require, instead of
            halves (i, i + 32).
        norm_weight: [512], dtype of `q`: the weight of `kv_a_layernorm`. None: latents are not
            normalized.
        norm_eps: added to the mean square of a latent; finite, at least 0.
        q_out: [rows, num_qo_heads, 576], dtype of `q`. May be `q`. Allocated when absent.

    Returns:
        `q_out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or a slot or a position
            is out of range; nothing has been written then.

    Note:
        Deterministic; a row depends only on itself. If two rows have the same slot, either may win.

    Source: DeepSeek-AI 2024, "DeepSeek-V2"; Su et al. 2021, "RoFormer".
    """
    if q_out is None:
        q_out = empty(lambda: (q.shape, None, q))
    _C.rope_append_latent(
        q,
        kv,
        latent_cache,
        cache_slots,
        positions,
        cos_sin,
        interleaved,
        norm_weight,
        norm_eps,
        q_out,
    )
    return q_out


class _AttentionOptions(TypedDict, total=False):
    """Arguments of `append_attention` that do not affect the type of its result."""

    sm_scale: float | None
    sliding_window: int | None
    is_causal: bool
    sinks: Tensor | None
    mask: AttentionMask | None
    prefixes: PrefixTensors | None
    out: Tensor | None
    workspace: Tensor | None


@overload
def append_attention(
    q: Tensor,
    cache: PagedKv,
    batch: PagedBatch,
    *,
    lse: None = None,
    return_lse: Literal[False] = False,
    **options: "Unpack[_AttentionOptions]",
) -> Tensor: ...
@overload
def append_attention(
    q: Tensor,
    cache: PagedKv,
    batch: PagedBatch,
    *,
    lse: Tensor,
    return_lse: bool = False,
    **options: "Unpack[_AttentionOptions]",
) -> tuple[Tensor, Tensor]: ...
@overload
def append_attention(
    q: Tensor,
    cache: PagedKv,
    batch: PagedBatch,
    *,
    lse: Tensor | None = None,
    return_lse: Literal[True],
    **options: "Unpack[_AttentionOptions]",
) -> tuple[Tensor, Tensor]: ...
@overload
def append_attention(
    q: Tensor,
    cache: PagedKv,
    batch: PagedBatch,
    *,
    lse: Tensor | None = None,
    return_lse: bool = False,
    **options: "Unpack[_AttentionOptions]",
) -> Tensor | tuple[Tensor, Tensor]: ...
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
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention from the last rows of each request to its whole paged KV cache.

    Same as `reference.append_attention`. Row i of a request with qo_len rows sits at position
    kv_len - qo_len + i and sees the positions up to its own, at most `sliding_window` of them. One
    call serves decoding (qo_len 1), verification (k + 1), prefill chunks and any mixture. Without
    `is_causal` a row sees the positions after its own as well, to the end of the request, which
    block drafters need. Such a row has the bits that its query would give as the request's last
    row.

    An attention sink is an extra logit per head without a value: it is in the softmax denominator
    and adds nothing to the result::

        out = sum_t exp(score[t]) v[t] / (exp(sink) + sum_t exp(score[t]))
        lse = log(exp(sink) + sum_t exp(score[t]))

    The sink is added after all tokens of the row. A sink of -inf gives the same bits as no sink.
    The lse includes the sink, so use `merge_states` on parts of which exactly one had the sinks.

    Keys and values of 8-bit caches are elements times the scale of their token and head, as
    `rope_append_kv` writes them. The scales stay outside of the inner products::

        score[t] = sum_d q[d] k[t, d] * sm_scale * k_scales[t]
        p = softmax(score)
        out[d] = sum_t (p[t] v_scales[t]) v[t, d]

    Without `cache.v` attention is latent (MLA): a token has one key of 576 elements for all query
    heads. Its first 512 elements, the latent, are also its value; the last 64 are rotated. The
    caller absorbs the queries and expands the output of each head afterwards::

        q[.., h, :512] = q_nope[.., h] w_uk[h]     w_uk: [num_qo_heads, qk_nope_head_dim, 512]
        q[.., h, 512:] = rope(q_rope[.., h])
        attended[.., h] = w_uv[h] out[.., h]       w_uv: [num_qo_heads, v_head_dim, 512]

    The result equals that of `reference.expanded_attention` with the keys and values of every head.
    This one form serves decoding, verification and prefill, so that all have the same bits.

    Requests that begin with the same pages (a system prompt, several samples of one prompt) may be
    declared as groups, in levels from the widest to the narrowest, so that shared pages are read
    once for all of their rows instead of once per request::

        requests             a    b    c    d    e      a to e begin with the same 100 tokens,
        prefixes.leaders = [[0,   0,   0,   0,   0],    a and b with the same 300,
                            [0,   0,   2,   3,   3]]    d and e with the same 200
        prefixes.lens    = [[100, 100, 100, 100, 100],
                            [300, 300, 0,   200, 200]]

    The groups change the schedule only: the result is the same bit for bit. A declared prefix is
    shared only if that saves more reading than it costs; on CUDA declaring any prefix takes two
    more launches, a few microseconds.

    Args:
        q: [rows, num_qo_heads, head_dim], float32, bfloat16 or float16. Rows may be strided.
            head_dim is 64, 96, 128, 256 or 512; 576 for latent attention.
        cache: keys and values, dtype of `q`, int8 or float8_e4m3fn; on CUDA the last two require a
            bfloat16 `q`. page_size is 16, 32 or 64; num_kv_heads divides num_qo_heads. The two bit
            patterns of float8_e4m3fn for NaN are read as 480 and -480. To use one scale per head,
            repeat it in all slots. Without values attention is latent: num_kv_heads is 1 and the
            dtype that of `q`, on CUDA bfloat16 or float16.
        batch: rows and pages of every request. Rows past the last entry of `qo_indptr` yield zeros
            and an lse of -inf.
        sm_scale: scale of the scores; finite, at least 0. None: 1 / sqrt(head_dim). Required for
            latent attention: the scale of the heads before absorption, 1 / sqrt(qk_nope_head_dim +
            64), times any factor of a scaled RoPE.
        sliding_window: positions a row sees, its own and those before it. None: all. Pages before
            every row's window are not read; their ids may be anything.
        is_causal: rows see no position after their own.
        sinks: [num_qo_heads], float32. Not scaled by `sm_scale`; a sink of +inf makes rows NaN.
            None: no sinks.
        mask: hides tokens that a row would otherwise see. A row that sees no token gives zeros and
            an lse of -inf, or of its sink. None: nothing is hidden.
        prefixes: groups of requests that begin with the same pages. None: no request shares
            anything.
        out: [rows, num_qo_heads, head_dim], dtype of `q`; [rows, num_qo_heads, 512] for latent
            attention. Allocated when absent.
        lse: [rows, num_qo_heads], float32. If passed, receives the natural log-sum-exp of the
            scores, sinks included.
        return_lse: return the lse too, allocated when absent.
        workspace: [floats], float32, for partial results of requests that are split among threads
            or SMs; see `attention_workspace_size`. Allocated when absent; a short one means less
            splitting. On CUDA it begins with counters, which must be zero and are zero again
            afterwards: use one workspace per stream, and zero it after a call that the device
            aborted. If concurrent calls use the same one, rows may be missing. A count that is too
            high is then reported as wrong data; counts that happen to even out go undetected.

    Returns:
        `out`, or (`out`, `lse`) if `lse` is passed or `return_lse` is set.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a length is below
            its rows or above its pages; a page id in use is out of range; the prefixes are not as
            described, or not shared.

    Note:
        The bits of a row depend only on its own query, the part of its request's KV that it sees,
        the scale, the window and its head's sink: not on the other rows, the batch, page size, page
        order, threads or declared prefixes. They do depend on the dtype of the caches. With a
        mask they also depend on the row's mask bits and on the positions of hidden tokens, so a
        node of a tree has other bits than in plain decoding; `tree_chains` avoids that. Keys and
        values that only a mask hides must be finite.

    Source: Dao et al. 2022 and 2023 (FlashAttention); Kwon et al. 2023 (paged KV); Xiao et al. 2023
        (attention sinks), OpenAI 2025 (gpt-oss); DeepSeek-AI 2024 (DeepSeek-V2: MLA, absorption).
    """
    if out is None:
        out = empty(
            lambda: (q.shape if cache.v is not None else (*q.shape[:-1], LATENT_DIM), None, q)
        )
    if lse is None and return_lse:
        lse = empty(lambda: (q.shape[:2], torch.float32, q))
    if workspace is None:
        sizes = try_or_none(
            lambda: _workspace_size(
                q.shape, cache.k.shape, batch.kv_indices.shape[0], batch.kv_lens.shape[0], q.device
            )
        )
        if sizes and sizes[0]:
            workspace = torch.empty(sizes[0], dtype=torch.float32, device=q.device)
            workspace[: sizes[1]] = 0
    _C.append_attention(
        q,
        cache,
        batch,
        sm_scale,
        sliding_window,
        is_causal,
        sinks,
        mask,
        prefixes,
        out,
        lse,
        workspace,
    )
    return out if lse is None else (out, lse)


def attention_workspace_size(
    q_shape: Sequence[int],
    cache_shape: Sequence[int],
    num_pages: int,
    batch: int,
    device: torch.device | str = "cpu",
) -> int:
    """Return the workspace size, in floats, that lets `append_attention` split without limit.

    Args:
        q_shape: shape of `q`: [rows, num_qo_heads, head_dim].
        cache_shape: shape of a cache: [num_pages, page_size, num_kv_heads, head_dim].
        num_pages: number of entries of `kv_indices`.
        batch: number of requests.
        device: device of the call's tensors.

    Returns:
        The size; 0 if no request is long enough to be split. It suffices for all calls with these
        or smaller shapes, one after the other. On CUDA the workspace begins with counters: allocate
        it with zeros; every call leaves the counters zero.

    Raises:
        ValueError: a size is out of range.
    """
    for name, shape, count in (("q_shape", q_shape, 3), ("cache_shape", cache_shape, 4)):
        if try_or_none(lambda shape=shape: len(shape)) != count:  # type: ignore[misc]
            raise ValueError(
                f"attention_workspace_size: {name} must be {count} sizes, got {describe(shape)}"
            )
    place = try_or_none(lambda: torch.device(device))
    if place is None:
        raise ValueError(
            f"attention_workspace_size: device must be a torch.device, got {describe(device)}"
        )
    return _workspace_size(q_shape, cache_shape, num_pages, batch, place)[0]


# Phases of a block of `append_attention` on CUDA; see `set_phase_stamps`.
PHASES = ("plan", "item", "load", "stream", "merge")


def set_phase_stamps(stamps: Tensor | None) -> None:
    """Make `append_attention` on CUDA record the time of each phase in each block (for benchmarks).

    Calls then run a slower build of the kernel that records time stamps and gives the same bits.
    That build exists for bfloat16 with head_dim 128 only; while recording is on, other calls on
    CUDA fail. A captured graph keeps the setting that was active at its capture.

    Args:
        stamps: [blocks, 8], int64, on CUDA; at least three rows for each SM. It must live until the
            last such call has ended. Row b receives, for block b: its start and end in nanoseconds
            on a clock common to all blocks; the SM cycles spent in each of `PHASES`; and the low 32
            bits of the SM's clock at the end. Rows without a block are not written. A call with
            shared prefixes makes several launches; the last one is recorded. None stops recording,
            the default.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.
    """
    _C.set_phase_stamps(stamps)


def _workspace_size(
    q_shape: Sequence[int],
    cache_shape: Sequence[int],
    num_pages: int,
    batch: int,
    device: torch.device,
) -> tuple[int, int]:
    """Return the workspace size and the size of its part that must be zero, in floats."""
    rows, num_qo_heads, head_dim = q_shape
    index = -1
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    return _C.attention_workspace_size(
        rows, num_qo_heads, head_dim, cache_shape[2], num_pages, cache_shape[1], batch, index
    )


def merge_states(
    outs: Tensor, lses: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Combine attention results over disjoint parts of the KV cache into one.

    Same as `reference.merge_states`: weights e^lse, states folded left in fp32, rounded once.

    FlashInfer's function of this name takes [rows, states, ..] and an lse to base 2. Here states
    come first, and the lse is a natural log. To convert, pass `outs.transpose(0, 1).contiguous()`
    and `lses.transpose(0, 1).contiguous() * ln 2`. If there are as many states as rows, the wrong
    order cannot be detected and gives wrong results.

    Args:
        outs: [states, rows, num_heads, head_dim], float32, bfloat16 or float16. head_dim is at
            least 1.
        lses: [states, rows, num_heads], float32. Natural log; -inf marks an empty state, which
            contributes nothing, whatever values its `outs` hold.
        out: [rows, num_heads, head_dim], dtype of `outs`. Allocated when absent.
        lse: [rows, num_heads], float32. Allocated when absent.

    Returns:
        (`out`, `lse`): zero and -inf where every state is empty.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        Deterministic; the result of a row and head depends on its own states alone.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    if out is None:
        out = empty(lambda: (outs.shape[1:], None, outs))
    if lse is None:
        lse = empty(lambda: (lses.shape[1:], torch.float32, lses))
    _C.merge_states(outs, lses, out, lse)
    return out, lse


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
    """Move keys and values of an accepted tree path to the slots of a chain, IN PLACE.

    Same as `reference.compact_kv`. The rows of request b are its root, at position
    base = kv_lens[b] - rows, and its nodes, node j in slot base + 1 + j of the request's pages:

        slot base + 1 + i = slot base + 1 + accepted_nodes[b, i]   for i < num_accepted_tokens[b]

    Per-row tensors of a step, such as the hidden states that drafters read, can be moved in the
    same way: pass them as a cache with pages of one token, where page r is row r.

    Args:
        k_cache: [num_pages, page_size, num_kv_heads, head_dim], float32, bfloat16, float16, int8 or
            float8_e4m3fn. Move the scales of 8-bit caches in a second call, as the pair of caches
            k_scales[..., None] and v_scales[..., None].
        v_cache: as `k_cache`; None: there is one cache.
        accepted_nodes: [batch, nodes], int32. Ascending; not read past num_accepted_tokens[b],
            where `verify` leaves -1.
        num_accepted_tokens: [batch], int32. Length of each path. 0 moves nothing, and nothing else
            of the request is read.
        qo_indptr: [batch + 1], int32. Rows of request b are qo_indptr[b] .. qo_indptr[b + 1]: the
            root and its nodes.
        kv_lens: [batch], int32. Tokens in the cache, these rows included.
        kv_indptr: [batch + 1], int32. First page of each request in `kv_indices`.
        kv_indices: [pages], int32. Page ids.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a path does not ascend
            or leaves its request's nodes; a length or a page id in use is out of range. Nothing has
            been written then. On CUDA wrong values are reported by `specops.check_errors`, and
            that request is left unchanged.

    Note:
        Copies bits. Slots at and before the root are never written, nor are tokens already in
        place. Pages that several requests share must end before the nodes; in practice, they
        always do.

    Source: Miao et al. 2023 (SpecInfer).
    """
    _C.compact_kv(
        k_cache,
        v_cache,
        accepted_nodes,
        num_accepted_tokens,
        qo_indptr,
        kv_lens,
        kv_indptr,
        kv_indices,
    )


def copy_kv(k_cache: Tensor, v_cache: Tensor | None, from_slots: Tensor, to_slots: Tensor) -> None:
    """Copy keys and values of tokens to other slots, IN PLACE.

    Same as `reference.copy_kv`:

        cache[to_slots[i]] = cache[from_slots[i]]   for both caches, where to_slots[i] is not -1

    Use it with `batching.tree_chains`, which returns the slots to copy for the chains of a tree.

    Args:
        k_cache: [num_pages, page_size, num_kv_heads, head_dim], float32, bfloat16, float16, int8 or
            float8_e4m3fn. Copy the scales of 8-bit caches in a second call, as the pair of caches
            k_scales[..., None] and v_scales[..., None].
        v_cache: as `k_cache`; None: there is one cache, as for latent attention.
        from_slots: [copies], int64. Slots in the paged cache, page * page_size + offset. Entry i is
            not read if to_slots[i] is -1.
        to_slots: [copies], int64. -1: no copy. The copies run in any order, so no slot may occur
            twice or be one of `from_slots`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or a slot is out of
            range; nothing has been written then. On CUDA a wrong slot is reported by
            `specops.check_errors`, and that copy is skipped.

    Note:
        Copies bits.
    """
    _C.copy_kv(k_cache, v_cache, from_slots, to_slots)
