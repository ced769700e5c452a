# SPDX-License-Identifier: Apache-2.0
"""The plug-in's environment variables: which parts of vLLM specops computes, and how."""

import os
from collections.abc import Mapping

VARIABLE = "SPECOPS_VLLM"
VERIFY_VARIABLE = "SPECOPS_VLLM_VERIFY"

# Parts in the order of a step. Rotary embedding is not listed, since tests show that vLLM's is
# row-identical.
PARTS = ("norm", "linear", "attention", "activation", "sampling")
EXACT = "exact"
# Verification strategies. Only the first one keeps seeded texts independent of the drafts.
TARGET_MATCH = "target_match"
STRATEGIES = (TARGET_MATCH, "rejection", "block")
# vLLM's method for drafter classes of users and of the plug-in.
CUSTOM_CLASS = "custom_class"


def parts_of(environment: Mapping[str, str] | None = None) -> frozenset[str]:
    """Parse SPECOPS_VLLM: "exact" for all parts, or a comma-separated list of parts.

    Args:
        environment: environment to read; None: that of the process.

    Returns:
        Names of `PARTS`; empty if the variable is unset or empty, which disables the plug-in.

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
    """Parse SPECOPS_VLLM_VERIFY.

    Args:
        environment: environment to read; None: that of the process.

    Returns:
        One of `STRATEGIES`; target_match if the variable is unset or empty.

    Raises:
        ValueError: the word is not a strategy, or SPECOPS_VLLM has parts but lacks sampling, which
            verifies drafts.
    """
    variables = os.environ if environment is None else environment
    strategy = variables.get(VERIFY_VARIABLE, "").strip() or TARGET_MATCH
    if strategy not in STRATEGIES:
        names = ", ".join(STRATEGIES)
        raise ValueError(f"{VERIFY_VARIABLE} must be one of {names}, got {strategy!r}")
    parts = parts_of(variables)
    if strategy != TARGET_MATCH and parts and "sampling" not in parts:
        raise ValueError(
            f"{VERIFY_VARIABLE}={strategy} requires the part sampling in {VARIABLE}, got "
            f"{variables[VARIABLE]}"
        )
    return strategy
