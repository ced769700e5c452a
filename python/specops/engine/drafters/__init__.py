# SPDX-License-Identifier: Apache-2.0
"""Drafters: what proposes the tokens that the next step verifies."""

from specops.engine.drafters.base import (
    Drafter,
    DrafterContext,
    DrafterStep,
    DrawnFrom,
    MethodUnavailable,
    Proposals,
    Scheduled,
    StepResults,
    TargetStep,
    stage_limit,
)

__all__ = [
    "Drafter",
    "DrafterContext",
    "DrafterStep",
    "DrawnFrom",
    "MethodUnavailable",
    "Proposals",
    "Scheduled",
    "StepResults",
    "TargetStep",
    "stage_limit",
]
