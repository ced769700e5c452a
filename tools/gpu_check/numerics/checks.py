# SPDX-License-Identifier: Apache-2.0
"""Numeric checks; each yields its trials lazily."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from specops import attention, dense, sampling
from torch import Tensor

from tools.gpu_check.numerics.cases import (
    CACHES_8BIT,
    LATENT_KEY,
    OPS,
    Op,
    paged_case,
)
from tools.gpu_check.numerics.machines import Machine
from tools.gpu_check.numerics.trials import Pair, Trial


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks.

    Attributes:
        cases: cases of an op compared with the interpreter.
        seconds: time for these cases of an op.
        few: cases of the checks that run each case several times.
        inputs: inputs of `linear`. From 513 on there are several leaves, which blocks may share.
        outputs: outputs of `linear`.
        rows: row counts of `linear`, for each kernel that supports them.
        vocab: vocabulary size at which many blocks share a row that is alone.
        crowd: number of rows at which a row gets one block.
    """

    cases: int
    seconds: float
    few: int
    inputs: tuple[int, ...]
    outputs: int
    rows: tuple[int, ...]
    vocab: int
    crowd: int


REAL = Sizes(
    cases=300,
    seconds=6.0,
    few=40,
    inputs=(256, 1200, 4608),
    outputs=1056,
    rows=(1, 2, 5, 8, 9, 16, 17, 33, 64, 65, 130, 513),
    vocab=128_256,
    crowd=300,
)
REHEARSED = Sizes(
    cases=2,
    seconds=6.0,
    few=1,
    inputs=(1040,),
    outputs=40,
    rows=(1, 9, 66),
    vocab=20_000,
    crowd=9,
)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


VERIFICATION = ("verify", "sample")


def against_the_interpreter(
    device: Machine, other: Machine, sizes: Sizes, *, of_verification: bool | None = None
) -> Iterator[Trial]:
    """Compare the device's bits with the interpreter's for every op on random cases.

    of_verification: True for the ops of VERIFICATION only, False for all others.
    """
    for name, op in OPS.items():
        if of_verification is not None and (name in VERIFICATION) != of_verification:
            continue

        def pairs(op: Op = op) -> Iterator[Pair]:
            for seed in range(sizes.cases):
                left, right = (
                    machine.run(machine.prepared(op.make, _generator(seed)))
                    for machine in (other, device)
                )
                yield left, right

        yield Trial("interpreter", name, pairs, op.limits, sizes.seconds)


def first_calls(device: Machine) -> Iterator[Trial]:
    """Check ops whose very first call is captured, when none of their code is loaded yet.

    Run it before every other check; afterwards it is meaningless.
    """
    for name, op in OPS.items():

        def pairs(op: Op = op) -> Iterator[Pair]:
            call = device.prepared(op.make, _generator(0))
            first = device.replayed(call, warm=False)
            yield device.run(call), first

        yield Trial("first call", name, pairs)


def graph_is_eager(device: Machine, sizes: Sizes) -> Iterator[Trial]:
    """Compare a captured and replayed call with an eager one."""
    for name, op in OPS.items():

        def pairs(op: Op = op) -> Iterator[Pair]:
            for seed in range(sizes.few):
                call = device.prepared(op.make, _generator(seed))
                yield device.run(call), device.replayed(call)

        yield Trial("graph = eager", name, pairs)


SHARES = (0.25, 0.5, 1.0)


def schedules_agree(device: Machine, sizes: Sizes) -> Iterator[Trial]:
    """Compare `append_attention` unsplit with splits that use more and more of its workspace."""

    def pairs() -> Iterator[Pair]:
        for seed in range(sizes.few):
            generator = _generator(seed)
            kind = (None, *CACHES_8BIT)[seed % 3]
            case = paged_case(
                generator, device.move, most_tokens=5000, head_dim=128, cache_dtype=kind
            )
            with device.at_work():
                floats = case.workspace_size()
            uncut = torch.zeros(1, device=device.device)
            results = [device.run(lambda case=case, w=uncut: case.call(workspace=w))]
            for share in SHARES:
                workspace = torch.zeros(max(1, int(share * floats)), device=device.device)
                call = lambda case=case, w=workspace: case.call(workspace=w)  # noqa: E731
                results.append(device.run(call))
                results.append(device.run(call))  # with what the first call left in the workspace
            for result in results[1:]:
                yield results[0], result

    yield Trial("schedules", "append_attention", pairs)


def rows_stand_anywhere(device: Machine, sizes: Sizes) -> Iterator[Trial]:
    """Check that a row has the same bits alone, among others, and at any position."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_inputs in sizes.inputs:
            subject = f"linear {_name(dtype)}, {num_inputs} inputs"
            yield Trial(
                "row identity",
                subject,
                lambda dtype=dtype, n=num_inputs: _rows_of_linear(device, sizes, dtype, n),
            )
    yield Trial(
        "row identity",
        "append_attention, 5 rows beside 1",
        lambda: _rows_of_attention(device, sizes),
    )
    for dtype in (torch.bfloat16, torch.float32):
        yield Trial(
            "row identity",
            f"sample {_name(dtype)}, {sizes.vocab:,} tokens",
            lambda dtype=dtype: _rows_of_sampling(device, sizes, dtype),
        )


def _rows_of_linear(
    device: Machine, sizes: Sizes, dtype: torch.dtype, num_inputs: int
) -> Iterator[Pair]:
    """Compare rows of `linear` in other batches with the same rows in the largest batch.

    The other batches are the shuffled batch, its last row alone, and the first n rows for each size
    n under each kernel that can be forced.
    """
    generator = _generator(num_inputs)
    most = max(sizes.rows)
    x = device.move(torch.randn(most, num_inputs, generator=generator).to(dtype))
    weight = device.move(torch.randn(sizes.outputs, num_inputs, generator=generator).to(dtype))
    order = torch.randperm(most, generator=generator)
    with device.at_work():
        packed = dense.pack_weight(weight)

    def multiplied(x: Tensor, kernel: str | None = None) -> Tensor:
        with device.at_work():
            dense.set_linear_kernel(kernel)
            try:
                return device.run(lambda: [dense.linear(x, packed)])[0]
            finally:
                dense.set_linear_kernel(None)

    whole = multiplied(x)
    yield [whole[order]], [multiplied(device.move(x[order.to(x.device)]))]
    yield [whole[-1:]], [multiplied(x[-1:])]
    for rows in sizes.rows:
        with device.at_work():
            kernels = [] if dtype == torch.float32 else dense.linear_kernels(rows)
        for kernel in (None, *kernels):
            if kernel != "tile_256x128" or device.has_large_blocks:
                yield [whole[:rows]], [multiplied(x[:rows], kernel)]


def _rows_of_attention(device: Machine, sizes: Sizes) -> Iterator[Pair]:
    for seed in range(sizes.few):
        kind = (None, *CACHES_8BIT)[seed % 3]
        case = paged_case(
            _generator(seed), device.move, most_tokens=2000, qo_len=5, cache_dtype=kind
        )
        whole = device.run(case.call)
        qo_indptr = case.batch.qo_indptr
        last = case.q[qo_indptr[1:].long() - 1]
        single = torch.arange(len(qo_indptr), dtype=torch.int32, device=device.device)
        one = replace(case, q=last, batch=case.batch._replace(qo_indptr=single))
        rows = qo_indptr[1:].long().cpu() - 1
        yield [result[rows] for result in whole], device.run(one.call)


FILTERS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.3, "typical_p": 0.9},
)


def _rows_of_sampling(device: Machine, sizes: Sizes, dtype: torch.dtype) -> Iterator[Pair]:
    """Compare tokens, logprobs and ranks of a row alone on the device with the row in a crowd."""
    generator, rows = _generator(7), sizes.crowd
    logits = device.move((torch.randn(rows, sizes.vocab, generator=generator) * 3).to(dtype))
    numbers = device.move(torch.arange(rows, dtype=torch.int32))
    seeds = device.move(torch.randint(0, 1 << 40, (rows,), generator=generator))

    def sampled(which: slice, given: dict[str, float]) -> list[Tensor]:
        def call() -> list[Tensor]:
            x = logits[which]
            logprobs = torch.empty(x.shape[0], device=x.device)
            ranks = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
            tokens = sampling.sample(
                x,
                numbers[which],
                sampling=sampling.SamplingTensors(seeds=seeds[which], **given),
                outputs=sampling.SampleOutputs(logprobs=logprobs, ranks=ranks),
            )
            return [tokens, logprobs, ranks]

        return device.run(call)

    for given in FILTERS:
        crowd = sampled(slice(None), given)
        for row in (0, rows // 2, rows - 1):
            yield [result[row : row + 1] for result in crowd], sampled(slice(row, row + 1), given)


def codes_are_exact(device: Machine) -> Iterator[Trial]:
    """Check that every finite byte value of 8-bit keys and values is decoded exactly."""
    for kind in CACHES_8BIT:
        yield Trial("codes", _name(kind), lambda kind=kind: _codes(device, kind))


CODES_DIM, CODES_TOKENS = 128, 16


def _codes(device: Machine, kind: torch.dtype) -> Iterator[Pair]:
    codes = torch.arange(256, dtype=torch.uint8).view(kind)
    codes = torch.where(codes.float().isfinite(), codes.float(), 0.0).to(kind)
    dim, tokens = CODES_DIM, CODES_TOKENS
    ones = device.move(torch.ones(2, tokens, 1))

    def attended(q: Tensor, k: Tensor, v: Tensor, pages: Tensor, length: int) -> list[Tensor]:
        """Run requests of one row each over `length` tokens of one page."""
        batch = q.shape[0]
        counts = device.move(torch.arange(batch + 1, dtype=torch.int32))
        lens = device.move(torch.full((batch,), length, dtype=torch.int32))
        rows, keys, values = (device.move(x) for x in (q.bfloat16(), k, v))
        scales = [ones, ones] if k.dtype == kind else []
        cache = attention.PagedKv(keys, values, *scales)
        paged = attention.PagedBatch(counts, counts, device.move(pages.int()), lens)
        return device.run(
            lambda: list(attention.append_attention(rows, cache, paged, return_lse=True))
        )

    # Keys: a one-hot query reads one element as its score. With a single token, the output is its
    # value.
    cache = torch.zeros(2, tokens, 1, dim).to(kind)
    cache[:, 0, 0] = codes.view(2, dim)
    q = torch.eye(dim).repeat(2, 1)[:, None]
    pages = torch.arange(2).repeat_interleave(dim)
    out, lse = attended(q, cache, cache, pages, 1)
    wide = cache.float().bfloat16()
    yield attended(q, wide, wide, pages, 1), [out, lse]
    yield _sums_of(codes.view(2, dim)[pages][:, None]), [out]
    # Values: every byte value in every column, of a token with weight exactly 1 among others with
    # 0.
    largest = float(codes.float().max())
    keys = torch.zeros(2, tokens, 1, dim)
    keys[:, range(tokens), 0, range(tokens)] = largest
    shifted = torch.stack([codes.roll(8 * token) for token in range(2 * tokens)])
    values = shifted[:, :dim].view(2, tokens, 1, dim)
    q = torch.eye(tokens, dim).repeat(2, 1)[:, None] * 448
    pages = torch.arange(2).repeat_interleave(tokens)
    out, _ = attended(q, keys.to(kind), values, pages, tokens)
    yield _sums_of(values.view(2 * tokens, 1, dim)), [out]


def _sums_of(values: Tensor) -> list[Tensor]:
    """Return the sum of a single value: -0 becomes 0."""
    return [(values.float() + 0.0).bfloat16()]


def launches(device: Machine, *, is_small: bool) -> Iterator[Trial]:
    """Check that kernels with large shared memory launch in every form and give finite results.

    is_small: use small vocabularies, for a rehearsal.
    """
    for subject, call in _largest(device, is_small):

        def pairs(call: Callable[[], list[Tensor]] = call) -> Iterator[Pair]:
            finite = [x.isfinite() for x in device.run(call) if x.is_floating_point()]
            yield [torch.ones_like(x) for x in finite], finite

        yield Trial("launch", subject, pairs)


def _largest(device: Machine, is_small: bool) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        of_latents = () if dtype == torch.float32 else (LATENT_KEY,)
        for head_dim in (64, 96, 128, 256, 512, *of_latents):
            subject = f"append_attention {_name(dtype)} {head_dim}"
            case = paged_case(_generator(0), device.move, head_dim=head_dim, dtype=dtype, qo_len=9)
            batch = case.batch.kv_lens.shape[0]
            nothing = torch.zeros(1, batch, dtype=torch.int32, device=device.device)
            leaders = torch.arange(batch, dtype=torch.int32, device=device.device)[None]
            prefixes = attention.PrefixTensors(leaders, nothing)
            small = torch.zeros(1, device=device.device)
            yield subject, case.call
            yield f"{subject}, prefixes", lambda case=case, p=prefixes: case.call(prefixes=p)
            yield f"{subject}, no workspace", lambda case=case, w=small: case.call(workspace=w)
        for rows in (1, 8, 16, 64, 200):
            x = device.move(torch.randn(rows, 128).to(dtype))
            weight = device.move(torch.randn(272, 128).to(dtype))
            yield (
                f"linear {_name(dtype)} M={rows}",
                lambda x=x, w=weight: [dense.linear(x, dense.pack_weight(w))],
            )
    for kind in CACHES_8BIT:
        for head_dim in (64, 96, 128, 256, 512):
            case = paged_case(
                _generator(0), device.move, head_dim=head_dim, qo_len=9, cache_dtype=kind
            )
            yield f"append_attention {_name(kind)} {head_dim}", case.call
    yield from _with_processors(device, 2000 if is_small else 200_000)


def _with_processors(
    device: Machine, vocab: int
) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Yield sampling calls with a bias, for which a block holds two bits of every token."""
    logits = device.move(torch.randn(2, vocab, generator=_generator(0)))
    ints = [device.move(torch.tensor(x, dtype=torch.int32)) for x in ([0, 1], [3, 3], [[1], [2]])]
    slots, positions, biased = ints
    processors = sampling.LogitsProcessors(
        slots=slots,
        logit_bias_token_ids=biased,
        logit_bias=device.move(torch.full((2, 1), 2.0)),
    )

    def sampled() -> list[Tensor]:
        logprobs = torch.empty(2, device=logits.device)
        outputs = sampling.SampleOutputs(logprobs=logprobs)
        tokens = sampling.sample(logits, positions, processors=processors, outputs=outputs)
        return [tokens, logprobs]

    yield f"sample with processors over {vocab} tokens", sampled
    yield f"top_logprobs over {vocab} tokens", lambda: list(sampling.top_logprobs(logits, 3))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
