# SPDX-License-Identifier: Apache-2.0
"""`sample` and `verify` on a GPU: 256 requests, or one, with 4 drafts each over 128,256 tokens.

Logits are random with a trained model's spread, or recorded from the bundled model. The peers are
FlashInfer's pipelines. Outputs and workspaces are allocated before the calls.
"""

from typing import Any

import torch
from specops.sampling import (
    Drafts,
    SampleOutputs,
    SamplingTensors,
    VerifyOutputs,
    VerifyStrategy,
    sample,
    sampling_workspace,
    verify,
)
from torch import Tensor

from bench.bench_sampling import (
    EVERY_FILTER,
    SCALE,
    TOP_P,
    commit_call,
    every_processor,
    request_filters,
    top_drafts,
)
from bench.common import Timing
from bench.cuda import Call, CudaBench, bandwidth_figure, time_figure
from bench.peers import flashinfer_sampling as flashinfer
from bench.peers.flashinfer_peer import Refused
from bench.recorded_logits import Recorded, record

BATCH, DRAFTS, VOCAB = 256, 4, 128256
ROWS = DRAFTS + 1
DTYPES = ((torch.bfloat16, "bf16"), (torch.float32, "fp32"))


def random_logits(bench: CudaBench, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Return enough buffers of [rows, vocab] that each is cold at every use."""
    vocab = bench.pick(VOCAB, 512)
    copies = bench.copies(rows * vocab * dtype.itemsize)
    return [bench.randn(rows, vocab, dtype=dtype, scale=SCALE) for _ in range(copies)]


def verify_calls(
    bench: CudaBench,
    logits: list[Tensor],
    drafts: list[Tensor],
    strategy: VerifyStrategy,
    values: dict[str, float] | None = None,
    processors: bool = False,
) -> list[Call]:
    """Return a call per buffer of logits, with its drafts [batch, DRAFTS]."""
    batch = drafts[0].shape[0]
    arguments: dict[str, Any] = {
        "positions": bench.ints([0] * batch),
        "strategy": bench.ints([int(strategy)] * batch),
        "outputs": VerifyOutputs(
            bench.ints(torch.zeros(batch, ROWS, dtype=torch.int32)), bench.ints([0] * batch)
        ),
        "workspace": sampling_workspace(logits[0], batch),
        "sampling": None if values is None else request_filters(batch, values, bench.device),
    }
    if processors:
        every, positions = every_processor(batch, batch * ROWS, logits[0].shape[1], bench.device)
        arguments |= {"processors": every, "positions": positions}
    output_indptr = bench.ints(torch.arange(batch + 1) * ROWS)

    def call(x: Tensor, of_row: Tensor) -> Call:
        chains = Drafts(output_indptr, of_row)
        return lambda: verify(x, chains, **arguments)

    return [call(x, of_row) for x, of_row in zip(logits, drafts, strict=True)]


def argmax_calls(bench: CudaBench, logits: list[Tensor]) -> list[Call]:
    """Return a call per buffer of torch's argmax over each row."""
    out = bench.ints(torch.zeros(logits[0].shape[0]), torch.int64)
    return [lambda x=x: torch.argmax(x, -1, out=out) for x in logits]


# Without draft_probs, a draft's distribution is one-hot.
ONE_HOT = VerifyStrategy.REJECTION


def strategy_calls(
    bench: CudaBench, logits: list[Tensor], drafts: list[Tensor]
) -> dict[str, list[Call]]:
    """Return verification calls of every kind, by name."""
    greedy, target = VerifyStrategy.GREEDY, VerifyStrategy.TARGET_MATCH
    top_p = {"top_p": TOP_P}
    return {
        "greedy": verify_calls(bench, logits, drafts, greedy),
        "target_match": verify_calls(bench, logits, drafts, target, top_p),
        "rejection": verify_calls(bench, logits, drafts, ONE_HOT, top_p),
        "processors": verify_calls(bench, logits, drafts, target, top_p, True),
        "parameters": verify_calls(bench, logits, drafts, target, EVERY_FILTER, True),
    }


def run_sampling_cuda(bench: CudaBench) -> None:
    """Time verification of every kind, against the read bandwidth and greedy verification."""
    for dtype, name in DTYPES:
        for batch in bench.pick((BATCH, 1), (4, 1)):
            logits = random_logits(bench, batch * ROWS, dtype)
            # Draft the rows' most probable tokens, so that greedy verification walks whole chains.
            cases = strategy_calls(bench, logits, [top_drafts(x, batch) for x in logits])
            cases["torch argmax"] = argmax_calls(bench, logits)
            timings = bench.time(cases)
            prefix, what = f"sampling.verify.{name}.b{batch}", f"verify {name}, batch {batch}, k 4"
            if batch == 1:
                bar = bench.on("H200", "value <= 8")
                bench.add(time_figure(timings, "greedy", f"{prefix}.greedy", what, bar=bar))
            else:
                bar = bench.goal("G6") if dtype == torch.bfloat16 else None
                _greedy_figures(bench, timings, prefix, what, logits[0], bar)
            _strategy_figures(bench, timings, prefix, what, is_judged=batch > 1)
            del logits, cases
    batch = bench.pick(BATCH, 4)
    timings = bench.time({"commit": [commit_call(batch, ROWS, bench.device)]})
    what = (
        f"commit of {batch} requests, 5 tokens each, with every rule: time, and of the copy that "
        "puts the lengths back"
    )
    bench.add(time_figure(timings, "commit", "sampling.commit", what))


def _greedy_figures(
    bench: CudaBench,
    timings: list[Timing],
    prefix: str,
    what: str,
    logits: Tensor,
    bar: str | None,
) -> None:
    peers = {"torch argmax": "torch argmax"}
    text = f"{what}, greedy: time, and times faster than torch's argmax"
    bench.add(time_figure(timings, "greedy", f"{prefix}.greedy", text, peers, bar))
    text = f"{what}, greedy: share of read bandwidth"
    num_bytes = logits.numel() * logits.element_size()
    id = f"{prefix}.greedy.read"
    bench.add(bandwidth_figure(timings, "greedy", id, text, num_bytes, "ratio >= 0.8"))


def _strategy_figures(
    bench: CudaBench, timings: list[Timing], prefix: str, what: str, *, is_judged: bool
) -> None:
    for case, other, words, bar in (
        ("target_match", "greedy", "target_match with top-p", "ratio <= 1.25"),
        ("rejection", "greedy", "rejection with top-p, one-hot drafts", "ratio <= 1.25"),
        ("processors", "target_match", "processors and top-p", "ratio <= 1.5"),
        ("parameters", "target_match", "every parameter", "ratio <= 1.5"),
    ):
        over = (other, "greedy verify" if other == "greedy" else "top-p alone")
        text = f"{what}, {words}: time over {over[1]}"
        id = f"{prefix}.{case}"
        figure = time_figure(timings, case, id, text, over=over, bar=bar if is_judged else None)
        bench.add(figure)


def run_recorded_cuda(bench: CudaBench) -> None:
    """Time verification of the bundled model's recorded logits, with the text as drafts."""
    batch = bench.pick(BATCH, 2)
    rows = batch * ROWS
    recorded = record(bench.device, rows, bench.pick(768, 16))
    for dtype, name in DTYPES:
        # Buffers hold different rows as long as there are enough; buffers are small, so there are
        # many.
        num_bytes = rows * recorded.logits.shape[1] * dtype.itemsize
        sets = [recorded.rolled(number * ROWS) for number in range(bench.copies(num_bytes))]
        logits = [one.logits.to(dtype) for one in sets]
        drafts = [_read_on(one, batch) for one in sets]
        cases = strategy_calls(bench, logits, drafts)
        cases["torch argmax"] = argmax_calls(bench, logits)
        timings = bench.time(cases)
        accepted = _accepted(cases["rejection"][0])
        prefix = f"recorded.verify.{name}"
        what = (
            f"verify {name}, batch {batch}, k 4, logits of the bundled model over "
            f"{logits[0].shape[1]} tokens ({accepted:.2f} drafts accepted by rejection)"
        )
        _greedy_figures(bench, timings, prefix, what, logits[0], None)
        _strategy_figures(bench, timings, prefix, what, is_judged=False)
        del logits, drafts, cases


def _read_on(recorded: Recorded, batch: int) -> Tensor:
    """Return the next tokens of the recorded texts, used as drafts: [batch, DRAFTS]."""
    return recorded.next_token_ids.view(batch, ROWS)[:, :DRAFTS].contiguous()


def _accepted(call: Call) -> float:
    """Return the mean number of accepted drafts per request."""
    result: Any = call()
    return float(result[1].float().mean())


def _sample_calls(bench: CudaBench, logits: list[Tensor], top_k: int, top_p: float) -> list[Call]:
    rows = logits[0].shape[0]
    real = torch.ones(rows, device=bench.device)
    filters = SamplingTensors(
        temperature=real,
        top_k=bench.ints([top_k] * rows),
        top_p=real * top_p,
        min_p=real * 0.0,
        seeds=bench.ints(torch.arange(rows), torch.int64),
    )
    parameters: dict[str, Any] = {
        "sampling": filters,
        "outputs": SampleOutputs(bench.ints([0] * rows)),
        "workspace": sampling_workspace(logits[0]),
    }
    positions = bench.ints(torch.arange(rows))
    return [lambda x=x: sample(x, positions, **parameters) for x in logits]


def run_sampling_peers_cuda(bench: CudaBench) -> None:
    """Time sampling and verification against FlashInfer's pipelines on the same fp32 logits."""
    batch = bench.pick(BATCH, 4)
    logits = random_logits(bench, batch, torch.float32)
    for what, top_k in (("top-p", 0), ("top-k top-p", 50)):
        name = what.replace(" ", "_").replace("-", "_")
        id = f"sampling_peers.sample.{name}"
        cases = {"ours": _sample_calls(bench, logits, top_k, TOP_P)}
        try:
            cases["peer"] = flashinfer.sampling(what, logits, top_k, TOP_P)
        except Refused as refused:
            bench.note(id, str(refused))
        text = f"sample {what}, {batch} rows fp32: times faster than FlashInfer"
        peers = {"peer": "FlashInfer"} if "peer" in cases else None
        bench.add(time_figure(bench.time(cases), "ours", id, text, peers, "ratio >= 1"))
    del logits, cases
    _verification_beside(bench, batch)


def _verification_beside(bench: CudaBench, batch: int) -> None:
    logits = random_logits(bench, batch * ROWS, torch.float32)
    zero = bench.ints(torch.zeros(batch, DRAFTS, dtype=torch.int32))
    one_hot = torch.zeros(batch, DRAFTS, logits[0].shape[1], device=bench.device)
    one_hot[:, :, 0] = 1.0
    drafts, filters = [zero] * len(logits), {"top_p": TOP_P}
    cases = {
        "rejection": verify_calls(bench, logits, drafts, ONE_HOT, filters),
        "top_p": verify_calls(bench, logits, drafts, VerifyStrategy.TARGET_MATCH, filters),
    }
    try:
        cases["peer"] = flashinfer.chain_verification(logits, zero, TOP_P, one_hot)
    except Refused as refused:
        bench.note("sampling_peers.verify", str(refused))
    timings = bench.time(cases)
    peers = {"peer": "FlashInfer softmax, renorm, chain"} if "peer" in cases else None
    for case, what in (("rejection", "rejection with one-hot drafts"), ("top_p", "target_match")):
        text = f"{what}, top-p, {batch} requests of 5 rows fp32: times faster than FlashInfer"
        id = f"sampling_peers.verify.{case}"
        bench.add(time_figure(timings, case, id, text, peers, "ratio >= 4"))
