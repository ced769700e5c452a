# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding kernels: one documented module per family of ops.

Every op takes torch tensors, runs on the device they live on, and keeps the row-identity contract
of docs/exactness.md: the bits of an output row depend only on that row's own request.
"""

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
