# SPDX-License-Identifier: Apache-2.0
"""The registry of drafting methods: one line for each, and the only place that lists them."""

import importlib
from types import ModuleType

NAIVE = "naive"  # no drafter

# By name, the module whose `load(context)` makes the method's drafter (drafters/base.py). Where a
# request has several drafters, those that stand below continue nobody and those above continue
# them: so a drafter on the host stands above those on the device.
METHODS: dict[str, str] = {
    "ngram": "specops.engine.drafters.ngram",
    "suffix": "specops.engine.drafters.suffix",
    "mtp": "specops.engine.drafters.mtp",
}

# Drafters that no request chooses: each request that speculates has them behind its method's.
COMPANIONS: dict[str, str] = {"forced": "specops.engine.drafters.forced"}


def method_names() -> tuple[str, ...]:
    """The values that `method` may have."""
    return (NAIVE, *METHODS)


def drafting_order() -> tuple[str, ...]:
    """The methods in the order in which they draft in a step."""
    return tuple(reversed(METHODS))


def module_of(drafter: str) -> ModuleType:
    """Imports the module that makes a method's drafter, or a companion."""
    return importlib.import_module((METHODS | COMPANIONS)[drafter])
