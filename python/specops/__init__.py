# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding kernels: one documented module per family of ops.

batching      index arrays of a step, rows of logits, trees of drafts
attention     rotary embedding into a paged KV cache, and attention over it
linear_attention    attention by a state of fixed size: convolution, gated delta rule
dense, moe    the layers between: linear, norms, activations; mixtures of experts
sampling      choosing tokens, verifying drafts, ending requests
ngram, suffix_tree, predicted_text    drafts without a model
quantization  weights of 8 and 4 bits
runtime       threads, instruction sets, errors of CUDA ops

`import specops` is enough to call `specops.sampling.verify`. Some modules must be imported by name:
`specops.reference` (all ops in plain PyTorch: the specification), `specops.torch_ops`
(torch.compile), `specops.minimal` (an engine in one file), `specops.engine` (the serving engine),
`specops.audit` (checks of answers), `specops.scoring` (logprobs of given texts) and
`specops.integrations` (the ops in other projects).

Every op takes torch tensors, runs on their device, and keeps the row-identity contract
of docs/exactness.md: the bits of an output row depend only on that row's own request.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specops import attention as attention
    from specops import batching as batching
    from specops import dense as dense
    from specops import linear_attention as linear_attention
    from specops import moe as moe
    from specops import ngram as ngram
    from specops import predicted_text as predicted_text
    from specops import quantization as quantization
    from specops import runtime as runtime
    from specops import sampling as sampling
    from specops import suffix_tree as suffix_tree
    from specops.runtime import (
        check_errors,
        error_sentence,
        get_isa,
        get_num_threads,
        has_cuda,
        portable_isas,
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
    "portable_isas",
    "set_isa",
    "set_num_threads",
    "supported_isas",
    "take_error",
]

_MODULES = {
    "attention",
    "batching",
    "dense",
    "linear_attention",
    "moe",
    "ngram",
    "predicted_text",
    "quantization",
    "runtime",
    "sampling",
    "suffix_tree",
}


def __getattr__(name: str) -> Any:
    """Import a submodule on first use: torch takes seconds, and `specops --help` needs none."""
    if name in _MODULES:
        return import_module(f"specops.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'specops' has no attribute {name!r}")
    module = "suffix_tree" if name.startswith("Suffix") else "runtime"
    globals()[name] = value = getattr(import_module(f"specops.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
