# SPDX-License-Identifier: Apache-2.0
"""What the environment asks of the plug-in: which parts of vLLM specops computes."""

import os
from collections.abc import Mapping

VARIABLE = "SPECOPS_VLLM"

# In the order in which a step needs them. Rotary embedding is none of them: vLLM's own is
# row-identical, which the tests hold.
PARTS = ("norm", "linear", "attention", "activation", "sampling")
EXACT = "exact"


def parts_of(environment: Mapping[str, str] | None = None) -> frozenset[str]:
    """Reads SPECOPS_VLLM: "exact" for all parts, or a list of them with commas.

    Args:
        environment: instead of the process's own.

    Returns:
        Names of `PARTS`. None where the variable is not set or empty: the plug-in does nothing.

    Raises:
        ValueError: a word is neither "exact" nor a part.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE, "")
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word != EXACT and word not in PARTS:
            names = ", ".join(PARTS)
            raise ValueError(f"{VARIABLE} must be {EXACT} or a list of {names}, got {word!r}")
    return frozenset(PARTS if EXACT in words else words)
