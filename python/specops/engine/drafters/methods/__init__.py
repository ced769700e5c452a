# SPDX-License-Identifier: Apache-2.0
"""The registry of drafting methods: one line for each, and the only place that lists them.

A method is a module with a `METHOD`, which says everything that others need to know of it, and a
line here. Descriptions need the standard library alone: the drafter itself is imported when it is
loaded.
"""

import importlib
from functools import cache
from types import ModuleType

from specops.engine.drafters.methods import checks
from specops.engine.drafters.methods.method import Method, Options

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
    "option_names",
]

NAIVE = "naive"  # no drafter

# By name, the module whose METHOD describes it. The first one is what an engine does where nothing
# is said: it needs no other model, and gains where text repeats itself.
METHODS: dict[str, str] = {
    "ngram": "specops.engine.drafters.methods.ngram",
    "suffix": "specops.engine.drafters.methods.suffix",
    "mtp": "specops.engine.drafters.methods.mtp",
    "prediction": "specops.engine.drafters.methods.prediction",
    "draft_model": "specops.engine.drafters.methods.draft_model",
    "eagle": "specops.engine.drafters.methods.eagle",
    "eagle3": "specops.engine.drafters.methods.eagle3",
    "medusa": "specops.engine.drafters.methods.medusa",
    "hydra": "specops.engine.drafters.methods.hydra",
    "dflash": "specops.engine.drafters.methods.dflash",
}

# Drafters that no request chooses: each request that speculates has them behind its method's.
COMPANIONS: dict[str, str] = {"forced": "specops.engine.drafters.forced"}


def method_names() -> tuple[str, ...]:
    """The values that `method` may have."""
    return (NAIVE, *METHODS)


def default_method() -> str:
    """The method of an engine that is not told any."""
    return next(iter(METHODS))


def method_of(name: str) -> Method:
    """The description of a method of the registry."""
    return next(one for one in methods() if one.name == name)


def methods() -> tuple[Method, ...]:
    """The descriptions of all methods, in the registry's order."""
    return _described(tuple(METHODS.values()))


@cache
def _described(modules: tuple[str, ...]) -> tuple[Method, ...]:
    return tuple(importlib.import_module(module).METHOD for module in modules)


def drafting_order() -> tuple[str, ...]:
    """The methods in the order in which they draft in a step.

    First those that continue nobody, then those on the device, then those on the host.
    """
    by_turn = sorted(methods(), key=lambda one: (one.may_follow, one.is_on_host))
    return tuple(one.name for one in by_turn)


def method_choices() -> tuple[str, ...]:
    """What there is to choose from: every method, and with a second one what that may continue.

    Those that draft from a parameter of the request are left out.
    """
    choices: list[str] = []
    every = [one for one in methods() if one.parameter is None]
    for first in every:
        choices.append(first.name)
        if first.needs_weights:
            choices += [f"{first.name}+{one.name}" for one in every if one.may_follow]
    return tuple(choices)


def option_names(*, of_requests: bool = False, without_files: bool = False) -> tuple[str, ...]:
    """The fields that methods add to the speculative configuration, each once.

    Args:
        of_requests: those that a request may set alone.
        without_files: all but those that name a file.
    """
    names: dict[str, None] = {}
    for method in methods():
        for name in method.of_requests if of_requests else method.option_names:
            if not (without_files and name in method.files):
                names[name] = None
    return tuple(names)


def companion(name: str) -> ModuleType:
    """Imports the module that makes a companion."""
    return importlib.import_module(COMPANIONS[name])
