# SPDX-License-Identifier: Apache-2.0
"""Export and import of prompts' pages in an engine's prefix cache, as bytes.

For a model with linear attention, the data ends with the states at the end of the last page.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from specops.engine.drafters.base import Drafter
from specops.engine.memory.kv_cache import DraftKv, PagePool, Salt
from specops.engine.models import PrefixStates
from specops.engine.models.kv import KvCache, TensorShard


class PagesEvicted(Exception):
    """Error: pages were evicted from the prefix cache before they were copied."""


class PromptPages:
    """Export and import of prompts' pages. Only the thread that owns the engine may use it.

    Args:
        pool: the engine's page pool.
        states: states of prefixes, for layers with linear attention.
        cache: the target's keys, values and states.
        drafters: the engine's drafters, by method.
    """

    def __init__(
        self,
        pool: PagePool,
        states: PrefixStates,
        cache: KvCache,
        drafters: Mapping[str, Drafter],
    ) -> None:
        self._pool, self._states, self._cache = pool, states, cache
        self._drafters = drafters

    def take(
        self, token_ids: Sequence[int], draft_kv: DraftKv | None, salt: Salt
    ) -> tuple[int, bytearray]:
        """Copy the cached pages of a prompt.

        The copy ends before the first page that was evicted, or that lacks the draft KV. For a
        model with linear attention, it ends at a page whose states are stored.

        Args:
            token_ids: the prompt.
            draft_kv: draft KV that the pages must hold; None: no draft KV is required.
            salt: cache salt of the request that computed the pages.

        Returns:
            The number of pages, and the bytes of this rank's shard: all tensors of `tensors` in
            turn, then the states.
        """
        num_pages, pieces = self.copy(token_ids, draft_kv, salt, most=None)
        return num_pages, bytearray().join(part for piece in pieces for part in piece)

    def copy(
        self,
        token_ids: Sequence[int],
        draft_kv: DraftKv | None,
        salt: Salt,
        *,
        most: int | None,
    ) -> tuple[int, Iterator[list[bytes]]]:
        """Copy the cached pages of a prompt in pieces, between which the engine may run steps.

        Args:
            token_ids, draft_kv, salt: as in `take`.
            most: bytes after which a piece ends; it has less than twice as many, or one page of a
                tensor. None: all bytes are one piece.

        Returns:
            The number of pages, and the pieces of the bytes that `take` returns. They raise
            PagesEvicted if pages were evicted that had not been copied.
        """
        with self._held(token_ids, draft_kv, salt) as pages:
            self._states.release_unusable(pages, draft_kv)
            entry = self._states.entry_of(pages, draft_kv)
            states: list[bytes] = []
            if entry is not None:
                states = [_rows(shard, [entry]) for shard in self.states(draft_kv)]
            num_pages = len(pages)

        def pieces() -> Iterator[list[bytes]]:
            model, draft = self.tensors(draft_kv)
            spans = deque(
                (shard, span)
                for shard in (*model, *draft)
                for span in _spans(
                    num_pages, num_pages if most is None else most // _bytes_of(shard).shape[1]
                )
            )
            while spans:
                piece: list[bytes] = []
                with self._held(token_ids, draft_kv, salt) as pages:
                    if len(pages) < num_pages:
                        raise PagesEvicted
                    while spans and (most is None or sum(map(len, piece)) < most):
                        shard, span = spans.popleft()
                        piece.append(_rows(shard, pages[span]))
                yield piece
            yield states

        return num_pages, pieces()

    def num_cached(self, token_ids: Sequence[int], draft_kv: DraftKv | None, salt: Salt) -> int:
        """Return the number of pages that `take` would copy, and mark them as recently used."""
        with self._held(token_ids, draft_kv, salt) as pages:
            self._states.release_unusable(pages, draft_kv)
            return len(pages)

    @contextlib.contextmanager
    def _held(
        self, token_ids: Sequence[int], draft_kv: DraftKv | None, salt: Salt
    ) -> Iterator[list[int]]:
        """Hold the cached pages of a prompt during a `with` block."""
        pages = self._pool.match_prefix(token_ids, len(token_ids) - 1, draft_kv, salt)
        try:
            yield pages
        finally:
            self._pool.release(pages)

    def give(
        self,
        token_ids: Sequence[int],
        num_pages: int,
        data: bytearray,
        draft_kv: DraftKv | None,
        salt: Salt,
    ) -> int:
        """Put pages into the prefix cache for the next request with this prompt.

        Pages that the cache has already are not replaced. Nothing is added if too few pages are
        free, or if states must be stored and every entry for states is reserved by a running
        request.

        Args:
            token_ids: the prompt.
            num_pages: number of pages in `data`.
            data: result of `take`, from an engine with equal tensors.
            draft_kv, salt: as in `take`.

        Returns:
            The number of leading pages of the prompt that are in the cache now.
        """
        size = self._pool.page_size
        held = self._pool.match_prefix(token_ids, num_pages * size, draft_kv, salt)
        try:
            missing = range(len(held), num_pages)
            new = self._pool.allocate(len(missing))
            if new is not None:
                held += new
                if new:
                    self._put(data, num_pages, draft_kv, missing, new)
                for page in missing:
                    end = (page + 1) * size
                    held[page] = self._pool.register(
                        held[page],
                        held[page - 1] if page else None,
                        token_ids[end - size : end],
                        None if draft_kv is None else draft_kv.key(token_ids, end),
                        salt,
                    )
                self._put_states(data, held, draft_kv)
            self._states.release_unusable(held, draft_kv)
            return len(held)
        finally:
            self._pool.release(held)

    def tensors(
        self, draft_kv: DraftKv | None
    ) -> tuple[Sequence[TensorShard], Sequence[TensorShard]]:
        """Return the tensors indexed by page: those of the model, and those of a drafter.

        Every rank holds a drafter's whole tensors, which are described as a single head.
        """
        draft = () if draft_kv is None else self._drafters[draft_kv.owner].kv_tensors()
        return self._cache.page_shards, list(map(_whole, draft))

    def states(self, draft_kv: DraftKv | None) -> Sequence[TensorShard]:
        """Return the tensors indexed by prefix state entry: the model's, and a drafter's."""
        states = None if draft_kv is None else self._drafters[draft_kv.owner].states
        draft = () if states is None else states.prefix_shards
        return [*self._cache.prefix_shards, *(_whole(one.tensor) for one in draft)]

    def _put(
        self,
        data: bytearray,
        num_pages: int,
        draft_kv: DraftKv | None,
        which: range,
        new: Sequence[int],
    ) -> None:
        """Copy the pages with indices `which` to the cache's pages `new`."""
        begin = 0
        model, draft = self.tensors(draft_kv)
        for shard in (*model, *draft):
            own = _bytes_of(shard)
            count = num_pages * own.shape[1]
            source = torch.frombuffer(data, dtype=torch.uint8, offset=begin, count=count)
            rows = source.view(num_pages, -1)[which.start :]
            index = torch.tensor(new, dtype=torch.int64, device=own.device)
            own.index_copy_(0, index, rows.to(own.device))
            begin += count

    def _put_states(self, data: bytearray, held: Sequence[int], draft_kv: DraftKv | None) -> None:
        """Copy the states at the end of the pages into the cache, unless it holds them already."""
        entry, kept = self._states.new_entry(held, draft_kv), self.states(draft_kv)
        begin = len(data) - sum(_bytes_of(shard).shape[1] for shard in kept)
        for shard in kept if entry is not None else ():
            own = _bytes_of(shard)[entry]
            own.copy_(torch.frombuffer(data, dtype=torch.uint8, offset=begin, count=len(own)))
            begin += len(own)


def _spans(count: int, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` items, at least one, that cover `count` items."""
    step = max(most, 1)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def _whole(tensor: Tensor) -> TensorShard:
    return TensorShard(tensor, 1, (tensor.shape[2],))


def _bytes_of(shard: TensorShard) -> Tensor:
    """Return a byte view of a tensor: [pages, bytes], or [entries, bytes] for states."""
    return shard.tensor.view(shard.tensor.shape[0], -1).view(torch.uint8)


def _rows(shard: TensorShard, indices: Sequence[int]) -> bytes:
    index = torch.tensor(indices, dtype=torch.int64, device=shard.tensor.device)
    return _bytes_of(shard).index_select(0, index).cpu().numpy().tobytes()
