# SPDX-License-Identifier: Apache-2.0
# Types of the compiled module. Its functions are private and positional; the documented functions
# are in the family modules. torch_ops.py makes the schemas of torch.ops.specops from this file.
from collections.abc import Hashable
from os import PathLike
from typing import Annotated

from torch import Tensor

from specops.argument_groups import (
    AttentionMask,
    DraftProbs,
    Drafts,
    EmittedTokens,
    EndingRules,
    LogitsProcessors,
    ModuleRows,
    PagedBatch,
    PagedKv,
    PrefixTensors,
    RequestStatus,
    SampleOutputs,
    SamplingTensors,
    TokenCounts,
    TokenTables,
    TopLogprobsOutputs,
    VerifyOutputs,
)
from specops.dense import PackedWeight
from specops.suffix_tree import SuffixDraft, TokenIds

Written = Tensor  # an argument that the op writes
Size = int  # may be symbolic in a graph with dynamic shapes

# runtime
def set_num_threads(num_threads: int) -> None: ...
def num_threads() -> int: ...
def supported_isas() -> list[str]: ...
def set_isa(isa: str) -> None: ...
def active_isa() -> str: ...
def use_vnni(use: bool) -> None: ...  # for tests

source_digest: str
compiler: str

def set_kernel_overlap(overlap: bool) -> None: ...
def kernel_overlap() -> bool: ...

has_cuda: bool
no_gradient: str  # error text for a tensor that must not require gradients

def take_error(out: Written) -> None: ...
def take_error_sync(device: int) -> int: ...
def error_sentence(code: int) -> str | None: ...

# batching
def prepare_batch(
    qo_lens: Tensor,
    kv_lens: Tensor,
    output_modes: Tensor,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
    page_size: int | None,
    total_rows: Size,
    num_output_rows: Size,
    max_seq_len: Size | None,
    qo_indptr: Written,
    row_to_request: Written,
    positions: Written,
    cache_slots: Written,
    output_indptr: Written,
    output_rows: Written,
    output_row_to_request: Written,
    output_padding_offset: Written | None,
    output_cum_offsets: Written | None,
) -> None: ...
def gather_input_ids(
    row_to_request: Tensor,
    positions: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    lens: Tensor,
    draft_token_ids: Tensor | None,
    out: Written,
) -> None: ...
def gather_output_rows(hidden: Tensor, output_rows: Tensor, out: Written) -> None: ...
def build_tree(
    parents: Tensor,
    num_draft_tokens: Tensor,
    positions: Tensor,
    depths: Written,
    row_positions: Written,
    ancestor_mask: Written,
    first_child: Written,
    next_sibling: Written,
    sibling_index: Written,
) -> None: ...
def find_shared_prefixes(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    page_size: int,
    leaf_tokens: int,
    max_levels: int,
    order: Written,
    prefix_leaders: Written,
    prefix_lens: Written,
    counts: Written,
) -> None: ...
def tree_chains(
    parents: Tensor,
    num_draft_tokens: Tensor,
    qo_lens: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    spare_pages: Tensor,
    page_size: int,
    chain_indptr: Written,
    chain_qo_lens: Written,
    chain_kv_lens: Written,
    chain_kv_indptr: Written,
    chain_kv_indices: Written,
    from_slots: Written,
    to_slots: Written,
) -> None: ...
def prepare_draft_batch(
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    redraft_lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    page_size: int,
    window: int,
    total_rows: Size,
    draft_qo_indptr: Written,
    draft_kv_lens: Written,
    last_rows: Written,
    draft_positions: Written,
    row_to_request: Written,
    positions: Written,
    cache_slots: Written,
    source_rows: Written,
) -> None: ...
def advance_draft_batch(
    sampled_token_ids: Tensor,
    last_rows: Tensor,
    slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    page_size: int,
    step: int,
    ahead: int,
    draft_token_ids: Written,
    num_draft_tokens: Written,
    draft_qo_indptr: Written | None,
    draft_kv_lens: Written | None,
    next_last_rows: Written | None,
    draft_positions: Written | None,
    row_to_request: Written | None,
    positions: Written | None,
    cache_slots: Written | None,
    source_rows: Written | None,
) -> None: ...
def keep_hidden_rows(
    hidden: Tensor, slots: Tensor, qo_indptr: Tensor, kv_lens: Tensor, lens: Tensor, kept: Written
) -> None: ...

# attention
def rope_append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Annotated[PagedKv, Written],
    cache_slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    norm_eps: float,
    q_out: Written,
) -> None: ...
def rope_append_latent(
    q: Tensor,
    kv: Tensor,
    latent_cache: Written,
    cache_slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    norm_weight: Tensor | None,
    norm_eps: float,
    q_out: Written,
) -> None: ...
def append_attention(
    q: Tensor,
    cache: PagedKv,
    batch: PagedBatch,
    sm_scale: float | None,
    sliding_window: int | None,
    is_causal: bool,
    sinks: Tensor | None,
    mask: AttentionMask | None,
    prefixes: PrefixTensors | None,
    out: Written,
    lse: Written | None,
    workspace: Written | None,
) -> None: ...
def attention_workspace_size(
    rows: int,
    num_qo_heads: int,
    head_dim: int,
    num_kv_heads: int,
    num_pages: int,
    page_size: int,
    batch: int,
    device: int,
) -> tuple[int, int]: ...
def set_phase_stamps(stamps: object | None) -> None: ...
def merge_states(outs: Tensor, lses: Tensor, out: Written, lse: Written) -> None: ...
def compact_kv(
    k_cache: Written,
    v_cache: Written | None,
    accepted_nodes: Tensor,
    num_accepted_tokens: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
) -> None: ...
def copy_kv(
    k_cache: Written, v_cache: Written | None, from_slots: Tensor, to_slots: Tensor
) -> None: ...

# dense
def silu_mul(gate_up: Tensor, out: Written) -> None: ...
def gelu_tanh_mul(gate_up: Tensor, out: Written) -> None: ...
def swiglu_oai_mul(gate_up: Tensor, out: Written) -> None: ...
def packed_weight_layout(
    device: str,
    kind: str,
    element_bytes: int,
    num_outputs: int,
    num_inputs: int,
    activation: str | None,
    group: int,
    activations: str,
) -> list[int]: ...
def pack_weight(weight: Tensor, packed: Written, activation: str | None) -> None: ...
def linear_kernels(rows: Size) -> list[str]: ...
def set_linear_kernel(kernel: str | None) -> None: ...
def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Written,
    workspace: Written | None,
) -> None: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Written | None, out: Written
) -> None: ...
def output_gate(
    x: Tensor,
    gate: Tensor,
    activation: str,
    norm_weight: Tensor | None,
    norm_eps: float,
    out: Written,
) -> None: ...
def embedding(token_ids: Tensor, weight: Tensor, out: Written) -> None: ...
def mtp_input(
    rows: ModuleRows,
    tokens: TokenTables,
    embedding: Tensor,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    hidden: Tensor,
    kept: Tensor | None,
    eps: float,
    ahead: int,
    hidden_first: bool,
    mask_first_position: bool,
    out: Written,
) -> None: ...

# linear_attention
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    states: Written,
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    bias: Tensor | None,
    out: Written,
) -> None: ...
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Written,
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    out: Written,
) -> None: ...
def selective_state_update(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    states: Written,
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    out: Written,
) -> None: ...

# moe
def moe_route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    scoring: str,
    num_groups: int,
    top_k_groups: int,
    min_sum: float | None,
    scale: float,
    expert_ids: Written,
    expert_weights: Written,
) -> None: ...
def moe_sort(
    expert_ids: Tensor,
    num_experts: int,
    expert_indptr: Written,
    row_indices: Written,
    places: Written,
) -> None: ...
def moe_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    expert_indptr: Tensor,
    row_indices: Tensor | None,
    out: Written,
    workspace: Written | None,
) -> None: ...
def moe_combine(
    expert_out: Tensor,
    places: Tensor,
    expert_weights: Tensor,
    shared: Tensor | None,
    out: Written,
) -> None: ...

# sampling
def sample(
    logits: Tensor,
    positions: Tensor,
    sampling: SamplingTensors | None,
    processors: LogitsProcessors | None,
    purpose: int,
    anchors: Tensor | None,
    processed_logprobs: bool,
    outputs: Annotated[SampleOutputs, Written],
    workspace: Written | None,
) -> None: ...
def verify(
    logits: Tensor,
    drafts: Drafts,
    positions: Tensor,
    strategy: Tensor | int | None,
    policy: Tensor | int | None,
    accept_rates: Tensor | None,
    sampling: SamplingTensors | None,
    processors: LogitsProcessors | None,
    draft_probs: DraftProbs | None,
    processed_logprobs: bool,
    outputs: Annotated[VerifyOutputs, Written],
    workspace: Written | None,
) -> None: ...
def top_logprobs(
    logits: Tensor,
    n: Size,
    processed_logprobs: bool,
    drafts: Drafts | None,
    positions: Tensor | None,
    sampling: SamplingTensors | None,
    processors: LogitsProcessors | None,
    outputs: Annotated[TopLogprobsOutputs, Written],
    workspace: Written | None,
) -> None: ...
def set_verify_stamps(stamps: object | None) -> None: ...
def sampling_workspace_bytes(
    rows: int, vocab_size: int, element_bytes: int, batch: int, device_index: int
) -> int: ...
def commit(
    emitted: Annotated[EmittedTokens, Written],
    slots: Tensor,
    token_ids: Written,
    lens: Written,
    prompt_lens: Tensor | None,
    rules: EndingRules | None,
    counts: Annotated[TokenCounts, Written] | None,
    status: Annotated[RequestStatus, Written] | None,
    num_committed_tokens: Written | None,
) -> None: ...
def philox4x32(seed: int, counter: list[int]) -> list[int]: ...

# suffix_tree
def ngram_propose(
    token_ids: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    min_ngram_size: int | Tensor,
    max_ngram_size: int | Tensor,
    leftmost: bool | Tensor,
    num_given_drafts: Tensor | None,
    max_total_draft_tokens: int | None,
    table: Written | None,
    state: Written | None,
    scan_tokens: int | None,
    index_tokens: int | None,
    draft_token_ids: Written,
    num_draft_tokens: Written,
    match_lens: Written | None,
) -> None: ...

class SuffixCache:
    def __init__(
        self,
        draft_type: type[SuffixDraft],
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
        max_cached_tokens: int,
        max_cached_bytes: int,
        read_on: bool,
        background_tokens: int,
        decoding_cache_names: bool,
    ) -> None: ...
    def start(self, request_id: Hashable, prompt: TokenIds, scope: str) -> int: ...
    def extend(self, request_id: Hashable, token_ids: TokenIds) -> None: ...
    def speculate(
        self,
        request_id: Hashable,
        max_draft_tokens: int,
        use_tree: bool,
        max_spec_factor: float | None,
        max_spec_offset: float | None,
        min_token_prob: float | None,
        context: TokenIds | None,
    ) -> SuffixDraft: ...
    def step(
        self,
        requests: Tensor,
        new_token_ids: Tensor,
        num_new_tokens: Tensor,
        max_draft_tokens: Tensor,
        draft_token_ids: Tensor,
        num_draft_tokens: Tensor | None,
        num_given_drafts: Tensor | None,
        parents: Tensor | None,
        probs: Tensor | None,
        scores: Tensor | None,
        match_lens: Tensor | None,
        use_tree: bool,
    ) -> Tensor: ...
    def stop(self, request_id: Hashable) -> None: ...
    def evict(self, request_id: Hashable) -> None: ...
    def discard(self, request_id: Hashable) -> bool: ...
    def add(self, token_ids: TokenIds, request_id: Hashable | None, scope: str | None) -> None: ...
    def reclaim(self) -> int: ...
    def wait(self) -> None: ...
    def save(self, path: str | PathLike[str], label: str) -> None: ...
    @staticmethod
    def read_label(path: str | PathLike[str]) -> str: ...
    def load(self, path: str | PathLike[str]) -> None: ...
    def running_requests(self) -> list[Hashable]: ...
    def cached_requests(self) -> list[Hashable | None]: ...
    def num_cached_requests(self) -> int: ...
    def num_cached_tokens(self) -> int: ...
    def num_common_requests(self) -> int: ...
    def num_scopes(self) -> int: ...
    def num_bytes(self) -> int: ...
    def count(self, token_ids: TokenIds, request_id: Hashable | None) -> int: ...
    def check_integrity(self) -> str: ...
