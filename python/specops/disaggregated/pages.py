# SPDX-License-Identifier: Apache-2.0
"""A prompt's pages in transfer: their description, and the heads that each reading rank gets.

Keys, values and states are sharded over ranks by heads. The two engines may have different numbers
of ranks: a rank of the receiving engine (the reader) gets its heads from one or more ranks of the
sending engine, each head once. A message therefore holds part of one rank's shard, and its header
names that rank and the reader.
"""

from collections.abc import Iterator, Sequence

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from specops.engine.parallel.ranks import shard_range

VERSION = 5

# Header fields in the order in which `check` compares them.
_CHECKED = [
    "version",
    "exact_across_tp",
    "contract",
    "num_ranks",
    "rank",
    "num_readers",
    "reader",
    "page_size",
    "model",
    "token_ids",
    "owner",
    "lookahead",
    "draft",
    "states",
]


class KvTransferError(ValueError):
    """Error: pages cannot be used by this engine, or cannot be transferred."""


class Layout(Struct, frozen=True, array_like=True):
    """Layout of a tensor of pages or of states.

    Attributes:
        dtype: dtype of its elements.
        shape: [rows, heads of all ranks, ...] of one page, or of the states of one prefix.
        widths: the second axis consists of consecutive parts, each with all heads; for each part,
            the number of elements of a head.
    """

    dtype: str
    shape: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        """Number of heads of all ranks."""
        return self.shape[1] // sum(self.widths)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the second axis: all later axes, in one row."""
        return int(getattr(torch, self.dtype).itemsize * torch.Size(self.shape[2:]).numel())


class Header(Struct, frozen=True, tag=True):
    """Description of pages.

    Attributes:
        version: version of this format.
        exact_across_tp: virtual TP ranks of the engine that computed them.
        contract: digest of that engine's execution contract, with the LoRA adapter of the request.
        num_ranks: number of ranks over which its keys and values are sharded.
        rank: rank that holds the pages.
        num_readers: number of ranks of the receiving engine.
        reader: rank of the receiving engine that gets this part.
        page_size: tokens of a page.
        token_ids: the whole prompt, since draft KV of the last page may depend on later tokens.
        num_pages: number of pages that follow, from the beginning of the prompt.
        owner: drafter whose keys and values are on the pages as well; empty: none.
        lookahead: number of tokens after a position that its draft KV depends on.
        model: the model's tensors, in order.
        draft: the drafter's tensors, after the model's.
        states: states of layers with linear attention, the model's and then the drafter's; they
            follow the pages.
    """

    version: int
    exact_across_tp: int
    contract: str
    num_ranks: int
    rank: int
    num_readers: int
    reader: int
    page_size: int
    token_ids: list[int]
    num_pages: int
    owner: str
    lookahead: int
    model: list[Layout]
    draft: list[Layout]
    states: list[Layout]

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages and states."""
        return sum(count * self.bytes_of(layout) for layout, count in self.tensors)

    @property
    def tensors(self) -> list[tuple[Layout, int]]:
        """All tensors in order, each with its number of pages, or of prefixes for states."""
        of_pages = [(layout, self.num_pages) for layout in (*self.model, *self.draft)]
        return of_pages + [(layout, 1) for layout in self.states if self.num_pages]

    def bytes_of(self, layout: Layout) -> int:
        """Return the number of bytes that follow per page of a tensor, or per prefix."""
        columns = len(self.heads_of(layout)) * sum(layout.widths)
        return layout.shape[0] * columns * layout.element_bytes

    def heads_of(self, layout: Layout) -> range:
        """Return the heads that the reader gets from this rank, and not from an earlier one."""
        held = shard_range(layout.num_heads, self.num_ranks, self.rank)
        required = shard_range(layout.num_heads, self.num_readers, self.reader)
        begin = max(held.start, required.start)
        if self.rank - 1 in shard_range(self.num_ranks, self.num_readers, self.reader):
            begin = max(begin, shard_range(layout.num_heads, self.num_ranks, self.rank - 1).stop)
        return range(begin, max(begin, min(held.stop, required.stop)))


class Pages(Struct, array_like=True):
    """A prompt's pages.

    Attributes:
        header: description of the pages.
        data: for each tensor, its pages in order; then the states.
    """

    header: Header
    data: bytearray

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes."""
        return len(self.data) + 4 * len(self.header.token_ids)


def check(header: Header, expected: Header) -> None:
    """Refuse pages unless the reading engine would have computed the same bits.

    Raises:
        KvTransferError: a field of the header does not match; the message names it.
    """
    for name in _CHECKED:
        got, required = getattr(header, name), getattr(expected, name)
        if got != required:
            if name == "token_ids":
                raise KvTransferError(
                    "KV transfer: token_ids must be the request's prompt, got different ones"
                )
            raise KvTransferError(f"KV transfer: {name} must be {required!r}, got {got!r}")
    if not 0 <= header.num_pages <= expected.num_pages:
        raise KvTransferError(
            f"KV transfer: num_pages must be in [0, {expected.num_pages}], got {header.num_pages}"
        )


def sources(num_ranks: int, num_readers: int, reader: int) -> range:
    """Return the ranks of the sending engine from which a reader gets its heads.

    Raises:
        KvTransferError: neither number of ranks divides the other.
    """
    if num_ranks < 1 or (num_ranks % num_readers and num_readers % num_ranks):
        raise KvTransferError(
            "KV transfer: tensor_parallel_size of one engine must divide the other's, got "
            f"{num_ranks} and {num_readers}"
        )
    return shard_range(num_ranks, num_readers, reader)


def cut(pages: Pages, num_readers: int, reader: int) -> Pages:
    """Return the part of a rank's pages that a reader gets from that rank.

    Args:
        pages: the rank's whole shard.
        num_readers: number of ranks of the reading engine.
        reader: rank of the reader.

    Raises:
        KvTransferError: the reader gets nothing from this rank.
    """
    header = pages.header
    is_reader = 0 <= reader < num_readers
    if not is_reader or header.rank not in sources(header.num_ranks, num_readers, reader):
        raise KvTransferError(
            f"KV transfer: reader {reader} of {num_readers} shares no heads with rank "
            f"{header.rank} of {header.num_ranks}"
        )
    part = Pages(replace(header, num_readers=num_readers, reader=reader), pages.data)
    if part.header.num_bytes < header.num_bytes:
        part.data = bytearray(part.header.num_bytes)
        _copy(pages, part, part.header)
    return part


def joined(parts: Sequence[Pages], expected: Header) -> Pages:
    """Join the parts that a reader got from ranks of another engine.

    Args:
        parts: parts of all `sources`, in their order.
        expected: header of the reader's own shard.

    Raises:
        KvTransferError: the parts have different numbers of pages.
    """
    counts = [part.header.num_pages for part in parts]
    if counts != counts[:1] * len(parts):
        raise KvTransferError(f"KV transfer: num_pages must be equal on all ranks, got {counts}")
    header = replace(expected, num_pages=counts[0])
    if len(parts) == 1:
        return Pages(header, parts[0].data)
    pages = Pages(header, bytearray(header.num_bytes))
    for part in parts:
        _copy(part, pages, part.header)
    return pages


def _copy(source: Pages, target: Pages, header: Header) -> None:
    """Copy the heads that `header` selects from one set of pages to another."""
    every = zip(source.header.tensors, _tensors(source), _tensors(target), strict=True)
    for (layout, _), (source_heads, old), (target_heads, new) in every:
        moved = header.heads_of(layout)
        begin = 0
        end = 0
        for width in layout.widths:
            count = len(moved) * width
            first, other = (
                (moved.start - heads.start) * width for heads in (source_heads, target_heads)
            )
            new.narrow(2, end + other, count).copy_(old.narrow(2, begin + first, count))
            begin, end = begin + len(source_heads) * width, end + len(target_heads) * width


def _tensors(pages: Pages) -> Iterator[tuple[range, Tensor]]:
    """Yield each tensor's heads, and its bytes as [pages, rows, columns, bytes of an element]."""
    header = pages.header
    begin = 0
    data = torch.empty(0, dtype=torch.uint8)
    if pages.data:
        data = torch.frombuffer(pages.data, dtype=torch.uint8)
    for layout, count in header.tensors:
        heads = header.heads_of(layout)
        columns = len(heads) * sum(layout.widths)
        end = begin + count * header.bytes_of(layout)
        yield heads, data[begin:end].view(count, layout.shape[0], columns, layout.element_bytes)
        begin = end
