# SPDX-License-Identifier: Apache-2.0
"""The row-identical dense layers of a transformer block.

Every output row is computed with a reduction order that depends on the layer's shape alone, so a row
has the same bits alone, in a batch, or in the middle of a prefill chunk.
"""

import torch
from torch import Tensor

from specops import _C


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Applies the gated activation `silu(gate) * up`.

    Same as `reference.silu_mul`: computed in fp32, rounded once to the dtype of `gate_up`.

    Args:
        gate_up: [rows, 2 * width], float32, bfloat16 or float16. Each row holds gate, then up; rows
            may be strided.
        out: [rows, width], dtype of `gate_up`. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above.

    Note:
        Deterministic; elementwise.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """
    if out is None:
        out = torch.empty(
            gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device
        )
    _C.silu_mul(gate_up, out)
    return out
