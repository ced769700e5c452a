# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers with `append_attention`: `attn_implementation="specops"`.

    from specops import transformers as specops_transformers

    specops_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="specops")
    model.generate(**inputs, past_key_values=specops_transformers.PagedCache())

Attention computes a row the same way in prefill, decoding and verification: its bits do not depend
on the other rows of the call, the batch or the padding. The model's other layers are torch's.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import flash_attention_mask

from specops.attention import append_attention

PAGE_SIZE = 64


def register() -> None:
    """Makes "specops" an `attn_implementation` of transformers."""
    AttentionInterface.register("specops", attention)
    AttentionMaskInterface.register("specops", flash_attention_mask)


class PagedCache(Cache):  # type: ignore[misc]
    """A cache whose tensors are whole pages, which `attention` reads where they lie."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_PagedLayer)


class _PagedLayer(DynamicLayer):  # type: ignore[misc]
    """`keys` and `values` are views of the first tokens of room for more."""

    is_initialized: bool

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Appends keys and values [batch, heads, tokens, head_dim], and returns all there are."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = _appended(self.keys, key_states)
        self.values = _appended(self.values, value_states)
        return self.keys, self.values


def _appended(old: Tensor, new: Tensor) -> Tensor:
    before, size = old.shape[2], old.shape[2] + new.shape[2]
    room = _room(old)
    if room is None or room.shape[1] < size:
        capacity = -(-max(size, 2 * before) // PAGE_SIZE) * PAGE_SIZE
        room = new.new_zeros(new.shape[0], capacity, new.shape[1], new.shape[3])
        room[:, :before] = old.transpose(1, 2)
    room[:, before:size] = new.transpose(1, 2)
    return room[:, :size].transpose(1, 2)


def _room(x: Tensor) -> Tensor | None:
    """All of the memory [batch, tokens, heads, head_dim] behind a view, if it is whole pages."""
    batch, heads, _, head_dim = x.shape
    stride, token = x.stride(0), heads * head_dim
    num_bytes = batch * stride * x.element_size()
    is_whole = x.untyped_storage().nbytes() == num_bytes and stride % (PAGE_SIZE * token) == 0
    if x.storage_offset() or x.stride()[1:] != (head_dim, token, 1) or not stride or not is_whole:
        return None
    return x.as_strided((batch, stride // token, heads, head_dim), (stride, token, head_dim, 1))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attends causally from the last rows of each sequence, as transformers' interface has it.

    Args:
        module: the layer; causal.
        query: [batch, num_qo_heads, rows, head_dim], of any dtype `append_attention` takes.
        key: [batch, num_kv_heads, tokens, head_dim]; pages are made of it unless it is one of
            `PagedCache`.
        value: as `key`.
        attention_mask: bool [batch, tokens], False for padding; None: there is none.
        dropout: 0.
        scaling: of the scores. None: 1 / sqrt(head_dim).
        sliding_window: tokens a row sees. None: all.
        s_aux: [num_qo_heads], the sinks of gpt-oss. None: none.

    Returns:
        [batch, rows, num_qo_heads, head_dim], zeros in rows of padding; and None, no weights.

    Raises:
        ValueError: the model asks for what `append_attention` has not.
    """
    asked = {"dropout": dropout, "softcap": options.get("softcap")}
    asked["rows that see later ones"] = options.get("is_causal", module.is_causal) is False
    for name, wanted in asked.items():
        if wanted is not None and wanted is not False and wanted != 0.0:
            raise ValueError(f"attn_implementation 'specops' has no {name}, got {wanted!r}")
    batch, rows, device = query.shape[0], query.shape[2], query.device
    k_room, v_room = (None, None) if attention_mask is not None else (_room(key), _room(value))
    if attention_mask is None:
        attention_mask = torch.ones(batch, key.shape[2], dtype=torch.bool, device=device)
    if k_room is None or v_room is None:
        k_room, v_room = _gathered(key, attention_mask), _gathered(value, attention_mask)
    pages = k_room.shape[1] // PAGE_SIZE
    shape = (batch * pages, PAGE_SIZE, *k_room.shape[2:])
    wanted = attention_mask[:, -rows:]
    q = query.transpose(1, 2)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    rows_out = append_attention(
        q[wanted],
        k_room.view(shape),
        v_room.view(shape),
        torch.nn.functional.pad(wanted.sum(1).cumsum(0), (1, 0)).int(),
        torch.arange(batch + 1, dtype=torch.int32, device=device) * pages,
        torch.arange(batch * pages, dtype=torch.int32, device=device),
        attention_mask.sum(1).int(),
        sm_scale=scaling,
        sliding_window=sliding_window,
        sinks=None if s_aux is None else s_aux.float(),
    )
    assert isinstance(rows_out, Tensor)
    out[wanted] = rows_out
    return out, None


def _gathered(x: Tensor, mask: Tensor) -> Tensor:
    """Whole pages [batch, tokens, heads, head_dim] with the tokens of a mask, one after another."""
    batch, heads, _, head_dim = x.shape
    capacity = -(-max(mask.shape[1], 1) // PAGE_SIZE) * PAGE_SIZE
    room = x.new_zeros(batch, capacity, heads, head_dim)
    there = torch.arange(capacity, device=x.device) < mask.sum(1, keepdim=True)
    room[there] = x.transpose(1, 2)[:, : mask.shape[1]][mask]
    return room
