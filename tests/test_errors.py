# SPDX-License-Identifier: Apache-2.0
"""Invalid tensor arguments of every op: a ValueError names the argument and what is wrong with it.

The tests call the compiled module directly, without the Python wrappers, and read its arguments
from _C.pyi. A new op only needs a function that returns a valid call, listed in WHOLE_CALLS.
"""

import ast
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import specops
import torch
from specops import (
    _C,
    argument_groups,
    attention,
    batching,
    dense,
    linear_attention,
    moe,
    ngram,
    reference,
    runtime,
    sampling,
    torch_ops,
)
from specops.quantization import quantize_weight
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

STUB = Path(specops.__file__).with_name("_C.pyi")
FAMILIES = (attention, batching, dense, linear_attention, moe, ngram, runtime, sampling)
DEFS = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.FunctionDef)]
# Named tuples that ops take as one argument.
GROUPS = {
    name: kind
    for name, kind in vars(argument_groups).items()
    if isinstance(kind, type) and issubclass(kind, tuple)
}


def kinds_of(node: ast.FunctionDef) -> dict[str, str]:
    """Return the annotation of each argument; fields of named tuples have dotted names."""
    kinds = {}
    for arg in node.args.args:
        assert arg.annotation
        kind = ast.unparse(arg.annotation).replace("Written", "Tensor").replace("Size", "int")
        group = GROUPS.get(re.sub(r"^Annotated\[(\w+), Tensor\]", r"\1", kind).split(" | ")[0])
        if group is None:
            kinds[arg.arg] = kind
            continue
        for field, of_field in group.__annotations__.items():
            text = inspect.formatannotation(of_field).replace("torch.", "")
            is_optional = kind.endswith("| None") and not text.endswith("| None")
            kinds[f"{arg.arg}.{field}"] = f"{text} | None" if is_optional else text
    return kinds


OPS = {node.name: kinds_of(node) for node in DEFS}
CLASSES = {"SuffixCache"}  # classes whose errors are tested elsewhere
TENSOR_OPS = {name: args for name, args in OPS.items() if "Tensor" in str(args.values())}

OPS_OF_TORCH = torch_ops.OPS

# Public argument names of those DraftIndices arrays whose name is also another argument's.
PUBLIC_DRAFT_NAMES = {"qo_indptr": "draft_qo_indptr", "kv_lens": "draft_kv_lens"}
# Optional arguments that other arguments of commit's valid call require.
NEEDED_IN_COMMIT = {"prompt_lens", "counts.counted_token_ids", "counts.token_counts"}
NEEDED_IN_COMMIT |= {"status.thinking_state", "status.finish_reasons"}

# Ops without a reference, which would not be simpler than the op.
NO_REFERENCE = {"pack_weight", "take_error"}


def fields_apart(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a valid call in the form that `torch.ops` takes."""
    apart = {}
    for name, value in arguments.items():
        if isinstance(value, dense.PackedWeight):
            fields = list(value._asdict().items())[:11]
            apart |= {f"{name}_{field}": of for field, of in fields}
        else:
            apart[name.replace(".", "_")] = value
    return apart


def spread(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with each field of a named tuple under its own dotted name."""
    apart = {}
    for name, value in arguments.items():
        if type(value) in GROUPS.values():
            apart |= {f"{name}.{field}": of for field, of in value._asdict().items()}
        else:
            apart[name] = value
    return apart


def gathered(name: str, apart: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an op: the inverse of `spread`."""
    whole = {}
    for argument, good in WHOLE_CALLS[name]().items():
        if type(good) in GROUPS.values():
            fields = [apart[f"{argument}.{field}"] for field in good._fields]
            is_present = any(field is not None for field in fields)
            whole[argument] = type(good)(*fields) if is_present else None
        else:
            whole[argument] = apart[argument]
    return whole


def call(name: str, apart: dict[str, Any], module: Any = _C) -> None:
    getattr(module, name)(*gathered(name, apart).values())


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prepare_batch() -> dict[str, Any]:
    return {
        "qo_lens": ints(3, 2),
        "kv_lens": ints(20, 2),
        "output_modes": ints(2, 1),
        "kv_indptr": ints(0, 2, 3),
        "kv_indices": ints(5, 1, 0),
        "page_size": 16,
        "total_rows": 5,
        "num_output_rows": 4,
        "max_seq_len": 32,
        **vars(batching.BatchIndices.empty(2, total_rows=5, num_output_rows=4, max_seq_len=32)),
    }


def gather_input_ids() -> dict[str, Any]:
    return {
        "row_to_request": ints(0, 0, 1, 1, -1),
        "positions": ints(1, 2, 2, 4, -1),
        "slots": ints(1, 0),
        "token_ids": torch.zeros(2, 6, dtype=torch.int32),
        "lens": ints(5, 5),
        "draft_token_ids": torch.zeros(2, 3, dtype=torch.int32),
        "out": ints(0, 0, 0, 0, 0),
    }


def gather_output_rows() -> dict[str, Any]:
    return {"hidden": torch.zeros(4, 8), "output_rows": ints(0, -1), "out": torch.zeros(2, 8)}


def build_tree() -> dict[str, Any]:
    return {
        "parents": ints(-1, 0, -1, 0, 7, 7).view(2, 3),
        "num_draft_tokens": ints(3, 0),
        "positions": ints(4, 0),
        **vars(batching.DraftTree.empty(2, 3)),
    }


def find_shared_prefixes() -> dict[str, Any]:
    return {
        "kv_indptr": ints(0, 2, 3),
        "kv_indices": ints(5, 1, 5),
        "page_size": 16,
        "leaf_tokens": 16,
        "max_levels": 1,
        "order": ints(7, 7),
        "prefix_leaders": ints(7, 7).view(1, 2),
        "prefix_lens": ints(7, 7).view(1, 2),
        "counts": torch.zeros(2, dtype=torch.int64),
    }


def tree_chains() -> dict[str, Any]:
    out = vars(batching.TreeChains.empty(2, chains=3, pages=4, copies=20))
    chains = [name for name in out if name not in ("chain_indptr", "from_slots", "to_slots")]
    return {
        "parents": ints(-1, 0, -1, 0, 7, 7).view(2, 3),
        "num_draft_tokens": ints(3, 0),
        "qo_lens": ints(4, 2),
        "kv_lens": ints(18, 2),
        "kv_indptr": ints(0, 2, 3),
        "kv_indices": ints(5, 1, 0),
        "spare_pages": ints(9, 6),
        "page_size": 16,
        **{f"chain_{name}" if name in chains else name: array for name, array in out.items()},
    }


def prepare_draft_batch() -> dict[str, Any]:
    out = vars(batching.DraftIndices.empty(2, total_rows=6))
    return {
        "slots": ints(2, 0),
        "qo_indptr": ints(0, 3, 5),
        "kv_lens": ints(20, 2),
        "redraft_lens": ints(0, 0),
        "kv_indptr": ints(0, 2, 3),
        "kv_indices": ints(5, 1, 0),
        "lens": ints(3, 0, 20),
        "max_draft_tokens": ints(2, 2, 2),
        "page_size": 16,
        "window": 4,
        "total_rows": 6,
        **{PUBLIC_DRAFT_NAMES.get(name, name): array for name, array in out.items()},
    }


def advance_draft_batch() -> dict[str, Any]:
    good = prepare_draft_batch()
    out = vars(batching.DraftIndices.empty(2, total_rows=2))
    kept = ("slots", "kv_indptr", "kv_indices", "lens", "max_draft_tokens", "page_size")
    names = {**PUBLIC_DRAFT_NAMES, "last_rows": "next_last_rows"}
    return {
        "sampled_token_ids": ints(7, 8),
        "last_rows": ints(3, -1),
        **{name: good[name] for name in kept},
        "step": 0,
        "ahead": 1,
        "draft_token_ids": torch.zeros(3, 4, dtype=torch.int32),
        "num_draft_tokens": ints(0, 0, 0),
        **{names.get(name, name): array for name, array in out.items()},
    }


def keep_hidden_rows() -> dict[str, Any]:
    good = prepare_draft_batch()
    return {
        "hidden": torch.zeros(5, 8),
        **{name: good[name] for name in ("slots", "qo_indptr", "kv_lens", "lens")},
        "kept": torch.zeros(3, 4, 8),
    }


def paged_cache() -> dict[str, Any]:
    return {"k_cache": torch.zeros(3, 16, 2, 64), "v_cache": torch.zeros(3, 16, 2, 64)}


def quantized_cache() -> attention.PagedKv:
    caches = [cache.to(torch.int8) for cache in paged_cache().values()]
    return attention.PagedKv(*caches, torch.ones(3, 16, 2), torch.ones(3, 16, 2))


def rope_append_kv() -> dict[str, Any]:
    return {
        "q": torch.zeros(3, 4, 64),
        "k": torch.zeros(3, 2, 64),
        "v": torch.zeros(3, 2, 64),
        "cache": quantized_cache(),
        "cache_slots": torch.tensor([0, 17, -1]),
        "positions": ints(0, 1, 2),
        "cos_sin": torch.zeros(8, 64),
        "interleaved": False,
        "q_norm_weight": torch.ones(64),
        "k_norm_weight": torch.ones(64),
        "norm_eps": 1e-6,
        "q_out": torch.zeros(3, 4, 64),
    }


def rope_append_latent() -> dict[str, Any]:
    return {
        "q": torch.zeros(3, 4, 576),
        "kv": torch.zeros(3, 576),
        "latent_cache": torch.zeros(3, 16, 1, 576),
        "cache_slots": torch.tensor([0, 17, -1]),
        "positions": ints(0, 1, 2),
        "cos_sin": torch.zeros(8, 64),
        "interleaved": False,
        "norm_weight": torch.ones(512),
        "norm_eps": 1e-6,
        "q_out": torch.zeros(3, 4, 576),
    }


def append_attention() -> dict[str, Any]:
    return {
        "q": torch.zeros(3, 4, 64),
        "cache": quantized_cache(),
        "batch": attention.PagedBatch(
            ints(0, 1, 3), ints(0, 1, 3), kv_indices=ints(0, 2, 1), kv_lens=ints(5, 20)
        ),
        "sm_scale": 0.125,
        "sliding_window": None,
        "is_causal": True,
        "sinks": torch.zeros(4),
        "mask": attention.AttentionMask(ints(1, 1, 3).view(3, 1), ints(4, 18)),
        "prefixes": attention.PrefixTensors(ints(0, 1).view(1, 2), ints(0, 0).view(1, 2)),
        "out": torch.zeros(3, 4, 64),
        "lse": torch.zeros(3, 4),
        "workspace": torch.zeros(4096),
    }


def merge_states() -> dict[str, Any]:
    return {
        "outs": torch.zeros(2, 3, 4, 8),
        "lses": torch.zeros(2, 3, 4),
        "out": torch.zeros(3, 4, 8),
        "lse": torch.zeros(3, 4),
    }


def compact_kv() -> dict[str, Any]:
    return {
        **paged_cache(),
        "accepted_nodes": ints(1, 3, -1, -1, -1, -1).view(2, 3),
        "num_accepted_tokens": ints(2, 0),
        "qo_indptr": ints(0, 5, 9),
        "kv_lens": ints(18, 9),
        "kv_indptr": ints(0, 2, 3),
        "kv_indices": ints(2, 0, 1),
    }


def copy_kv() -> dict[str, Any]:
    return {
        **paged_cache(),
        "from_slots": torch.tensor([0, 5, 7]),
        "to_slots": torch.tensor([20, -1, 30]),
    }


def silu_mul() -> dict[str, Any]:
    return {"gate_up": torch.zeros(3, 8), "out": torch.zeros(3, 4)}


def gelu_tanh_mul() -> dict[str, Any]:
    return silu_mul()


def swiglu_oai_mul() -> dict[str, Any]:
    return silu_mul()


def pack_weight() -> dict[str, Any]:
    return {
        "weight": torch.zeros(5, 4),
        "packed": torch.zeros(1, 4, 16),
        "activation": None,
    }


def linear() -> dict[str, Any]:
    return {
        "x": torch.zeros(3, 4),
        "weight": dense.pack_weight(torch.zeros(5, 4)),
        "bias": torch.zeros(5),
        "out": torch.zeros(3, 5),
        "workspace": torch.zeros(8),
    }


def rms_norm() -> dict[str, Any]:
    return {
        "x": torch.zeros(3, 4),
        "weight": torch.ones(4),
        "eps": 1e-6,
        "residual": torch.zeros(3, 4),
        "out": torch.zeros(3, 4),
    }


def output_gate() -> dict[str, Any]:
    return {
        "x": torch.zeros(2, 3, 4),
        "gate": torch.zeros(2, 3, 4),
        "activation": "silu",
        "norm_weight": torch.ones(4),
        "norm_eps": 1e-6,
        "out": torch.zeros(2, 3, 4),
    }


def requests_of_slots() -> dict[str, Any]:
    return {"slots": ints(1, 0), "qo_indptr": ints(0, 1, 3), "kv_lens": ints(1, 7)}


def causal_conv1d() -> dict[str, Any]:
    return {
        "x": torch.zeros(3, 5),
        "weight": torch.zeros(4, 5),
        "states": torch.zeros(2, 6, 5),
        **requests_of_slots(),
        "bias": torch.zeros(5),
        "out": torch.zeros(3, 5),
    }


def gated_delta_rule() -> dict[str, Any]:
    return {
        "q": torch.zeros(3, 2, 16),
        "k": torch.zeros(3, 2, 16),
        "v": torch.zeros(3, 4, 32),
        "a": torch.zeros(3, 4),
        "b": torch.zeros(3, 4),
        "a_log": torch.zeros(4),
        "dt_bias": torch.zeros(4),
        "states": torch.zeros(2, 3, 4, 16, 32),
        **requests_of_slots(),
        "out": torch.zeros(3, 4, 32),
    }


def selective_state_update() -> dict[str, Any]:
    return {
        "x": torch.zeros(3, 4, 32),
        "dt": torch.zeros(3, 4),
        "b": torch.zeros(3, 2, 16),
        "c": torch.zeros(3, 2, 16),
        "a_log": torch.zeros(4),
        "d": torch.zeros(4),
        "dt_bias": torch.zeros(4),
        "states": torch.zeros(2, 3, 4, 16, 32),
        **requests_of_slots(),
        "out": torch.zeros(3, 4, 32),
    }


def embedding() -> dict[str, Any]:
    return {"token_ids": ints(0, 4), "weight": torch.zeros(5, 4), "out": torch.zeros(2, 4)}


def mtp_input() -> dict[str, Any]:
    return {
        "rows": dense.ModuleRows(ints(0, 1, -1), ints(3, 0, -1), source_rows=ints(1, 0, -1)),
        "tokens": dense.TokenTables(
            slots=ints(1, 0),
            token_ids=torch.zeros(2, 6, dtype=torch.int32),
            lens=ints(2, 5),
            draft_token_ids=torch.zeros(2, 3, dtype=torch.int32),
        ),
        "embedding": torch.zeros(5, 4),
        "embedding_norm": torch.ones(4),
        "hidden_norm": torch.ones(4),
        "hidden": torch.zeros(2, 4),
        "kept": torch.zeros(2, 3, 4),
        "eps": 1e-6,
        "ahead": 1,
        "hidden_first": False,
        "mask_first_position": False,
        "out": torch.zeros(3, 8),
    }


def moe_route() -> dict[str, Any]:
    return {
        "logits": torch.zeros(3, 8),
        "top_k": 2,
        "bias": torch.zeros(8),
        "scoring": "sigmoid",
        "num_groups": 4,
        "top_k_groups": 2,
        "min_sum": 1e-20,
        "scale": 2.5,
        "expert_ids": torch.zeros(3, 2, dtype=torch.int32),
        "expert_weights": torch.zeros(3, 2),
    }


def moe_sort() -> dict[str, Any]:
    return {
        "expert_ids": ints(0, 3, 1, 2).view(2, 2),
        "num_experts": 4,
        "expert_indptr": ints(0, 0, 0, 0, 0),
        "row_indices": ints(0, 0, 0, 0),
        "places": ints(0, 0, 0, 0).view(2, 2),
    }


def moe_linear() -> dict[str, Any]:
    experts = [dense.pack_weight(torch.zeros(5, 4)) for _ in range(3)]
    return {
        "x": torch.zeros(4, 4),
        "weight": moe.stack_experts(experts, 3),
        "bias": torch.zeros(3, 5),
        "expert_indptr": ints(0, 2, 2, 4),
        "row_indices": ints(0, 3, 0, 2),
        "out": torch.zeros(4, 5),
        "workspace": torch.zeros(4),
    }


def moe_combine() -> dict[str, Any]:
    return {
        "expert_out": torch.zeros(4, 8),
        "places": ints(0, 3, -1, 1).view(2, 2),
        "expert_weights": torch.zeros(2, 2),
        "shared": torch.zeros(2, 8),
        "out": torch.zeros(2, 8),
    }


def processors(rows: int) -> sampling.LogitsProcessors:
    """Return processors of two requests, in slots 2 and 0 of three, for a vocabulary of 9."""
    return sampling.LogitsProcessors(
        slots=ints(2, 0),
        token_ids=torch.zeros(3, 6, dtype=torch.int32),
        prompt_lens=ints(1, 1, 1),
        counted_token_ids=ints(0, 3, -1).repeat(3, 1),
        token_counts=ints(2, 3, 0).repeat(3, 1),
        repetition_penalty=torch.full((3,), 1.5),
        presence_penalty=torch.full((3,), 0.5),
        frequency_penalty=torch.full((3,), 0.25),
        logit_bias_token_ids=ints(1, -1).repeat(3, 1),
        logit_bias=torch.ones(3, 2),
        bad_words=ints(0, 1, 2, -1).view(2, 2).repeat(3, 1, 1),
        stop_token_ids=ints(8, -1).repeat(3, 1),
        min_tokens=ints(5, 5, 5),
        allowed_token_mask=ints(-1, 255).view(2, 1),
        mask_indices=ints(-1, *[1] * (rows - 1)),
    )


def sampling_tensors(count: int) -> sampling.SamplingTensors:
    return sampling.SamplingTensors(
        temperature=torch.ones(count),
        top_k=torch.zeros(count, dtype=torch.int32),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        typical_p=torch.ones(count),
        seeds=torch.arange(count),
        choice_index=torch.zeros(count, dtype=torch.int32),
    )


def drafts() -> sampling.Drafts:
    return sampling.Drafts(
        output_indptr=ints(0, 3, 5),
        token_ids=torch.zeros(2, 3, dtype=torch.int32),
        parents=ints(-1, -1, 1).repeat(2, 1),
    )


def workspace() -> Tensor:
    return torch.zeros(64, dtype=torch.uint8)


def sample() -> dict[str, Any]:
    return {
        "logits": torch.zeros(2, 9),
        "positions": ints(3, 4),
        "sampling": sampling_tensors(2),
        "processors": processors(rows=2),
        "purpose": 3,
        "anchors": ints(0, 0),
        "processed_logprobs": False,
        "outputs": sampling.SampleOutputs(
            ints(0, 0), logprobs=torch.zeros(2), ranks=ints(0, 0), probs=torch.zeros(2, 9)
        ),
        "workspace": workspace(),
    }


def verify() -> dict[str, Any]:
    return {
        "logits": torch.zeros(5, 9),
        "drafts": drafts(),
        "positions": ints(3, 4),
        "strategy": ints(2, 1),
        "policy": ints(0, 2),
        "accept_rates": torch.full((2, 3), 0.5),
        "sampling": sampling_tensors(2),
        "processors": processors(rows=5),
        "draft_probs": sampling.DraftProbs(
            torch.full((2, 3, 2), 0.5), ints(0, 1).repeat(2, 3, 1), ints(1, -1)
        ),
        "processed_logprobs": False,
        "outputs": sampling.VerifyOutputs(
            torch.zeros(2, 4, dtype=torch.int32),
            ints(0, 0),
            accepted_nodes=torch.zeros(2, 3, dtype=torch.int32),
            logprobs=torch.zeros(2, 4),
            ranks=torch.zeros(2, 4, dtype=torch.int32),
        ),
        "workspace": workspace(),
    }


def top_logprobs() -> dict[str, Any]:
    return {
        "logits": torch.zeros(5, 9),
        "n": 3,
        "processed_logprobs": True,
        "drafts": drafts(),
        "positions": ints(3, 4),
        "sampling": sampling_tensors(2),
        "processors": processors(rows=5),
        "outputs": sampling.TopLogprobsOutputs(
            torch.zeros(5, 3, dtype=torch.int32),
            logprobs=torch.zeros(5, 3),
            ranks=torch.zeros(5, 3, dtype=torch.int32),
            lse=torch.zeros(5),
        ),
        "workspace": workspace(),
    }


def commit() -> dict[str, Any]:
    counted = torch.full((3, 6), -1, dtype=torch.int32)
    return {
        "emitted": sampling.EmittedTokens(
            torch.zeros(2, 3, dtype=torch.int32),
            torch.zeros(2, 3),
            torch.zeros(2, 3, dtype=torch.int32),
        ),
        "slots": ints(0, 2),
        "token_ids": torch.zeros(3, 6, dtype=torch.int32),
        "lens": ints(1, 0, 3),
        "prompt_lens": ints(1, 0, 1),
        "rules": sampling.EndingRules(
            max_lens=ints(6, 6, 5),
            min_tokens=ints(0, 0, 1),
            stop_token_ids=ints(3, 4, 5).view(3, 1),
            stop_sequences=ints(1, -1, 2, 1, 0, 2).view(3, 1, 2),
            think_end_token_id=ints(7, 7, -1),
            thinking_budget=ints(2, -1, 5),
            reply_budget=ints(2, -1, 5),
            inject_token_ids=ints(8, 9, 8, -1, -1, -1).view(3, 2),
        ),
        "counts": sampling.TokenCounts(counted, torch.zeros(3, 6, dtype=torch.int32)),
        "status": sampling.RequestStatus(ints(0, 0, 0), ints(-1, -1, -1), ints(0, 0, -1)),
        "num_committed_tokens": ints(0, 0),
    }


def ngram_propose() -> dict[str, Any]:
    return {
        "token_ids": torch.zeros(2, 8, dtype=torch.int32),
        "lens": ints(8, 3),
        "max_draft_tokens": ints(2, 2),
        "min_ngram_size": ints(1, 1),
        "max_ngram_size": ints(3, 3),
        "leftmost": ints(0, 1),
        "num_given_drafts": ints(0, 2),
        "max_total_draft_tokens": 9,
        "table": torch.zeros(2, 64, dtype=torch.int32),
        "state": torch.zeros(2, 2, dtype=torch.int32),
        "scan_tokens": 1,
        "index_tokens": 8,
        "draft_token_ids": torch.zeros(2, 4, dtype=torch.int32),
        "num_draft_tokens": ints(0, 0),
        "match_lens": ints(0, 0),
    }


def take_error() -> dict[str, Any]:
    return {"out": ints(0)}


WHOLE_CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    made.__name__: made
    for made in (
        prepare_batch,
        gather_input_ids,
        gather_output_rows,
        build_tree,
        find_shared_prefixes,
        tree_chains,
        prepare_draft_batch,
        advance_draft_batch,
        keep_hidden_rows,
        rope_append_kv,
        rope_append_latent,
        append_attention,
        merge_states,
        compact_kv,
        copy_kv,
        silu_mul,
        gelu_tanh_mul,
        swiglu_oai_mul,
        pack_weight,
        linear,
        rms_norm,
        output_gate,
        embedding,
        mtp_input,
        causal_conv1d,
        gated_delta_rule,
        selective_state_update,
        moe_route,
        moe_sort,
        moe_linear,
        moe_combine,
        sample,
        verify,
        top_logprobs,
        commit,
        ngram_propose,
        take_error,
    )
}
# The same calls, with dotted names for the fields of named tuples.
GOOD_CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    name: lambda made=made: spread(made())  # type: ignore[misc]
    for name, made in WHOLE_CALLS.items()
}


def strided(tensor: Tensor) -> Tensor:
    """Return a view with the same values and stride 2 in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


# Ways to make a valid argument invalid, with a pattern that the message must contain.
WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dtype": (lambda t: t.to(torch.complex64), r"got complex64 \["),
    "another integer": (lambda t: t.to(torch.int16), r"got int16 \["),
    "rank": (lambda t: t.unsqueeze(0), r"\[.*\], got \w+ \[1, "),
    "strides": (strided, r"contiguous.*, got strides \["),
    "device": (lambda t: t.to("meta"), r"got Tensor \w+ strided meta"),
    "sparse": (lambda t: t.to_sparse(), r"got Tensor \w+ sparse_coo cpu"),
    "list": (lambda t: t.tolist(), r"got list"),
    "numpy": (lambda t: t.numpy(), r"got numpy\.ndarray"),
    "none": (lambda t: None, r"got None$"),
}


def test_every_op_has_a_valid_call_and_one_family() -> None:
    compiled = {name for name in dir(_C) if callable(getattr(_C, name)) and name[0] != "_"}
    assert compiled == {*OPS, *CLASSES}, "the compiled module and its types"
    assert set(GOOD_CALLS) == set(TENSOR_OPS)
    for name in TENSOR_OPS:
        assert sum(hasattr(family, name) for family in FAMILIES) == 1, f"{name} in its family"
        assert hasattr(reference, name) or name in NO_REFERENCE, f"{name} in the reference"


@pytest.mark.parametrize("name", sorted(GOOD_CALLS))
def test_valid_calls_are_accepted(name: str) -> None:
    arguments = GOOD_CALLS[name]()
    assert list(arguments) == list(OPS[name])
    call(name, arguments)
    for argument, kind in OPS[name].items():
        assert ("Tensor" in kind) == isinstance(arguments[argument], Tensor)
        if kind.startswith("Tensor") and kind.endswith("None"):
            without = {**GOOD_CALLS[name](), argument: None}
            # These arrays are only valid together: those of max_seq_len, of prefixes and of
            # sampling, and 8-bit caches with their scales.
            together = name in ("prepare_batch", "advance_draft_batch") or argument.startswith(
                ("prefixes.", "processors.", "cache.k_scales", "cache.v_scales")
            )
            together |= name == "ngram_propose" and argument in ("table", "state")
            needed = {"sampling.temperature", "sampling.seeds", "accept_rates", "positions"}
            needed |= {"draft_probs.token_ids", "outputs.token_ids", "outputs.lse"}
            needed |= {"outputs.num_accepted_tokens", "draft_probs.probs"}
            needed |= {"drafts.output_indptr", "drafts.token_ids"}
            needed |= {"outputs.logprobs"} if name == "top_logprobs" else set()
            needed |= NEEDED_IN_COMMIT if name == "commit" else set()
            # `mask.bits` is required by its starts, and `cache.v` by keys that are not latents.
            needed |= {"mask.bits", "cache.v"}
            if not together and argument not in needed:
                call(name, without)


def error_of(name: str, arguments: dict[str, Any]) -> str:
    """Return the message of the ValueError that a call raises, or "nothing"."""
    try:
        call(name, arguments)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_invalid_tensors_are_named(name: str) -> None:
    """Try every way to make each tensor argument invalid."""
    tried = 0
    for argument, kind in TENSOR_OPS[name].items():
        if "Tensor" not in kind:
            continue
        for wrong, (change, got) in WRONG.items():
            if wrong == "none" and kind.endswith("None"):
                continue
            if (name, wrong) == ("take_error", "strides"):  # one element is always contiguous
                continue
            arguments = GOOD_CALLS[name]()
            arguments[argument] = change(arguments[argument])
            message = error_of(name, arguments)
            pattern = rf"^{name}: {re.escape(argument)} must be .*{got}"
            assert re.search(pattern, message), f"{argument}, {wrong}: {message}"
            tried += 1
    assert tried


@pytest.mark.parametrize("name", sorted(WHOLE_CALLS))
def test_invalid_named_tuples_are_refused(name: str) -> None:
    for argument, good in WHOLE_CALLS[name]().items():
        if type(good) not in GROUPS.values():
            continue
        kind = type(good).__name__
        for wrong in (3, (), (*good, None), list(good), good[0]):
            arguments = {**WHOLE_CALLS[name](), argument: wrong}
            with pytest.raises(ValueError, match=f"^{name}: {argument} must be a {kind}, got "):
                getattr(_C, name)(*arguments.values())


@pytest.mark.parametrize("wrong", [wrong for wrong in WRONG if wrong != "none"])
@pytest.mark.parametrize("field", ["data", "scales", "offsets", "input_order", "code_values"])
def test_invalid_fields_of_a_weight_are_named(field: str, wrong: str) -> None:
    quantized = quantize_weight(torch.zeros(5, 4), kind="int4", group=32)
    table, order = torch.zeros(16, dtype=torch.int8), torch.arange(4, dtype=torch.int32)
    weight = dense.pack_weight(
        quantized._replace(offsets=quantized.scales, code_values=table, input_order=order)
    )
    change, got = WRONG[wrong]
    changed = weight._replace(**{field: change(getattr(weight, field))})
    with pytest.raises(ValueError) as caught:
        _C.linear(torch.zeros(3, 4), changed, None, torch.zeros(3, 5), None)
    assert re.search(rf"^linear: weight\.{field} must be .*{got}", str(caught.value))


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_fields_of_a_weight_must_agree(kind: str) -> None:
    zeros = torch.zeros(5, 4)
    both = [dense.pack_weight(zeros), dense.pack_weight(quantize_weight(zeros))]
    weight, other = both if kind == "plain" else both[::-1]
    x, out = torch.zeros(3, 4), torch.zeros(3, 5)
    _C.linear(x, weight, None, out, None)
    names = "'plain' or 'int8' or 'int4' or 'fp8'"
    for changes, words in [
        ({"kind": "int5"}, rf"weight\.kind must be {names}, got 'int5'"),
        ({"kind": 8}, rf"weight\.kind must be {names}, got 8"),
        ({"kind": other.kind, "activations": other.activations}, r"weight\.data must be "),
        ({"activations": other.activations}, r"weight\.activations must be '.*', got '"),
        ({"group": 8}, r"weight\.group must be .*, got 8"),
        ({"input_order": zeros[0].int() - 1}, r"weight\.input_order must be .*, got "),
        ({"offsets": zeros}, r"weight\.offsets must be None of this kind, got "),
        ({"code_values": zeros}, r"weight\.code_values must be None of this kind, got "),
        ({"data": other.data}, r"weight\.data must be "),
        ({"data": None}, r"weight\.data must be .*, got None"),
        ({"scales": other.scales}, r"weight\.scales must be .*, got "),
        ({"num_outputs": 77}, r"weight\.data must be "),
        ({"num_inputs": 60}, r"weight\.data must be "),
        ({"activation": "relu"}, r"weight\.activation must be .*, got 'relu'"),
        ({"activation": "silu"}, r"weight\.num_outputs must be gates and as many ups, got 5"),
    ]:
        with pytest.raises(ValueError, match=f"^linear: {words}"):
            _C.linear(x, weight._replace(**changes), None, out, None)
    for whole in (None, (), tuple(weight)[:10], list(weight), weight.data):
        with pytest.raises(ValueError, match=r"^linear: weight must be a PackedWeight, got"):
            _C.linear(x, whole, None, out, None)


@pytest.mark.parametrize("field", sampling.LogitsProcessors._fields)
def test_missing_processor_field_is_accepted_or_named(field: str) -> None:
    """Without a field, the call is still valid, or the message names the missing field."""
    try:
        call("verify", {**GOOD_CALLS["verify"](), f"processors.{field}": None})
    except ValueError as error:
        needed = re.match(r"verify: processors\.(\w+) must be given with .*, got None", str(error))
        assert needed and needed[1] == field, str(error)


@pytest.mark.parametrize("name", sorted(GOOD_CALLS))
def test_dimensions_must_agree(name: str) -> None:
    """If a dimension of a tensor grows by one, the call is valid or the message names the sizes."""
    refused = 0
    for argument, good in GOOD_CALLS[name]().items():
        for axis in range(good.dim() if isinstance(good, Tensor) else 0):
            arguments = GOOD_CALLS[name]()
            arguments[argument] = torch.cat([good, good.narrow(axis, 0, 1)], dim=axis)
            try:
                call(name, arguments)
            except ValueError as error:
                assert re.match(rf"{name}: \S.* must be .*, got \S", str(error)), str(error)
                refused += 1
    assert refused >= (1 if name == "take_error" else 2)


def empty_like_numpy(shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor whose strides are all 0, like one from `torch.from_numpy`."""
    empty = torch.empty(0, dtype=dtype).as_strided(shape, [0] * len(shape))
    assert empty.is_contiguous()
    return empty


@pytest.mark.parametrize("name", sorted(GOOD_CALLS))
def test_empty_tensors_may_have_any_strides(name: str) -> None:
    """Outcomes equal those with torch's own empty tensors, for one empty tensor and for all."""

    def outcome(empty: Callable[..., Tensor], axes: dict[str, int]) -> str:
        arguments = GOOD_CALLS[name]()
        for argument, axis in axes.items():
            shape = list(arguments[argument].shape)
            shape[axis] = 0
            arguments[argument] = empty(shape, dtype=arguments[argument].dtype)
        try:
            call(name, arguments)
        except ValueError as error:
            return str(error)
        return "no error"

    tensors = {a: good for a, good in GOOD_CALLS[name]().items() if isinstance(good, Tensor)}
    cases = [{argument: axis} for argument, good in tensors.items() for axis in range(good.dim())]
    for axes in [*cases, dict.fromkeys(tensors, 0)]:
        assert outcome(empty_like_numpy, axes) == outcome(torch.empty, axes), axes


@pytest.mark.parametrize("name", sorted(GOOD_CALLS))
def test_missing_argument_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError):
        getattr(_C, name)(*list(WHOLE_CALLS[name]().values())[:-1])


def public_call(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the public function of an op, and arguments with which it allocates the outputs."""
    function = next(getattr(family, name) for family in FAMILIES if hasattr(family, name))
    good = WHOLE_CALLS[name]()
    if name == "top_logprobs":
        good = {"logits": good["logits"], "n": 3}
    given = {"residual", "bias", "scales"}
    needed = {
        argument
        for argument, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty or argument in given
    }
    assert needed <= set(good)
    return function, {argument: good[argument] for argument in good if argument in needed}


WRONG_KINDS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda t: None,
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "scalar": lambda t: torch.zeros((), dtype=t.dtype),
    "flat": lambda t: t.flatten(),
    "rank": lambda t: t.unsqueeze(0),
    "device": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("wrong", WRONG_KINDS)
@pytest.mark.parametrize("name", sorted(GOOD_CALLS))
def test_invalid_tensors_are_named_before_allocation(name: str, wrong: str) -> None:
    """A public function that allocates outputs still lets the op name the invalid argument."""
    function, good = public_call(name)
    function(**good)
    for argument, value in spread(public_call(name)[1]).items():
        if not isinstance(value, Tensor) or (wrong == "flat" and value.dim() == 1):
            continue
        if wrong == "none" and (
            argument in {"residual", "bias"}
            or ("." in argument and OPS[name][argument].endswith("| None"))
            or (name in ("compact_kv", "copy_kv") and argument == "v_cache")
        ):
            continue
        given = public_call(name)[1]
        changed = {**GOOD_CALLS[name](), **spread(given), argument: WRONG_KINDS[wrong](value)}
        with pytest.raises(ValueError) as caught:
            function(**{key: gathered(name, changed)[key] for key in given})
        assert re.search(rf"^{name}: {argument} must be .*got ", str(caught.value)), caught.value


def test_invalid_sizes_are_named_before_allocation() -> None:
    def refused(message: str, name: str, **changes: Any) -> None:
        function, good = public_call(name)
        with pytest.raises(ValueError, match=message):
            function(**{**good, **changes})

    for size in (0, 2**31, 2**62):
        refused(
            f"prepare_batch: page_size must be an int32.*got {size}",
            "prepare_batch",
            page_size=size,
        )
    refused("total_rows must be an int32 of at least 0, got -1", "prepare_batch", total_rows=-1)
    refused("num_output_rows must be.*got -1", "prepare_batch", num_output_rows=-1)
    for size in (-1, 2**70, 1.5, True, "3", float("nan")):
        refused(
            f"top_logprobs: n must be an int32 of at least 0, got {size!r}", "top_logprobs", n=size
        )
    refused(r"top_logprobs: n must be an int in 0 \.\. 9, got 10", "top_logprobs", n=10)
    refused(
        r"linear: weight must be a PackedWeight.*got float32 \[5, 4\]",
        "linear",
        weight=torch.zeros(5, 4),
    )
    refused(
        r"silu_mul: gate_up must be \[rows, 2 \* width\], got 7",
        "silu_mul",
        gate_up=torch.zeros(3, 7),
    )


def test_rms_norm_refuses_memory_it_would_read_after_writing() -> None:
    x, weight = torch.randn(6, 4), torch.ones(4)
    good = {"x": x[:3], "weight": weight, "eps": 1e-6}
    with pytest.raises(ValueError, match="rms_norm: residual must be another tensor than x"):
        dense.rms_norm(**good, residual=x[:3])
    with pytest.raises(ValueError, match="rms_norm: residual must be another tensor than x"):
        dense.rms_norm(**good, residual=x[2:5])
    with pytest.raises(ValueError, match="rms_norm: out must be another tensor than residual"):
        dense.rms_norm(**good, residual=x[3:], out=x[3:])
    dense.rms_norm(**good, residual=x[3:], out=x[:3])


# ---- out of memory, and gradients ----

# Functions that allocate nothing if the caller passes no outputs.
ALLOCATE_NOTHING = {"advance_draft_batch", "commit", "compact_kv", "copy_kv", "keep_hidden_rows"}
ALLOCATE_NOTHING |= {"take_error"}


@pytest.mark.parametrize("name", sorted(set(GOOD_CALLS) - ALLOCATE_NOTHING))
def test_out_of_memory_blames_no_argument(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an output cannot be allocated, the caller gets torch's own error."""
    function, good = public_call(name)

    def no_room(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty", no_room)
    monkeypatch.setattr(Tensor, "new_empty", no_room)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        function(**good)


@pytest.mark.ci
def test_output_beyond_the_address_space_is_an_out_of_memory_error() -> None:
    """The process limits its address space, so the allocation itself fails."""
    program = """if True:
        import resource
        import torch
        from specops import dense
        x, weight = torch.zeros(200_000, 4), dense.pack_weight(torch.zeros(4096, 4))
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        try:
            dense.linear(x, weight)
        except RuntimeError as error:
            assert not isinstance(error, ValueError)
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "can't allocate memory" in done.stdout, done.stdout + done.stderr


REAL_CASES = [
    (name, argument)
    for name, good in GOOD_CALLS.items()
    for argument, value in good().items()
    if isinstance(value, Tensor) and value.is_floating_point()
]
NO_GRADIENT = "must be a tensor that needs no gradient.*no_grad.*, got requires_grad=True$"


@pytest.mark.parametrize("name,argument", REAL_CASES)
def test_gradient_is_refused(name: str, argument: str) -> None:
    """Gradients are not dropped silently: in eager mode, by torch.ops, and while tracing."""
    arguments = GOOD_CALLS[name]()
    arguments[argument].requires_grad_()
    by_torch = OPS_OF_TORCH[name]
    apart = fields_apart(arguments)
    whole = gathered(name, arguments)
    for function, given in ((getattr(_C, name), whole), (by_torch, apart)):
        with pytest.raises(ValueError, match=f"^{name}: {argument} {NO_GRADIENT}"):
            function(*given.values())
        with torch.no_grad():
            function(*given.values())
    with FakeTensorMode() as mode:
        fake = {
            key: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for key, value in apart.items()
        }
        with pytest.raises(ValueError, match=f"^{name}: {argument} {NO_GRADIENT}"):
            by_torch(*fake.values())
        with torch.no_grad():
            by_torch(*fake.values())


def test_compiled_function_refuses_a_gradient() -> None:
    weight = torch.ones(8)
    compiled = torch.compile(
        lambda x: dense.rms_norm(x, weight, 1e-6), backend="aot_eager", fullgraph=True
    )
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(Exception, match="rms_norm: x must be a tensor that needs no gradient"):
        compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), dense.rms_norm(x, weight, 1e-6))


def test_packed_parameter_requires_no_gradient() -> None:
    """A module's parameter requires a gradient; its packed weight does not."""
    layer = torch.nn.Linear(4, 5)
    with pytest.raises(ValueError, match=f"^pack_weight: weight {NO_GRADIENT}"):
        dense.pack_weight(layer.weight)
    with torch.no_grad():
        packed = dense.pack_weight(layer.weight)
    assert not packed.data.requires_grad
    assert not dense.linear(torch.zeros(3, 4), packed).requires_grad


# ---- numbers ----


@pytest.mark.parametrize("value", [-1.0, -1e-9, float("nan"), float("inf"), 1e39, True, "1", None])
@pytest.mark.parametrize(
    "name,argument",
    [
        ("rms_norm", "eps"),
        ("mtp_input", "eps"),
        ("rope_append_kv", "norm_eps"),
        ("rope_append_latent", "norm_eps"),
        ("append_attention", "sm_scale"),
    ],
)
def test_invalid_scales_and_epsilons_are_refused(name: str, argument: str, value: Any) -> None:
    arguments = GOOD_CALLS[name]()
    call(name, {**arguments, argument: 0})
    if value is None and argument == "sm_scale":
        return
    with pytest.raises(
        ValueError, match=f"^{name}: {argument} must be a finite number of at least"
    ):
        call(name, {**arguments, argument: value})


def test_invalid_size_is_named() -> None:
    """The message does not name another argument, or an output that depends on the size."""

    def refused(message: str, name: str, **changes: Any) -> None:
        function, good = public_call(name)
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            function(**{**good, **changes})

    refused("total_rows must be .* got True", "prepare_batch", total_rows=True)
    refused("max_levels must be .* got 2147483648", "find_shared_prefixes", max_levels=2**31)
    refused("kv_indptr must be int32 .* got list", "find_shared_prefixes", kv_indptr=[0, 2])
    refused("page_size must be .* got 2147483648", "tree_chains", page_size=2**31)
    refused("out_dtype must be .* got 'x'", "linear", out_dtype="x")
    refused("out_dtype must be .* got float64", "linear", out_dtype=torch.float64)
    refused("n must be an int in 0 .. 9, got 999999", "top_logprobs", n=999999)
    outputs = sampling.TopLogprobsOutputs(ints(0, 0).repeat(5, 1), torch.zeros(5, 2))
    for n in (7, 999999, 2**70, 1.5, float("nan")):
        refused(r"(n|outputs.token_ids) must be .*, got", "top_logprobs", n=n, outputs=outputs)
    for sizes in ({"num_outputs": -5}, {"num_inputs": -4}, {"num_inputs": 2**70}):
        weight = dense.pack_weight(torch.zeros(5, 4))._replace(**sizes)
        refused(f"weight.{next(iter(sizes))} must be", "linear", weight=weight)
    with pytest.raises(ValueError, match=r"^linear_workspace_size: weight must be a PackedW"):
        dense.linear_workspace_size(3, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^sampling_workspace: logits must be"):
        sampling.sampling_workspace(3)  # type: ignore[arg-type]


def test_error_for_a_fake_tensor_names_torch_ops() -> None:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")  # such as torch's warning about memory that does not exist
        x, weight = torch.zeros(3, 4), torch.ones(4)
        with pytest.raises(
            ValueError, match=r"got FakeTensor .*strict=True.*specops\.torch_ops.*OPS"
        ):
            dense.rms_norm(x, weight, 1e-6)
