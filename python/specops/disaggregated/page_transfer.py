# SPDX-License-Identifier: Apache-2.0
"""Export and import of a prompt's pages, with a header that tells which engines may use them.

Pages from the prefix cache give the same bits as computing the prompt, and random numbers depend
only on seed and position, so only pages are transferred. The receiving engine computes the last
tokens of the prompt itself (less than a page plus the drafters' lookahead), which yields the first
token. If pages arrive late or never, the engine computes the whole prompt instead.
"""

from collections.abc import Iterator, Mapping, Sequence

from specops.api.contract import digest_with_adapter
from specops.api.sampling_params import SamplingParams
from specops.api.speculative_config import SpeculativeConfig
from specops.disaggregated.pages import VERSION, Header, KvTransferError, Layout, Pages, check
from specops.engine.engine import Engine
from specops.engine.memory.kv_cache import DraftKv, Salt, adapted_salt
from specops.engine.models.kv import TensorShard
from specops.service.contract import contract_of


class PageTransfer:
    """Export and import of the pages of prompts of one engine.

    With several ranks, each rank holds a shard of every page; all ranks have the same pages.

    Args:
        engine: an engine with prefix caching.

    Attributes:
        contract: what the bits of the engine depend on (service/contract.py).

    Raises:
        ValueError: prefix caching is disabled.
    """

    def __init__(self, engine: Engine) -> None:
        if not engine.config.enable_prefix_caching:
            raise ValueError("enable_prefix_caching must be on for a server with a role, got off")
        self._engine = engine
        self.contract = contract_of(engine)

    def take(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None = None,
        adapter: tuple[str, str] | None = None,
    ) -> Pages:
        """Copy a prompt's full pages from the prefix cache, for another engine.

        Args:
            token_ids: the prompt.
            params: sampling parameters of the request that computed it.
            speculative_config: configuration of that request.
            adapter: name and digest of its LoRA adapter; None: the model alone.

        Returns:
            A copy of this rank's shard of the pages.

        Raises:
            ValueError: no request could have this prompt or these arguments.
        """
        draft_kv = self._engine.draft_kv_of(token_ids, params, speculative_config)
        salt = adapted_salt(params.cache_salt, adapter)
        num_pages, data = self._engine.pages.take(token_ids, draft_kv, salt)
        return Pages(self._header(token_ids, draft_kv, num_pages, adapter), data)

    def copy(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None = None,
        *,
        most: int,
    ) -> tuple[Header, Iterator[list[bytes]]]:
        """Copy as `take` does, in pieces of about `most` bytes (`PromptPages.copy`)."""
        draft_kv = self._engine.draft_kv_of(token_ids, params, speculative_config)
        num_pages, pieces = self._engine.pages.copy(
            token_ids, draft_kv, params.cache_salt, most=most
        )
        return self._header(token_ids, draft_kv, num_pages, None), pieces

    def expected(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        speculative_config: Mapping[str, object] | SpeculativeConfig | None = None,
        adapter: tuple[str, str] | None = None,
    ) -> Header:
        """Return the header that another engine's pages must match to be used for a request."""
        draft_kv = self._engine.draft_kv_of(token_ids, params, speculative_config)
        num_pages = (len(token_ids) - 1) // self._engine.config.page_size
        return self._header(token_ids, draft_kv, num_pages, adapter)

    def give(self, pages: Pages, expected: Header, salt: Salt = None) -> int:
        """Put pages into the prefix cache for the next request with this prompt.

        If there are too few free pages, the request computes its prompt (`PromptPages.give`).

        Args:
            pages: this rank's shard of pages that another engine has computed.
            expected: header for the request that will use the pages.
            salt: salt of that request's pages, see `adapted_salt`.

        Returns:
            Number of leading pages of the prompt that are in the cache now.

        Raises:
            KvTransferError: the pages have another contract, prompt or layout.
        """
        header = pages.header
        check(header, expected)
        if len(pages.data) != header.num_bytes:
            raise KvTransferError(
                f"KV transfer: data must have {header.num_bytes} bytes, got {len(pages.data)}"
            )
        draft_kv = None
        if expected.owner:
            draft_kv = DraftKv(expected.owner, expected.lookahead, max_drafts=0)
        return self._engine.pages.give(
            header.token_ids, header.num_pages, pages.data, draft_kv, salt
        )

    def _header(
        self,
        token_ids: Sequence[int],
        draft_kv: DraftKv | None,
        num_pages: int,
        adapter: tuple[str, str] | None,
    ) -> Header:
        contract = self.contract["digest"]
        ranks = self._engine.ranks
        model, draft = self._engine.pages.tensors(draft_kv)
        return Header(
            version=VERSION,
            exact_across_tp=ranks.num_virtual_ranks,
            contract=digest_with_adapter(contract, None if adapter is None else adapter[1]),
            num_ranks=ranks.size,
            rank=ranks.rank,
            num_readers=ranks.size,
            reader=ranks.rank,
            page_size=self._engine.config.page_size,
            token_ids=list(token_ids),
            num_pages=num_pages,
            owner="" if draft_kv is None else draft_kv.owner,
            lookahead=0 if draft_kv is None else draft_kv.lookahead,
            model=[_layout(shard) for shard in model],
            draft=[_layout(shard) for shard in draft],
            states=[_layout(shard) for shard in self._engine.pages.states(draft_kv)],
        )


def _layout(shard: TensorShard) -> Layout:
    dtype = str(shard.tensor.dtype).removeprefix("torch.")
    _, rows, _, *more = shard.tensor.shape
    return Layout(dtype, (rows, shard.all_heads * sum(shard.widths), *more), shard.widths)
