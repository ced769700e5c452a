# SPDX-License-Identifier: Apache-2.0
"""Every op in plain PyTorch: the executable specification that tests and benches compare with.

Nothing in the package imports this package, and it imports nothing but torch.
"""

from specops.reference.attention import (
    append_attention,
    compact_kv,
    merge_states,
    rope_append_kv,
    rope_cos_sin,
)
from specops.reference.batching import (
    advance_draft_batch,
    build_tree,
    gather_input_ids,
    gather_output_rows,
    keep_hidden_rows,
    prepare_batch,
    prepare_draft_batch,
)
from specops.reference.dense import embedding, linear, mtp_input, rms_norm, silu_mul
from specops.reference.distribution import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    TARGET,
    Uniform,
    kept_tokens,
    philox4x32,
    philox_uniform,
    process_logits,
    target_probs,
)
from specops.reference.sampling import (
    ACCEPT_ALL,
    BLOCK,
    GREEDY,
    NORMAL,
    REJECT_ALL,
    REJECTION,
    SYNTHETIC,
    TARGET_MATCH,
    TOPP,
    commit,
    sample,
    top_logprobs,
    verify,
)
from specops.reference.suffix_tree import SuffixCache, ngram_propose

__all__ = [
    "ACCEPT",
    "ACCEPT_ALL",
    "BLOCK",
    "DRAFT",
    "GREEDY",
    "NORMAL",
    "REJECTION",
    "REJECT_ALL",
    "RESIDUAL",
    "SYNTHETIC",
    "TARGET",
    "TARGET_MATCH",
    "TOPP",
    "SuffixCache",
    "Uniform",
    "advance_draft_batch",
    "append_attention",
    "build_tree",
    "commit",
    "compact_kv",
    "embedding",
    "gather_input_ids",
    "gather_output_rows",
    "keep_hidden_rows",
    "kept_tokens",
    "linear",
    "merge_states",
    "mtp_input",
    "ngram_propose",
    "philox4x32",
    "philox_uniform",
    "prepare_batch",
    "prepare_draft_batch",
    "process_logits",
    "rms_norm",
    "rope_append_kv",
    "rope_cos_sin",
    "sample",
    "silu_mul",
    "target_probs",
    "top_logprobs",
    "verify",
]
