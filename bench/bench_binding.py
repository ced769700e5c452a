# SPDX-License-Identifier: Apache-2.0
"""Overhead of a call into specops before any work: Python function, binding and checks."""

from typing import Any
from unittest import mock

import torch
from specops import _C, sampling, torch_ops
from specops.attention import (
    PagedBatch,
    PagedKv,
    append_attention,
    attention_workspace_size,
)
from specops.dense import rms_norm, silu_mul

from bench.common import Bench, Figure
from bench.cuda import CudaBench


def run_binding(bench: Bench) -> None:
    """Time `sample` on zero rows, which checks ten tensor arguments and then has no work."""
    real, whole = torch.empty(0), torch.empty(0, dtype=torch.int32)
    logits, seeds = torch.empty(0, 16), torch.empty(0, dtype=torch.int64)
    keywords: dict[str, Any] = {
        "sampling": sampling.SamplingTensors(real, whole, real, real, None, seeds, whole),
        "outputs": sampling.SampleOutputs(whole, real),
    }
    with mock.patch.object(_C, "sample") as seen:
        sampling.sample(logits, whole, **keywords)
    call = seen.call_args.args  # the arguments in the order that the Python function passes
    logits_positions, processors = call[:2], [None] * len(sampling.LogitsProcessors._fields)
    apart = (*logits_positions, *call[2], *processors, *call[4:7], *call[7], call[8])
    timing = bench.alternate(
        {
            "binding": lambda: _C.sample(*call),
            "python": lambda: sampling.sample(logits, whole, **keywords),
            "torch_ops": lambda: torch_ops.OPS["sample"](*apart),
        }
    )
    for case, what, bar in (
        ("binding", "a call of _C.sample with ten tensors and no rows", "value <= 3"),
        ("python", "the same through specops.sampling.sample", None),
        ("torch_ops", "the same through torch.ops.specops.sample.default", None),
    ):
        bench.add(
            Figure(
                f"binding.{case}",
                what,
                timing.median(case) * 1e6,
                "us",
                bar=bar,
                read_gb_s=timing.read_gb_s(case),
            )
        )


def run_binding_cuda(bench: CudaBench) -> None:
    """Time eager calls on the host, including checks and launch, with preallocated outputs."""
    width = 1024
    x, weight, out = bench.randn(1, width), bench.randn(width), bench.randn(1, width)
    pair = bench.randn(1, 2 * width)
    kv_cache = bench.randn(1, 16, 1, 128)
    q, attended = bench.randn(1, 4, 128), bench.randn(1, 4, 128)
    zero, one, both = bench.ints([0]), bench.ints([1]), bench.ints([0, 1])
    real, logits = torch.ones(1, device=bench.device), bench.randn(1, 512)
    seeds = bench.ints([0], torch.int64)
    parameters: dict[str, Any] = {
        "sampling": sampling.SamplingTensors(real, zero, real, real * 0, seeds=seeds),
        "outputs": sampling.SampleOutputs(bench.ints([0])),
        "workspace": sampling.sampling_workspace(logits),
    }
    where = (PagedKv(kv_cache, kv_cache), PagedBatch(both, both, zero, one))
    floats = attention_workspace_size(q.shape, kv_cache.shape, 1, 1, bench.device)
    buffers = {"out": attended, "workspace": torch.zeros(floats or 1, device=bench.device)}
    for name, call in (
        ("silu_mul", lambda: silu_mul(pair, out=out)),
        ("rms_norm", lambda: rms_norm(x, weight, 1e-6, out=out)),
        ("append_attention", lambda: append_attention(q, *where, **buffers)),
        ("sample", lambda: sampling.sample(logits, zero, **parameters)),
        ("torch.mul", lambda: torch.mul(x, weight, out=out)),
    ):
        ours = "torch" not in name
        bench.add(
            Figure(
                f"binding.host.{name}",
                f"{name}, one row, eager: time of the host",
                bench.host_us(call),
                "us",
                bar="value <= 3" if ours else None,
            )
        )
