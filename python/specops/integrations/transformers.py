# SPDX-License-Identifier: Apache-2.0
"""`append_attention` for Hugging Face transformers: `attn_implementation="specops"`.

    from specops.integrations import transformers as specops_transformers

    specops_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="specops")
    model.generate(**inputs, past_key_values=specops_transformers.PagedCache())

Attention computes a row in the same way in prefill, decoding and verification: its bits depend
neither on other rows of the call nor on the batch or the padding. All other layers of the model
remain torch's. The tokens that a row attends to are derived from transformers' masks, once per
step. Causal masks with padding, a sliding window or packed sequences are supported, in any cache.
Other features raise an error that names them: other kinds of masks, four-dimensional masks,
dropout, soft caps, position biases, and inputs that require gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import causal_mask_function, sdpa_mask

from specops.attention import PagedBatch, PagedKv, append_attention

PAGE_SIZE = 64

# Options of attention implementations in transformers that `append_attention` does not support.
_UNSUPPORTED = (
    "dropout",
    "softcap",
    "position_bias",
    "output_attentions",
    "cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "indices",
    "block_indices",
)


def register() -> None:
    """Make "specops" an `attn_implementation` of transformers."""
    # With a static cache, `generate` compiles the model, but attention must stay uncompiled.
    uncompiled = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register("specops", uncompiled)
    AttentionMaskInterface.register("specops", make_mask)


class PagedCache(Cache):  # type: ignore[misc]
    """KV cache whose tensors consist of whole pages, which `attention` reads in place."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_PagedLayer)


class _PagedLayer(DynamicLayer):  # type: ignore[misc]
    """Layer of a `PagedCache`; `keys` and `values` are views of the used part of larger buffers."""

    is_initialized: bool

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Append keys and values [batch, heads, tokens, head_dim], and return the whole cache."""
        if not self.is_initialized:
            self.dtype = key_states.dtype
            self.device = key_states.device
            self.is_initialized = True
            self.keys = key_states[:, :, :0]
            self.values = value_states[:, :, :0]
        self.keys = _appended(self.keys, key_states)
        self.values = _appended(self.values, value_states)
        return self.keys, self.values


def _appended(old: Tensor, new: Tensor) -> Tensor:
    before = old.shape[2]
    size = before + new.shape[2]
    buffer = _buffer_of(old)
    if buffer is None or buffer.shape[1] < size:
        capacity = _whole_pages(max(size, 2 * before))
        buffer = new.new_zeros(new.shape[0], capacity, new.shape[1], new.shape[3])
        buffer[:, :before] = old.transpose(1, 2)
    buffer[:, before:size] = new.transpose(1, 2)
    return buffer[:, :size].transpose(1, 2)


def _buffer_of(x: Tensor) -> Tensor | None:
    """Return the whole buffer [batch, tokens, heads, head_dim] of a view.

    Return None if the buffer does not consist of whole pages in this layout.
    """
    batch, heads, _, head_dim = x.shape
    stride, token = x.stride(0), heads * head_dim
    num_bytes = batch * stride * x.element_size()
    is_whole = x.untyped_storage().nbytes() == num_bytes and stride % (PAGE_SIZE * token) == 0
    if x.storage_offset() or x.stride()[1:] != (head_dim, token, 1) or not stride or not is_whole:
        return None
    return x.as_strided((batch, stride // token, heads, head_dim), (stride, token, head_dim, 1))


def _whole_pages(num_tokens: int) -> int:
    return -(-max(num_tokens, 1) // PAGE_SIZE) * PAGE_SIZE


@dataclass
class StepMask:
    """Attention mask of a step in the form that `append_attention` takes, shared by all layers.

    transformers passes it to `attention` unchanged, like a four-dimensional mask.

    Attributes:
        qo_indptr: [sequences + 1], int32.
        kv_lens: [sequences], int32.
        rows: [rows], int64. Indices of the batch's rows that attend to any token. None: all rows.
        slots: [2, sequences, tokens], int64. For each slot of a sequence's pages, the batch index
            and the column of its key. None: each sequence is a batch entry, from column 0 on.
        window: number of tokens that a row attends to with a sliding window; None: no window.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    rows: Tensor | None = None
    slots: Tensor | None = None
    window: int | None = None

    ndim = 4

    _page_tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def contiguous(self) -> "StepMask":
        """Return the mask itself; transformers calls this method on masks."""
        return self

    def page_table(self, num_pages: int) -> tuple[Tensor, Tensor]:
        """Return kv_indptr and kv_indices of consecutive pages, `num_pages` per sequence.

        They are computed once per step.
        """
        if num_pages not in self._page_tables:
            count, device = len(self.kv_lens), self.kv_lens.device
            kv_indices = torch.arange(num_pages, dtype=torch.int32, device=device)
            kv_indptr = torch.arange(count + 1, dtype=torch.int32, device=device)
            self._page_tables[num_pages] = kv_indptr * (num_pages // max(count, 1)), kv_indices
        return self._page_tables[num_pages]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | StepMask | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> StepMask:
    """Make the mask of a step; the arguments follow transformers' interface.

    Args:
        batch_size: number of sequences in the batch.
        q_length: rows per sequence.
        kv_length: number of key tokens, including the unused capacity of a static cache.
        q_offset: number of tokens before the rows.
        kv_offset: number of tokens that a sliding cache has dropped before its first key.
        mask_function: selects the tokens that a row attends to: all before it, a window, or its
            packed sequence.
        attention_mask: bool [batch, tokens], False for padding; None: no padding.
        device: device of the layers.
        options: passed on to transformers' own masks.

    Returns:
        The mask.

    Raises:
        ValueError: the mask is of another kind.
    """
    if isinstance(attention_mask, StepMask):
        return attention_mask
    is_causal = mask_function is causal_mask_function
    if is_causal and attention_mask is None:
        return _causal(batch_size, q_length, q_offset - kv_offset + q_length, device)
    end = int(q_offset) + q_length - kv_offset  # number of used columns, including the new rows
    text = torch.ones(batch_size, end, dtype=torch.bool, device=device)
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + end]
        text[:, : padding.shape[1]] = padding
        text[:, padding.shape[1] :] = False
    if is_causal:
        if bool(text.all()):
            return _causal(batch_size, q_length, end, device)
        begins = text.int().argmax(1, keepdim=True).expand(-1, q_length)
        return _gathered(text, begins)
    seen = sdpa_mask(
        batch_size,
        q_length,
        end,
        q_offset,
        kv_offset,
        mask_function,
        allow_is_causal_skip=False,
        device=device,
        use_vmap=options.get("use_vmap", False),
    )
    return _read(seen[:, 0] & text[:, None], text)


def _causal(batch: int, rows: int, kv_len: int | Tensor, device: torch.device | str) -> StepMask:
    """Return a purely causal mask, without reading device memory."""
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
    kv_lens = torch.zeros(batch, dtype=torch.int32, device=device) + kv_len
    return StepMask(qo_indptr, kv_lens)


def _read(seen: Tensor, text: Tensor) -> StepMask:
    """Convert a boolean mask `seen` [batch, q_length, columns].

    Each row must see its sequence up to itself, perhaps only a window of it; else raise ValueError.
    """
    q_length, end = seen.shape[1:]
    columns = torch.arange(end, device=seen.device)
    own_columns = columns[end - q_length :]
    firsts = seen.byte().argmax(2)
    text_begins = text.byte().argmax(1)
    # A row that sees only itself begins a sequence; the first row may continue a cached one.
    begins = torch.where(firsts == own_columns, own_columns, text_begins[:, None])
    begins[:, 0] = text_begins
    begins = begins.cummax(1).values

    is_text = text[:, own_columns]
    expected = (columns >= firsts[..., None]) & (columns <= own_columns[:, None]) & text[:, None]
    places = text.cumsum(1)
    spans = places[:, own_columns] - places.gather(1, firsts) + 1
    windows = set(spans[is_text & (firsts > begins)].tolist())
    is_known = bool(((seen == expected) | ~is_text[..., None]).all())
    if not is_known or len(windows) > 1:
        raise ValueError(
            "attn_implementation 'specops' supports causal masks with padding, a sliding window or "
            "packed sequences, got a mask of another kind"
        )
    if bool(text.all()) and not bool(begins.any()):
        mask = _causal(len(text), q_length, end, text.device)
    else:
        mask = _gathered(text, begins)
    mask.window = windows.pop() if windows else None
    return mask


def _gathered(text: Tensor, begins: Tensor) -> StepMask:
    """Return the mask of packed sequences, given the first column of each row's sequence."""
    device = text.device
    batch, end = text.shape
    q_length = begins.shape[1]
    text, begins = text.cpu(), begins.cpu()
    rows = text[:, end - q_length :].flatten().nonzero()[:, 0]
    # Columns and tokens (`places`) are numbered consecutively over the whole batch.
    of_batch = torch.arange(batch)[:, None] * end
    own_columns = (of_batch + torch.arange(end - q_length, end)).flatten()[rows]
    begins = (of_batch + begins).flatten()[rows]
    firsts, lens = torch.unique_consecutive(begins, return_counts=True)
    qo_indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    places = text.flatten().cumsum(0) - 1
    begin = places[firsts][:, None]
    last = places[own_columns[qo_indptr[1:] - 1]][:, None]
    kv_lens = (last - begin + 1)[:, 0]
    # Slots past the end of a sequence are never read; fill them with the last key's position.
    slots = torch.arange(_whole_pages(max(kv_lens.tolist(), default=0)))
    columns = text.flatten().nonzero()[:, 0][torch.minimum(begin + slots, last)]
    return StepMask(
        qo_indptr.int().to(device),
        kv_lens.int().to(device),
        rows.to(device),
        torch.stack([columns // end, columns % end]).to(device),
    )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: StepMask | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of the last rows of each sequence; transformers' interface.

    Args:
        module: the layer.
        query: [batch, num_qo_heads, rows, head_dim], of any dtype `append_attention` takes.
        key: [batch, num_kv_heads, tokens, head_dim]; copied into pages unless it comes from a
            `PagedCache`.
        value: as `key`.
        attention_mask: mask from `make_mask`; None: every row sees all earlier tokens.
        dropout: must be 0.
        scaling: scale of the scores. None: 1 / sqrt(head_dim).
        sliding_window: number of tokens that a row attends to. None: all.
        is_causal: must be True; None: the layer's setting, which must be True.
        s_aux: [num_qo_heads], attention sinks of gpt-oss. None: no sinks.
        options: arguments of other attention implementations.

    Returns:
        [batch, rows, num_qo_heads, head_dim], zeros in rows of padding; and None for the weights.

    Raises:
        ValueError: the model needs an option that `append_attention` does not support, or
            gradients.
    """
    for name, setting in (("dropout", dropout), *options.items()):
        is_off = setting is None or (isinstance(setting, (bool, int, float)) and not setting)
        if name in _UNSUPPORTED and not is_off:
            got = repr(setting)
            if isinstance(setting, Tensor):
                got = f"a tensor {list(setting.shape)}"
            raise ValueError(f"attn_implementation 'specops' does not support {name}, got {got}")
    if not (module.is_causal if is_causal is None else is_causal):
        raise ValueError(
            "attn_implementation 'specops' supports only causal attention, got is_causal=False"
        )
    inputs = [x for x in (query, key, value, s_aux) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ValueError(
            "attn_implementation 'specops' computes no gradients, got inputs that require them; "
            "use torch.no_grad(), or another implementation for training"
        )
    batch, num_heads, rows, head_dim = query.shape
    mask = attention_mask
    if mask is None:
        mask = _causal(batch, rows, key.shape[2], query.device)
    elif not isinstance(mask, StepMask):
        raise ValueError(
            "attn_implementation 'specops' requires the model's attention_mask to have shape "
            f"[batch, tokens], got {list(mask.shape)}"
        )
    if mask.window not in (None, sliding_window):
        raise ValueError(
            "attn_implementation 'specops' requires a mask with the layer's sliding_window of "
            f"{sliding_window}, got one of {mask.window} tokens"
        )
    q = query.transpose(1, 2).contiguous().view(batch * rows, num_heads, head_dim)
    cache = PagedKv(_pages(key, mask.slots), _pages(value, mask.slots))
    out = append_attention(
        q if mask.rows is None else q[mask.rows],
        cache,
        PagedBatch(mask.qo_indptr, *mask.page_table(len(cache.k)), mask.kv_lens),
        sm_scale=scaling,
        sliding_window=sliding_window,
        sinks=None if s_aux is None else s_aux.float(),
    )
    assert isinstance(out, Tensor)
    if mask.rows is not None:
        out = torch.zeros_like(q).index_copy_(0, mask.rows, out)
    return out.view(batch, rows, num_heads, head_dim), None


def _pages(x: Tensor, slots: Tensor | None) -> Tensor:
    """Return keys or values as pages [pages, PAGE_SIZE, heads, head_dim], copying if needed."""
    batch, heads, tokens, head_dim = x.shape
    if slots is not None:
        batch_indices, columns = slots
        pages = x[batch_indices, :, columns]
    elif (buffer := _buffer_of(x)) is not None:
        pages = buffer
    else:
        pages = x.new_zeros(batch, _whole_pages(tokens), heads, head_dim)
        pages[:, :tokens] = x.transpose(1, 2)
    return pages.view(pages.shape[0] * pages.shape[1] // PAGE_SIZE, PAGE_SIZE, heads, head_dim)
