# SPDX-License-Identifier: Apache-2.0
"""`sample` and `verify` on 48 rows of 151,936 fp32 logits, rotated over at least 512 MiB."""

from collections.abc import Callable
from itertools import cycle

import torch
from specops.sampling import AcceptPolicy, VerifyStrategy, sample, verify
from torch import Tensor

from bench.common import Bench, Figure

ROWS, VOCAB = 48, 151936
BATCH, DRAFTS = 8, 5
COLD_BYTES = 512 << 20
TOP_P = 0.9
# Spread of the logits: a trained model's are peaked, and so are these.
SCALE = 3.0


def run_sampling(bench: Bench) -> None:
    """Top-p sampling against torch's sort pipeline, and greedy verification against the read."""
    num_bytes = ROWS * VOCAB * 4
    copies = -(-COLD_BYTES // num_bytes)
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(ROWS, VOCAB, generator=generator) * SCALE for _ in range(copies)]
    cases = {
        "top_p": _sample(logits, temperature=1.0, top_p=TOP_P),
        "greedy": _sample(logits, temperature=0.0, top_p=1.0),
        "plain": _sample(logits, temperature=1.0, top_p=1.0),
        "verify": _verify(logits),
    }
    with torch.inference_mode():
        timing = bench.alternate(cases, rounds=9, window_s=0.2)
        sort = bench.alternate({"torch": _torch_top_p(logits)}, rounds=5, window_s=0.5)
        argmax = bench.alternate({"torch": _argmax(logits)}, rounds=5)
    threads = bench.num_threads
    for case, peer, peer_timing, bar in (
        ("top_p", "torch sort pipeline", sort, "ratio >= 80"),
        ("greedy", "torch argmax", argmax, None),
    ):
        bench.add(
            Figure(
                f"sampling.sample.{case}",
                f"sample {case}, 48 x 151,936 fp32: times faster than torch",
                timing.median(case) * 1e3,
                "ms",
                peer,
                peer_timing.median("torch") * 1e3,
                peer_timing.median("torch") / timing.median(case),
                bar,
                threads=threads,
                read_gb_s=timing.read_gb_s(case),
            )
        )
    for case, what, bar in (
        ("verify", "greedy verify, 8 requests of 6 rows", "ratio >= 0.7"),
        ("top_p", "sample with top-p", None),
        ("plain", "sample at temperature 1", None),
    ):
        bench.add(
            Figure(
                f"sampling.{case}.read",
                f"{what}, 48 x 151,936 fp32: share of read bandwidth",
                num_bytes * 1e-9 / timing.median(case),
                "GB/s",
                "read bandwidth",
                timing.read_gb_s(case),
                timing.share(case, num_bytes),
                bar,
                threads=threads,
                read_gb_s=timing.read_gb_s(case),
            )
        )


def _sample(logits: list[Tensor], *, temperature: float, top_p: float) -> Callable[[], Tensor]:
    rotated = cycle(logits)
    positions = torch.arange(ROWS, dtype=torch.int32)
    out = torch.empty(ROWS, dtype=torch.int32)
    parameters = {
        "temperature": torch.full((ROWS,), temperature),
        "top_k": torch.zeros(ROWS, dtype=torch.int32),
        "top_p": torch.full((ROWS,), top_p),
        "min_p": torch.zeros(ROWS),
        "seeds": torch.arange(ROWS),
    }
    return lambda: sample(next(rotated), positions, out=out, **parameters)


def _verify(logits: list[Tensor]) -> Callable[[], object]:
    rotated = cycle(logits)
    output_indptr = torch.arange(BATCH + 1, dtype=torch.int32) * (DRAFTS + 1)
    drafts = torch.zeros(BATCH, DRAFTS, dtype=torch.int32)
    whole, real = torch.zeros(BATCH, dtype=torch.int32), torch.zeros(BATCH)
    outputs = {
        "output_token_ids": torch.empty(BATCH, DRAFTS + 1, dtype=torch.int32),
        "num_accepted_tokens": torch.empty(BATCH, dtype=torch.int32),
    }
    return lambda: verify(
        next(rotated),
        output_indptr,
        drafts,
        positions=whole,
        strategy=torch.full_like(whole, VerifyStrategy.GREEDY),
        policy=torch.full_like(whole, AcceptPolicy.NORMAL),
        temperature=real,
        top_k=whole,
        top_p=torch.ones_like(real),
        min_p=real,
        seeds=torch.zeros(BATCH, dtype=torch.int64),
        **outputs,
    )


def _torch_top_p(logits: list[Tensor]) -> Callable[[], Tensor]:
    """The usual pipeline: sort, softmax, cumulative sum, cut, scatter back, draw."""
    rotated = cycle(logits)

    def call() -> Tensor:
        ordered, ids = next(rotated).sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        cut = probs.cumsum(-1) - probs > TOP_P
        kept = torch.zeros_like(probs).scatter_(-1, ids, probs.masked_fill(cut, 0.0))
        return torch.multinomial(kept, 1)

    return call


def _argmax(logits: list[Tensor]) -> Callable[[], Tensor]:
    rotated = cycle(logits)
    return lambda: next(rotated).argmax(-1)
