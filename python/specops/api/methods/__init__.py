# SPDX-License-Identifier: Apache-2.0
"""Registry of drafting methods; no other place lists them.

To add a method, write a module with a `METHOD` that describes it, and add a line here. Descriptions
need only the standard library; the drafter's module is imported when it is loaded.
"""

import importlib
from functools import cache
from types import ModuleType

from specops.api.methods import checks
from specops.api.methods.method import Method, Options

__all__ = [
    "COMPANIONS",
    "METHODS",
    "NAIVE",
    "Method",
    "Options",
    "checks",
    "companion",
    "default_method",
    "drafting_order",
    "method_choices",
    "method_names",
    "method_of",
    "methods",
]

NAIVE = "naive"  # no drafter

# Method -> module with its METHOD. The first method is an engine's default: n-gram drafting needs
# no draft model, and helps where text repeats itself.
METHODS: dict[str, str] = {
    "ngram": "specops.api.methods.ngram",
    "suffix": "specops.api.methods.suffix",
    "mtp": "specops.api.methods.mtp",
    "prediction": "specops.api.methods.prediction",
    "draft_model": "specops.api.methods.draft_model",
    "eagle": "specops.api.methods.eagle",
    "eagle3": "specops.api.methods.eagle3",
    "medusa": "specops.api.methods.medusa",
    "hydra": "specops.api.methods.hydra",
    "dflash": "specops.api.methods.dflash",
}

# Drafters that no request selects: they run after the method of every request that speculates.
COMPANIONS: dict[str, str] = {"forced": "specops.engine.drafters.forced"}


def method_names() -> tuple[str, ...]:
    """Return all method names, including "naive"."""
    return (NAIVE, *METHODS)


def default_method() -> str:
    """Return the method of an engine whose configuration names none."""
    return next(iter(METHODS))


def method_of(name: str) -> Method:
    """Return the description of a method of the registry."""
    return next(one for one in methods() if one.name == name)


def canonical_name(spelling: str) -> str:
    """Return the name of the method that has this alias, or else the spelling itself."""
    return next((one.name for one in methods() if spelling in one.aliases), spelling)


def methods() -> tuple[Method, ...]:
    """Return the descriptions of all methods, in the registry's order."""
    return _described(tuple(METHODS.values()))


@cache
def _described(modules: tuple[str, ...]) -> tuple[Method, ...]:
    return tuple(importlib.import_module(module).METHOD for module in modules)


def drafting_order() -> tuple[str, ...]:
    """Return the methods in the order in which they draft in a step.

    First come methods that cannot continue another one, then those on the device, then those on
    the host.
    """
    by_turn = sorted(methods(), key=lambda one: (one.may_follow, one.is_on_host))
    return tuple(one.name for one in by_turn)


def method_choices() -> tuple[str, ...]:
    """Return every method, and every combination "a+b" in which b may continue a.

    Methods that draft from a parameter of the request are left out.
    """
    choices: list[str] = []
    every = [one for one in methods() if one.parameter is None]
    for first in every:
        choices.append(first.name)
        if first.needs_weights:
            choices += [f"{first.name}+{one.name}" for one in every if one.may_follow]
    return tuple(choices)


def companion(name: str) -> ModuleType:
    """Import and return the module of a drafter that is listed in COMPANIONS."""
    return importlib.import_module(COMPANIONS[name])
