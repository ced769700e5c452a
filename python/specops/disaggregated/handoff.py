# SPDX-License-Identifier: Apache-2.0
"""A prompt's pages as bytes: read from one engine, and written to another's prefix cache.

A prompt found in the prefix cache gives the same bits as a computed one, so only pages need to be
transferred. The receiving engine computes the rest of the prompt itself (less than a page plus the
drafters' lookahead), and with it the first token. Random numbers depend only on the seed and the
position. Pages that arrive too late, or not at all, cost only time.

For a model with linear attention, the states at the end of the last page follow the pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specops.api.config import EngineConfig
from specops.api.sampling_params import SamplingParams
from specops.api.speculative_config import SpeculativeConfig
from specops.disaggregated.pages import VERSION, HandoffError, Header, Layout, Pages, check
from specops.engine.engine import Engine
from specops.engine.machine import one_rank
from specops.engine.memory.kv_cache import DraftKv
from specops.engine.models.kv import Share
from specops.engine.parallel.ranks import Ranks
from specops.service.contract import contract_of


class PagesEngine(Engine):
    """An engine that can export and import the pages of prompts.

    With several ranks, each has a shard of every page, and all ranks agree on which pages exist.

    Args:
        config: configuration with prefix caching.
        ranks: as in `Engine`.

    Attributes:
        ranks: this rank and the others.
        contract: what its bits depend on (service/contract.py).

    Raises:
        ValueError: as `Engine`, or prefix caching is disabled.
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
        """Copy the full pages of a prompt in the prefix cache, for another engine.

        The result ends before the first page that was evicted or computed by another method. For a
        model with linear attention, it ends at a page with retained states.

        Args:
            token_ids: the prompt.
            params: sampling parameters of the request that computed it.
            speculative_config: configuration of that request.

        Returns:
            A copy of this rank's shard of the pages.

        Raises:
            ValueError: no request could have this prompt or these arguments.
        """
        draft_kv = self._draft_kv(token_ids, params, speculative_config)
        pages = self._pool.match_prefix(token_ids, len(token_ids) - 1, draft_kv, params.cache_salt)
        try:
            self._scheduler.states.cut(pages, draft_kv)
            model, draft = self._shares("" if draft_kv is None else draft_kv.owner)
            index = torch.tensor(pages, dtype=torch.int64, device=self._device.device)
            data = bytearray().join(_taken(share, index) for share in (*model, *draft))
            entry = self._scheduler.states.entry_of(pages, draft_kv)
            if entry is not None:
                at = index.new_tensor([entry])
                data += b"".join(_taken(share, at) for share in self._kept(draft_kv))
        finally:
            self._pool.release(pages)
        return Pages(self._header(token_ids, draft_kv, len(pages)), data)

    def _header(self, token_ids: Sequence[int], draft_kv: DraftKv | None, num_pages: int) -> Header:
        owner = "" if draft_kv is None else draft_kv.owner
        model, draft = self._shares(owner)
        return Header(
            version=VERSION,
            exact_across_tp=self.ranks.slices,
            contract=self.contract["digest"],
            num_ranks=self.ranks.size,
            rank=self.ranks.rank,
            num_readers=self.ranks.size,
            reader=self.ranks.rank,
            page_size=self.config.page_size,
            token_ids=list(token_ids),
            num_pages=num_pages,
            owner=owner,
            lookahead=0 if draft_kv is None else draft_kv.lookahead,
            model=[_layout(share) for share in model],
            draft=[_layout(share) for share in draft],
            states=[_layout(share) for share in self._kept(draft_kv)],
        )

    def expected(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None = None,
    ) -> Header:
        """Return the header that the pages of a request's prompt must match."""
        draft_kv = self._draft_kv(token_ids, params, speculative_config)
        return self._header(token_ids, draft_kv, (len(token_ids) - 1) // self.config.page_size)

    def give_pages(self, pages: Pages, expected: Header, cache_salt: str | None = None) -> int:
        """Put pages into the prefix cache for the next request with this prompt.

        Pages that the cache already has stay. If not enough pages are free, none are added and the
        request computes its prompt. The same holds if required states have no free entry, because
        all entries wait for pages of running requests.

        Args:
            pages: this rank's shard of pages that another engine has computed.
            expected: header for the request that will use the pages.
            cache_salt: cache salt of that request.

        Returns:
            Number of leading pages of the prompt in the cache; computation continues after them.

        Raises:
            HandoffError: the pages have another contract, prompt or layout.
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
        held = self._pool.match_prefix(tokens, header.num_pages * size, draft_kv, cache_salt)
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
                        cache_salt,
                    )
                self._put_states(pages, held, draft_kv)
            self._scheduler.states.cut(held, draft_kv)
            return len(held)
        finally:
            self._pool.release(held)

    def _put(self, pages: Pages, owner: str, which: range, new: Sequence[int]) -> None:
        """Copy the pages with indices `which` to the cache's pages `new`."""
        header, begin = pages.header, 0
        model, draft = self._shares(owner)
        index = torch.tensor(new, dtype=torch.int64, device=self._device.device)
        for share in (*model, *draft):
            own = _bytes_of(share)
            size = own.shape[1]
            end = begin + header.num_pages * size
            if which:
                source = torch.frombuffer(
                    pages.data, dtype=torch.uint8, offset=begin, count=end - begin
                )
                rows = source.view(header.num_pages, size)[which.start :]
                own.index_copy_(0, index, rows.to(own.device))
            begin = end

    def _put_states(self, pages: Pages, held: Sequence[int], draft_kv: DraftKv | None) -> None:
        """Copy the states at the end of the pages to their cache entry, unless it exists."""
        entry, kept = self._scheduler.states.new_entry(held, draft_kv), self._kept(draft_kv)
        begin = len(pages.data) - sum(_bytes_of(share).shape[1] for share in kept)
        for share in kept if entry is not None else ():
            own = _bytes_of(share)[entry]
            source = torch.frombuffer(pages.data, dtype=torch.uint8, offset=begin, count=len(own))
            own.copy_(source)
            begin += len(own)

    def _draft_kv(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None,
    ) -> DraftKv | None:
        """Return the draft KV that a request's drafters keep on the pages of its prompt."""
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

    def _shares(self, owner: str) -> tuple[Sequence[Share], Sequence[Share]]:
        """Return the page-indexed tensors: the model's, and a drafter's.

        Every rank holds all of a drafter's tensors, which are described as a single head.
        """
        draft = self.drafters[owner].kv_tensors() if owner else ()
        return self._runner.parts.cache.page_shares, list(map(_whole, draft))

    def _kept(self, draft_kv: DraftKv | None) -> Sequence[Share]:
        """Return the tensors indexed by entries of prefix states: the model's, and a drafter's."""
        states = None if draft_kv is None else self.drafters[draft_kv.owner].states
        draft = () if states is None else states.prefix_shares
        return [*self._runner.parts.cache.prefix_shares, *(_whole(one.tensor) for one in draft)]


def _whole(tensor: Tensor) -> Share:
    return Share(tensor, 1, (tensor.shape[2],))


def _layout(share: Share) -> Layout:
    dtype = str(share.tensor.dtype).removeprefix("torch.")
    _, rows, _, *more = share.tensor.shape
    return Layout(dtype, (rows, share.all_heads * sum(share.widths), *more), share.widths)


def _bytes_of(share: Share) -> Tensor:
    """Return a byte view of a tensor: [pages, bytes], or [entries, bytes] for states."""
    return share.tensor.view(share.tensor.shape[0], -1).view(torch.uint8)


def _taken(share: Share, index: Tensor) -> bytes:
    return _bytes_of(share).index_select(0, index).cpu().numpy().tobytes()
