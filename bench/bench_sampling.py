# SPDX-License-Identifier: Apache-2.0
"""`sample` and `verify` on 48 rows of 151,936 logits, rotated over at least 512 MiB.

On a GPU: 256 requests with 4 drafts each over 128,256 tokens, and one request; FlashInfer beside.
"""

from collections.abc import Callable
from itertools import cycle

import torch
from specops.sampling import AcceptPolicy, LogitsProcessors, VerifyStrategy, sample, verify
from torch import Tensor

from bench.common import Bench, Figure
from bench.cuda import Call, CudaBench, bandwidth_figure, time_figure
from bench.peers import flashinfer_peer

ROWS, VOCAB = 48, 151936
BATCH, DRAFTS = 8, 5
COLD_BYTES = 512 << 20
TOP_K, TOP_P = 50, 0.9
# Spread of the logits: a trained model's are peaked, and so are these.
SCALE = 3.0


def run_sampling(bench: Bench) -> None:
    """Sampling against the usual pipelines, and greedy verification against the read."""
    _run_float32(bench)
    _run_bfloat16(bench)


def _run_float32(bench: Bench) -> None:
    num_bytes = ROWS * VOCAB * 4
    copies = -(-COLD_BYTES // num_bytes)
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(ROWS, VOCAB, generator=generator) * SCALE for _ in range(copies)]
    cases = {
        "top_p": _sample(logits, temperature=1.0, top_p=TOP_P),
        "greedy": _sample(logits, temperature=0.0, top_p=1.0),
        "plain": _sample(logits, temperature=1.0, top_p=1.0),
        "verify": _verify(logits, VerifyStrategy.GREEDY),
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


def _run_bfloat16(bench: Bench) -> None:
    num_bytes = ROWS * VOCAB * 2
    copies = -(-COLD_BYTES // num_bytes)
    generator = torch.Generator().manual_seed(0)
    logits = [
        (torch.randn(ROWS, VOCAB, generator=generator) * SCALE).bfloat16() for _ in range(copies)
    ]
    cases = {
        "verify": _verify(logits, VerifyStrategy.GREEDY),
        "target_match": _verify(logits, VerifyStrategy.TARGET_MATCH, TOP_K, TOP_P),
        "top_p": _sample(logits, temperature=1.0, top_p=TOP_P),
        "everything": _sample_everything(logits),
    }
    pipelines = {"torch": _torch_pipeline(logits), "transformers": _transformers_pipeline(logits)}
    with torch.inference_mode():
        timing = bench.alternate(cases, rounds=9, window_s=0.2)
        peers = bench.alternate(pipelines, rounds=3, window_s=0.5)
    common = {"threads": bench.num_threads}
    bench.add(
        Figure(
            "sampling.verify.read_bf16",
            "greedy verify, 8 requests of 6 rows, 48 x 151,936 bf16: share of read bandwidth",
            num_bytes * 1e-9 / timing.median("verify"),
            "GB/s",
            "read bandwidth",
            timing.read_gb_s("verify"),
            timing.share("verify", num_bytes),
            "ratio >= 0.7",
            read_gb_s=timing.read_gb_s("verify"),
            **common,
        )
    )
    for case, peer, bar in (
        ("torch", "torch sort pipeline", "ratio >= 80"),
        ("transformers", "transformers' logits processors", "ratio >= 20"),
    ):
        bench.add(
            Figure(
                f"sampling.target_match.{case}",
                f"target_match, top-k 50, top-p 0.9, 48 x 151,936 bf16: times faster than {case}",
                timing.median("target_match") * 1e3,
                "ms",
                peer,
                peers.median(case) * 1e3,
                peers.median(case) / timing.median("target_match"),
                bar,
                read_gb_s=timing.read_gb_s("target_match"),
                **common,
            )
        )
    bench.add(
        Figure(
            "sampling.sample.everything",
            "sample with every parameter and processor, 48 x 151,936 bf16: over top-p alone",
            timing.median("everything") * 1e3,
            "ms",
            "top-p alone",
            timing.median("top_p") * 1e3,
            timing.ratio("everything", "top_p"),
            "ratio <= 1.5",
            read_gb_s=timing.read_gb_s("everything"),
            **common,
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


def _sample_everything(logits: list[Tensor]) -> Callable[[], Tensor]:
    """2,000 counted tokens, 100 biases, 20 bad words and a grammar's mask in every row."""
    rotated = cycle(logits)

    def ints(value: int) -> Tensor:
        return torch.full((ROWS,), value, dtype=torch.int32)

    def some_tokens(count: int) -> Tensor:
        rows = [torch.randperm(VOCAB)[:count].sort().values for _ in range(ROWS)]
        return torch.stack(rows).int()

    processors = LogitsProcessors(
        slots=torch.arange(ROWS, dtype=torch.int32),
        token_ids=torch.randint(VOCAB, (ROWS, 4096), dtype=torch.int32),
        prompt_lens=ints(1000),
        counted_token_ids=some_tokens(2000),
        token_counts=torch.randint(1, 9, (ROWS, 2000), dtype=torch.int32),
        repetition_penalty=torch.full((ROWS,), 1.1),
        presence_penalty=torch.full((ROWS,), 0.2),
        frequency_penalty=torch.full((ROWS,), 0.1),
        logit_bias_token_ids=some_tokens(100),
        logit_bias=torch.randn(ROWS, 100),
        bad_words=torch.randint(VOCAB, (ROWS, 20, 3), dtype=torch.int32),
        stop_token_ids=some_tokens(4),
        min_tokens=ints(4096),
        allowed_token_mask=torch.randint(-(2**31), 2**31, (ROWS, VOCAB // 32), dtype=torch.int32),
        mask_indices=torch.arange(ROWS, dtype=torch.int32),
    )
    parameters = {
        "temperature": torch.full((ROWS,), 0.8),
        "top_k": ints(TOP_K),
        "top_p": torch.full((ROWS,), TOP_P),
        "min_p": torch.full((ROWS,), 0.05),
        "seeds": torch.arange(ROWS),
    }
    positions, out = ints(3000), ints(0)
    return lambda: sample(next(rotated), positions, out=out, processors=processors, **parameters)


def _verify(
    logits: list[Tensor], strategy: VerifyStrategy, top_k: int = 0, top_p: float = 1.0
) -> Callable[[], object]:
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
        strategy=torch.full_like(whole, strategy),
        policy=torch.full_like(whole, AcceptPolicy.NORMAL),
        temperature=torch.full_like(real, float(strategy != VerifyStrategy.GREEDY)),
        top_k=torch.full_like(whole, top_k),
        top_p=torch.full_like(real, top_p),
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


def _torch_pipeline(logits: list[Tensor]) -> Callable[[], Tensor]:
    """One sort for both filters: cut after the first TOP_K, then where the mass reaches TOP_P."""
    rotated = cycle(logits)

    def call() -> Tensor:
        ordered, ids = next(rotated).float().sort(dim=-1, descending=True)
        ordered[:, TOP_K:] = -torch.inf
        probs = ordered.softmax(-1)
        cut = probs.cumsum(-1) - probs > TOP_P
        kept = torch.zeros_like(probs).scatter_(-1, ids, probs.masked_fill(cut, 0.0))
        return torch.multinomial(kept, 1)

    return call


def _transformers_pipeline(logits: list[Tensor]) -> Callable[[], Tensor]:
    """What `generate` does with the logits of a step."""
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    rotated = cycle(logits)
    warpers = LogitsProcessorList([TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)])
    no_tokens = torch.zeros(ROWS, 0, dtype=torch.int64)

    def call() -> Tensor:
        scores = warpers(no_tokens, next(rotated).float())
        return torch.multinomial(scores.softmax(-1), 1)

    return call


def _argmax(logits: list[Tensor]) -> Callable[[], Tensor]:
    rotated = cycle(logits)
    return lambda: next(rotated).argmax(-1)


# On a GPU

CUDA_BATCH, CUDA_DRAFTS, CUDA_VOCAB = 256, 4, 128256
# Greedy verification reads every logit once: 80 % of that, in microseconds on an H200.
GREEDY_BARS = {torch.bfloat16: "value <= 95", torch.float32: "value <= 190"}


def _logits(bench: CudaBench, rows: int, dtype: torch.dtype) -> list[Tensor]:
    vocab = bench.pick(CUDA_VOCAB, 512)
    copies = bench.copies(rows * vocab * torch.empty(0, dtype=dtype).element_size())
    return [bench.randn(rows, vocab, dtype=dtype, scale=SCALE) for _ in range(copies)]


def _cuda_verify(
    bench: CudaBench, logits: list[Tensor], batch: int, strategy: VerifyStrategy, top_p: float
) -> list[Call]:
    """Drafts are the target's own choices where greedy, so that whole chains are walked."""
    rows = CUDA_DRAFTS + 1
    whole, real = bench.ints([0] * batch), torch.zeros(batch, device=bench.device)
    shared = {
        "positions": whole,
        "strategy": torch.full_like(whole, strategy),
        "policy": torch.full_like(whole, AcceptPolicy.NORMAL),
        "temperature": real if strategy == VerifyStrategy.GREEDY else real + 1.0,
        "top_k": whole,
        "top_p": real + top_p,
        "min_p": real,
        "seeds": bench.ints(torch.arange(batch), torch.int64),
        "output_token_ids": bench.ints(torch.zeros(batch, rows, dtype=torch.int32)),
        "num_accepted_tokens": bench.ints([0] * batch),
    }
    output_indptr = bench.ints(torch.arange(batch + 1) * rows)

    def call(x: Tensor) -> Call:
        drafts = x.argmax(-1).view(batch, rows)[:, :CUDA_DRAFTS].to(torch.int32).contiguous()
        return lambda: verify(x, output_indptr, drafts, **shared)

    return [call(x) for x in logits]


def run_sampling_cuda(bench: CudaBench) -> None:
    """Greedy and sampled verification, and sampling, beside the read line."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for batch in bench.pick((CUDA_BATCH, 1), (4, 1)):
            rows = batch * (CUDA_DRAFTS + 1)
            logits = _logits(bench, rows, dtype)
            greedy, target = VerifyStrategy.GREEDY, VerifyStrategy.TARGET_MATCH
            cases = {
                "greedy": _cuda_verify(bench, logits, batch, greedy, 1.0),
                "target_match": _cuda_verify(bench, logits, batch, target, TOP_P),
                "torch argmax": [lambda x=x: x.argmax(-1) for x in logits],
            }
            timings = bench.time(cases)
            prefix, what = f"sampling.verify.{name}.b{batch}", f"verify {name}, batch {batch}, k 4"
            if batch == 1:
                bar = bench.on("H200", "value <= 8")
                bench.add(time_figure(timings, "greedy", f"{prefix}.greedy", what, bar=bar))
            else:
                bar = bench.on("H200", GREEDY_BARS[dtype])
                peers = {"torch argmax": "torch argmax"}
                text = f"{what}, greedy: time, and times faster than torch's argmax"
                bench.add(time_figure(timings, "greedy", f"{prefix}.greedy", text, peers, bar))
                text = f"{what}, greedy: share of read bandwidth"
                num_bytes = logits[0].numel() * logits[0].element_size()
                id = f"{prefix}.greedy.read"
                figure = bandwidth_figure(timings, "greedy", id, text, num_bytes, "ratio >= 0.8")
                bench.add(figure)
            text = f"{what}, target_match with top-p: time over greedy's"
            id = f"{prefix}.target_match"
            over = ("greedy", "greedy verify")
            bar = "ratio <= 1.25" if batch > 1 else None
            bench.add(time_figure(timings, "target_match", id, text, over=over, bar=bar))
            del logits, cases


def _cuda_sample(bench: CudaBench, logits: list[Tensor], top_k: int, top_p: float) -> list[Call]:
    rows = logits[0].shape[0]
    real = torch.ones(rows, device=bench.device)
    parameters = {
        "temperature": real,
        "top_k": bench.ints([top_k] * rows),
        "top_p": real * top_p,
        "min_p": real * 0.0,
        "seeds": bench.ints(torch.arange(rows), torch.int64),
        "out": bench.ints([0] * rows),
    }
    positions = bench.ints(torch.arange(rows))
    return [lambda x=x: sample(x, positions, **parameters) for x in logits]


def run_sampling_peers_cuda(bench: CudaBench) -> None:
    """Sampling and verification beside FlashInfer's pipelines on the same fp32 logits."""
    batch = bench.pick(CUDA_BATCH, 4)
    logits = _logits(bench, batch, torch.float32)
    for what, top_k in (("top-p", 0), ("top-k top-p", 50)):
        cases = {"ours": _cuda_sample(bench, logits, top_k, TOP_P)}
        if calls := flashinfer_peer.sampling(what, logits, top_k, TOP_P):
            cases["peer"] = calls
        name = what.replace(" ", "_").replace("-", "_")
        text = f"sample {what}, {batch} rows fp32: times faster than FlashInfer"
        peers = {"peer": "FlashInfer"} if "peer" in cases else None
        id = f"sampling_peers.sample.{name}"
        bench.add(time_figure(bench.time(cases), "ours", id, text, peers, "ratio >= 1"))
    del logits, cases
    logits = _logits(bench, batch * (CUDA_DRAFTS + 1), torch.float32)
    drafts = bench.ints(torch.zeros(batch, CUDA_DRAFTS, dtype=torch.int32))
    one_hot = torch.zeros(batch, CUDA_DRAFTS, logits[0].shape[1], device=bench.device)
    one_hot[:, :, 0] = 1.0
    cases = {"ours": _cuda_verify(bench, logits, batch, VerifyStrategy.TARGET_MATCH, TOP_P)}
    if calls := flashinfer_peer.chain_verification(logits, drafts, TOP_P, one_hot):
        cases["peer"] = calls
    text = f"verify with top-p, {batch} requests of 5 rows fp32: times faster than FlashInfer"
    peers = {"peer": "FlashInfer softmax, renorm, chain"} if "peer" in cases else None
    id = "sampling_peers.verify.top_p"
    bench.add(time_figure(bench.time(cases), "ours", id, text, peers, "ratio >= 4"))
