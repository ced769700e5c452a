# SPDX-License-Identifier: Apache-2.0
# Types of the compiled module. Private and positional: the documented functions are in the families.
from torch import Tensor

# runtime
def set_num_threads(num_threads: int) -> None: ...
def num_threads() -> int: ...
def supported_isas() -> list[str]: ...
def set_isa(isa: str) -> None: ...
def active_isa() -> str: ...

# batching

# attention

# dense
def silu_mul(gate_up: Tensor, out: Tensor) -> None: ...

# sampling

# suffix_tree
