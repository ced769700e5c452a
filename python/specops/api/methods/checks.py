# SPDX-License-Identifier: Apache-2.0
"""Checks of single configuration values; their errors name the field and the allowed values."""

from collections.abc import Collection

# Formats that weights can be quantized to at load time.
QUANTIZATIONS = ("none", "wint8", "wint4", "mix_quant")


def choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def spelling(holder: object, name: str, choices: Collection[str]) -> None:
    """Raise ValueError unless a field is one of the choices in any letter case; lower-case it."""
    value = getattr(holder, name)
    lower = value.lower() if isinstance(value, str) else value
    if lower not in choices:
        choice(name, value, choices)
    object.__setattr__(holder, name, lower)


def integer(name: str, value: object, lowest: int, bits: int = 32) -> None:
    """Raise ValueError unless the value is a signed integer of `bits` bits and >= `lowest`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not lowest <= value < 1 << bits - 1:
        raise ValueError(f"{name} must be at least {lowest} and fit {bits} bits, got {value}")


def number(name: str, value: object, lowest: float, highest: float) -> None:
    """Raise ValueError unless the value is a number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be in [{lowest:g}, {highest:g}], got {value!r}")


def flag(name: str, value: object) -> None:
    """Raise ValueError unless the value is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def path(name: str, value: object) -> None:
    """Raise ValueError unless the value is a path or None."""
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"{name} must be a path or null, got {value!r}")


def adapter_name(name: str) -> None:
    """Raise ValueError unless the text can be the name of a LoRA adapter, also in a log line."""
    if not 0 < len(name) <= 256 or not name.isprintable() or name != name.strip():
        raise ValueError(
            "the name of an adapter must have 1 to 256 printable characters without spaces around "
            f"them, got {name[:256]!r}"
        )
