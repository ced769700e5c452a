# SPDX-License-Identifier: Apache-2.0
"""What a step has beside its arrays where it verifies trees: their chains, and where tokens go.

To attention, and to nobody else, each chain of a tree is a request (`batching.tree_chains`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specops import attention, batching
from specops.batching import BatchIndices, TreeChains
from specops.engine.memory.step_memory import Layout
from specops.engine.memory.step_shape import StepShape
from specops.engine.models import KvCache, StepBatch
from specops.engine.plan import Scheduled


class ChainRow(NamedTuple):
    """Of every chain of a step; int32."""

    qo_lens: Any
    kv_lens: Any
    output_modes: Any  # 0: rows with logits are the requests' affair


class StepTrees:
    """The arrays of a step's trees, and the ops over them.

    Args:
        shape: of the step.
        page_size: tokens of a page.
        results: takes what comes back.
        inputs: takes what the host fills.
        scratch: takes what only the device sees.
    """

    def __init__(
        self, shape: StepShape, page_size: int, results: Layout, inputs: Layout, scratch: Layout
    ) -> None:
        self._shape, self._page_size = shape, page_size
        batch, rows, chains = shape.batch, shape.rows, shape.chains
        self.accepted_nodes = results.int32(batch, shape.width)
        self.parents = inputs.int32(batch, shape.width)
        self._chains = inputs.int32(len(ChainRow._fields), chains)
        self._kv_indptr = inputs.int32(chains + 1)
        self._kv_indices = inputs.int32(shape.chain_pages)
        self._from_slots = inputs.int64(shape.copies)
        self._to_slots = inputs.int64(shape.copies)
        self._indices = {
            "qo_indptr": scratch.int32(chains + 1),
            "output_indptr": scratch.int32(chains + 1),
            "row_to_request": scratch.int32(rows),
            "positions": scratch.int32(rows),
            "cache_slots": scratch.int64(rows),
            "output_rows": scratch.int32(0),
            "output_row_to_request": scratch.int32(0),
        }

    def fill(
        self,
        parts: Sequence[Scheduled],
        qo_lens: Any,
        kv_lens: Any,
        kv_indptr: Any,
        kv_indices: Any,
    ) -> None:
        """Finds the chains of the trees; the arrays are those of the step's requests."""
        columns = ChainRow(*self._chains.host)
        columns.output_modes.fill(0)
        parents = self.parents.host
        parents[:] = np.arange(-1, self._shape.width - 1)
        num_drafts = np.zeros(self._shape.batch, dtype=np.int32)
        spare_pages: list[int] = []
        for index, part in enumerate(parts):
            num_drafts[index] = part.num_drafts
            if part.draft_parents is not None:
                parents[index, : part.num_drafts] = part.draft_parents
                spare_pages += part.spare_pages
        tensor = torch.from_numpy
        batching.tree_chains(
            tensor(parents),
            tensor(num_drafts),
            tensor(qo_lens),
            tensor(kv_lens),
            tensor(kv_indptr),
            tensor(kv_indices),
            torch.tensor(spare_pages, dtype=torch.int32),
            page_size=self._page_size,
            out=TreeChains(
                chain_indptr=torch.empty(self._shape.batch + 1, dtype=torch.int32),
                qo_lens=tensor(columns.qo_lens),
                kv_lens=tensor(columns.kv_lens),
                kv_indptr=tensor(self._kv_indptr.host),
                kv_indices=tensor(self._kv_indices.host),
                from_slots=tensor(self._from_slots.host),
                to_slots=tensor(self._to_slots.host),
            ),
        )

    def bind(self, requests: StepBatch) -> StepBatch:
        """Returns the step's rows as attention sees them: those of chains, not of requests."""
        self._columns = ChainRow(*self._chains.device)
        self._chain_indices = BatchIndices(
            **{name: array.device for name, array in self._indices.items()}
        )
        return replace(
            requests,
            positions=self._chain_indices.positions,
            qo_indptr=self._chain_indices.qo_indptr,
            kv_indptr=self._kv_indptr.device,
            kv_indices=self._kv_indices.device,
            kv_lens=self._columns.kv_lens,
            from_slots=self._from_slots.device,
            to_slots=self._to_slots.device,
        )

    def prepare(self) -> None:
        """Builds the index arrays of the chains."""
        batching.prepare_batch(
            self._columns.qo_lens,
            self._columns.kv_lens,
            self._columns.output_modes,
            self._kv_indptr.device,
            self._kv_indices.device,
            page_size=self._page_size,
            total_rows=self._shape.rows,
            num_output_rows=0,
            out=self._chain_indices,
        )

    def keep_accepted(
        self, cache: KvCache, num_accepted: Tensor, qo_indptr: Tensor, requests: StepBatch
    ) -> None:
        """Moves keys and values of accepted paths to where plain decoding would have put them."""
        accepted = (self.accepted_nodes.device, num_accepted, qo_indptr)
        pages = (requests.kv_lens, requests.kv_indptr, requests.kv_indices)
        for layer in cache.layers:
            for pair in layer.pairs:
                attention.compact_kv(*pair, *accepted, *pages)

    def keep_states(
        self,
        states: Iterable[Tensor],
        num_accepted: Tensor,
        qo_indptr: Tensor,
        qo_lens: Tensor,
        row_numbers: Tensor,
    ) -> None:
        """Moves states of accepted paths behind the root's: for drafters, all drafts are chains."""
        accepted = (self.accepted_nodes.device, num_accepted, qo_indptr)
        for one in states:  # pages of one row
            attention.compact_kv(
                one.view(len(one), 1, 1, -1), None, *accepted, qo_lens, qo_indptr, row_numbers
            )
