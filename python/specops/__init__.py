# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding kernels: one documented module per family of ops.

Every op takes torch tensors, runs on the device they live on, and keeps the row-identity contract
of docs/exactness.md: the bits of an output row depend only on that row's own request.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specops import runtime as runtime
    from specops import suffix_tree as suffix_tree
    from specops.runtime import (
        check_errors,
        error_sentence,
        get_isa,
        get_num_threads,
        has_cuda,
        set_isa,
        set_num_threads,
        supported_isas,
        take_error,
    )
    from specops.suffix_tree import SuffixCache, SuffixDecodingCache, SuffixDraft

__version__ = "0.1.0"

__all__ = [
    "SuffixCache",
    "SuffixDecodingCache",
    "SuffixDraft",
    "check_errors",
    "error_sentence",
    "get_isa",
    "get_num_threads",
    "has_cuda",
    "set_isa",
    "set_num_threads",
    "supported_isas",
    "take_error",
]


def __getattr__(name: str) -> Any:
    """Imports what is asked for: torch takes seconds, and `specops --help` has no use for it."""
    if name in ("runtime", "suffix_tree"):
        return import_module(f"specops.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'specops' has no attribute {name!r}")
    module = "suffix_tree" if name.startswith("Suffix") else "runtime"
    globals()[name] = value = getattr(import_module(f"specops.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
