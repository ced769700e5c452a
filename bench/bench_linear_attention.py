# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next-80B's gated delta rule and Granite 4 H Small's Mamba-2, against torch code.

In decoding and verification, a request's states (2 MB of 32 heads, or 4 MB of 128) are read once,
and written once per row. The rows of a prompt update the states in the L2 cache, so arithmetic is
the limit. transformers computes prompts in chunks of 64 or 256 rows as matrix products, a form
whose bits depend on the chunks (docs/models.md).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from specops.linear_attention import gated_delta_rule, selective_state_update
from torch import Tensor

from bench.common import Bench, Figure
from bench.limits import add_share, instructions

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 16, 32, 128, 128
HEADS, STATE_DIM, HEAD_DIM, CHUNK = 128, 128, 64, 256
ROWS = (1, 5, 256)  # rows per request
DRAFTS = 4


class Case(NamedTuple):
    """An op with one state per head.

    Attributes:
        name: beginning of the figures' names.
        what: name of the op.
        shape: number of heads, and the dimensions of a state.
        flops: flops per row and element of a state.
        ours: function that returns a call of the op over some rows.
        torch: the same for the torch code of transformers.
        most_one_by_one: number of rows up to which transformers computes them one by one.
    """

    name: str
    what: str
    shape: tuple[int, int, int]
    flops: int
    ours: Callable[[int], Callable[[], object]]
    torch: Callable[[int], Callable[[], object]]
    most_one_by_one: int


def run_linear_attention(bench: Bench) -> None:
    """Time one request against transformers.

    transformers computes a few rows one by one, and many rows in chunks.
    """
    delta = (VALUE_HEADS, KEY_DIM, VALUE_DIM)
    for rows in ROWS:
        _run(
            bench,
            rows,
            Case("linear_attention", "gated delta rule", delta, 7, _ours, _torch, 1 + DRAFTS),
        )
        space = (HEADS, STATE_DIM, HEAD_DIM)
        _run(
            bench,
            rows,
            Case("linear_attention.mamba2", "Mamba-2", space, 5, _our_space, _torch_space, 1),
        )


def _run(bench: Bench, rows: int, case: Case) -> None:
    cases = {"ours": case.ours(rows), "torch": case.torch(rows)}
    with torch.inference_mode():
        timing = bench.alternate(cases, rounds=7, window_s=0.1)
    heads, dim, columns = case.shape
    what = f"{case.what} bf16, {heads} heads of {dim} by {columns}, {rows} rows"
    num_bytes = 4 * heads * dim * columns * (1 + min(rows, 1 + DRAFTS))
    common: dict[str, Any] = {"threads": bench.num_threads}
    flops = case.flops * heads * dim * columns * rows
    add_share(
        bench,
        f"{case.name}.r{rows}.rate",
        f"{what}: share of read, {num_bytes * 1e-6:.0f} MB of states",
        timing,
        "ours",
        num_bytes,
        instructions(bench, "fp32", flops / 2),
        rate=(flops * 1e-9, "GFLOP/s"),
    )
    form = "row by row" if rows <= case.most_one_by_one else "by chunks"
    bench.add(
        Figure(
            f"{case.name}.r{rows}.vs_torch",
            f"{what}: times faster than transformers in torch, {form}",
            timing.median("ours") * 1e3,
            "ms",
            f"torch, {form}",
            timing.median("torch") * 1e3,
            timing.ratio("torch", "ours"),
            read_gb_s=timing.read_gb_s(),
            **common,
        )
    )


def _inputs(rows: int) -> list[Tensor]:
    """Return q, k, v, a and b."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(KEY_HEADS, KEY_DIM)] * 2 + [(VALUE_HEADS, VALUE_DIM)] + [(VALUE_HEADS,)] * 2
    return [torch.randn(rows, *shape, generator=generator).bfloat16() for shape in shapes]


def _ours(rows: int) -> Callable[[], object]:
    inputs = _inputs(rows)
    states = torch.zeros(1, 1 + DRAFTS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    indices = _indices(rows)
    gates = torch.zeros(VALUE_HEADS), torch.zeros(VALUE_HEADS)
    out = torch.empty_like(inputs[2])
    return lambda: gated_delta_rule(*inputs, *gates, states, *indices, out=out)


def _torch(rows: int) -> Callable[[], object]:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    rule = theirs.torch_recurrent_gated_delta_rule
    if rows > 1 + DRAFTS:
        rule = theirs.torch_chunk_gated_delta_rule
    q, k, v, a, b = (one[None] for one in _inputs(rows))
    g, beta = -torch.nn.functional.softplus(a.float()), b.sigmoid()
    state = torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return lambda: rule(q, k, v, g=g, beta=beta, **options)


def _indices(rows: int) -> list[Tensor]:
    """Return slots, qo_indptr and kv_lens of one request that continues a text."""
    return [torch.tensor(one, dtype=torch.int32) for one in ([0], [0, rows], [rows + 1])]


def _space_inputs(rows: int) -> list[Tensor]:
    """Return x, dt, b and c; all heads are one group."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, HEAD_DIM), (HEADS,), (1, STATE_DIM), (1, STATE_DIM)]
    return [torch.randn(rows, *shape, generator=generator).bfloat16() for shape in shapes]


def _our_space(rows: int) -> Callable[[], object]:
    inputs, indices = _space_inputs(rows), _indices(rows)
    states = torch.zeros(1, 1 + DRAFTS, HEADS, STATE_DIM, HEAD_DIM)
    of_heads, out = torch.zeros(3, HEADS), torch.empty_like(inputs[0])
    return lambda: selective_state_update(*inputs, *of_heads, states, *indices, out=out)


def _torch_space(rows: int) -> Callable[[], object]:
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as theirs

    x, dt, b, c = (one[None] for one in _space_inputs(rows))
    decay, d, bias = -torch.ones(HEADS), torch.zeros(HEADS), torch.zeros(HEADS)
    state = torch.zeros(1, HEADS, HEAD_DIM, STATE_DIM)
    if rows > 1:
        options = {"D": d, "dt_bias": bias, "dt_softplus": True, "return_final_states": True}
        return lambda: theirs.mamba2_chunk_scan(
            x, dt, decay, b, c, CHUNK, initial_states=state, **options
        )
    step, bias, d = (
        one.expand(HEADS, HEAD_DIM) for one in (dt[0, 0, :, None], bias[:, None], d[:, None])
    )
    wide = decay[:, None, None].expand(HEADS, HEAD_DIM, STATE_DIM)
    return lambda: theirs.mamba2_selective_state_update(
        state, x[:, 0], step[None], wide, b[:, 0], c[:, 0], d, dt_bias=bias, dt_softplus=True
    )
