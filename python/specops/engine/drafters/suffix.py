# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding: draft what most often followed the last tokens, in this and other requests."""

import secrets
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops.engine.drafters.base import (
    Drafter,
    DrafterContext,
    StepResults,
    stage_limit,
)
from specops.engine.drafters.suffix_store import SuffixStore
from specops.engine.request import Request


def load(context: DrafterContext) -> Drafter:
    """Make the drafter; every model supports it.

    Raises:
        ValueError: the corpus or the cache file that the configuration names cannot be used.
    """
    store = SuffixStore(context.config, context.tokenizer, context.target.config.vocab_size)
    return SuffixDrafter(context.config.max_num_seqs, store)


class SuffixDrafter(Drafter):
    """Drafter that calls `specops.suffix_tree.SuffixCache` once per step, for all requests.

    The cache has a tree for each request from its first slot until `leave`, also while the request
    is preempted. While no request takes drafts, the cache receives no emitted tokens; it receives
    all of them at once before it drafts again, or when the request loses its slot.

    Args:
        slots: number of request slots.
        store: owner of the cache, which also adds texts to it.
    """

    name = "suffix"

    def __init__(self, slots: int, store: SuffixStore) -> None:
        self.cache = store.cache
        self._store = store
        self._requests: dict[int, Request] = {}  # by slot
        # By slot: the request's number in the cache, and how many tokens the cache has received.
        self._numbers: NDArray[np.int64] = np.full(slots, -1, dtype=np.int64)  # -1: none
        self._lens_sent: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        # Arguments of `SuffixCache.step`, by request of the step.
        self._rows: NDArray[np.int64] = np.empty(slots, dtype=np.int64)
        self._num_tokens: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._max_drafts: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._num_given: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._counts: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._drafts: NDArray[np.int32] = np.empty((slots, 0), dtype=np.int32)
        self._probs: NDArray[np.float32] = np.empty((slots, 0), dtype=np.float32)
        # Tensors over the first n entries of these arrays, by n, so that steps need not create
        # them.
        self._tensors: dict[int, tuple[Tensor, ...]] = {}
        self._started: dict[int, int] = {}  # number in the cache by `Request.arrival`
        # A response stays in the cache under its request's name and may be saved to a file. So
        # names must be unique across engines, too.
        self._prefix = secrets.token_hex(8)

    def start(self, request: Request) -> bool:
        """Build the tree of a request's prompt, unless it exists already."""
        number = self._started.get(request.arrival)
        if number is None:
            scope = _scope_of(request)
            text = self._store.answers.text_of(_prompt_of(request), request.token_ids, scope)
            number = self.cache.start(self._name_of(request), text, scope=scope)
            self._started[request.arrival] = number
        self._numbers[request.slot] = number
        self._lens_sent[request.slot] = len(request.token_ids)
        self._requests[request.slot] = request
        return False

    def stop(self, request: Request, slot: int) -> None:
        """Release the slot; the request's tree stays in the cache."""
        if self._requests.pop(slot, None) is not None:
            self._numbers[slot] = -1
            self._send(request, slot, len(request.token_ids))

    def leave(self, request: Request) -> None:
        """Drop the request's own tree; its response stays in the shared tree."""
        if self._started.pop(request.arrival, None) is not None:
            self.cache.stop(self._name_of(request))
            self._store.answers.add(
                _prompt_of(request), request.output_token_ids, _scope_of(request)
            )
            if not request.output_token_ids:  # there is no response to keep
                self.cache.discard(self._name_of(request))

    def finish(self, results: StepResults) -> None:
        """Append the emitted tokens to the trees, and add drafts to the proposals."""
        if not self._requests:
            return
        limits = [stage_limit(part, self.name) for part in results.parts]
        if not any(limits):
            return
        slots, lens, before = results.slots, results.lens, results.lens_before
        for row in (self._lens_sent[slots] != before).nonzero()[0].tolist():
            slot = int(slots[row])
            if slot in self._requests:
                self._send(self._requests[slot], slot, int(before[row]))
        self._lens_sent[slots] = lens[slots]
        self._draft(results, limits)

    def _draft(self, results: StepResults, limits: list[int]) -> None:
        """Append the emitted tokens of the requests, and draft for them."""
        proposals, batch, slots = results.proposals, len(limits), results.slots
        requests, num_tokens, max_drafts, drafts, counts, num_given, probs = self._views(
            batch, proposals.token_ids.shape[1]
        )
        # Slots are in range, and only mode "clip" writes to `out` without a copy.
        np.take(self._numbers, slots, out=self._rows[:batch], mode="clip")
        np.subtract(results.lens[slots], results.lens_before, out=self._num_tokens[:batch])
        given = self._num_given[:batch]
        np.take(proposals.counts, slots, out=given, mode="clip")
        np.subtract(limits, given, out=self._max_drafts[:batch], casting="unsafe")
        np.maximum(self._max_drafts[:batch], 0, out=self._max_drafts[:batch])
        given[self._max_drafts[:batch] == 0] = 0  # no drafts to add
        if given.any():
            np.take(proposals.token_ids, slots, axis=0, out=self._drafts[:batch], mode="clip")
        self.cache.step(
            requests,
            results.token_ids,
            num_tokens,
            max_drafts,
            draft_token_ids=drafts,
            num_draft_tokens=counts,
            num_given_drafts=num_given,
            probs=probs,
        )
        found_rows = self._counts[:batch].nonzero()[0]
        found, of_rows = slots[found_rows], self._counts[found_rows]
        proposals.counts[found] += of_rows
        proposals.token_ids[found] = self._drafts[found_rows]
        if any(part.request.speculative.selects_drafts for part in results.parts):
            behind = np.arange(self._probs.shape[1]) >= given[found_rows, None]
            proposals.confidences[found] = np.where(
                behind, self._probs[found_rows], proposals.confidences[found]
            )

    @property
    def drafts_common_text(self) -> bool:
        """True if the cache holds corpus texts, also from a loaded file."""
        return self._store.has_common_text

    @property
    def is_unsaved(self) -> bool:
        """True if a cache file is configured and is not up to date."""
        return self._store.is_unsaved

    def gauges(self) -> Mapping[str, int]:
        """Return the size of the shared tree."""
        return {
            "suffix_cache_requests": self.cache.num_cached_requests,
            "suffix_cache_tokens": self.cache.num_cached_tokens,
            "suffix_cache_bytes": self.cache.num_bytes,
        }

    def learn(self, prompt: bytes, answer: NDArray[np.int32], salt: str | None) -> None:
        """Add an answer to the shared tree, and to the earlier answers to its prompt."""
        self._store.learn(prompt, answer, salt or "")

    def forget(self) -> None:
        """Drop the responses of other requests."""
        self._store.forget()

    def save(self) -> None:
        """Write the shared responses to the `suffix_cache` file, which is replaced atomically.

        Raises:
            ValueError: no file is configured, or it cannot be written.
        """
        self._store.save()

    def _send(self, request: Request, slot: int, length: int) -> None:
        """Send the first `length` tokens of a request to the cache, except those sent before."""
        sent = int(self._lens_sent[slot])
        if sent < length:
            self.cache.extend(self._name_of(request), request.token_ids[sent:length])
            self._lens_sent[slot] = length

    def _views(self, batch: int, width: int) -> tuple[Tensor, ...]:
        if self._drafts.shape[1] != width:
            self._drafts = np.full((len(self._rows), width), -1, dtype=np.int32)
            self._probs = np.zeros((len(self._rows), width), dtype=np.float32)
            self._tensors.clear()
        tensors = self._tensors.get(batch)
        if tensors is None:
            arrays = (
                self._rows,
                self._num_tokens,
                self._max_drafts,
                self._drafts,
                self._counts,
                self._num_given,
                self._probs,
            )
            tensors = tuple(torch.from_numpy(array[:batch]) for array in arrays)
            self._tensors[batch] = tensors
        return tensors

    def _name_of(self, request: Request) -> str:
        return f"{self._prefix}-{request.arrival}"


def _scope_of(request: Request) -> str:
    """Return the scope of the responses that a request drafts from."""
    return request.params.cache_salt or ""


def _prompt_of(request: Request) -> list[int]:
    return request.token_ids[: request.prompt_len]
