# SPDX-License-Identifier: Apache-2.0
"""Fixtures every op test takes: the device, the instruction set, the seed, and the error rule."""

from collections.abc import Callable, Iterator

import pytest
import specops
import torch
from torch import Tensor

# The references' torch ops: a barrier among threads that share a core costs more than they save.
torch.set_num_threads(1)


@pytest.fixture(params=["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """The device an op test runs on; later issues add simt and cuda here, not in the tests."""
    return str(request.param)


@pytest.fixture(params=specops.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set, the portable path included."""
    before = specops.get_isa()
    specops.set_isa(request.param)
    yield request.param
    specops.set_isa(before)


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    torch.manual_seed(0)
    before = specops.get_num_threads()
    yield
    specops.set_num_threads(before)


def assert_close(op: Callable[..., Tensor], got: Tensor, *inputs: Tensor) -> None:
    """The error of `got` is at most twice that of the reference run in the op's own dtype.

    `op` is the reference; it is run once on float64 inputs (the truth) and once as is.
    """
    truth = op(*(x.double() if x.is_floating_point() else x for x in inputs)).double()
    plain = op(*inputs).double()
    allowed = 2.0 * (plain - truth).abs().max().item() + 1e-5
    error = (got.double() - truth).abs().max().item()
    assert error <= allowed, f"max error {error:.3e}, allowed {allowed:.3e}"
