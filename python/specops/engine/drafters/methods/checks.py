# SPDX-License-Identifier: Apache-2.0
"""Checks of one value of a configuration: each refuses with the name and what would be right."""

from collections.abc import Collection

# What weights are made into as they are loaded.
QUANTIZATIONS = ("none", "wint8", "wint4", "mix_quant")


def choice(name: str, value: object, choices: Collection[str]) -> None:
    """Refuses what is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def spelling(holder: object, name: str, choices: Collection[str]) -> None:
    """Refuse a field whose value is none of the choices, and write a choice in lower case."""
    value = getattr(holder, name)
    lower = value.lower() if isinstance(value, str) else value
    if lower not in choices:
        choice(name, value, choices)
    object.__setattr__(holder, name, lower)


def integer(name: str, value: object, lowest: int, bits: int = 32) -> None:
    """Refuses what is no integer from `lowest` on that fits so many bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not lowest <= value < 1 << bits - 1:
        raise ValueError(f"{name} must be at least {lowest} and fit {bits} bits, got {value}")


def number(name: str, value: object, lowest: float, highest: float) -> None:
    """Refuses what is no number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be in [{lowest:g}, {highest:g}], got {value!r}")


def flag(name: str, value: object) -> None:
    """Refuses what is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def path(name: str, value: object) -> None:
    """Refuses what is neither a path nor None."""
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"{name} must be a path or null, got {value!r}")
