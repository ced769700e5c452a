# SPDX-License-Identifier: Apache-2.0
"""Linear-attention ops in plain PyTorch."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def _requests(
    slots: Tensor, qo_indptr: Tensor, kv_lens: Tensor
) -> Iterator[tuple[int, range, range]]:
    """Yield the slot, rows and positions of each request that has a slot."""
    indptr = qo_indptr.tolist()
    for b, slot in enumerate(slots.tolist()):
        rows, end = range(indptr[b], indptr[b + 1]), int(kv_lens[b])
        if slot >= 0:
            yield slot, rows, range(end - len(rows), end)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (silu of the convolution, the new states); rows without a slot are zeros."""
    out, states = torch.zeros_like(x), states.clone()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    taps, window = len(weight), states.shape[1]
    for slot, rows, positions in _requests(slots, qo_indptr, kv_lens):
        # Inputs of the previous positions from `states`; zeros before position 0.
        before = range(positions.start - taps + 1, positions.start)
        kept = [states[slot, i % window] * (i >= 0) for i in before]
        seen = torch.stack([*kept, *(x[row] for row in rows)]) if rows else x[:0]
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            total = torch.zeros_like(x[row], dtype=wide) if bias is None else bias.to(wide)
            for tap in range(taps):
                if position - taps + 1 + tap >= 0:
                    total = total + weight[tap].to(wide) * seen[i + tap].to(wide)
            out[row] = F.silu(total).to(x.dtype)
        for row, position in zip(rows, positions, strict=True):
            states[slot, position % window] = x[row]
    return out, states


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
) -> tuple[Tensor, Tensor]:
    """Return (the outputs q @ state, the new states); rows without a slot are zeros.

    If `a` and `dt_bias` have one entry per key channel, so has the decay: it is then a factor per
    row of a state instead of one factor.
    """
    out, states = torch.zeros_like(v), states.clone()
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    window, repeats = states.shape[1], v.shape[1] // q.shape[1]

    def unit(x: Tensor) -> Tensor:
        x = x.to(wide)
        return (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeats, 0)

    for slot, rows, positions in _requests(slots, qo_indptr, kv_lens):
        state = torch.zeros_like(states[slot, 0], dtype=wide)
        if positions.start:
            state = states[slot, (positions.start - 1) % window].to(wide)
        for row, position in zip(rows, positions, strict=True):
            step = F.softplus(a[row].to(wide) + dt_bias).view(len(a_log), -1, 1)
            decay = torch.exp(-a_log.exp()[:, None, None] * step)
            key, query = unit(k[row])[..., None], unit(q[row])[..., None] * q.shape[-1] ** -0.5
            state = decay * state
            delta = (v[row].to(wide) - (key * state).sum(1)) * b[row].to(wide).sigmoid()[:, None]
            state = state + key * delta[:, None]
            out[row] = (query * state).sum(1).to(v.dtype)
            states[slot, position % window] = state.to(states.dtype)
    return out, states


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
) -> tuple[Tensor, Tensor]:
    """Return (the outputs c @ state + d * x, the new states); rows without a slot are zeros."""
    out, states = torch.zeros_like(x), states.clone()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    window, repeats = states.shape[1], x.shape[1] // b.shape[1]

    def of_heads(group: Tensor) -> Tensor:
        return group.to(wide).repeat_interleave(repeats, 0)[..., None]

    for slot, rows, positions in _requests(slots, qo_indptr, kv_lens):
        state = torch.zeros_like(states[slot, 0], dtype=wide)
        if positions.start:
            state = states[slot, (positions.start - 1) % window].to(wide)
        for row, position in zip(rows, positions, strict=True):
            step = F.softplus(dt[row].to(wide) + dt_bias)[:, None, None]
            value = x[row].to(wide)[:, None]
            decay = torch.exp(-a_log.exp()[:, None, None] * step)
            state = decay * state + of_heads(b[row]) * (step * value)
            queried = (of_heads(c[row]) * state).sum(1) + d[:, None] * value[:, 0]
            out[row] = queried.to(x.dtype)
            states[slot, position % window] = state.to(states.dtype)
    return out, states
