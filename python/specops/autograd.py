# SPDX-License-Identifier: Apache-2.0
"""Ops of a dense model with gradients: a trainer computes the logprobs that the engine reports.

The forward pass of each function is the op of this package, whose rows have the same bits in every
batch. So the logprobs of a training step equal those of the rollout, bit for bit, if both use the
same weights. The backward pass is the derivative that PyTorch computes of the same formula from the
same inputs; it recomputes the formula and keeps nothing else. Gradients are deterministic, but
their bits depend on torch and on the batch.

Gradients exist only in these functions: the ops themselves still refuse tensors that require them.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specops import attention as attention_ops
from specops import batching, dense, reference, sampling
from specops.argument_groups import Drafts, PagedBatch, PagedKv, VerifyOutputs

_PAGE_SIZE = 16  # tokens


class _OpWithFormula(torch.autograd.Function):
    """Function whose value comes from an op, and its gradients from a formula in PyTorch."""

    @staticmethod
    def forward(
        ctx: Any,
        op: Callable[..., Tensor],
        formula: Callable[..., Tensor],
        *tensors: Tensor | None,
    ) -> Tensor:
        """Return the value of the op."""
        ctx.formula = formula
        ctx.save_for_backward(*tensors)
        return op(*(None if one is None else one.detach() for one in tensors))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of the formula at the saved inputs."""
        needed = ctx.needs_input_grad[2:]
        inputs = [
            None if one is None else one.detach().requires_grad_(needs)
            for one, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            value = ctx.formula(*inputs)
        wanted = [one for one in inputs if one is not None and one.requires_grad]
        gradients = iter(torch.autograd.grad(value, wanted, gradient))
        return None, None, *(next(gradients) if needs else None for needs in needed)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Look up the rows of tokens; see `dense.embedding`."""
    return _apply(
        lambda weight: dense.embedding(token_ids, weight),
        lambda weight: functional.embedding(token_ids, weight),
        weight,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize rows by their root mean square; see `dense.rms_norm`."""
    return _apply(
        lambda x, weight: dense.rms_norm(x, weight, eps),
        lambda x, weight: reference.rms_norm(x, weight, eps)[0],
        x,
        weight,
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply rows with a weight, `x @ weight.T + bias`; see `dense.linear`.

    Args:
        x: [rows, num_inputs], bfloat16 or float32, on CUDA also float16.
        weight: [num_outputs, num_inputs], dtype of `x`. It is packed at each call.
        bias: [num_outputs], dtype of `x`; or None.
        activation: activation of a weight whose first half of rows makes gates and the other half
            ups, as in `dense.pack_weight`; the output is then half as wide.
        out_dtype: dtype of the output, that of `x` or float32; None: that of `x`.

    Returns:
        The output, [rows, num_outputs].
    """

    def op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        packed = dense.pack_weight(weight, activation=activation)
        return dense.linear(x, packed, bias, out_dtype=out_dtype)

    def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return reference.linear(x, weight, bias, out_dtype, activation=activation)

    return _apply(op, formula, x, weight, bias)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens: Sequence[int],
    cos_sin: Tensor,
    *,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Compute causal attention within whole sequences, which lie one after another.

    The ops are `attention.rope_append_kv` and `attention.append_attention`, with keys and values in
    the dtype of `q`, and a scale of head_dim ** -0.5.

    Args:
        q: [rows, num_qo_heads, head_dim], before RoPE.
        k: [rows, num_kv_heads, head_dim], before RoPE.
        v: [rows, num_kv_heads, head_dim].
        lens: number of rows of each sequence, at least 1. They add up to `rows`; each sequence
            begins at position 0.
        cos_sin: [max_positions, rotary_dim], float32, from `attention.rope_cos_sin`.
        q_norm_weight: [head_dim] for RMSNorm of q before RoPE; or None.
        k_norm_weight: [head_dim] for RMSNorm of k before RoPE; or None.
        norm_eps: added to the mean square of a head.

    Returns:
        The output, in the shape and dtype of `q`.

    Raises:
        ValueError: `lens` has a number below 1 or does not add up to the rows, or an op refuses a
            tensor.
    """
    _check_lens("attention", lens, len(q))
    num_pages = [-(-length // _PAGE_SIZE) for length in lens]
    kv_lens = torch.tensor(lens, dtype=torch.int32, device=q.device)
    kv_indptr = _starts(num_pages, q)
    kv_indices = torch.arange(sum(num_pages), dtype=torch.int32, device=q.device)
    rows = batching.prepare_batch(
        kv_lens,
        kv_lens,
        torch.full_like(kv_lens, batching.OutputMode.NONE),
        kv_indptr,
        kv_indices,
        page_size=_PAGE_SIZE,
    )

    def rotated(
        rope_append_kv: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_norm_weight: Tensor | None,
        k_norm_weight: Tensor | None,
    ) -> tuple[Tensor, PagedKv]:
        pages = (sum(num_pages), _PAGE_SIZE, *k.shape[1:])
        cache = PagedKv(k.new_zeros(pages), k.new_zeros(pages))
        norms: dict[str, Any] = {
            "q_norm_weight": q_norm_weight,
            "k_norm_weight": k_norm_weight,
            "norm_eps": norm_eps,
        }
        slots, positions = rows.cache_slots, rows.positions
        return rope_append_kv(q, k, v, cache, slots, positions, cos_sin, **norms), cache

    def op(*tensors: Tensor) -> Tensor:
        q, cache = rotated(attention_ops.rope_append_kv, *tensors)
        paged = PagedBatch(rows.qo_indptr, kv_indptr, kv_indices, kv_lens)
        return attention_ops.append_attention(q, cache, paged)

    def formula(*tensors: Tensor) -> Tensor:
        q, cache = rotated(reference.rope_append_kv, *tensors)
        assert cache.v is not None
        k, v = (one.flatten(0, 1)[rows.cache_slots] for one in (cache.k, cache.v))
        outputs = [
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in zip(
                *(one.transpose(0, 1).float().split_with_sizes(lens, 1) for one in (q, k, v)),
                strict=True,
            )
        ]
        return torch.cat(outputs, 1).transpose(0, 1).to(q.dtype)

    return _apply(op, formula, q, k, v, q_norm_weight, k_norm_weight)


def token_logprobs(logits: Tensor, token_ids: Tensor, lens: Sequence[int]) -> Tensor:
    """Return the logprob of each token of whole sequences, given the tokens before it.

    The logprobs are those of the untouched logits, as `sample` and `verify` report them by default.

    Args:
        logits: [rows, vocab_size], float32: those after each token.
        token_ids: [rows], int32: the sequences, one after another.
        lens: number of tokens of each sequence, at least 1. They add up to `rows`.

    Returns:
        The logprobs, [rows], float32; 0 for the first token of each sequence.

    Raises:
        ValueError: `lens` has a number below 1 or does not add up to the rows, or an op refuses a
            tensor.
    """
    _check_lens("token_logprobs", lens, len(logits))

    def op(logits: Tensor) -> Tensor:
        # `verify` reports the logprobs of drafts that it accepts.
        table = torch.nn.utils.rnn.pad_sequence(
            list(token_ids.split_with_sizes(lens)), batch_first=True, padding_value=-1
        )
        drafts = Drafts(_starts(lens, logits), table[:, 1:].contiguous())
        logprobs = logits.new_zeros(table.shape)
        sampling.verify(
            logits,
            drafts,
            table.new_ones(len(lens)),
            policy=sampling.AcceptPolicy.ACCEPT_ALL,
            outputs=VerifyOutputs(logprobs=logprobs),
        )
        first = logits.new_zeros(1)
        return torch.cat(
            [
                torch.cat([first, row[: length - 1]])
                for row, length in zip(logprobs, lens, strict=True)
            ]
        )

    def formula(logits: Tensor) -> Tensor:
        chosen = functional.log_softmax(logits, -1)[:-1].gather(1, token_ids[1:, None].long())[:, 0]
        is_first = torch.zeros_like(token_ids, dtype=torch.bool)
        is_first[_starts(lens, logits)[:-1].long()] = True
        return functional.pad(chosen, (1, 0)).masked_fill(is_first, 0.0)

    return _apply(op, formula, logits)


def _apply(
    op: Callable[..., Tensor], formula: Callable[..., Tensor], *tensors: Tensor | None
) -> Tensor:
    """Apply an op to tensors, with the gradients of a formula."""
    value: Tensor = _OpWithFormula.apply(op, formula, *tensors)  # type: ignore[no-untyped-call]
    return value


def _starts(lens: Sequence[int], like: Tensor) -> Tensor:
    """Return where each sequence starts, and where the last one ends."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=like.device)


def _check_lens(function: str, lens: Sequence[int], num_rows: int) -> None:
    """Refuse lengths that do not divide the rows into sequences."""
    if min(lens, default=0) < 1 or sum(lens) != num_rows:
        raise ValueError(
            f"{function}: lens must be numbers of at least 1 that add up to {num_rows} rows, "
            f"got {list(lens)}"
        )
