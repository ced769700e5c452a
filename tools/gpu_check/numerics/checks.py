# SPDX-License-Identifier: Apache-2.0
"""The checks: each yields what it found of an op or kernel, and whether that is as it should be."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from specops import dense, sampling
from torch import Tensor

from tools.gpu_check.numerics.cases import (
    CACHES_8BIT,
    LATENT_KEY,
    OPS,
    Op,
    PagedCase,
    paged_case,
)
from tools.gpu_check.numerics.machines import Machine

Pair = tuple[list[Tensor], list[Tensor]]

SECONDS = 10.0  # of one subject, so that each gets its turn


@dataclass(frozen=True)
class Found:
    """What a check found.

    Attributes:
        check: its name.
        subject: op or kernel.
        cases: how many were tried.
        equal: how many had the same bits.
        worst: the largest difference, as a share of the root mean square.
        passed: whether it is as it should be.
        remark: in words, where there is something to say.
    """

    check: str
    subject: str
    cases: int
    equal: int
    worst: float
    passed: bool
    remark: str = ""

    def as_dict(self) -> dict[str, object]:
        """For the results."""
        return asdict(self)


def equal_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether all tensors have the same bits, NaN included."""
    return all(
        a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest root mean square of a difference, as a share of the first's; inf where unlike."""
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        x, y = (t.double()[t.isfinite()] for t in (a, b))
        if x.numel() == 0:
            continue
        difference = (x - y).square().mean().sqrt()
        size = x.square().mean().sqrt()
        share = 0.0 if difference == 0 else float(difference / size) if size > 0 else float("inf")
        worst = max(worst, share)
    return worst


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tally(
    check: str,
    subject: str,
    pairs: Iterator[Pair],
    most: float = 0.0,
    differing: float = 0.0,
    remark: str = "",
) -> Found:
    """Compares pairs of results until SECONDS have passed; `most` and `differing` as in Op."""
    cases = equal = 0
    worst, begun = 0.0, time.monotonic()
    for left, right in pairs:
        if cases and time.monotonic() - begun > SECONDS:
            break
        cases += 1
        if equal_bits(left, right):
            equal += 1
        else:
            worst = max(worst, distance(left, right))
    same = cases - equal <= differing * cases
    return Found(check, subject, cases, equal, worst, same or 0.0 < worst <= most, remark)


def against_the_interpreter(device: Machine, other: Machine, cases: int) -> Iterator[Found]:
    """Every op on random cases: the device's bits beside the interpreter's."""
    for name, op in OPS.items():

        def pairs(op: Op = op) -> Iterator[Pair]:
            for seed in range(cases):
                left, right = (
                    machine.run(machine.prepared(op.make, _generator(seed)))
                    for machine in (other, device)
                )
                yield left, right

        yield _tally("interpreter", name, pairs(), op.most, op.differing)


def graph_is_eager(device: Machine, cases: int) -> Iterator[Found]:
    """What a captured call gives when it is replayed."""
    for name, op in OPS.items():

        def pairs(op: Op = op) -> Iterator[Pair]:
            for seed in range(cases):
                call = device.prepared(op.make, _generator(seed))
                yield device.run(call), device.replayed(call)

        yield _tally("graph = eager", name, pairs())


SHARES = (0.25, 0.5, 1.0)


def schedules_agree(device: Machine, cases: int) -> Iterator[Found]:
    """`append_attention` uncut, and cut as far as more and more of its workspace allows."""

    def pairs() -> Iterator[Pair]:
        for seed in range(cases):
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
                results.append(device.run(call))  # with what the first left in it
            for result in results[1:]:
                yield results[0], result

    yield _tally("schedules", "append_attention", pairs())


def rows_stand_anywhere(device: Machine, cases: int) -> Iterator[Found]:
    """A row of `linear` alone, among others, and at other places of a tile."""

    def pairs() -> Iterator[Pair]:
        for seed in range(cases):
            generator = _generator(seed)
            rows = int(torch.randint(2, 140, (1,), generator=generator))
            x = torch.randn(rows, 256, generator=generator).bfloat16()
            weight = torch.randn(160, 256, generator=generator).bfloat16()
            order = torch.randperm(rows, generator=generator)
            here = [device.move(t) for t in (x, weight, x[order], x[:1])]
            x, weight, shuffled, alone = here

            def multiplied(x: Tensor, weight: Tensor = weight) -> list[Tensor]:
                return device.run(lambda: [dense.linear(x, dense.pack_weight(weight))])

            whole = multiplied(x)[0]
            yield [whole[order]], multiplied(shuffled)
            yield [whole[:1]], multiplied(alone)

    yield _tally("row identity", "linear", pairs())

    def verified() -> Iterator[Pair]:
        for seed in range(cases):
            kind = (None, *CACHES_8BIT)[seed % 3]
            case = paged_case(
                _generator(seed), device.move, most_tokens=2000, qo_len=5, cache_dtype=kind
            )
            whole = device.run(case.call)
            qo_indptr, *rest = case.where
            last = case.q[qo_indptr[1:].long() - 1]
            batch = torch.arange(len(qo_indptr), dtype=torch.int32, device=device.device)
            one = PagedCase(last, case.caches, (batch, *rest), case.scales)
            rows = qo_indptr[1:].long().cpu() - 1
            yield [result[rows] for result in whole], device.run(one.call)

    yield _tally("row identity", "append_attention", verified(), remark="5 rows beside 1")


def launches(device: Machine, *, is_small: bool) -> Iterator[Found]:
    """Every form of the kernels that ask for much shared memory: it is launched, and finite.

    is_small: with small vocabularies, for a rehearsal.
    """
    for subject, call in _largest(device, is_small):
        try:
            results = device.run(call)
        except (RuntimeError, ValueError) as error:
            yield Found("launch", subject, 1, 0, float("inf"), False, str(error)[:200])
            continue
        finite = all(bool(x.isfinite().all()) for x in results if x.is_floating_point())
        remark = "" if finite else "not finite"
        yield Found("launch", subject, 1, int(finite), 0.0, finite, remark)


def _largest(device: Machine, is_small: bool) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        of_latents = () if dtype == torch.float32 else (LATENT_KEY,)
        for head_dim in (64, 96, 128, 256, *of_latents):
            case = paged_case(_generator(0), device.move, head_dim=head_dim, dtype=dtype, qo_len=9)
            batch = case.where[3].shape[0]
            nothing = torch.zeros(1, batch, dtype=torch.int32, device=device.device)
            leaders = torch.arange(batch, dtype=torch.int32, device=device.device)[None]
            prefixes = {"prefix_leaders": leaders, "prefix_lens": nothing}
            small = torch.zeros(1, device=device.device)
            yield f"append_attention {name} {head_dim}", case.call
            yield (
                f"append_attention {name} {head_dim}, prefixes",
                lambda case=case, given=prefixes: case.call(**given),
            )
            yield (
                f"append_attention {name} {head_dim}, no workspace",
                lambda case=case, w=small: case.call(workspace=w),
            )
        for rows in (1, 8, 16, 64, 200):
            x = device.move(torch.randn(rows, 128).to(dtype))
            weight = device.move(torch.randn(272, 128).to(dtype))
            yield (
                f"linear {name} M={rows}",
                lambda x=x, w=weight: [dense.linear(x, dense.pack_weight(w))],
            )
    for kind in CACHES_8BIT:
        for head_dim in (64, 96, 128, 256):
            case = paged_case(
                _generator(0), device.move, head_dim=head_dim, qo_len=9, cache_dtype=kind
            )
            yield f"append_attention {str(kind).removeprefix('torch.')} {head_dim}", case.call
    yield from _with_processors(device, 2000 if is_small else 200_000)


def _with_processors(
    device: Machine, vocab: int
) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Sampling with a bias: a block then holds two bits of every token."""
    logits = device.move(torch.randn(2, vocab, generator=_generator(0)))
    ints = [device.move(torch.tensor(x, dtype=torch.int32)) for x in ([0, 1], [3, 3], [[1], [2]])]
    slots, positions, biased = ints
    processors = sampling.LogitsProcessors(
        slots=slots,
        logit_bias_token_ids=biased,
        logit_bias=device.move(torch.full((2, 1), 2.0)),
    )
    yield (
        f"sample with processors over {vocab} tokens",
        lambda: [sampling.sample(logits, positions, processors=processors)],
    )
    yield (
        f"top_logprobs over {vocab} tokens",
        lambda: list(sampling.top_logprobs(logits, 3)),
    )
