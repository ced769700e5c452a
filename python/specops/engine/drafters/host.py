# SPDX-License-Identifier: Apache-2.0
"""The drafters that run on the host: when they are asked, and what they said last."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.drafters.base import HostDraftBatch, HostDrafter
from specops.engine.request import Request


class HostDrafts:
    """Asks host drafters once a step's results are read, each for all its requests in one call.

    What is said of a request of the last step stands in a row of its own, in the step's order.
    While nobody is to get drafts no drafter is asked, nor told what steps emit: it learns all of
    that at once, when it is asked again or the request goes.

    Args:
        slots: requests that run at once.

    Attributes:
        width: the most that any request drafts.
    """

    def __init__(self, slots: int) -> None:
        self.width = 0
        self._slots = slots
        self._drafters: dict[str, HostDrafter] = {}
        self._requests: dict[int, Request] = {}  # by slot, those whose method is here
        # By slot.
        self._rows: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._lens_told: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._row_numbers: NDArray[np.int32] = np.arange(slots, dtype=np.int32)
        # By row.
        self._num_tokens: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._max_drafts: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._num_given: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._drafts: dict[str, NDArray[np.int32]] = {}  # by method, [slots, width]
        self._counts: dict[str, NDArray[np.int32]] = {}  # by method, [slots]
        # Of the first rows, by how many and by method, so that a step makes none.
        self._tensors: dict[tuple[int, str], tuple[Tensor, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._drafters)

    def __contains__(self, method: str) -> bool:
        return method in self._drafters

    def add(self, method: str, drafter: HostDrafter) -> None:
        """Takes in a drafter."""
        self._drafters[method] = drafter
        self._drafts[method] = np.full((self._slots, self.width), -1, dtype=np.int32)
        self._counts[method] = np.zeros(self._slots, dtype=np.int32)

    def start(self, request: Request) -> None:
        """A request whose drafts end here got its slot."""
        method = _method(request)
        wanted = request.speculative.num_speculative_tokens
        if wanted > self.width:
            wider = ((0, 0), (0, wanted - self.width))
            for name, drafts in self._drafts.items():
                self._drafts[name] = np.pad(drafts, wider, constant_values=-1)
            self._tensors.clear()
            self.width = wanted
        self._drafters[method].start(request)
        self._requests[request.slot] = request
        self._lens_told[request.slot] = len(request.token_ids)

    def stop(self, request: Request) -> None:
        """A request gave its slot back."""
        if _method(request) in self._drafters:
            self._tell(request, len(request.token_ids))
            self._drafters[_method(request)].stop(request)
            del self._requests[request.slot]

    def leave(self, request: Request) -> None:
        """A request is gone for good, with a slot or without."""
        if _method(request) in self._drafters:
            self._drafters[_method(request)].leave(request)

    def propose(
        self,
        slots: NDArray[np.int32],
        token_ids: Tensor,
        lens_before: NDArray[np.int32],
        lens: NDArray[np.int32],
        limits: Sequence[int],
        given: Mapping[int, NDArray[np.int32]],
    ) -> None:
        """Tells the drafters what a step emitted and has them draft for the next one.

        Args:
            slots: [batch]. Of the requests of the step.
            token_ids: [batch, w], int32, on the host. A row begins with what was emitted.
            lens_before: [batch], tokens of each request before the step.
            lens: by slot, tokens of each request by now.
            limits: [batch]. Most drafts of each; 0 for requests of other methods, too.
            given: drafts that are there and are to be continued, by their row; most rows have none.
        """
        batch = len(slots)
        for slot in slots[self._lens_told[slots] != lens_before].tolist():
            if slot in self._requests:
                self._tell(self._requests[slot], int(lens_before[slots == slot][0]))
        self._lens_told[slots] = lens[slots]
        np.subtract(lens[slots], lens_before, out=self._num_tokens[:batch])
        self._max_drafts[:batch] = limits
        self._rows[slots] = self._row_numbers[:batch]
        self._num_given[:batch] = 0
        for row, drafts in given.items():
            self._num_given[row] = len(drafts)
            self._max_drafts[row] = max(limits[row] - len(drafts), 0)
        for method, drafter in self._drafters.items():
            for row, drafts in given.items():
                self._drafts[method][row, : len(drafts)] = drafts
            drafter.propose(self._batch(slots, token_ids, method))

    def propose_nothing(self) -> None:
        """Forgets what the drafters said, and neither tells them nor asks them anything."""
        self._num_given.fill(0)
        for counts in self._counts.values():
            counts.fill(0)

    def _tell(self, request: Request, length: int) -> None:
        """Lets a request's drafter have the first tokens, as far as it has not."""
        told = self._lens_told[request.slot]
        if told < length:
            drafter = self._drafters[_method(request)]
            drafter.extend(request, request.token_ids[told:length])
            self._lens_told[request.slot] = length

    def num_drafts(self, request: Request) -> int:
        """How many drafts the last step brought for a request that took part in it."""
        row = self._rows[request.slot]
        return int(self._num_given[row]) + int(self._counts[_method(request)][row])

    def drafts(self, request: Request, count: int) -> NDArray[np.int32]:
        """The first of them."""
        return self._drafts[_method(request)][self._rows[request.slot], :count]

    def _batch(self, slots: NDArray[np.int32], token_ids: Tensor, method: str) -> HostDraftBatch:
        batch = len(slots)
        tensors = self._tensors.get((batch, method))
        if tensors is None:
            arrays = (
                self._num_tokens,
                self._max_drafts,
                self._drafts[method],
                self._counts[method],
                self._num_given,
            )
            tensors = tuple(torch.from_numpy(array[:batch]) for array in arrays)
            self._tensors[batch, method] = tensors
        return HostDraftBatch(slots, token_ids, *tensors)


def _method(request: Request) -> str:
    """The drafter on the host that a request's drafts end with; empty: none."""
    return request.speculative.host_method
