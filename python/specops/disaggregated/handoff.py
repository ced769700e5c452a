# SPDX-License-Identifier: Apache-2.0
"""A prompt's pages as bytes: taken out of one engine, and given to another's prefix cache.

Whatever an engine does with a prompt that it finds in its prefix cache has the bits of one that it
computes, so nothing else has to move. The engine that gets the pages computes the rest of the
prompt itself, less than a page and what drafts look ahead, and with it the first token. Random
numbers follow from the seed and the position. Pages that come too late, or not at all, cost time.

Behind the pages are the states at the end of the last one, of a model with linear attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from msgspec import Struct
from torch import Tensor

from specops.engine.config import EngineConfig
from specops.engine.engine import Engine
from specops.engine.machine import one_rank
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.parallel.ranks import Ranks
from specops.engine.sampling_params import SamplingParams
from specops.engine.speculative_config import SpeculativeConfig
from specops.service.contract import contract_of

VERSION = 3

# In this order.
_CHECKED = [
    *("version", "contract", "num_ranks", "rank", "page_size", "model", "token_ids", "owner"),
    *("lookahead", "draft", "states"),
]


class HandoffError(ValueError):
    """These pages are of no use to this engine."""


class Layout(Struct, frozen=True, array_like=True):
    """A tensor of pages, or of states.

    Attributes:
        dtype: of its elements.
        shape: of one page of it, or of the states of one prefix.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of a page, or of one prefix."""
        return int(getattr(torch, self.dtype).itemsize * torch.Size(self.shape).numel())


class Header(Struct, frozen=True, tag=True):
    """What pages are of.

    Attributes:
        version: of this format.
        contract: the digest of the execution contract of the engine that computed them.
        num_ranks: among which its keys and values are shared out.
        rank: whose share this is.
        page_size: tokens of a page.
        token_ids: the prompt's, to its end: draft KV of the last page may depend on those behind.
        num_pages: that follow, from the prompt's first on.
        owner: the drafter whose keys and values they have beside the model's; empty: none.
        lookahead: tokens behind a position that these depend on.
        model: the model's tensors, in order.
        draft: the drafter's, behind them.
        states: of layers with linear attention, behind all pages, if there are any.
    """

    version: int
    contract: str
    num_ranks: int
    rank: int
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
        """Of the pages and states."""
        of_page = sum(one.num_bytes for one in (*self.model, *self.draft))
        of_states = sum(one.num_bytes for one in self.states) if self.num_pages else 0
        return self.num_pages * of_page + of_states


class Pages(Struct, array_like=True):
    """A prompt's pages.

    Attributes:
        header: what they are of.
        data: tensor by tensor, of each its pages in order; then the states.
    """

    header: Header
    data: bytearray

    @property
    def num_bytes(self) -> int:
        """What they take, about."""
        return len(self.data) + 4 * len(self.header.token_ids)


class PagesEngine(Engine):
    """An engine whose prompts' pages can be taken out, and put in.

    Of several ranks each has its share of every page, and all decide alike what they have.

    Args:
        config: with prefix caching.
        ranks: as in `Engine`.

    Attributes:
        ranks: this one and its others.
        contract: what its bits depend on (service/contract.py).

    Raises:
        ValueError: as `Engine`, or it has no prefix cache.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks | None = None) -> None:
        if not config.enable_prefix_caching:
            raise ValueError("enable_prefix_caching must be on for a role, got off")
        self.ranks = ranks or one_rank(config)
        super().__init__(config, self.ranks)
        self.contract = contract_of(self)

    def take_pages(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None = None,
    ) -> Pages:
        """Copies the full pages of a prompt that the prefix cache has, for another engine.

        Pages that were evicted, or that another method computed, end what is found. Of a model with
        linear attention the last one is one whose states are kept.

        Args:
            token_ids: the prompt.
            params: of the request that computed it.
            speculative_config: of that request.

        Returns:
            The pages; their bytes are a copy.

        Raises:
            ValueError: no request could have this prompt or these arguments.
        """
        draft_kv = self._draft_kv(token_ids, params, speculative_config)
        pages = self._pool.match_prefix(token_ids, len(token_ids) - 1, draft_kv)
        try:
            self._scheduler.states.cut(pages)
            model, draft = self._tensors("" if draft_kv is None else draft_kv.owner)
            index = torch.tensor(pages, dtype=torch.int64, device=self._device.device)
            data = bytearray().join(_taken(tensor, index) for tensor in (*model, *draft))
            entry = self._scheduler.states.entry_of(pages)
            if entry is not None:
                data += b"".join(_taken(tensor, index.new_tensor([entry])) for tensor in self._kept)
        finally:
            self._pool.release(pages)
        return Pages(self._header(token_ids, draft_kv, len(pages)), data)

    def _header(self, token_ids: Sequence[int], draft_kv: DraftKv | None, num_pages: int) -> Header:
        owner = "" if draft_kv is None else draft_kv.owner
        model, draft = self._tensors(owner)
        return Header(
            version=VERSION,
            contract=self.contract["digest"],
            num_ranks=self.ranks.size,
            rank=self.ranks.rank,
            page_size=self.config.page_size,
            token_ids=list(token_ids),
            num_pages=num_pages,
            owner=owner,
            lookahead=0 if draft_kv is None else draft_kv.lookahead,
            model=[_layout(tensor) for tensor in model],
            draft=[_layout(tensor) for tensor in draft],
            states=[_layout(tensor) for tensor in self._kept],
        )

    def expected(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None = None,
    ) -> Header:
        """What the pages of a request's prompt must be of: as `take_pages`, before any came."""
        draft_kv = self._draft_kv(token_ids, params, speculative_config)
        return self._header(token_ids, draft_kv, (len(token_ids) - 1) // self.config.page_size)

    def give_pages(self, pages: Pages, expected: Header) -> int:
        """Puts pages into the prefix cache, where the next request with this prompt finds them.

        Those that are there already stay. Where there is no room, as all pages are held, none are
        put in: the request computes its prompt. So it does without states that it needs, which find
        no room while all wait for the pages of running requests.

        Args:
            pages: that another engine has computed.
            expected: of the request that is to find them.

        Returns:
            How many leading pages of the prompt the cache has now, to go on behind.

        Raises:
            HandoffError: they are of another contract, prompt or layout.
        """
        header = pages.header
        check(header, expected)
        if len(pages.data) != header.num_bytes:
            raise HandoffError(
                f"handoff: data must have {header.num_bytes} bytes, got {len(pages.data)}"
            )
        draft_kv = None
        if expected.owner:
            draft_kv = DraftKv(expected.owner, expected.lookahead, max_drafts=0)
        tokens, size = header.token_ids, header.page_size
        held = self._pool.match_prefix(tokens, header.num_pages * size, draft_kv)
        try:
            missing = range(len(held), header.num_pages)
            new = self._pool.allocate(len(missing))
            if new is not None:
                held += new
                self._put(pages, expected.owner, missing, new)
                for page in missing:
                    end = (page + 1) * size
                    held[page] = self._pool.register(
                        held[page],
                        held[page - 1] if page else None,
                        tokens[end - size : end],
                        None if draft_kv is None else draft_kv.key(tokens, end),
                    )
                self._put_states(pages, held)
            self._scheduler.states.cut(held)
            return len(held)
        finally:
            self._pool.release(held)

    def _put(self, pages: Pages, owner: str, which: range, new: Sequence[int]) -> None:
        """Copies some of the pages to where they belong."""
        header, begin = pages.header, 0
        model, draft = self._tensors(owner)
        index = torch.tensor(new, dtype=torch.int64, device=self._device.device)
        for tensor in (*model, *draft):
            size = _layout(tensor).num_bytes
            end = begin + header.num_pages * size
            if which:
                source = torch.frombuffer(
                    pages.data, dtype=torch.uint8, offset=begin, count=end - begin
                )
                rows = source.view(header.num_pages, size)[which.start :]
                _bytes_of(tensor).index_copy_(0, index, rows.to(tensor.device))
            begin = end

    def _put_states(self, pages: Pages, held: Sequence[int]) -> None:
        """Copies the states at the end of pages to where they are found, unless they are there."""
        entry = self._scheduler.states.new_entry(held)
        begin = len(pages.data) - sum(one.num_bytes for one in pages.header.states)
        for tensor in self._kept if entry is not None else ():
            size = _layout(tensor).num_bytes
            source = torch.frombuffer(pages.data, dtype=torch.uint8, offset=begin, count=size)
            _bytes_of(tensor)[entry].copy_(source)
            begin += size

    def _draft_kv(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None,
    ) -> DraftKv | None:
        """What a request's drafters keep on the pages of its prompt."""
        plain = replace(params, n=1, seed=0, structured_output=None, prompt_logprobs=None)
        request = self._admission.make(
            token_ids,
            plain,
            request_id=None,
            choice_index=0,
            speculative_config=speculative_config,
            owners=(),
            taken=self._requests.keys(),
        )
        return request.draft_kv

    def _tensors(self, owner: str) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The tensors that are indexed by pages: the model's, and a drafter's."""
        model = self._runner.parts.cache.page_tensors
        return model, self.drafters[owner].kv_tensors() if owner else ()

    @property
    def _kept(self) -> Sequence[Tensor]:
        """The tensors that are indexed by entries of states of prefixes."""
        return [tensor for one in self._runner.parts.cache.kept for tensor in one.tensors]


def check(header: Header, expected: Header) -> None:
    """Refuses pages that would not have the bits of the engine that is to read them.

    Raises:
        HandoffError: they are of something else; the sentence names it.
    """
    for name in _CHECKED:
        got, wanted = getattr(header, name), getattr(expected, name)
        if got != wanted:
            if name == "token_ids":
                raise HandoffError("handoff: token_ids must be the request's prompt, got others")
            raise HandoffError(f"handoff: {name} must be {wanted!r}, got {got!r}")
    if not 0 <= header.num_pages <= expected.num_pages:
        raise HandoffError(
            f"handoff: num_pages must be in [0, {expected.num_pages}], got {header.num_pages}"
        )


def _layout(tensor: Tensor) -> Layout:
    return Layout(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))


def _bytes_of(tensor: Tensor) -> Tensor:
    """A view of a tensor of pages as [pages, bytes], or likewise of states."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def _taken(tensor: Tensor, index: Tensor) -> bytes:
    return _bytes_of(tensor).index_select(0, index).cpu().numpy().tobytes()
