# SPDX-License-Identifier: Apache-2.0
"""Every op in plain PyTorch: the executable specification that tests and benches compare with.

Nothing in the package imports this module, and it imports nothing but torch.
"""

import torch
from torch import Tensor


# ---- batching ----

# ---- attention ----

# ---- dense ----


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` in fp32 (fp64 for fp64 input), rounded once."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


# ---- sampling ----

# ---- suffix_tree ----
