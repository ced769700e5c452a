# SPDX-License-Identifier: Apache-2.0
"""Additional arrays of a step that verifies trees: their chains, and the copies of tokens.

Only attention treats each chain of a tree as a request of its own (`batching.tree_chains`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specops import attention, batching
from specops.batching import BatchIndices, TreeChains
from specops.engine.memory.step_memory import Array, Layout
from specops.engine.memory.step_shape import StepShape, TreeShape
from specops.engine.models import KvCache, StepBatch
from specops.engine.plan import Part


def tree_shape(parts: Sequence[Part], page_size: int) -> TreeShape:
    """Return the sizes needed for the chains of a step's trees, and for their copied tokens."""
    chains = pages = copies = 0
    for part in parts:
        count = part.num_chains
        chains += count
        pages += count * len(part.pages)
        # A chain copies at most from the start of a page to the end of its path.
        copies += (count - 1) * (page_size + part.num_drafts)
    return TreeShape(chains, pages, copies)


def index_arrays(layout: Layout, batch: int, rows: int, outputs: int) -> dict[str, Array]:
    """Add the arrays that `batching.prepare_batch` builds to a layout."""
    return {
        "qo_indptr": layout.int32(batch + 1),
        "output_indptr": layout.int32(batch + 1),
        "row_to_request": layout.int32(rows),
        "positions": layout.int32(rows),
        "cache_slots": layout.int64(rows),
        "output_rows": layout.int32(outputs),
        "output_row_to_request": layout.int32(outputs),
    }


def batch_indices(arrays: Mapping[str, Array]) -> BatchIndices:
    """Return the arrays of `index_arrays` as tensors, once they are placed."""
    return BatchIndices(**{name: array.device for name, array in arrays.items()})


class StepTrees:
    """Arrays of a step's trees, and the ops on them.

    Args:
        shape: shape of the step, which has trees.
        page_size: tokens of a page.
        results: layout of arrays copied back to the host.
        inputs: layout of arrays that the host fills.
        scratch: layout of arrays that only the device uses.
    """

    def __init__(
        self, shape: StepShape, page_size: int, results: Layout, inputs: Layout, scratch: Layout
    ) -> None:
        self._shape, self._page_size = shape, page_size
        assert shape.trees is not None
        batch, rows, (chains, pages, copies) = shape.batch, shape.rows, shape.trees
        self.accepted_nodes = results.int32(batch, shape.width)
        self.parents = inputs.int32(batch, shape.width)
        # qo_lens, kv_lens and output_modes. No row of a chain has logits: requests' rows have them.
        self._chains = inputs.int32(3, chains)
        self._kv_indptr = inputs.int32(chains + 1)
        self._kv_indices = inputs.int32(pages)
        self._from_slots = inputs.int64(copies)
        self._to_slots = inputs.int64(copies)
        self._indices = index_arrays(scratch, chains, rows, 0)

    def fill(self, parts: Sequence[Part], requests: Sequence[Any]) -> None:
        """Find the chains of the trees, and fill the input arrays.

        Args:
            parts: parts of the step.
            requests: qo_lens, kv_lens, kv_indptr and kv_indices of all requests, on the host.
        """
        qo_lens, kv_lens, output_modes = self._chains.host
        output_modes.fill(0)
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
        own_qo_lens, own_kv_lens, kv_indptr, kv_indices = map(tensor, requests)
        batching.tree_chains(
            tensor(parents),
            tensor(num_drafts),
            own_qo_lens,
            own_kv_lens,
            kv_indptr,
            kv_indices,
            torch.tensor(spare_pages, dtype=torch.int32),
            page_size=self._page_size,
            out=TreeChains(
                chain_indptr=torch.empty(self._shape.batch + 1, dtype=torch.int32),
                qo_lens=tensor(qo_lens),
                kv_lens=tensor(kv_lens),
                kv_indptr=tensor(self._kv_indptr.host),
                kv_indices=tensor(self._kv_indices.host),
                from_slots=tensor(self._from_slots.host),
                to_slots=tensor(self._to_slots.host),
            ),
        )

    def bind(self, requests: StepBatch, num_accepted: Tensor, qo_lens: Tensor) -> StepBatch:
        """Return the step's batch for attention, in which chains take the place of requests.

        Args:
            requests: the batch for all other ops.
            num_accepted: int32 [batch], number of accepted drafts of each request.
            qo_lens: int32 [batch], rows of each request.
        """
        self._requests, self._qo_lens = requests, qo_lens
        self._accepted = self.accepted_nodes.device, num_accepted, requests.qo_indptr
        self._lens = self._chains.device
        self._chain_indices = batch_indices(self._indices)
        return replace(
            requests,
            positions=self._chain_indices.positions,
            qo_indptr=self._chain_indices.qo_indptr,
            kv_indptr=self._kv_indptr.device,
            kv_indices=self._kv_indices.device,
            kv_lens=self._lens[1],
            from_slots=self._from_slots.device,
            to_slots=self._to_slots.device,
        )

    def prepare(self) -> None:
        """Build the index arrays of the chains."""
        qo_lens, kv_lens, output_modes = self._lens
        batching.prepare_batch(
            qo_lens,
            kv_lens,
            output_modes,
            self._kv_indptr.device,
            self._kv_indices.device,
            page_size=self._page_size,
            total_rows=self._shape.rows,
            num_output_rows=0,
            out=self._chain_indices,
        )

    def keep_accepted(self, cache: KvCache, states: Iterable[Tensor], row_numbers: Tensor) -> None:
        """Move keys, values and states of accepted paths to where plain decoding would put them.

        Args:
            cache: keys and values.
            states: hidden states that drafters read, [rows, hidden_size] each. Drafters expect the
                accepted drafts as a chain.
            row_numbers: int32 [rows], 0, 1, 2 and so on.
        """
        requests = self._requests
        pages = requests.kv_lens, requests.kv_indptr, requests.kv_indices
        for pair in cache.pairs:
            attention.compact_kv(*pair, *self._accepted, *pages)
        rows = self._qo_lens, requests.qo_indptr, row_numbers  # as a cache with pages of one row
        for one in states:
            attention.compact_kv(one.view(len(one), 1, 1, -1), None, *self._accepted, *rows)
