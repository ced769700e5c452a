# SPDX-License-Identifier: Apache-2.0
"""Drafts from a request's own tokens: continuations of earlier matches of its last tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specops import _C
from specops._checks import check_kind, empty


@dataclass(frozen=True)
class NgramIndex:
    """An index of rows, so that `ngram_propose` need not scan whole rows in every step.

    With an index the cost of a call depends on the number of new tokens, not on the length of the
    rows; the drafts are the same as without it. It belongs to the rows of one `token_ids`, which
    may only be appended to: call `reset` for a row that is rewritten or reused by another request.
    The index of a row is rebuilt automatically if the row has become shorter, or if the n-gram
    sizes or `leftmost` have changed.

    A row's last `scan_tokens` tokens are scanned rather than indexed, and a row of less than four
    times that is scanned as a whole, so short rows cost nothing extra. A call indexes at most
    `index_tokens` tokens; the part of a long prompt that is not yet indexed is scanned. A row needs
    one entry for each distinct n-gram of each size, and the sizes share the entries evenly. N-grams
    that do not fit are scanned, and so are rows with more than 16 sizes.

    Attributes:
        table: [batch, entries], int32. Any initial content; a row is cleared when first used.
        state: [batch, 2], int32. Initially zeros.
        scan_tokens: at least 0. None: 2,048 on the CPU, 4,096 on CUDA, where a scan costs about as
            much as a look-up.
        index_tokens: at least 0. None: 256.
    """

    table: Tensor
    state: Tensor
    scan_tokens: int | None = None
    index_tokens: int | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        max_len: int,
        *,
        num_sizes: int = 4,
        device: torch.device | str = "cpu",
        scan_tokens: int | None = None,
        index_tokens: int | None = None,
    ) -> "NgramIndex":
        """Make an index with 4 bytes per size and token.

        Args:
            batch: number of rows.
            max_len: maximum tokens per row.
            num_sizes: number of n-gram sizes: max_ngram_size - min_ngram_size + 1.
            device: device of the rows.
            scan_tokens: see the attribute.
            index_tokens: see the attribute.
        """
        table = torch.empty((batch, num_sizes * max_len), dtype=torch.int32, device=device)
        state = torch.zeros((batch, 2), dtype=torch.int32, device=device)
        return cls(table, state, scan_tokens, index_tokens)

    def reset(self, row: int) -> None:
        """Clear the index of a row, without waiting for the device."""
        self.state[row] = 0


def ngram_propose(
    token_ids: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    min_ngram_size: int | Tensor = 2,
    max_ngram_size: int | Tensor = 5,
    leftmost: bool | Tensor = False,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor | None = None,
    match_lens: Tensor | None = None,
    num_given_drafts: Tensor | None = None,
    max_total_draft_tokens: int | None = None,
    index: NgramIndex | None = None,
) -> tuple[Tensor, Tensor]:
    """Draft the tokens that followed an earlier occurrence of each request's last tokens.

    Same as `reference.ngram_propose`. For each request, with t = token_ids[b, :lens[b]]:

        for n = max_ngram_size down to min_ngram_size:
            for start = lens[b] - n - 1 down to 0, or from 0 up to that if leftmost:
                if t[start : start + n] == t[-n:]:
                    the drafts are t[start + n :], at most min(max_draft_tokens[b], k) of them

    so the longest match wins, and among the longest the most recent one, or the leftmost. A row
    holds prompt and output in one piece. A match may span both, and may overlap the last tokens.
    Drafts end where the row ends.

    Drafts that another drafter has written to `draft_token_ids` count as the last tokens of t, and
    new drafts are written after them. They count towards every limit, but no limit removes them: a
    request whose limit they reach, or whose limit is 0, keeps them and their number. So several
    drafters can continue each other in one buffer, with `num_draft_tokens` as both input and output
    number.

    With `max_total_draft_tokens` the requests share a total: each is limited to the largest common
    cap that keeps the sum within it, and the remainder goes, one each, to the first requests that
    the cap has limited.

    Args:
        token_ids: [batch, max_len], int32. Prompt and output of each request; rows may be strided.
            Not read past lens[b].
        lens: [batch], int32. Tokens of each request.
        max_draft_tokens: [batch], int32. Maximum number of drafts of each request; 0 turns drafting
            off.
        min_ngram_size: at least 1; one int, or int32 [batch].
        max_ngram_size: at least min_ngram_size; one int, or int32 [batch].
        leftmost: one bool, or int32 [batch] of 0 and 1.
        draft_token_ids: [batch, k], int32. Written: the drafts, then -1. Existing drafts stay.
        num_draft_tokens: [batch], int32. Written: number of drafts, existing ones included.
            Allocated when absent.
        match_lens: [batch], int32. Receives the length of the match that the request's drafts
            follow, at most max_ngram_size; 0 if this call added no drafts.
        num_given_drafts: [batch], int32. Number of existing drafts of each request; may be
            `num_draft_tokens` itself. None: none.
        max_total_draft_tokens: maximum drafts of all requests together, at least 0. None: no limit.
        index: index of these rows; updated. None: scan every row from its end to the match.

    Returns:
        `draft_token_ids` and `num_draft_tokens`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a length is outside
            0 .. max_len; a limit is negative; the n-gram sizes are not in order. Nothing has been
            written then. On CUDA wrong values in tensors are reported by `specops.check_errors`;
            such a request has no drafts.

    Note:
        Deterministic, and equal with and without an index, on every device. Without an index each
        request takes one scan for all sizes, which ends at the first match of max_ngram_size
        tokens. With an index it takes a scan of scan_tokens, and a look-up per size and new token.
        The host reads nothing, so the call may be captured in a CUDA graph.

    Source: Saxena 2023, "Prompt Lookup Decoding"; FastDeploy's ngram_match.
    """
    if num_draft_tokens is None:
        num_draft_tokens = empty(lambda: ((lens.numel(),), torch.int32, lens))
    table = state = scan_tokens = index_tokens = None
    if index is not None:
        check_kind("ngram_propose", "index", index, NgramIndex, ", or None")
        table, state = index.table, index.state
        scan_tokens, index_tokens = index.scan_tokens, index.index_tokens
    _C.ngram_propose(
        token_ids,
        lens,
        max_draft_tokens,
        min_ngram_size,
        max_ngram_size,
        leftmost,
        num_given_drafts,
        max_total_draft_tokens,
        table,
        state,
        scan_tokens,
        index_tokens,
        draft_token_ids,
        num_draft_tokens,
        match_lens,
    )
    return draft_token_ids, num_draft_tokens
