# SPDX-License-Identifier: Apache-2.0
"""Repeated calls of kernels whose last-arriving block finishes the work of the others.

The last block varies from run to run, and a missing memory fence would show only in rare timings.
So each call is repeated very often. Outputs are poisoned before each call and compared on the
device after it. Two calls share one workspace, so the second may begin before the first has ended.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from specops import dense, sampling
from torch import Tensor

from tools.gpu_check.numerics.cases import Call, PagedCase, paged_case
from tools.gpu_check.numerics.machines import Machine
from tools.gpu_check.numerics.trials import Pair, Trial


@dataclass(frozen=True)
class Repeats:
    """Number of repetitions, and sizes of the repeated calls.

    Attributes:
        total: replays of each call.
        at_once: replays between two looks at the clock.
        tokens: tokens in the cache.
        inputs: inputs of `linear`.
        outputs: outputs of `linear`.
        vocab: vocabulary size of the sampled row.
    """

    total: int
    at_once: int
    tokens: int
    inputs: int
    outputs: int
    vocab: int


REAL = Repeats(100_000, 1000, 16_000, 4096, 1024, 128_256)
REHEARSED = Repeats(4, 2, 3000, 1100, 40, 20_000)

# Two calls over one workspace, and their outputs. Their inputs differ, so what one call leaves in
# the workspace is never a correct result of the other.
Meeting = tuple[Call, Call]


def replays(device: Machine, repeats: Repeats) -> Iterator[Trial]:
    """Repeat split attention, `linear` with leaves, and one row of logits `repeats.total` times."""
    meetings = {
        "append_attention": lambda: _attention(device, repeats),
        "linear M=64": lambda: _linear(device, repeats),
        "sample M=1": lambda: _sample(device, repeats),
    }
    for name, prepare in meetings.items():

        def pairs(prepare: Callable[[], Meeting] = prepare) -> Iterator[Pair]:
            none = torch.zeros(1, dtype=torch.int64)
            again = device.rounds(prepare(), repeats.at_once)
            for _ in range(repeats.total // repeats.at_once):
                yield [none], [again()]

        subject = f"{name}, {repeats.at_once:,} replays a case"
        yield Trial("replays", subject, pairs, seconds=15.0)


def _attention(device: Machine, repeats: Repeats) -> Meeting:
    generator = torch.Generator().manual_seed(3)
    first = paged_case(
        generator,
        device.move,
        most_tokens=repeats.tokens,
        head_dim=128,
        dtype=torch.bfloat16,
        qo_len=5,
    )
    with device.at_work():
        workspace = torch.zeros(first.workspace_size(), device=device.device)

    def call(case: PagedCase) -> Call:
        out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2], device=device.device)
        return lambda: case.call(out=out, lse=lse, workspace=workspace)

    return call(first), call(replace(first, q=first.q.flip(0).contiguous()))


def _linear(device: Machine, repeats: Repeats) -> Meeting:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(repeats.outputs, repeats.inputs, generator=generator).bfloat16()
    with device.at_work():
        packed = dense.pack_weight(device.move(weight))
        floats = dense.linear_workspace_size(64, packed)
    workspace = torch.zeros(floats, device=device.device)

    def call() -> Call:
        x = device.move(torch.randn(64, repeats.inputs, generator=generator).bfloat16())
        out = torch.empty(64, repeats.outputs, dtype=x.dtype, device=device.device)
        return lambda: [dense.linear(x, packed, out=out, workspace=workspace)]

    return call(), call()


def _sample(device: Machine, repeats: Repeats) -> Meeting:
    generator = torch.Generator().manual_seed(5)
    position = device.move(torch.tensor([11], dtype=torch.int32))
    seeds = device.move(torch.tensor([5]))
    logits = [device.move(torch.randn(1, repeats.vocab, generator=generator) * 3) for _ in range(2)]
    with device.at_work():
        workspace = sampling.sampling_workspace(logits[0])

    def call(x: Tensor) -> Call:
        logprobs = torch.empty(1, device=device.device)
        out, ranks = (torch.empty(1, dtype=torch.int32, device=device.device) for _ in range(2))
        given = sampling.SamplingTensors(temperature=1.0, top_p=0.9, seeds=seeds)
        outputs = sampling.SampleOutputs(out, logprobs=logprobs, ranks=ranks)

        def sampled() -> list[Tensor]:
            sampling.sample(x, position, sampling=given, outputs=outputs, workspace=workspace)
            return [out, logprobs, ranks]

        return sampled

    return call(logits[0]), call(logits[1])
