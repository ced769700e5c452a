# SPDX-License-Identifier: Apache-2.0
"""The plug-in's environment variables: which parts of vLLM specops computes, and how."""

import os
from collections.abc import Mapping

VARIABLE = "SPECOPS_VLLM"
VERIFY_VARIABLE = "SPECOPS_VLLM_VERIFY"

# In the order in which a step needs them. Rotary embedding is none of them: vLLM's own is
# row-identical, which the tests hold.
PARTS = ("norm", "linear", "attention", "activation", "sampling")
EXACT = "exact"
# How drafts are verified, as the op names it. With the first one drafts change no seeded text.
TARGET_MATCH = "target_match"
STRATEGIES = (TARGET_MATCH, "rejection", "block")


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


def strategy_of(environment: Mapping[str, str] | None = None) -> str:
    """Reads SPECOPS_VLLM_VERIFY.

    Args:
        environment: instead of the process's own.

    Returns:
        One of `STRATEGIES`; target_match where the variable is not set or empty.

    Raises:
        ValueError: it is none of them, or SPECOPS_VLLM has parts, but not sampling, which verifies.
    """
    given = os.environ if environment is None else environment
    strategy = given.get(VERIFY_VARIABLE, "").strip() or TARGET_MATCH
    if strategy not in STRATEGIES:
        names = ", ".join(STRATEGIES)
        raise ValueError(f"{VERIFY_VARIABLE} must be one of {names}, got {strategy!r}")
    parts = parts_of(given)
    if strategy != TARGET_MATCH and parts and "sampling" not in parts:
        raise ValueError(
            f"{VERIFY_VARIABLE}={strategy} needs the part sampling in {VARIABLE}, got "
            f"{given[VARIABLE]}"
        )
    return strategy
