# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in Qwen3-Next-80B's shape, against the torch code of transformers.

In decoding and verification, a request's states (2 MB: 32 heads of 128 by 128) are read once, and
written once per row. The rows of a prompt update the states in the L2 cache, so arithmetic is the
limit. transformers computes prompts in chunks of 64 rows as matrix products, a form whose bits
depend on the chunks (docs/models.md).
"""

from collections.abc import Callable
from typing import Any

import torch
from specops.linear_attention import gated_delta_rule
from torch import Tensor

from bench.common import Bench, Figure
from bench.limits import add_share, instructions

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 16, 32, 128, 128
ROWS = (1, 5, 256)  # rows per request
FLOPS = 7 * KEY_DIM * VALUE_DIM  # flops per row and value head
DRAFTS = 4


def run_linear_attention(bench: Bench) -> None:
    """Time one request against transformers.

    transformers computes a few rows one by one, and many rows in chunks.
    """
    for rows in ROWS:
        _run(bench, rows)


def _run(bench: Bench, rows: int) -> None:
    inputs = _inputs(rows)
    cases = {"ours": _ours(inputs, rows), "torch": _torch(inputs, rows)}
    with torch.inference_mode():
        timing = bench.alternate(cases, rounds=7, window_s=0.1)
    what = f"gated delta rule bf16, {VALUE_HEADS} heads of {KEY_DIM} by {VALUE_DIM}, {rows} rows"
    num_bytes = 4 * VALUE_HEADS * KEY_DIM * VALUE_DIM * (1 + min(rows, 1 + DRAFTS))
    common: dict[str, Any] = {"threads": bench.num_threads}
    flops = FLOPS * VALUE_HEADS * rows
    add_share(
        bench,
        f"linear_attention.r{rows}.rate",
        f"{what}: share of read, {num_bytes * 1e-6:.0f} MB of states",
        timing,
        "ours",
        num_bytes,
        instructions(bench, "fp32", flops / 2),
        rate=(flops * 1e-9, "GFLOP/s"),
    )
    form = "row by row" if rows <= 1 + DRAFTS else "by chunks"
    bench.add(
        Figure(
            f"linear_attention.r{rows}.vs_torch",
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


def _ours(inputs: list[Tensor], rows: int) -> Callable[[], object]:
    states = torch.zeros(1, 1 + DRAFTS, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    indices = [torch.tensor(one, dtype=torch.int32) for one in ([0], [0, rows], [rows + 1])]
    gates = torch.zeros(VALUE_HEADS), torch.zeros(VALUE_HEADS)
    out = torch.empty_like(inputs[2])
    return lambda: gated_delta_rule(*inputs, *gates, states, *indices, out=out)


def _torch(inputs: list[Tensor], rows: int) -> Callable[[], object]:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    rule = theirs.torch_recurrent_gated_delta_rule
    if rows > 1 + DRAFTS:
        rule = theirs.torch_chunk_gated_delta_rule
    q, k, v, a, b = (one[None] for one in inputs)
    g, beta = -torch.nn.functional.softplus(a.float()), b.sigmoid()
    state = torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return lambda: rule(q, k, v, g=g, beta=beta, **options)
