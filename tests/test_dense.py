# SPDX-License-Identifier: Apache-2.0
"""The dense family against its reference, and row identity."""

import pytest
import torch
from conftest import assert_close
from specops import dense, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", [(0, 64), (1, 64), (5, 77), (1500, 128)])
def test_silu_mul(device: str, isa: str, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = (4 * torch.randn(rows, 2 * width)).to(dtype).to(device)
    out = dense.silu_mul(gate_up)
    assert out.shape == (rows, width)
    if rows:
        assert_close(reference.silu_mul, out, gate_up)


def test_silu_mul_strided_rows(device: str, isa: str) -> None:
    wide = torch.randn(6, 300, device=device)
    view = wide[:, 10:266]
    assert torch.equal(dense.silu_mul(view), dense.silu_mul(view.contiguous()))
