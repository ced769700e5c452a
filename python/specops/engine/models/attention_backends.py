# SPDX-License-Identifier: Apache-2.0
"""What computes a layer's attention: our op, or, for comparison, torch's or FlashInfer's.

Only ours gives a row the same bits whatever stands beside it. With the others speculation may
change a token, which is why an engine with them calls itself not exact.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specops import attention

if TYPE_CHECKING:
    from specops.engine.models.transformer import LayerBatch, LayerKv

BACKENDS = ("specops", "torch", "flashinfer")
_FLASHINFER_WORKSPACE_BYTES = 128 << 20  # as its documentation has it


class AttentionBackend(Protocol):
    """Computes the attention of one layer from the cache."""

    def __call__(
        self,
        q: Tensor,
        cache: "LayerKv",
        batch: "LayerBatch",
        *,
        sm_scale: float,
        sliding_window: int | None,
        out: Tensor,
    ) -> None:
        """Fills `out` [rows, num_qo_heads, head_dim], as `append_attention` does."""


def backend_of(name: str, device: torch.device, *, has_8_bit_cache: bool) -> AttentionBackend:
    """Returns the backend of one of `BACKENDS`.

    Raises:
        ValueError: it cannot be used here.
    """
    if name == "flashinfer":
        return _flashinfer(device, has_8_bit_cache)
    return {"specops": by_specops, "torch": by_torch}[name]


def by_specops(
    q: Tensor,
    cache: "LayerKv",
    batch: "LayerBatch",
    *,
    sm_scale: float,
    sliding_window: int | None,
    out: Tensor,
) -> None:
    """`append_attention`."""
    attention.append_attention(
        q,
        cache.k,
        cache.v,
        batch.qo_indptr,
        batch.kv_indptr,
        batch.kv_indices,
        batch.kv_lens,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        k_scales=cache.k_scales,
        v_scales=cache.v_scales,
        prefix_leaders=batch.prefix_leaders,
        prefix_lens=batch.prefix_lens,
        out=out,
        workspace=batch.workspace,
    )


def by_torch(
    q: Tensor,
    cache: "LayerKv",
    batch: "LayerBatch",
    *,
    sm_scale: float,
    sliding_window: int | None,
    out: Tensor,
) -> None:
    """`scaled_dot_product_attention`, request by request, over a copy of its pages."""
    page_size = cache.k.shape[1]
    rows, places, lens = (
        x.tolist() for x in (batch.qo_indptr, batch.kv_indptr, batch.kv_lens)
    )  # on a GPU the host waits for them
    out[rows[-1] :] = 0
    for request, kv_len in enumerate(lens):
        begin, end = rows[request], rows[request + 1]
        if begin == end:
            continue
        # Pages before every row's window may be others' by now.
        position = kv_len - (end - begin)
        first = 0 if sliding_window is None else max(position - sliding_window + 1, 0)
        first -= first % page_size
        pages = batch.kv_indices[places[request] + first // page_size : places[request + 1]]
        columns = torch.arange(first, kv_len, device=q.device)
        rows_at = torch.arange(position, kv_len, device=q.device)[:, None]
        seen = columns <= rows_at
        if sliding_window is not None:
            seen &= columns > rows_at - sliding_window
        attended = scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None],
            _gathered(cache.k, cache.k_scales, pages, kv_len - first, q.dtype),
            _gathered(cache.v, cache.v_scales, pages, kv_len - first, q.dtype),
            attn_mask=seen,
            scale=sm_scale,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)


def _gathered(
    cache: Tensor, scales: Tensor | None, pages: Tensor, tokens: int, dtype: torch.dtype
) -> Tensor:
    """The first tokens of some pages, [1, num_kv_heads, tokens, head_dim]."""
    count = -(-tokens // cache.shape[1])
    index = pages[:count].long()
    if scales is None:
        found = cache[index]
    else:  # torch does not index elements of float8_e4m3fn
        elements = cache.view(torch.uint8)[index].view(cache.dtype).float()
        found = (elements * scales[index][..., None]).to(dtype)
    return found.flatten(0, 1)[:tokens].transpose(0, 1)[None]


def _flashinfer(device: torch.device, has_8_bit_cache: bool) -> AttentionBackend:
    if device.type != "cuda":
        raise ValueError(f"attention_backend flashinfer needs a GPU, got device {device}")
    if has_8_bit_cache:
        raise ValueError(
            "attention_backend flashinfer needs a kv_cache_dtype of auto: it knows no scale per "
            "token and head"
        )
    try:
        flashinfer = import_module("flashinfer")
    except ModuleNotFoundError:
        raise ValueError(
            "attention_backend flashinfer needs flashinfer, which is not installed: "
            "pip install flashinfer-python"
        ) from None
    return ByFlashInfer(flashinfer, device)


class ByFlashInfer:
    """FlashInfer's paged prefill, planned anew for every layer: simple, for comparison."""

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        workspace = torch.empty(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def __call__(
        self,
        q: Tensor,
        cache: "LayerKv",
        batch: "LayerBatch",
        *,
        sm_scale: float,
        sliding_window: int | None,
        out: Tensor,
    ) -> None:
        """Plans from the lengths, and runs."""
        page_size = cache.k.shape[1]
        # Its lists end with a request's last page, and idle requests have none.
        has_rows = batch.qo_indptr.diff() > 0
        lens = torch.where(has_rows, batch.kv_lens, 0)
        counts = (lens + page_size - 1) // page_size
        kv_indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        within = torch.arange(int(kv_indptr[-1]), device=q.device)
        within -= kv_indptr[:-1].repeat_interleave(counts)
        places = batch.kv_indptr[:-1].repeat_interleave(counts) + within
        num_rows = int(batch.qo_indptr[-1])
        self._wrapper.plan(
            batch.qo_indptr,
            kv_indptr,
            batch.kv_indices[places],
            (lens - (counts - 1) * page_size).clamp(min=0).int(),
            q.shape[1],
            cache.k.shape[2],
            q.shape[2],
            page_size,
            causal=True,
            sm_scale=sm_scale,
            window_left=-1 if sliding_window is None else sliding_window - 1,
            q_data_type=q.dtype,
            kv_data_type=cache.k.dtype,
        )
        self._wrapper.run(q[:num_rows], (cache.k, cache.v), out=out[:num_rows])
        out[num_rows:] = 0
