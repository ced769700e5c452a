# SPDX-License-Identifier: Apache-2.0
"""Linear attention: a state of fixed size summarizes all positions before a row.

    mixed = causal_conv1d(x, conv_weight, conv_states, slots, qo_indptr, kv_lens)
    q, k, v = ...                                     # heads of mixed
    out = gated_delta_rule(q, k, v, a, b, a_log, dt_bias, states, slots, qo_indptr, kv_lens)
    out = dense.output_gate(out, z, "silu", norm_weight=norm)

Mamba-2 has `selective_state_update` instead of the gated delta rule, and its norm after the gate.

A slot keeps the states after the last `window` positions of its request; that of position i is at
i % window. Drafts therefore need no rollback: the next step starts from the state of the last
accepted row, and later rows do not matter. The window must hold all rows that a step may reject,
plus what each op reads in addition (see its docstring). A request whose first row has position 0
starts from zeros, independent of its slot's content.
"""

from torch import Tensor

from specops import _C
from specops._checks import empty


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve each channel over the last positions of a request, and apply silu.

    Same as `reference.causal_conv1d`. For position i of a request, in fp32, from the oldest tap on:

        out[i] = silu(bias + sum of weight[t] * x[i - taps + 1 + t], if that position exists)

    Positions before this step's rows are read from `states`; then this step's rows are written
    there.

    Args:
        x: [rows, channels], float32, bfloat16 or float16. Rows may be strided.
        weight: [taps, channels], dtype of `x`; 1 to 8 taps, the last one for the row itself.
        states: [num_slots, window, channels], dtype of `x`; `x` of position i is at i % window.
            The window must be at least taps - 1, and taps - 1 more than the rows of a step that may
            be rejected. Written for the last `window` rows of each request, elsewhere untouched.
        slots: [batch], int32. No slot may occur twice; -1: the request's rows of `out` become
            zeros.
        qo_indptr: [batch + 1], int32. Rows past its last entry become zeros.
        kv_lens: [batch], int32. Positions of each request, this step's rows included.
        bias: [channels], dtype of `x`; None: no bias.
        out: [rows, channels], dtype of `x`; must not be `x`. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a slot or a length is
            out of range. Nothing has been written then. On CUDA wrong values are reported by
            `specops.check_errors`; such a request stays unchanged.

    Note:
        Mutates `states`. Deterministic; a row's bits depend on its own request alone, not on how
        its positions are split into steps.

    Source: Gu and Dao 2023, "Mamba".
    """
    if out is None:
        out = empty(lambda: (x.shape, None, x))
    _C.causal_conv1d(x, weight, states, slots, qo_indptr, kv_lens, bias, out)
    return out


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Update the state of each head row by row, and query the state with `q`.

    Same as `reference.gated_delta_rule`. For each row of a request in order, in fp32; value head h
    has the query and key of head h * num_key_heads // num_value_heads:

        q, k  = q / sqrt(sum(q ** 2) + 1e-6) / sqrt(key_dim), k / sqrt(sum(k ** 2) + 1e-6)
        state = exp(-exp(a_log) * softplus(a + dt_bias)) * state
        state = state + outer(k, (v - k @ state) * sigmoid(b))
        out   = q @ state

    The decay is one number per head, or one per key channel (a row of the state) if `a` and
    `dt_bias` have such entries, as in Kimi Delta Attention.

    The initial state is that of the position before the first row, or zeros at position 0.

    Args:
        q: [rows, num_key_heads, key_dim], float32, bfloat16 or float16; key_dim a multiple of 16 up
            to 128. Rows may be strided. `k`, `v`, `a` and `b` have the same dtype, and their rows
            may be strided too.
        k: [rows, num_key_heads, key_dim].
        v: [rows, num_value_heads, value_dim]; num_value_heads is a multiple of num_key_heads;
            value_dim a multiple of 16 up to 256.
        a: [rows, num_value_heads], or [rows, num_value_heads, key_dim] for a decay per key channel.
        b: [rows, num_value_heads].
        a_log: [num_value_heads], float32.
        dt_bias: [num_value_heads], or [num_value_heads, key_dim] if `a` has three dimensions;
            float32.
        states: [num_slots, window, num_value_heads, key_dim, value_dim], float32; the state of
            position i is at i % window. The window must be one more than the rows of a step that
            may be rejected. Written for the last `window` rows of each request, elsewhere
            untouched.
        slots: [batch], int32. No slot may occur twice; -1: the request's rows of `out` become
            zeros.
        qo_indptr: [batch + 1], int32. Rows past its last entry become zeros.
        kv_lens: [batch], int32. Positions of each request, this step's rows included.
        out: [rows, num_value_heads, value_dim], dtype of `v`; must not be `q`, `k` or `v`.
            Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a slot or a length is
            out of range. Nothing has been written then. On CUDA wrong values are reported by
            `specops.check_errors`; such a request stays unchanged.

    Note:
        Mutates `states`. Deterministic; a row's bits depend on its own request alone, not on how
        its positions are split into steps. The chunked form with matrix products suits tensor
        cores, but its bits depend on the chunks, so it is not offered.

    Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"; a decay per key channel: Kimi
    Team 2025, "Kimi Linear".
    """
    if out is None:
        out = empty(lambda: (v.shape, None, v))
    _C.gated_delta_rule(q, k, v, a, b, a_log, dt_bias, states, slots, qo_indptr, kv_lens, out)
    return out


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Update the state of each Mamba-2 head row by row, and query the state with `c`.

    Same as `reference.selective_state_update`. For each row of a request in order, in fp32; head h
    has `b` and `c` of group h * num_groups // num_heads:

        step  = softplus(dt + dt_bias)
        state = exp(-exp(a_log) * step) * state + outer(b, step * x)
        out   = c @ state + d * x

    The initial state is that of the position before the first row, or zeros at position 0.

    Args:
        x: [rows, num_heads, head_dim], float32, bfloat16 or float16; head_dim a multiple of 16 up
            to 256. Rows may be strided. `dt`, `b` and `c` have the same dtype, and their rows may
            be strided too.
        dt: [rows, num_heads].
        b: [rows, num_groups, state_dim]; num_groups divides num_heads; state_dim a multiple of 16
            up to 256.
        c: [rows, num_groups, state_dim].
        a_log: [num_heads], float32.
        d: [num_heads], float32.
        dt_bias: [num_heads], float32.
        states: [num_slots, window, num_heads, state_dim, head_dim], float32; the state of position
            i is at i % window. The window must be one more than the rows of a step that may be
            rejected. Written for the last `window` rows of each request, elsewhere untouched.
        slots: [batch], int32. No slot may occur twice; -1: the request's rows of `out` become
            zeros.
        qo_indptr: [batch + 1], int32. Rows past its last entry become zeros.
        kv_lens: [batch], int32. Positions of each request, this step's rows included.
        out: [rows, num_heads, head_dim], dtype of `x`; must not be `x`, `b` or `c`. Allocated when
            absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a slot or a length is
            out of range. Nothing has been written then. On CUDA wrong values are reported by
            `specops.check_errors`; such a request stays unchanged.

    Note:
        Mutates `states`. Deterministic; a row's bits depend on its own request alone, not on how
        its positions are split into steps. The chunked form is not offered, because its bits depend
        on the chunks.

    Source: Dao and Gu 2024, "Transformers are SSMs".
    """
    if out is None:
        out = empty(lambda: (x.shape, None, x))
    _C.selective_state_update(
        x, dt, b, c, a_log, d, dt_bias, states, slots, qo_indptr, kv_lens, out
    )
    return out
