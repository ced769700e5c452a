# SPDX-License-Identifier: Apache-2.0
"""A CPU stand-in for FlashInfer as the benchmarks call it: parameters, workspaces, true results.

Results come from `reference`, computed only from the arguments of each call, so a wrong argument
gives a wrong result, which the benchmarks refuse. fa3 does not run here, as on GPUs before Hopper.
"""

import math
import types
from itertools import pairwise

import torch
from specops import reference
from specops.attention import PagedBatch, PagedKv
from torch import Tensor


def attend(q, caches, qo_indptr, kv_indptr, kv_indices, kv_lens, *, causal=True, **options):
    """Return out and the base-2 lse, as FlashInfer does."""
    cache = PagedKv(*caches)
    if causal:
        batch = PagedBatch(qo_indptr, kv_indptr, kv_indices, kv_lens)
        out, lse = reference.append_attention(q, cache, batch, **options)
        return out, lse / math.log(2)
    # Every row sees all of its group, as if it were alone after it.
    outs, lses = [], []
    for group, (start, end) in enumerate(pairwise(qo_indptr)):
        pages = kv_indices[kv_indptr[group] : kv_indptr[group + 1]]
        one = torch.tensor([0, 1], dtype=torch.int32)
        indptr, length = torch.tensor([0, len(pages)]).int(), kv_lens[group : group + 1]
        for row in range(int(start), int(end)):
            batch = PagedBatch(one, indptr, pages, length)
            out, lse = reference.append_attention(q[row : row + 1], cache, batch)
            outs.append(out)
            lses.append(lse / math.log(2))
    return torch.cat(outs), torch.cat(lses)


def lens_of(kv_indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    return ((kv_indptr.diff() - 1) * page_size + last_page_len).int()


class Wrapper:
    """Base of wrappers that are planned before they run, in a workspace provided by the caller."""

    def __init__(self, workspace, kv_layout, *, use_tensor_cores=False, backend="auto") -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"
        self.backend, self.use_tensor_cores = backend, use_tensor_cores
        self.options = {}

    def run(self, q, paged_kv_cache, *, out, lse=None, return_lse=False):
        self.check(q, paged_kv_cache)
        found = attend(q, paged_kv_cache, *self.paged, causal=self.causal, **self.options)
        out.copy_(found[0])
        if lse is not None:
            lse.copy_(found[1])
        return (out, lse) if return_lse else out

    def check(self, q, caches) -> None:
        heads, types = self.planned
        num_qo_heads, num_kv_heads, head_dim, page_size = heads
        assert q.shape[1:] == (num_qo_heads, head_dim)
        assert caches[0].shape[1:] == (page_size, num_kv_heads, head_dim)
        assert types == (q.dtype, caches[0].dtype)


class Decode(Wrapper):
    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        q_data_type,
        kv_data_type,
    ) -> None:
        assert self.use_tensor_cores and indptr[-1] == indices.shape[0]
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self.paged = (rows, indptr, indices, lens_of(indptr, last_page_len, page_size))
        self.planned = (
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_data_type, kv_data_type),
        )
        self.causal = True


class Prefill(Wrapper):
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        sm_scale=None,
        window_left=-1,
        q_data_type,
        kv_data_type,
    ) -> None:
        assert qo_indptr.shape == paged_kv_indptr.shape
        assert paged_kv_indptr[-1] == len(paged_kv_indices) and qo_indptr.dtype == torch.int32
        assert paged_kv_indptr.dtype == paged_kv_indices.dtype == torch.int32
        self.options = {
            "sm_scale": sm_scale,
            "sliding_window": window_left + 1 if window_left >= 0 else None,
        }
        if self.backend == "fa3":
            raise RuntimeError("fa3 needs Hopper")
        lens = lens_of(paged_kv_indptr, paged_kv_last_page_len, page_size)
        self.paged = (qo_indptr, paged_kv_indptr, paged_kv_indices, lens)
        self.planned = (
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            (q_data_type, kv_data_type),
        )
        self.causal = causal


class BatchAttention:
    def __init__(self, kv_layout="NHD") -> None:
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo,
        page_size,
        causal=False,
        sm_scale=None,
        q_data_type=torch.float16,
        kv_data_type=torch.float16,
    ) -> None:
        assert causal and head_dim_qk == head_dim_vo
        assert q_data_type == kv_data_type == torch.bfloat16
        self.paged = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    def run(self, q, kv_cache, out=None, lse=None):
        found = attend(q, kv_cache, *self.paged)
        return out.copy_(found[0]), lse.copy_(found[1])


def xqa_batch_decode_with_kv_cache(
    query,
    kv_cache,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_seq_len,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    out=None,
    kv_layout="NHD",
    q_len_per_req=1,
    mask=None,
) -> Tensor:
    """Check that the workspace is zero and that the mask is causal, and compute the result."""
    assert not workspace_buffer.any() and kv_layout == "NHD" and bmm2_scale == 1.0
    assert seq_lens.dtype == torch.uint32 and block_tables.dtype == torch.int32
    lens = seq_lens.to(torch.int64)
    batch, most = block_tables.shape
    assert max_seq_len == lens.max() and query.shape[0] == batch * q_len_per_req
    if q_len_per_req > 1:
        assert mask.shape == (batch, q_len_per_req, -(-q_len_per_req // 32) * 2)
        assert mask.dtype == torch.uint16
        bits = (mask.to(torch.int64)[..., None] >> torch.arange(16)) & 1
        sees = bits.flatten(2)[:, :, :q_len_per_req].bool()
        assert (sees == torch.ones(q_len_per_req, q_len_per_req).tril().bool()).all()
        assert not bits.flatten(2)[:, :, q_len_per_req:].any()
    counts = -(-lens // kv_cache[0].shape[1])
    assert counts.max() == most
    pages = torch.cat([block_tables[b, : counts[b]] for b in range(batch)])
    kv_indptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    rows = torch.arange(batch + 1, dtype=torch.int32) * q_len_per_req
    assert math.isclose(bmm1_scale, query.shape[-1] ** -0.5)
    return out.copy_(attend(query, kv_cache, rows, kv_indptr, pages, lens.int())[0])


def merge_state_in_place(v, s, v_other, s_other) -> None:
    largest = torch.maximum(s, s_other)
    ours, theirs = torch.exp2(s - largest), torch.exp2(s_other - largest)
    total = ours + theirs
    v.copy_((v * (ours / total)[..., None] + v_other * (theirs / total)[..., None]).to(v.dtype))
    s.copy_(largest + torch.log2(total))


class MultiLevelCascade:
    """A wrapper for each level; only the last one is causal."""

    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD") -> None:
        self.levels = [Prefill(float_workspace_buffer, kv_layout) for _ in range(num_levels)]

    def plan(
        self,
        qo_indptr_arr,
        paged_kv_indptr_arr,
        paged_kv_indices_arr,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=False,
        q_data_type=torch.float16,
    ) -> None:
        arrays = (
            qo_indptr_arr,
            paged_kv_indptr_arr,
            paged_kv_indices_arr,
            paged_kv_last_page_len,
        )
        for level, *of_level in zip(self.levels, *arrays, strict=True):
            level.plan(
                *of_level,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level is self.levels[-1],
                q_data_type=q_data_type,
                kv_data_type=q_data_type,
            )

    def run(self, q, paged_kv_cache):
        states = [
            level.run(
                q,
                paged_kv_cache,
                out=torch.empty_like(q),
                lse=torch.empty(q.shape[:2]),
                return_lse=True,
            )
            for level in self.levels
        ]
        for out, lse in states[:-1]:
            merge_state_in_place(*states[-1], out, lse)
        return states[-1][0]


def chain_speculative_sampling(
    draft_probs,
    draft_token_ids,
    target_probs,
    maybe_output_accepted_token_num=None,
    maybe_output_emitted_draft_token_num=None,
    *,
    seed,
    offset,
):
    batch, num_drafts, vocab_size = draft_probs.shape
    assert draft_token_ids.shape == (batch, num_drafts)
    assert target_probs.shape == (batch, num_drafts + 1, vocab_size)
    for counter in (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num):
        assert counter.shape == (batch,) and counter.dtype == torch.int32
        counter.add_(1)
    return target_probs.argmax(-1)


def modules() -> dict[str, types.ModuleType]:
    """Return the modules that `import flashinfer` would find."""
    package = types.ModuleType("flashinfer")
    sampling, decode = (
        types.ModuleType("flashinfer.sampling"),
        types.ModuleType("flashinfer.decode"),
    )
    package.BatchDecodeWithPagedKVCacheWrapper = Decode
    package.BatchPrefillWithPagedKVCacheWrapper = Prefill
    package.BatchAttention = BatchAttention
    package.MultiLevelCascadeAttentionWrapper = MultiLevelCascade
    package.merge_state_in_place = merge_state_in_place
    decode.xqa_batch_decode_with_kv_cache = xqa_batch_decode_with_kv_cache
    sampling.softmax = lambda logits: logits.softmax(-1)
    sampling.top_p_renorm_probs = lambda probs, top_p: probs
    sampling.top_p_sampling_from_probs = lambda probs, top_p, *, seed, offset: probs.argmax(-1)
    sampling.top_k_top_p_sampling_from_logits = lambda logits, top_k, top_p, *, seed, offset: (
        logits.argmax(-1)
    )
    sampling.chain_speculative_sampling = chain_speculative_sampling
    package.sampling, package.decode = sampling, decode
    return {
        "flashinfer": package,
        "flashinfer.sampling": sampling,
        "flashinfer.decode": decode,
    }
