# SPDX-License-Identifier: Apache-2.0
"""Trials: a trial checks one subject by comparing pairs of results that should agree."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

Pair = tuple[list[Tensor], list[Tensor]]

# Mantissa bits after the leading one.
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}


@dataclass(frozen=True)
class Limits:
    """Limits on the difference of two results.

    Attributes:
        most: largest root mean square of a tensor's differences, relative to the tensor's own; 0
            means that no bit may differ.
        ulps: largest difference of an element of 16-bit tensors, in units in the last place of the
            element or of its row's root mean square, taking the larger. One rounding is one unit,
            wherever it occurs.
        ulps_fp32: the same for float32 tensors, which are not rounded at the end.
        differing: fraction of cases that may differ by more than the other limits.
    """

    most: float = 0.0
    ulps: float = 0.0
    ulps_fp32: float = 0.0
    differing: float = 0.0


EQUAL = Limits()


@dataclass(frozen=True)
class Found:
    """Result of a trial.

    Attributes:
        check: the check's name.
        subject: op or kernel.
        cases: how many were tried.
        equal: how many had the same bits.
        worst: the largest difference, relative to the root mean square.
        ulps: the largest difference of an element, as Limits counts it.
        passed: whether the results agree within the limits.
        remark: message, such as an error.
    """

    check: str
    subject: str
    cases: int
    equal: int
    worst: float
    passed: bool
    remark: str = ""
    ulps: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the fields for the results file."""
        return asdict(self)


@dataclass(frozen=True)
class Trial:
    """A check of a subject that has not run yet.

    Attributes:
        check: the check's name.
        subject: op or kernel.
        pairs: computes the results that should agree, pair by pair; called once.
        limits: how far apart the results of a pair may be.
        seconds: time limit, so that every trial gets to run.
    """

    check: str
    subject: str
    pairs: Callable[[], Iterator[Pair]]
    limits: Limits = EQUAL
    seconds: float = 10.0

    def found(self) -> Found:
        """Compare pairs until the time is up; an exception fails the trial."""
        cases = equal = outside = 0
        worst = ulps = 0.0
        begun = time.monotonic()
        remark = ""
        try:
            for left, right in self.pairs():
                cases += 1
                if equal_bits(left, right):
                    equal += 1
                else:
                    worst = max(worst, distance(left, right))
                    ulps = max(ulps, ulps_apart(left, right))
                    outside += not is_within(self.limits, left, right)
                if time.monotonic() - begun > self.seconds:
                    break
        except Exception as error:  # an error of any kind must not stop the next trial
            text = " ".join(str(error).split())
            remark = f"{type(error).__name__}: {text}"[:300]
        passed = cases > 0 and not remark and outside <= self.limits.differing * cases
        return Found(self.check, self.subject, cases, equal, worst, passed, remark, ulps)


def is_within(limits: Limits, left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Return whether results that differ are within the limits."""
    if limits.most == 0.0:
        return False
    for a, b in zip(left, right, strict=True):
        if equal_bits([a], [b]):
            continue
        if not a.is_floating_point():
            return False
        ulps = limits.ulps_fp32 if a.dtype == torch.float32 else limits.ulps
        if distance([a], [b]) > limits.most or ulps_apart([a], [b]) > ulps:
            return False
    return True


def equal_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Return whether all tensors have the same bits, including NaN."""
    return all(
        a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the largest RMS difference relative to `left`; inf if shapes or non-finites differ."""
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


def ulps_apart(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the largest difference of an element, as Limits counts it; inf for unlike tensors."""
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        if not a.is_floating_point() or a.numel() == 0:
            continue
        if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        x, y = (t.double().where(t.isfinite(), 0.0) for t in (a, b))
        row = x.square().mean(-1, keepdim=True).sqrt()
        _, exponent = torch.frexp(torch.maximum(x.abs(), row))
        unit = torch.exp2(exponent.double() - 1 - _MANTISSA[a.dtype])
        apart = (x - y).abs() / unit
        worst = max(worst, float(apart.max()))
    return worst
