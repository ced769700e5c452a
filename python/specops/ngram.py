# SPDX-License-Identifier: Apache-2.0
"""Drafts from a request's own tokens: continuations of earlier matches of its last tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specops import _C
from specops._wrong import check_kind, empty


@dataclass(frozen=True)
class NgramIndex:
    """An index of rows, so that `ngram_propose` need not read them again in every step.

    With it a call costs as much as there are new tokens, however long the rows are; the drafts are
    those without it. It belongs to the rows of one `token_ids`, which only grow at their ends:
    `reset` a row that is given to another request, or rewritten. The index of a row that comes back
    shorter, or with other n-gram sizes, or with another side, is rebuilt automatically.

    A row's last `scan_tokens` tokens are scanned rather than noted, and a row of less than four
    times that is scanned as a whole, so short rows cost nothing more. At most `index_tokens` are
    noted in a call; until a long prompt is, the rest of it is scanned. A row needs an entry for
    each of its different n-grams, of each size, and the sizes share its entries evenly. N-grams
    without room are scanned, and so are rows of more than 16 sizes.

    Attributes:
        table: [batch, entries], int32. Any content; a row of it is cleared when first used.
        state: [batch, 2], int32. Zeros in the beginning.
        scan_tokens: at least 0. None: 2,048 on the CPU, 4,096 on CUDA, where a scan costs about a
            look-up.
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
        """Makes an index with 4 bytes per size and token.

        Args:
            batch: rows.
            max_len: tokens of a row.
            num_sizes: number of n-gram sizes: max_ngram_size - min_ngram_size + 1.
            device: where the rows are.
            scan_tokens: as the attribute.
            index_tokens: as the attribute.
        """
        table = torch.empty((batch, num_sizes * max_len), dtype=torch.int32, device=device)
        state = torch.zeros((batch, 2), dtype=torch.int32, device=device)
        return cls(table, state, scan_tokens, index_tokens)

    def reset(self, row: int) -> None:
        """Forgets a row. Nothing waits for the device."""
        self.state[row] = 0


def ngram_propose(
    token_ids: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    min_ngram_size: int | Tensor,
    max_ngram_size: int | Tensor,
    leftmost: bool | Tensor = False,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor | None = None,
    match_lens: Tensor | None = None,
    num_given_drafts: Tensor | None = None,
    max_total_draft_tokens: int | None = None,
    index: NgramIndex | None = None,
) -> tuple[Tensor, Tensor]:
    """Drafts the tokens that followed an earlier occurrence of each request's last tokens.

    Same as `reference.ngram_propose`. For each request, with t = token_ids[b, :lens[b]]:

        for n = max_ngram_size down to min_ngram_size:
            for start = lens[b] - n - 1 down to 0, or up from 0 to it where leftmost:
                if t[start : start + n] == t[-n:]:
                    the drafts are t[start + n :], at most min(max_draft_tokens[b], k) of them

    so the longest match wins, and among the longest the most recent one, or the leftmost. A row
    holds prompt and output in one piece, and a match may span both; it may overlap the last tokens,
    too. Drafts end where the row ends.

    Drafts that another drafter has put into `draft_token_ids` count as the last tokens of t, and
    new drafts are written after them. They count towards every limit, and no limit cuts them; a
    request whose limit they reach, or whose limit is 0, keeps them and their number. So several
    drafters may continue each other in one buffer, with `num_draft_tokens` as both input and output
    number.

    With `max_total_draft_tokens` the requests share a total: each is cut to the largest equal cap
    that keeps the sum within it, and the remainder goes one each to the first requests that the cap
    has cut.

    Args:
        token_ids: [batch, max_len], int32. Prompt and output of each request; rows may be strided.
            Not read past lens[b].
        lens: [batch], int32. Tokens of each request.
        max_draft_tokens: [batch], int32. Most drafts each request wants; 0 turns it off.
        min_ngram_size: at least 1; one int, or int32 [batch].
        max_ngram_size: at least min_ngram_size; one int, or int32 [batch].
        leftmost: one bool, or int32 [batch] of 0 and 1.
        draft_token_ids: [batch, k], int32. Written: the drafts, then -1. The given drafts stay.
        num_draft_tokens: [batch], int32. Written: how many drafts, given ones included. Allocated
            when absent.
        match_lens: [batch], int32. Receives how many tokens matched where the request's drafts were
            found, at most max_ngram_size, and 0 where this call has added none.
        num_given_drafts: [batch], int32. How many of each request are there already; may be
            `num_draft_tokens` itself. None: none.
        max_total_draft_tokens: most drafts of all requests together, at least 0. None: no limit.
        index: of these rows; changed. None reads every row from its end to the match.

    Returns:
        `draft_token_ids` and `num_draft_tokens`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a length is outside
            0 .. max_len; a limit is negative; the n-gram sizes are not in order. Nothing has been
            written then. On CUDA wrong values in tensors are reported by `specops.check_errors`;
            such a request has no drafts.

    Note:
        Deterministic, and equal with and without an index, on every device. Without one: one scan
        per request, whatever the sizes, which ends at the first match of max_ngram_size tokens.
        With one: a scan of scan_tokens, and a look-up per size and new token. No host read: it may
        be captured in a CUDA graph.

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
