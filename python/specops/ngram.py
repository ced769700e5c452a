# SPDX-License-Identifier: Apache-2.0
"""Drafts found in a request's own tokens: what followed earlier where its last tokens stood."""

import torch
from torch import Tensor

from specops import _C
from specops._wrong import unless_wrong


def ngram_propose(
    token_ids: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    min_ngram_size: int | Tensor,
    max_ngram_size: int | Tensor,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Drafts the tokens that followed an earlier occurrence of each request's last tokens.

    Same as `reference.ngram_propose`. For each request, with t = token_ids[b, :lens[b]]:

        for n = max_ngram_size down to min_ngram_size:
            for start = lens[b] - n - 1 down to 0:
                if t[start : start + n] == t[-n:]:
                    the drafts are t[start + n :], at most min(max_draft_tokens[b], k) of them

    so the longest match wins, and among the longest the most recent one. A row holds prompt and
    output in one piece, and a match may span both; it may overlap the last tokens, too. Drafts end
    where the row ends.

    Args:
        token_ids: [batch, max_len], int32. Prompt and output of each request; rows may be strided.
            What stands past lens[b] is not read.
        lens: [batch], int32. Tokens of each request.
        max_draft_tokens: [batch], int32. Most drafts each request wants; 0 turns it off.
        min_ngram_size: at least 1; one int, or int32 [batch].
        max_ngram_size: at least min_ngram_size; one int, or int32 [batch].
        draft_token_ids: [batch, k], int32. Written: the drafts, then -1.
        num_draft_tokens: [batch], int32. Written: how many drafts. Allocated when absent.

    Returns:
        `draft_token_ids` and `num_draft_tokens`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a length is outside
            0 .. max_len; a limit is negative; the n-gram sizes are not in order. Nothing has been
            written then. On CUDA wrong values in tensors are told by `specops.check_errors`; such a
            request has no drafts.

    Note:
        Deterministic. One backward scan per request, whatever the sizes; it ends at the first match
        of max_ngram_size tokens.

    Source: Saxena 2023, "Prompt Lookup Decoding"; FastDeploy's ngram_match.
    """
    if num_draft_tokens is None:
        num_draft_tokens = unless_wrong(
            lambda: torch.empty(lens.numel(), dtype=torch.int32, device=lens.device)
        )
    _C.ngram_propose(
        token_ids,
        lens,
        max_draft_tokens,
        min_ngram_size,
        max_ngram_size,
        draft_token_ids,
        num_draft_tokens,
    )
    return draft_token_ids, num_draft_tokens
