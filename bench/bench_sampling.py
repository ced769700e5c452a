# SPDX-License-Identifier: Apache-2.0
"""`sample` and `verify` on 48 rows of 151,936 logits, rotated over at least 512 MiB."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from specops.sampling import (
    Drafts,
    EmittedTokens,
    EndingRules,
    LogitsProcessors,
    RequestStatus,
    SampleOutputs,
    SamplingTensors,
    TokenCounts,
    VerifyOutputs,
    VerifyStrategy,
    commit,
    count_tokens,
    sample,
    verify,
)
from torch import Tensor

from bench.common import Bench, Figure, Timing
from bench.limits import add_share, instructions

ROWS, VOCAB = 48, 151936
BATCH, DRAFTS = 8, 5
COLD_BYTES = 512 << 20
TOP_K, TOP_P = 50, 0.9
# Standard deviation of the logits, with which they are as peaked as a trained model's.
SCALE = 3.0


def run_sampling(bench: Bench) -> None:
    """Time sampling against torch's and transformers' pipelines, and against reading the logits."""
    with torch.inference_mode():
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            generator = torch.Generator().manual_seed(0)
            num_bytes = ROWS * VOCAB * dtype.itemsize
            logits = [
                torch.empty(ROWS, VOCAB).normal_(0.0, SCALE, generator=generator).to(dtype)
                for _ in range(-(-COLD_BYTES // num_bytes))
            ]
            _strategies(bench, logits, name)
            if dtype == torch.float32:
                _pipelines(bench, logits)
            del logits
        _commit(bench)


def _strategies(bench: Bench, logits: list[Tensor], name: str) -> None:
    """Measure each kind of verification; for greedy, also the fraction of read bandwidth."""
    greedy, target = VerifyStrategy.GREEDY, VerifyStrategy.TARGET_MATCH
    cases = {
        "greedy": _verify(logits, greedy),
        "plain": _verify(logits, target, {}),
        "top_p": _verify(logits, target, {"top_p": TOP_P}),
        "rejection": _verify(logits, VerifyStrategy.REJECTION, {"top_p": TOP_P}),
        "processors": _verify(logits, target, {"top_p": TOP_P}, processors=True),
        "parameters": _verify(logits, target, EVERY_FILTER, processors=True),
    }
    timing = bench.alternate(cases, rounds=9, window_s=0.2)
    num_bytes = logits[0].numel() * logits[0].element_size()
    for case, what, bar in (
        ("greedy", "greedy verify, 8 requests of 6 rows", "ratio >= 0.7"),
        ("plain", "verify at temperature 1", None),
        ("top_p", "verify with top-p", None),
    ):
        add_share(
            bench,
            f"sampling.verify.{name}.{case}.read",
            f"{what}, 48 x 151,936 {name}: share of read bandwidth",
            timing,
            case,
            num_bytes,
            instructions(bench, f"max of {name}", logits[0].numel()),
            bar=bar,
        )
    for case, other, what, peer, bar in (
        ("rejection", "greedy", "rejection with top-p, one-hot drafts", "greedy verify", None),
        ("processors", "top_p", "verify with processors and top-p", "top-p alone", "ratio <= 1.5"),
        ("parameters", "top_p", "verify with every parameter", "top-p alone", "ratio <= 1.5"),
    ):
        bench.add(_over(bench, timing, case, other, f"{name}.{case}", what, peer, bar))


def _over(
    bench: Bench,
    timing: Timing,
    case: str,
    other: str,
    id: str,
    what: str,
    peer: str,
    bar: str | None,
) -> Figure:
    """Return the figure of a case's time divided by another's in the same round."""
    return Figure(
        f"sampling.verify.{id}",
        f"{what}, 48 x 151,936: time over {peer}",
        timing.median(case) * 1e3,
        "ms",
        peer,
        timing.median(other) * 1e3,
        timing.ratio(case, other),
        bar,
        threads=bench.num_threads,
        read_gb_s=timing.read_gb_s(case),
    )


def _pipelines(bench: Bench, logits: list[Tensor]) -> None:
    """Time other libraries' sampling pipelines on fp32 logits."""
    target = VerifyStrategy.TARGET_MATCH
    cases = {
        "top_p": _sample(logits, temperature=1.0, top_p=TOP_P),
        "greedy": _sample(logits, temperature=0.0, top_p=1.0),
        "target_match": _verify(logits, target, {"top_k": TOP_K, "top_p": TOP_P}),
    }
    timing = bench.alternate(cases, rounds=9, window_s=0.2)
    peers = {"sort": _torch_sort(logits, 0), "sort_k": _torch_sort(logits, TOP_K)}
    if processors := _transformers(logits):
        peers["transformers"] = processors
    slow = bench.alternate(peers, rounds=3, window_s=0.5)
    argmax = bench.alternate({"argmax": _argmax(logits)}, rounds=5)
    for id, what, case, peer, other, bar in (
        ("sample.top_p", "sample top-p", "top_p", "torch sort pipeline", "sort", "ratio >= 80"),
        ("sample.greedy", "sample greedy", "greedy", "torch argmax", "argmax", None),
        (
            "target_match.torch",
            "target_match, top-k 50, top-p 0.9",
            "target_match",
            "torch sort pipeline",
            "sort_k",
            "ratio >= 80",
        ),
        (
            "target_match.transformers",
            "target_match, top-k 50, top-p 0.9",
            "target_match",
            "transformers processors",
            "transformers",
            "ratio >= 20",
        ),
    ):
        theirs = argmax if other == "argmax" else slow
        if other not in theirs.seconds:
            continue
        bench.add(
            Figure(
                f"sampling.{id}",
                f"{what}, 48 x 151,936 fp32: times faster than {peer}",
                timing.median(case) * 1e3,
                "ms",
                peer,
                theirs.median(other) * 1e3,
                theirs.median(other) / timing.median(case),
                bar,
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s(case),
            )
        )


def _sample(logits: list[Tensor], *, temperature: float, top_p: float) -> Callable[[], Tensor]:
    rotated = cycle(logits)
    positions = torch.arange(ROWS, dtype=torch.int32)
    out = torch.empty(ROWS, dtype=torch.int32)
    parameters = SamplingTensors(
        temperature=torch.full((ROWS,), temperature),
        top_p=torch.full((ROWS,), top_p),
        seeds=torch.arange(ROWS),
    )
    outputs = SampleOutputs(out)
    return lambda: sample(next(rotated), positions, sampling=parameters, outputs=outputs)


EVERY_FILTER = {"temperature": 0.8, "top_k": TOP_K, "top_p": TOP_P, "min_p": 0.02}
HISTORY, BIASES, BAD_WORDS = 2000, 100, 10


def request_filters(batch: int, values: dict[str, float], device: torch.device) -> SamplingTensors:
    """Return tensors of sampling parameters, equal for all requests; default temperature 1."""
    tensors: dict[str, Tensor] = {"seeds": torch.arange(batch, device=device)}
    for name, value in {"temperature": 1.0, **values}.items():
        dtype = torch.int32 if name == "top_k" else torch.float32
        tensors[name] = torch.full((batch,), value, dtype=dtype, device=device)
    return SamplingTensors(**tensors)


def every_processor(
    batch: int, rows: int, vocab_size: int, device: torch.device
) -> tuple[LogitsProcessors, Tensor]:
    """Return logits processors of all kinds, for requests with a long history, and positions.

    They are penalties over 2,000 tokens, 100 biases, 10 bad words of up to 3 tokens, a minimum
    length, and a mask for each row that allows half of the tokens.
    """
    generator = torch.Generator().manual_seed(1)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).int()

    history = random(vocab_size, batch, HISTORY)
    history[:, ::2] %= 1000  # makes tokens recur
    tables = {
        "counted_token_ids": torch.empty(batch, HISTORY + 48, dtype=torch.int32),
        "token_counts": torch.empty(batch, HISTORY + 48, dtype=torch.int32),
    }
    for b in range(batch):
        row = {name: table[b] for name, table in tables.items()}
        count_tokens(history[b], HISTORY // 2, **row)
    step = vocab_size // BIASES  # keeps ids distinct and ascending
    bias_ids = torch.arange(BIASES).int() * step + random(step, batch, BIASES)
    processors = LogitsProcessors(
        slots=torch.arange(batch).int(),
        token_ids=history,
        prompt_lens=torch.full((batch,), HISTORY // 2).int(),
        **tables,
        repetition_penalty=torch.full((batch,), 1.1),
        presence_penalty=torch.full((batch,), 0.5),
        frequency_penalty=torch.full((batch,), 0.1),
        logit_bias_token_ids=bias_ids,
        logit_bias=torch.randn(batch, BIASES, generator=generator),
        bad_words=random(vocab_size, batch, BAD_WORDS, 3),
        stop_token_ids=random(vocab_size, batch, 2),
        min_tokens=torch.full((batch,), HISTORY).int(),
        allowed_token_mask=torch.randint(
            -(2**31), 2**31, (rows, -(-vocab_size // 32)), generator=generator
        ).int(),
        mask_indices=torch.arange(rows).int(),
    )
    moved = [None if field is None else field.to(device) for field in processors]
    return LogitsProcessors(*moved), torch.full((batch,), HISTORY).int().to(device)


def _verify(
    logits: list[Tensor],
    strategy: VerifyStrategy,
    values: dict[str, float] | None = None,
    processors: bool = False,
) -> Callable[[], object]:
    """Return a `verify` call whose drafts are the rows' most probable tokens."""
    device, dtype = logits[0].device, torch.int32
    output_indptr = torch.arange(BATCH + 1, dtype=dtype) * (DRAFTS + 1)
    rotated = cycle([(x, Drafts(output_indptr, top_drafts(x, BATCH))) for x in logits])
    arguments: dict[str, Any] = {
        "positions": torch.zeros(BATCH, dtype=dtype),
        "strategy": torch.full((BATCH,), int(strategy), dtype=dtype),
        "outputs": VerifyOutputs(
            torch.empty(BATCH, DRAFTS + 1, dtype=dtype), torch.empty(BATCH, dtype=dtype)
        ),
        "sampling": None if values is None else request_filters(BATCH, values, device),
    }
    if processors:
        every, positions = every_processor(BATCH, ROWS, VOCAB, device)
        arguments |= {"processors": every, "positions": positions}

    def call() -> object:
        x, drafts = next(rotated)
        return verify(x, drafts, **arguments)

    return call


def top_drafts(logits: Tensor, batch: int) -> Tensor:
    """Return the most probable token of every row except each request's last."""
    return logits.argmax(-1).view(batch, -1)[:, :-1].to(torch.int32).contiguous()


def _torch_sort(logits: list[Tensor], top_k: int) -> Callable[[], Tensor]:
    """Return torch's usual pipeline: sort, softmax, cumsum, mask, scatter back, sample."""
    rotated = cycle(logits)

    def call() -> Tensor:
        ordered, ids = next(rotated).sort(dim=-1, descending=True)
        if top_k:
            ordered[:, top_k:] = -torch.inf
        probs = ordered.softmax(-1)
        cut = probs.cumsum(-1) - probs > TOP_P
        filtered = torch.zeros_like(probs).scatter_(-1, ids, probs.masked_fill(cut, 0.0))
        return torch.multinomial(filtered, 1)

    return call


def _transformers(logits: list[Tensor]) -> Callable[[], Tensor] | None:
    """Return a call of transformers' top-k and top-p processors and of its sampling."""
    try:
        from transformers.generation import logits_process
    except ImportError as error:
        print(f"  no transformers: {error}", flush=True)
        return None
    processors = logits_process.LogitsProcessorList(
        [logits_process.TopKLogitsWarper(TOP_K), logits_process.TopPLogitsWarper(TOP_P)]
    )
    rotated, ids = cycle(logits), torch.zeros(ROWS, 1, dtype=torch.int64)
    return lambda: torch.multinomial(processors(ids, next(rotated)).softmax(-1), 1)


def _argmax(logits: list[Tensor]) -> Callable[[], Tensor]:
    rotated = cycle(logits)
    return lambda: next(rotated).argmax(-1)


def _commit(bench: Bench) -> None:
    """Time `commit` of 256 requests after verification, with all stop rules enabled."""
    call = commit_call(256, 5, torch.device("cpu"))
    timing = bench.alternate({"commit": call}, rounds=9)
    what = "commit of 256 requests, 5 tokens each, with every rule: time"
    us = timing.median("commit") * 1e6
    bench.add(Figure("sampling.commit", what, us, "us", read_gb_s=timing.read_gb_s("commit")))


def commit_call(batch: int, num_tokens: int, device: torch.device) -> Callable[[], object]:
    """Return a `commit` call that first resets lengths, so that no request reaches its limit."""

    def ints(*shape: int, fill: int = -1) -> Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=device)

    width = HISTORY + 48
    start, history = ints(batch, fill=HISTORY), ints(batch, width, fill=5)
    counted = torch.arange(width, dtype=torch.int32, device=device).repeat(batch, 1) * 7
    emitted = torch.arange(num_tokens, dtype=torch.int32, device=device).repeat(batch, 1) * 70
    tokens = EmittedTokens(
        emitted,
        logprobs=torch.zeros(batch, num_tokens, device=device),
        ranks=ints(batch, num_tokens, fill=1),
    )
    rules = EndingRules(
        max_lens=ints(batch, fill=width),
        min_tokens=ints(batch, fill=1),
        stop_token_ids=ints(batch, 4, fill=3),
        stop_sequences=ints(batch, 4, 8, fill=280),
        think_end_token_id=ints(batch, fill=3),
        thinking_budget=ints(batch, fill=width),
        inject_token_ids=ints(batch, 16, fill=3),
    )
    state: dict[str, Any] = {
        "prompt_lens": ints(batch, fill=HISTORY // 2),
        "rules": rules,
        "counts": TokenCounts(counted, ints(batch, width, fill=2)),
        "status": RequestStatus(ints(batch, fill=0), ints(batch), ints(batch, fill=0)),
        "num_committed_tokens": ints(batch),
    }
    slots, lens = torch.arange(batch, dtype=torch.int32, device=device), start.clone()

    def call() -> object:
        lens.copy_(start)
        return commit(tokens, slots, history, lens, **state)

    return call
