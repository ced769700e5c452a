# SPDX-License-Identifier: Apache-2.0
"""Index arrays of a ragged batch: each row's request and cache slot, and the rows that get logits.

Rows of all requests lie next to each other without padding. For kernels that expect a padded
[batch, max_seq_len] matrix, the arrays include the offsets in it; the matrix is never built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from specops import _C
from specops._checks import check_int, check_kind, describe, empty, try_or_none
from specops.argument_groups import PrefixTensors

_CPU = torch.device("cpu")


class OutputMode(IntEnum):
    """Selection of the rows of a request that produce logits in this step."""

    NONE = 0  # a prefill chunk that does not end the prompt
    LAST = 1  # plain decoding, or the chunk that ends the prompt
    ALL = 2  # verification: every row, for the last token and for each draft


@dataclass
class BatchIndices:
    """Index arrays of one step, made by `prepare_batch`; entries past the real rows are -1.

    Attributes:
        qo_indptr: [batch + 1], int32. Rows of request b are qo_indptr[b] .. qo_indptr[b + 1].
        row_to_request: [total_rows], int32.
        positions: [total_rows], int32. Absolute position of each row in its request.
        cache_slots: [total_rows], int64. Slot of each row in the paged cache.
        output_indptr: [batch + 1], int32. Output rows of request b are output_indptr[b] ..
            output_indptr[b + 1].
        output_rows: [num_output_rows], int32. The row each output row comes from.
        output_row_to_request: [num_output_rows], int32.
        output_padding_offset: [num_output_rows], int32, or None without `max_seq_len`.
        output_cum_offsets: [batch], int32, or None without `max_seq_len`.
    """

    qo_indptr: Tensor
    row_to_request: Tensor
    positions: Tensor
    cache_slots: Tensor
    output_indptr: Tensor
    output_rows: Tensor
    output_row_to_request: Tensor
    output_padding_offset: Tensor | None = None
    output_cum_offsets: Tensor | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        *,
        total_rows: int,
        num_output_rows: int,
        max_seq_len: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "BatchIndices":
        """Allocate the arrays, uninitialized, to be passed to `prepare_batch` as `out`.

        Args:
            batch: number of requests.
            total_rows: capacity of the row arrays.
            num_output_rows: capacity of the output row arrays.
            max_seq_len: None omits the two arrays of the padded view.
            device: device of the arrays.

        Returns:
            The arrays.
        """

        def int32(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        return cls(
            qo_indptr=int32(batch + 1),
            row_to_request=int32(total_rows),
            positions=int32(total_rows),
            cache_slots=torch.empty(total_rows, dtype=torch.int64, device=device),
            output_indptr=int32(batch + 1),
            output_rows=int32(num_output_rows),
            output_row_to_request=int32(num_output_rows),
            output_padding_offset=None if max_seq_len is None else int32(num_output_rows),
            output_cum_offsets=None if max_seq_len is None else int32(batch),
        )


@dataclass
class DraftTree:
    """A tree of drafts per request, made by `build_tree`. Row 0 is the root, node j is row j + 1.

    Attributes:
        depths: [batch, nodes + 1], int32. 0 for the root; -1 for rows past the request's nodes.
        row_positions: [batch, nodes + 1], int32. Position of the root plus depth; -1 for rows past
            the request's nodes.
        ancestor_mask: [batch, nodes + 1, ceil((nodes + 1) / 32)], int32. Bit c % 32 of word c // 32
            of row r is set if row c is r itself or an ancestor of r. 0 past the request's nodes.
        first_child: [batch, nodes + 1], int32. The lowest node whose parent is the row, or -1.
        next_sibling: [batch, nodes], int32. The next node with the same parent, or -1.
        sibling_index: [batch, nodes], int32. Number of earlier nodes with the same parent; -1 past
            the request's nodes.
    """

    depths: Tensor
    row_positions: Tensor
    ancestor_mask: Tensor
    first_child: Tensor
    next_sibling: Tensor
    sibling_index: Tensor

    @classmethod
    def empty(cls, batch: int, nodes: int, *, device: torch.device | str = "cpu") -> "DraftTree":
        """Allocate the arrays, uninitialized, to be passed to `build_tree` as `out`.

        Args:
            batch: number of requests.
            nodes: width of `parents`.
            device: device of the arrays.

        Returns:
            The arrays.
        """

        def int32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            depths=int32(batch, nodes + 1),
            row_positions=int32(batch, nodes + 1),
            ancestor_mask=int32(batch, nodes + 1, nodes // 32 + 1),
            first_child=int32(batch, nodes + 1),
            next_sibling=int32(batch, nodes),
            sibling_index=int32(batch, nodes),
        )


@dataclass
class DraftIndices:
    """Index arrays of one pass of a drafting module; entries past the real rows are -1.

    `prepare_draft_batch` makes them for the first pass of a step, and `advance_draft_batch` for the
    following passes.

    Attributes:
        qo_indptr: [batch + 1], int32. Rows of request b are qo_indptr[b] .. qo_indptr[b + 1].
        kv_lens: [batch], int32. Tokens in the module's cache, including this pass; 0 without rows.
        last_rows: [batch], int32. The row whose hidden state drafts the next token, or -1.
        draft_positions: [batch], int32. The position of that token, or 0.
        row_to_request: [total_rows], int32.
        positions: [total_rows], int32. Position of each row; the same as in the target.
        cache_slots: [total_rows], int64. Slot of each row in the paged cache.
        source_rows: [total_rows], int32. Source of the row's hidden state: a row of the previous
            pass (of the target, for the first pass), or -2 - i for row i of `keep_hidden_rows`.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    last_rows: Tensor
    draft_positions: Tensor
    row_to_request: Tensor
    positions: Tensor
    cache_slots: Tensor
    source_rows: Tensor

    @classmethod
    def empty(
        cls, batch: int, *, total_rows: int | None = None, device: torch.device | str = "cpu"
    ) -> "DraftIndices":
        """Allocate the arrays, uninitialized, to be passed as `out`.

        Args:
            batch: number of requests.
            total_rows: capacity of the row arrays. None: one row per request, as in the passes
                after the first.
            device: device of the arrays.

        Returns:
            The arrays.
        """

        def int32(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        if total_rows is None:
            total_rows = batch
        return cls(
            qo_indptr=int32(batch + 1),
            kv_lens=int32(batch),
            last_rows=int32(batch),
            draft_positions=int32(batch),
            row_to_request=int32(total_rows),
            positions=int32(total_rows),
            cache_slots=torch.empty(total_rows, dtype=torch.int64, device=device),
            source_rows=int32(total_rows),
        )


# `out` of `advance_draft_batch`.
_Following = TypeVar("_Following", bound=DraftIndices | None)


class Preorder(NamedTuple):
    """The nodes of one tree in preorder, made by `preorder`.

    Attributes:
        nodes: index of each node before reordering.
        parents: parent of each node, as an index into the new order; -1: the root.
    """

    nodes: list[int]
    parents: list[int]


@dataclass
class TreeChains:
    """Trees of drafts as chains, made by `tree_chains`; unused entries are padded as noted.

    Attributes:
        chain_indptr: [batch + 1], int32. Chains of request b are chain_indptr[b] ..
            chain_indptr[b + 1], in order of its rows.
        qo_lens: [chains], int32. Rows of each chain; padded with 0.
        kv_lens: [chains], int32. Tokens that the last row sees, itself included; padded with 0.
        kv_indptr: [chains + 1], int32. First page of each chain in `kv_indices`; padded with the
            last end.
        kv_indices: [pages], int32. Page ids; padded with 0.
        from_slots: [copies], int64. Slots of tokens that must be copied to the spare pages of a
            chain; padded with -1.
        to_slots: [copies], int64. Slots to copy those tokens to; padded with -1.
    """

    chain_indptr: Tensor
    qo_lens: Tensor
    kv_lens: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    from_slots: Tensor
    to_slots: Tensor

    @classmethod
    def empty(cls, batch: int, *, chains: int, pages: int, copies: int) -> "TreeChains":
        """Allocate the arrays, uninitialized, to be passed to `tree_chains` as `out`.

        Args:
            batch: number of requests.
            chains: number of chains of all requests together.
            pages: total entries of all chains' page lists.
            copies: number of tokens to copy.

        Returns:
            The arrays.
        """
        sizes = (batch + 1, chains, chains, chains + 1, pages)
        return cls(
            *[torch.empty(size, dtype=torch.int32) for size in sizes],
            *[torch.empty(copies, dtype=torch.int64) for _ in range(2)],
        )


@dataclass
class SharedPrefixes:
    """Groups of requests that begin with the same pages, found by `find_shared_prefixes`.

    Attributes:
        order: [batch], int32. The requests, ordered so that members of a group are neighbors.
        prefix_leaders: [levels, batch], int32, the argument of `append_attention` for a batch in
            this order. It has no levels if no requests share pages.
        prefix_lens: [levels, batch], int32. Number of tokens that each request's group shares.
        counts: [2], int64. Number of levels, and number of tokens that a step need not read again
            from the cache. Arrays passed as `out` may have more levels; those are unused.
    """

    order: Tensor
    prefix_leaders: Tensor
    prefix_lens: Tensor
    counts: Tensor

    @property
    def tensors(self) -> PrefixTensors:
        """The groups as an argument of `append_attention`."""
        levels = self.num_levels
        return PrefixTensors(self.prefix_leaders[:levels], self.prefix_lens[:levels])

    @property
    def num_levels(self) -> int:
        """Number of levels: the first of `counts`."""
        return int(self.counts[0])

    @property
    def num_saved_tokens(self) -> int:
        """Number of tokens that need not be read again: the second of `counts`."""
        return int(self.counts[1])

    @classmethod
    def empty(cls, batch: int, *, max_levels: int) -> "SharedPrefixes":
        """Allocate the arrays, uninitialized, to be passed to `find_shared_prefixes` as `out`.

        Args:
            batch: number of requests.
            max_levels: maximum number of levels.

        Returns:
            The arrays.
        """
        arrays = torch.empty(1 + 2 * max_levels, batch, dtype=torch.int32)
        leaders, lens = arrays[1 : 1 + max_levels], arrays[1 + max_levels :]
        return cls(arrays[0], leaders, lens, torch.empty(2, dtype=torch.int64))


def prepare_batch(
    qo_lens: Tensor,
    kv_lens: Tensor,
    output_modes: Tensor,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    *,
    page_size: int | None = None,
    total_rows: int | None = None,
    num_output_rows: int | None = None,
    max_seq_len: int | None = None,
    out: BatchIndices | None = None,
) -> BatchIndices:
    """Build every index array of one step over a ragged batch.

    Same as `reference.prepare_batch`. For row i < qo_lens[b] of request b:

        position   = kv_lens[b] - qo_lens[b] + i
        cache_slot = kv_indices[kv_indptr[b] + position // page_size] * page_size
                     + position % page_size

    A request with qo_lens[b] == 0 is idle: it has no rows and no output rows, and its pages are not
    read. The padded view of the output rows has rows of length L = max_seq_len; request b's first
    output row is at b * L. For output row r, v = r + output_padding_offset[r] gives its request,
    v // L, and its index among the request's output rows, v % L; output_cum_offsets[b] = b * L -
    output_indptr[b] is that offset for request b.

    Args:
        qo_lens: [batch], int32. Rows of each request in this step.
        kv_lens: [batch], int32. Tokens of each request in the cache, this step's rows included.
        output_modes: [batch], int32. `OutputMode` of each request.
        kv_indptr: [batch + 1], int32. First page of each request in `kv_indices`. Pass it together
            with `kv_indices` and `page_size`; without these three every cache slot is -1.
        kv_indices: [pages], int32. Page ids. Only pages of this step's rows are read: pages before
            a sliding window may be -1.
        page_size: tokens per page.
        total_rows: capacity of the row arrays, at least the sum of qo_lens. None: the capacity of
            `out`; without `out` the sum itself, for which the host waits.
        num_output_rows: capacity of the output row arrays. None: the capacity of `out`; without
            `out` the number of output rows, for which the host waits.
        max_seq_len: row length L of the padded view, at least every request's output rows. None
            omits output_padding_offset and output_cum_offsets.
        out: arrays of these capacities to write into. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a length is negative;
            kv_lens[b] < qo_lens[b]; a capacity is too small; the page table is too short for
            kv_lens[b]; the page id of a row is negative. Nothing has been written then. On CUDA
            wrong values are reported by `specops.check_errors`: the rows of such a request are -1
            and it has no output rows, rows past a capacity are omitted, and a row with a negative
            page id has no cache slot.

    Note:
        Deterministic. FastDeploy uses `LAST` for a request with one row or in prefill, and `ALL`
        for the others.

    Source: FastDeploy's virtual padding (its speculate_pre_process and
        speculate_get_output_padding_offset).
    """
    if out is None:
        if total_rows is None:
            total_rows = _total(lambda: qo_lens)
        if num_output_rows is None:
            num_output_rows = _total(lambda: _num_output_rows(qo_lens, output_modes))
        check_int("prepare_batch", "total_rows", total_rows)
        check_int("prepare_batch", "num_output_rows", num_output_rows)
        batch, device = try_or_none(lambda: (qo_lens.numel(), qo_lens.device)) or (0, _CPU)
        out = BatchIndices.empty(
            batch,
            total_rows=total_rows,
            num_output_rows=num_output_rows,
            max_seq_len=max_seq_len,
            device=device,
        )
    check_kind("prepare_batch", "out", out, BatchIndices)
    if total_rows is None:
        total_rows = _capacity(out.row_to_request)
    if num_output_rows is None:
        num_output_rows = _capacity(out.output_rows)
    _C.prepare_batch(
        qo_lens,
        kv_lens,
        output_modes,
        kv_indptr,
        kv_indices,
        page_size,
        total_rows,
        num_output_rows,
        max_seq_len,
        out.qo_indptr,
        out.row_to_request,
        out.positions,
        out.cache_slots,
        out.output_indptr,
        out.output_rows,
        out.output_row_to_request,
        out.output_padding_offset,
        out.output_cum_offsets,
    )
    return out


def _total(lengths: Callable[[], Tensor]) -> int:
    """Return the sum of lengths; 0 if an argument is invalid, which the op then reports."""
    total = try_or_none(lambda: lengths().sum())
    if not isinstance(total, Tensor) or total.is_meta or total.dtype != torch.int64:
        return 0
    if isinstance(total, FakeTensor):  # it has no value
        return 0
    return max(int(total), 0)  # raises during the capture of a CUDA graph


def _capacity(rows: Tensor) -> int:
    """Return the length of an array of `out`; 0 if it is no tensor, which the op then reports."""
    return try_or_none(lambda: rows.numel()) or 0


def _num_output_rows(qo_lens: Tensor, output_modes: Tensor) -> Tensor:
    """Return the number of output rows of each request."""
    of_last = torch.where(output_modes == OutputMode.LAST, qo_lens.clamp(max=1), 0)
    return torch.where(output_modes == OutputMode.ALL, qo_lens, of_last)


def pages_of_block_table(block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a dense block table to page lists, in the form that the ops take.

    Entries past a request's last page are never read, so they may hold anything, and the lengths
    need not be known. No entry is copied: if a table is rewritten in place in every step, one call
    in total is enough.

    Args:
        block_table: [batch, max_pages], int32, contiguous. Page ids, in order of position. Rows may
            be omitted at the end (`table[:batch]`); columns must not be.

    Returns:
        kv_indptr: [batch + 1], int32: 0, max_pages, 2 * max_pages and so on.
        kv_indices: [batch * max_pages], int32, the memory of `block_table`.

    Raises:
        ValueError: the table is not as described.

    Note:
        `append_attention` allocates a workspace for all entries, which are many here. Pass one
        sized by `attention_workspace_size` for the pages that the requests may hold together.
    """
    is_table = isinstance(block_table, Tensor) and not block_table.is_nested
    if not is_table or block_table.dim() != 2 or block_table.dtype != torch.int32:
        raise ValueError(
            "pages_of_block_table: block_table must be int32 [batch, max_pages], "
            f"got {describe(block_table)}"
        )
    if not block_table.is_contiguous():
        raise ValueError(
            "pages_of_block_table: block_table must be contiguous, got strides "
            f"{list(block_table.stride())}; pass all columns of a wider table"
        )
    batch, max_pages = block_table.shape
    kv_indptr = torch.arange(batch + 1, dtype=torch.int32, device=block_table.device) * max_pages
    return kv_indptr, block_table.view(-1)


def find_shared_prefixes(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    page_size: int,
    leaf_tokens: int,
    max_levels: int = 8,
    out: SharedPrefixes | None = None,
) -> SharedPrefixes:
    """Find groups of requests that begin with the same pages, to read these once. Runs on the host.

    Same as `reference.find_shared_prefixes`. Only the page lists are compared: requests that
    share a page (of a system prompt, of examples, of a prompt with several choices) have it at the
    same place in their lists. After sorting, lists with a common beginning are neighbors, and the
    common beginnings form nested groups:

        pages 7 8 1     order 0 2 1     prefix_leaders [[0, 0, 0], [0, 0, 2]]
              7 9                       prefix_lens    [[1, 1, 1], [2, 2, 0]] * page_size
              7 8 2                     with leaves of one page

    Run the step's requests in this order, and pass the groups to `append_attention`. They change
    its schedule only: no bit of its result depends on them.

    Args:
        kv_indptr: [batch + 1], int32, on the CPU like all arguments. First page of each request in
            `kv_indices`.
        kv_indices: [pages], int32. Page ids. Omit a request's last page while it is written to: it
            belongs to that request alone.
        page_size: tokens of a page.
        leaf_tokens: tokens of a leaf; a multiple of `page_size`. A group shares whole leaves, at
            least one more than the enclosing group. `append_attention` shares leaves of 64 tokens
            on the CPU and of 256 on CUDA.
        max_levels: maximum number of levels. Deeper groups are merged into the group that
            encloses them on the last level.
        out: arrays with `max_levels` levels to write into and return. Allocated when absent.

    Returns:
        The groups.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or a value is out of
            range.

    Note:
        Deterministic: lists are ordered by their page ids, equal lists by their index. The cost is
        that of sorting the lists.
    """
    found = out
    if found is None:
        check_int("find_shared_prefixes", "max_levels", max_levels)
        batch = try_or_none(lambda: kv_indptr.numel() - 1) or 0
        # There are never more levels than requests.
        found = SharedPrefixes.empty(max(batch, 0), max_levels=max_levels)
    check_kind("find_shared_prefixes", "out", found, SharedPrefixes)
    _C.find_shared_prefixes(
        kv_indptr,
        kv_indices,
        page_size,
        leaf_tokens,
        max_levels,
        found.order,
        found.prefix_leaders,
        found.prefix_lens,
        found.counts,
    )
    if out is None:
        levels = found.num_levels
        found.prefix_leaders = found.prefix_leaders[:levels]
        found.prefix_lens = found.prefix_lens[:levels]
    return found


def gather_input_ids(
    row_to_request: Tensor,
    positions: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    lens: Tensor,
    draft_token_ids: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Look up the token id of every row of a step, in the request's text and its drafts.

    Same as `reference.gather_input_ids`. For a row at position i of request b in slot s = slots[b]:

        out = (token_ids[s, :lens[s]] + draft_token_ids[b])[i]

    One rule covers a prefill chunk, a row of plain decoding (i = lens[s] - 1) and the rows of the
    drafts after it (i = lens[s] + j takes draft j). If the loop stores tokens with
    `sampling.commit`, it therefore never waits for the host. A padding row gets 0, a valid token
    id.

    Args:
        row_to_request: [rows], int32, from `BatchIndices`; -1: padding.
        positions: [rows], int32, from `BatchIndices`.
        slots: [batch], int32. Row of each request in `token_ids` and `lens`.
        token_ids: [num_slots, max_len], int32. Prompt and output of each request; rows may be
            strided.
        lens: [num_slots], int32. Number of tokens in each row of `token_ids`.
        draft_token_ids: [batch, k], int32. The drafts as passed to `sampling.verify`; only drafts
            that have a row are read. None: all rows are known tokens.
        out: [rows], int32. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a request, slot, length
            or position is out of range; a token id that a row takes is negative. Nothing has been
            written then. On CUDA wrong values are reported by `specops.check_errors`; such a row
            gets 0.

    Note:
        Deterministic. `dense.embedding` checks that an id is below the size of the vocabulary.

    Source: FastDeploy's speculate_pre_process.
    """
    if out is None:
        out = empty(lambda: (positions.shape, torch.int32, positions))
    _C.gather_input_ids(row_to_request, positions, slots, token_ids, lens, draft_token_ids, out)
    return out


def gather_output_rows(hidden: Tensor, output_rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Copy the hidden rows that need logits into one contiguous tensor.

    Same as `reference.gather_output_rows`: out[i] = hidden[output_rows[i]], or zeros where
    output_rows[i] is -1.

    Args:
        hidden: [rows, width], float32, bfloat16 or float16. Rows may be strided.
        output_rows: [num_output_rows], int32. Rows of `hidden`, or -1.
        out: [num_output_rows, width], dtype of `hidden`, not overlapping it. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, or an index is neither
            -1 nor a row of `hidden`. Nothing has been written then. On CUDA such an index yields
            zeros and is reported by `specops.check_errors`.

    Note:
        Deterministic; copies bits.

    Source: FastDeploy's rebuild_padding.
    """
    if out is None:
        out = empty(lambda: ((output_rows.numel(), hidden.shape[-1]), None, hidden))
    _C.gather_output_rows(hidden, output_rows, out)
    return out


def build_tree(
    parents: Tensor, num_draft_tokens: Tensor, positions: Tensor, *, out: DraftTree | None = None
) -> DraftTree:
    """Derive depths, positions, an attention mask and links from the parents of drafts.

    Same as `reference.build_tree`. The root of a request, its last committed token, is row 0; node
    j < num_draft_tokens[b] is row j + 1. With the root at position 10:

        root ─┬─ 0 ── 2        parents        [[-1, -1, 0]]
              └─ 1             depths         [[0, 1, 1, 2]]
                               row_positions  [[10, 11, 11, 12]]
                               ancestor_mask  [[[0b0001], [0b0011], [0b0101], [0b1011]]]
                               first_child    [[0, 2, -1, -1]]
                               next_sibling   [[1, -1, -1]]
                               sibling_index  [[0, 1, 0]]

    Args:
        parents: [batch, nodes], int32. Parent of each node: a node before it, or -1 for the root.
            Not read from num_draft_tokens[b] on. At most 8,192 nodes.
        num_draft_tokens: [batch], int32. Number of valid nodes of each request.
        positions: [batch], int32. Absolute position of each request's root.
        out: arrays of these sizes to write into. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a number of nodes, a
            position or a parent is out of range. Nothing has been written then. On CUDA wrong
            values are reported by `specops.check_errors`, and the request's tree is only its root.

    Note:
        Deterministic; a request depends on its own nodes alone.

    Source: Miao et al. 2023 (SpecInfer) and Cai et al. 2024 (Medusa), tree attention.
    """
    if out is None:
        look = lambda: (parents.shape[0], parents.shape[1], parents.device)  # noqa: E731
        batch, nodes, device = try_or_none(look) or (0, 0, _CPU)
        out = DraftTree.empty(batch, nodes, device=device)
    check_kind("build_tree", "out", out, DraftTree)
    _C.build_tree(
        parents,
        num_draft_tokens,
        positions,
        out.depths,
        out.row_positions,
        out.ancestor_mask,
        out.first_child,
        out.next_sibling,
        out.sibling_index,
    )
    return out


def preorder(parents: Sequence[int], nodes: Sequence[int] | None = None) -> Preorder:
    """Order the nodes of one tree so that each precedes all its descendants. Runs on the host.

    Same as `reference.preorder`. Drafters return the most probable nodes first; `tree_chains`
    requires preorder. Siblings stay in their order:

        root ─┬─ 0 ── 2        parents [-1, -1, 0]       nodes    [0, 2, 1]
              └─ 1                                       parents  [-1, 0, -1]

    Reorder token ids and other per-node data by the returned `nodes`:
    `token_ids = [token_ids[node] for node in nodes]`, or `token_ids[nodes]` for a tensor.

    Args:
        parents: parent of each node: an earlier node, or -1 for the root; as `SuffixCache` returns
            them.
        nodes: the nodes to keep, ascending; the parent of a kept node must be kept. None: all.

    Returns:
        The nodes in preorder, and their parents.

    Raises:
        ValueError: a parent is no earlier kept node or -1, or the nodes are not ascending.
    """
    children: dict[int, list[int]] = {-1: []}
    last = -1
    for node in range(len(parents)) if nodes is None else nodes:
        if not last < node < len(parents):
            raise ValueError(
                f"preorder: nodes must be ascending and below len(parents)={len(parents)}, "
                f"got {node} after {last}"
            )
        last, above = node, children.get(parents[node])
        if above is None:
            raise ValueError(
                f"preorder: parents[{node}] must be -1 or a node before it that is kept, "
                f"got {parents[node]}"
            )
        above.append(node)
        children[node] = []
    order: list[int] = []
    place_of = {-1: -1}
    left = children[-1][::-1]
    while left:
        node = left.pop()
        place_of[node] = len(order)
        order.append(node)
        left += reversed(children[node])
    return Preorder(order, [place_of[parents[node]] for node in order])


def num_spare_pages(parents: Sequence[int], kv_len: int, page_size: int) -> int:
    """Count the spare pages that `tree_chains` needs for one tree. Runs on the host.

    Args:
        parents: parents of the nodes, in preorder.
        kv_len: tokens of the request in the cache, its root and nodes included.
        page_size: tokens of a page.

    Returns:
        The number of spare pages of all chains except the first, which uses the request's pages.
        A chain needs at most 1 + ceil(depth / page_size).

    Raises:
        ValueError: a parent is neither -1 nor an earlier node.
    """
    root = kv_len - len(parents) - 1
    # The root, then each node: length of its path, and of the path's part that is in place.
    depths, in_place = [0], [0]
    pages = 0
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"num_spare_pages: parents[{node}] must be -1 or a node before it, got {parent}"
            )
        depth, above = depths[parent + 1] + 1, in_place[parent + 1]
        depths.append(depth)
        # Node j already has the slot that its chain needs if its path is 0, 1, .. j.
        in_place.append(depth if node == depth - 1 else above)
        ends_chain = node == len(parents) - 1 or parents[node + 1] != node
        if ends_chain and in_place[-1] < depth:
            pages += (root + depth) // page_size - (root + 1 + in_place[-1]) // page_size + 1
    return pages


def tree_chains(
    parents: Tensor,
    num_draft_tokens: Tensor,
    qo_lens: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    spare_pages: Tensor,
    *,
    page_size: int,
    out: TreeChains | None = None,
) -> TreeChains:
    """Split trees of drafts into chains that attention computes as requests. Runs on the host.

    Same as `reference.tree_chains`. The rows of a request are its root and its nodes in preorder: a
    node is followed by its descendants. The rows after one leaf up to the next leaf are then a
    chain of consecutive rows, and their ancestors belong to earlier chains. To attention each chain
    is a request that ends with its rows and shares the rows of its ancestors with other chains:

        root ─┬─ 0 ── 2        preorder        parents  [[-1, 0, -1]]
              └─ 1             0, 2, 1         chains   root 0 2 | 1
                                               qo_lens  3        | 1
                                               kv_lens  n + 3    | n + 2   with n tokens before

    Node j lies in slot base + 1 + j of its request's pages, with the root at base, as in
    `compact_kv`. For the first chain, plain decoding would use the same slots. For the other
    chains, the slots differ from some page on: the chain gets spare pages instead, and its tokens
    there must be copied with `attention.copy_kv`, after this step's rows are written and before
    attention. A row of a tree is then computed from the same keys and values in the same order as
    in plain decoding, and has the same bits.

    In a step with trees, run per layer: `rope_append_kv` with the requests' `cache_slots` and the
    chains' `positions`, both from `prepare_batch`; `copy_kv`; and `append_attention` with the
    chains, optionally declaring the pages that chains of a request share. At the end run
    `verify(parents=...)` and `compact_kv` with the requests.

    Args:
        parents: [batch, nodes], int32, on the CPU like all arguments. Parent of each node, or -1
            for the root. In preorder (see `preorder`): the parent of node j is node j - 1 or one of
            its ancestors. Not read from num_draft_tokens[b] on.
        num_draft_tokens: [batch], int32. Nodes of each request. With 0 its rows are one chain.
        qo_lens: [batch], int32. Rows of each request in this step; the last ones are the root and
            the nodes. 0: no chain.
        kv_lens: [batch], int32. Tokens in the cache, these rows included.
        kv_indptr: [batch + 1], int32. First page of each request in `kv_indices`.
        kv_indices: [pages], int32. Page ids.
        spare_pages: [spare], int32. Ids of free pages, at least as many as `num_spare_pages` counts
            for the trees together.
        page_size: tokens of a page.
        out: arrays to write into, at least as large as the result. Allocated a little larger when
            absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above, a value is out of
            range, there are too few spare pages or an array of `out` is too small. Nothing has been
            written then.

    Note:
        Deterministic.
    """
    if out is None:
        check_int("tree_chains", "page_size", page_size, least=1)
        batch, chains, pages, copies = try_or_none(
            lambda: _room_for_chains(
                parents, num_draft_tokens, kv_lens, kv_indptr, kv_indices, page_size
            )
        ) or (0, 0, 0, 0)
        out = TreeChains.empty(batch, chains=chains, pages=pages, copies=copies)
    check_kind("tree_chains", "out", out, TreeChains)
    _C.tree_chains(
        parents,
        num_draft_tokens,
        qo_lens,
        kv_lens,
        kv_indptr,
        kv_indices,
        spare_pages,
        page_size,
        out.chain_indptr,
        out.qo_lens,
        out.kv_lens,
        out.kv_indptr,
        out.kv_indices,
        out.from_slots,
        out.to_slots,
    )
    return out


def _room_for_chains(
    parents: Tensor,
    num_draft_tokens: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    page_size: int,
) -> tuple[int, int, int, int]:
    """Return the batch size and upper bounds on the numbers of chains, pages and copies.

    Values that are out of range, which the op rejects later, do not enlarge the bounds.
    """
    node = torch.arange(parents.shape[1])
    begins = (parents != node - 1) & (node < num_draft_tokens[:, None])
    more = begins.sum(1)
    pages = (more + 1) * kv_indptr.diff().clamp(0, kv_indices.numel())
    copies = more * (kv_lens.clamp(0, page_size) + num_draft_tokens.clamp(0, parents.shape[1]))
    batch = len(parents)
    return batch, batch + int(more.sum()), int(pages.sum()), int(copies.sum())


def prepare_draft_batch(
    qo_indptr: Tensor,
    kv_lens: Tensor,
    slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    page_size: int,
    total_rows: int | None = None,
    redraft_lens: Tensor | None = None,
    window: int = 0,
    out: DraftIndices | None = None,
) -> DraftIndices:
    """Build the rows that a drafting module runs right after the target's step is committed.

    Same as `reference.prepare_draft_batch`. The module's row at position i takes the target's
    hidden state at position i and token i + 1. So a request has a row for every position of the
    step whose next token is known: in a prompt chunk all positions (the next token is the prompt's,
    or the one just sampled), in a verification the root and the accepted drafts. These rows
    overwrite the cache entries of earlier drafts at their positions. For request b:

        s     = slots[b]
        begin = kv_lens[b] - (qo_indptr[b + 1] - qo_indptr[b])
        rows  = positions begin - redraft_lens[b] .. min(kv_lens[b], lens[s] - 1)
        source_rows of position i = qo_indptr[b] + i - begin             where i >= begin
                                    -2 - (s * window + i % window)       before
        last_rows = its last row, if that is position lens[s] - 2 and max_draft_tokens[s] > 0
        draft_positions = lens[s] in that case

    A request with slot -1, or without rows in the step, gets no rows.

    Args:
        qo_indptr: [batch + 1], int32. Rows of the target's step.
        kv_lens: [batch], int32. Lengths in the target's step, its rows included.
        slots: [batch], int32. Row of each request in the per-slot arrays; -1: does not draft.
        kv_indptr: [batch + 1], int32. First page of each request in `kv_indices`.
        kv_indices: [pages], int32. Page ids.
        lens: [num_slots], int32. Tokens of each slot, the step's included.
        max_draft_tokens: [num_slots], int32. Drafts requested for the next step.
        page_size: tokens per page.
        total_rows: capacity of the row arrays, at least the rows of all requests. None: the
            capacity of `out`; without `out` the sum of the step's rows and `redraft_lens`, for
            which the host waits.
        redraft_lens: [batch], int32. Number of positions before the step that the module computes
            again, at most `window`: modules - 1 with several modules. None: zeros.
        window: rows that `keep_hidden_rows` keeps per slot.
        out: arrays of these capacities to write into. Allocated when absent.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a slot, a length, a
            page or the capacity is out of range. Nothing has been written then. On CUDA wrong
            values are reported by `specops.check_errors`; such a request has no rows, and rows past
            the capacity are omitted.

    Note:
        Deterministic.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2; FastDeploy's
        draft_model_preprocess and eagle_get_hidden_states.
    """
    if redraft_lens is None:
        redraft_lens = empty(lambda: (slots.shape, torch.int32, slots))
        if redraft_lens is not None:
            redraft_lens.zero_()
    if out is None:
        if total_rows is None:
            total_rows = _total(lambda: qo_indptr[-1:]) + _total(lambda: redraft_lens)
        check_int("prepare_draft_batch", "total_rows", total_rows)
        batch, device = try_or_none(lambda: (slots.numel(), slots.device)) or (0, _CPU)
        out = DraftIndices.empty(batch, total_rows=total_rows, device=device)
    check_kind("prepare_draft_batch", "out", out, DraftIndices)
    if total_rows is None:
        total_rows = _capacity(out.row_to_request)
    _C.prepare_draft_batch(
        slots,
        qo_indptr,
        kv_lens,
        redraft_lens,
        kv_indptr,
        kv_indices,
        lens,
        max_draft_tokens,
        page_size,
        window,
        total_rows,
        out.qo_indptr,
        out.kv_lens,
        out.last_rows,
        out.draft_positions,
        out.row_to_request,
        out.positions,
        out.cache_slots,
        out.source_rows,
    )
    return out


def advance_draft_batch(
    sampled_token_ids: Tensor,
    last_rows: Tensor,
    slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    lens: Tensor,
    max_draft_tokens: Tensor,
    *,
    page_size: int,
    step: int,
    ahead: int = 1,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    out: _Following = None,  # type: ignore[assignment]
) -> _Following:
    """Record the drafts that were just sampled, and build the rows of the module's next pass.

    Same as `reference.advance_draft_batch`. Draft `step` of request b with slot s was sampled if
    last_rows[b] >= 0, and is used if step < max_draft_tokens[s]. Then:

        draft_token_ids[s, step] = sampled_token_ids[b], num_draft_tokens[s] = step + 1
        one row, if step + 1 < min(max_draft_tokens[s], k) and the request has its page:
            position = lens[s] + step - ahead, source_rows = last_rows[b]
            draft_positions = lens[s] + step + 1

    At step 0 the drafts of every request with a slot are cleared first (-1, count 0). The input
    token of the new row is the draft, which is `ahead` positions after the row.

    Args:
        sampled_token_ids: [batch], int32. Not read where last_rows is -1.
        last_rows: [batch], int32. `DraftIndices.last_rows` of the pass that gave these tokens.
        slots: [batch], int32. As in `prepare_draft_batch`, as are the next four arguments and
            page_size.
        kv_indptr: [batch + 1], int32.
        kv_indices: [pages], int32.
        lens: [num_slots], int32.
        max_draft_tokens: [num_slots], int32.
        page_size: tokens per page.
        step: index of the draft that was sampled, from 0.
        ahead: index of the module that runs next, from 1.
        draft_token_ids: [num_slots, k], int32. Written as above.
        num_draft_tokens: [num_slots], int32. Written as above.
        out: receives the next rows; its total_rows is batch. None: no pass follows.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a slot, a length or a
            page is out of range, or step is not below k. Nothing has been written then. On CUDA
            wrong values are reported by `specops.check_errors`; such a request gets no row.

    Note:
        Deterministic.

    Source: FastDeploy's draft_model_update.
    """
    if out is not None:
        check_kind("advance_draft_batch", "out", out, DraftIndices, ", or None")
    _C.advance_draft_batch(
        sampled_token_ids,
        last_rows,
        slots,
        kv_indptr,
        kv_indices,
        lens,
        max_draft_tokens,
        page_size,
        step,
        ahead,
        draft_token_ids,
        num_draft_tokens,
        None if out is None else out.qo_indptr,
        None if out is None else out.kv_lens,
        None if out is None else out.last_rows,
        None if out is None else out.draft_positions,
        None if out is None else out.row_to_request,
        None if out is None else out.positions,
        None if out is None else out.cache_slots,
        None if out is None else out.source_rows,
    )
    return out


def keep_hidden_rows(
    hidden: Tensor, slots: Tensor, qo_indptr: Tensor, kv_lens: Tensor, lens: Tensor, kept: Tensor
) -> None:
    """Store the target's hidden states at each request's last positions, for later drafting.

    With several drafting modules, the next step computes rows at these positions again
    (`redraft_lens` of `prepare_draft_batch`).

    Same as `reference.keep_hidden_rows`. For request b with s = slots[b], take the positions i of
    the step whose next token is known (i < lens[s] - 1, which excludes rejected drafts). For the
    last `window` of them:

        kept[s, i % window] = hidden[the row of i]

    Args:
        hidden: [rows, width], float32, bfloat16 or float16; rows may be strided. The hidden states
            of the target's step.
        slots: [batch], int32. -1: nothing is stored.
        qo_indptr: [batch + 1], int32. Rows of the target's step.
        kv_lens: [batch], int32. Lengths in the target's step, its rows included.
        lens: [num_slots], int32. Tokens of each slot, the step's included.
        kept: [num_slots, window, width], dtype of `hidden`. Written as above, elsewhere untouched.

    Raises:
        ValueError: a shape, dtype, layout or device differs from the above; a slot or a length is
            out of range. Nothing has been written then. On CUDA wrong values are reported by
            `specops.check_errors`; such a request stays unchanged.

    Note:
        Deterministic: copies only.
    """
    _C.keep_hidden_rows(hidden, slots, qo_indptr, kv_lens, lens, kept)
