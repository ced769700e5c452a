# SPDX-License-Identifier: Apache-2.0
"""Distribution that a row's token is sampled from: uniforms, processed logits, filters."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from specops.argument_groups import Drafts, LogitsProcessors, SamplingTensors

DRAFT, ACCEPT, RESIDUAL, TARGET = range(4)  # purposes of uniforms

# (seed, position, purpose, choice_index, sub_index, anchor) -> [0, 1); tests may replace it.
Uniform = Callable[[int, int, int, int, int, int], float]


def philox4x32(seed: int, counter: list[int]) -> list[int]:
    """Return a block of Philox4x32-10: four 32-bit words, from a 64-bit seed and four counters."""
    mask = 0xFFFFFFFF
    k0, k1 = seed & mask, seed >> 32 & mask
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def philox_uniform(
    seed: int,
    position: int,
    purpose: int,
    choice_index: int = 0,
    sub_index: int = 0,
    anchor: int = 0,
) -> float:
    """Return the uniform random number in [0, 1) for one decision.

    Purposes: 0 draft, 1 accept, 2 residual, 3 target.
    """
    word = philox4x32(seed, [position, purpose | sub_index << 8, choice_index, anchor])[0]
    return (word >> 8) * 2.0**-24


def _clean(x: Tensor) -> Tensor:
    """Replace NaN by -inf and +inf by the largest finite float32."""
    top = torch.finfo(torch.float32).max
    return x.nan_to_num(nan=-torch.inf, posinf=top, neginf=-torch.inf)


def _clean_logits(logits: Tensor) -> Tensor:
    return _clean(logits.double())


def kept_tokens(
    row: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the weights of one row (the largest is 1), and the mask of tokens the filters keep."""
    x = _clean_logits(row)
    order = torch.sort(x, descending=True, stable=True).indices
    weights = ((x - x.max()) / temperature).exp()
    kept = torch.zeros_like(x, dtype=torch.bool)
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        running = weights[order].cumsum(0)
        short = int((running < top_p * running[-1]).sum())
        order = order[: short + 1]
    kept[order] = True
    kept &= weights >= min_p
    if typical_p < 1.0:
        ids = kept.nonzero().flatten()
        probs = weights[ids] / weights[ids].sum()
        surprise = -probs.log()
        entropy = torch.special.entr(probs).sum()
        order = torch.sort((surprise - entropy).abs(), stable=True).indices
        short = int((probs[order].cumsum(0) < typical_p).sum())
        kept[ids[order[short + 1 :]]] = False
    return weights, kept


def target_probs(
    row: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    """Return the distribution that a row's token is sampled from, in float64.

    With temperature 0, it is one-hot at the first maximum. If every logit is NaN or -inf, it is
    one-hot at token 0.
    """
    x = _clean_logits(row)
    if temperature == 0 or x.max() == -torch.inf:
        return torch.nn.functional.one_hot((x == x.max()).nonzero()[0, 0], len(x)).double()
    weights, kept = kept_tokens(row, temperature, top_k, top_p, min_p, typical_p)
    return weights * kept / (weights * kept).sum()


def _draw(weights: Tensor, u: float) -> int:
    """Sample by inverse CDF: return the first id where the running weight exceeds u * total."""
    running = weights.cumsum(0)
    return int((running > u * running[-1]).nonzero()[0])


def _log_softmax(row: Tensor) -> Tensor:
    x = _clean_logits(row)
    if x.max() == -torch.inf:
        return x
    shifted = x - x.max()
    return shifted - shifted.exp().sum().log()


def _log_probs(row: Tensor, filters: Mapping[str, Any]) -> Tensor:
    """Return the logprobs after the filters; at temperature 0, those of the logits."""
    if filters["temperature"] == 0 or _clean_logits(row).max() == -torch.inf:
        return _log_softmax(row)
    return target_probs(row, **filters).log()


def _rank(row: Tensor, token_id: int) -> int:
    x = _clean_logits(row)
    return 1 + int((x > x[token_id]).sum())


_FILTERS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


def _of(column: Tensor | float | None, i: int, default: float = 0) -> Any:
    """Return the value of row i; a number applies to all rows, and None means the default."""
    if column is None:
        return default
    return column[i].item() if isinstance(column, Tensor) else column


def _filters_of(sampling: SamplingTensors, i: int) -> dict[str, Any]:
    return {name: _of(getattr(sampling, name), i, off) for name, off in _FILTERS.items()}


def process_logits(
    logits: Tensor,
    processors: LogitsProcessors | None,
    positions: Tensor,
    drafts: Drafts | None = None,
) -> Tensor:
    """Return the logits after mask, bad words, min tokens, bias and penalties, in the same dtype.

    Without drafts, every row is a request, as in `sample`. The drafts on the path to a row count as
    output tokens.
    """
    out = logits.clone()
    if processors is None:
        return out
    bounds = range(len(logits) + 1) if drafts is None else drafts.output_indptr.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for r in range(end - begin):
            in_flight: list[int] = []
            if drafts is not None:
                parents = None if drafts.parents is None else drafts.parents[b].tolist()
                in_flight = drafts.token_ids[b, _path(r, parents)].tolist()
            out[begin + r] = _process_row(
                logits[begin + r],
                processors,
                _of(processors.slots, b, -1),
                _of(processors.mask_indices, begin + r, -1),
                int(positions[b]),
                in_flight,
            )
    return out


def _path(row: int, parents: list[int] | None) -> list[int]:
    """Return the nodes on the path from the root (not a node) to a row; row r > 0 is node r - 1.

    parents None is a chain: the parent of node n is node n - 1.
    """
    if parents is None:
        return list(range(row))
    return [] if row == 0 else [*_path(parents[row - 1] + 1, parents), row - 1]


def _process_row(
    row: Tensor, p: Any, slot: int, mask: int, position: int, in_flight: list[int]
) -> Tensor:
    """Apply the processors to one row; every operation is rounded to float32, in this order."""
    x = _clean(row.float())
    if mask >= 0:
        ids = torch.arange(len(x))
        words = p.allowed_token_mask[mask].long()
        x[(words[ids // 32] >> ids % 32 & 1) == 0] = -torch.inf
    if slot >= 0:
        if p.bad_words is not None:
            tokens = ([] if position == 0 else p.token_ids[slot, :position].tolist()) + in_flight
            for padded in p.bad_words[slot].tolist():
                *before, last = [t for t in padded if t >= 0] or [-1]
                if last >= 0 and before == tokens[len(tokens) - len(before) :]:
                    x[last] = -torch.inf
        if p.min_tokens is not None and p.stop_token_ids is not None:
            output_len = position - int(p.prompt_lens[slot]) + len(in_flight)
            stops = p.stop_token_ids[slot]
            if output_len < int(p.min_tokens[slot]):
                x[stops[stops >= 0].long()] = -torch.inf
        if p.logit_bias is not None:
            ids = p.logit_bias_token_ids[slot]
            x[ids[ids >= 0].long()] += p.logit_bias[slot][ids >= 0]
        counts = torch.zeros(len(x), dtype=torch.int32)
        in_prompt = torch.zeros(len(x), dtype=torch.bool)
        if p.counted_token_ids is not None:
            ids = p.counted_token_ids[slot]
            packed = p.token_counts[slot][ids >= 0]
            counts[ids[ids >= 0].long()] = packed >> 1
            in_prompt[ids[ids >= 0].long()] = (packed & 1) == 1
        for token_id in in_flight:
            if 0 <= token_id < len(x):
                counts[token_id] += 1
        if p.repetition_penalty is not None:
            penalty = p.repetition_penalty[slot]
            seen = in_prompt | (counts > 0)
            x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
        if p.frequency_penalty is not None:
            x = torch.where(counts > 0, x - p.frequency_penalty[slot] * counts.float(), x)
        if p.presence_penalty is not None:
            x = torch.where(counts > 0, x - p.presence_penalty[slot], x)
    return _clean(x.to(row.dtype).float()).to(row.dtype)
