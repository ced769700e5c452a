# SPDX-License-Identifier: Apache-2.0
"""Proposers of vLLM's V1 model runner as a speculator of V2, which has no interface for them.

This module imports vLLM, so only the worker imports it, in a process of vLLM.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator


class ProposerSpeculator(BaseSpeculator):  # type: ignore[misc]
    """Speculator that asks a proposer of vLLM's V1 model runner for drafts.

    The proposer sees what V1 would pass: the rows of the batch with their new tokens, lengths and
    texts. Each request has as many drafts as the proposer returns, up to vLLM's limit for the step;
    the speculator is the runner's `draft_tokens_handler` as well, and reports them to the
    scheduler, which checks them against a grammar.

    Args:
        proposer: qualified name of the proposer's class.
        vllm_config: vLLM's configuration.
        states: the runner's state of all requests.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, proposer: str, vllm_config: Any, states: Any) -> None:
        self._num_drafts = int(vllm_config.speculative_config.num_speculative_tokens)
        self._proposer = resolve_obj_by_qualname(proposer)(vllm_config)
        self._proposer.load_model()
        self._states = states
        self._request_ids: list[str] = []
        self._drafts: list[list[int]] = []

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: there are no CUDA graphs."""

    def capture(self) -> None:
        """Do nothing: there are no CUDA graphs."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the drafts of every request, [batch, num_speculative_tokens], padded with 0."""
        drafts = torch.zeros(input_batch.num_reqs, self._num_drafts, dtype=torch.int64)
        if dummy_run:
            return drafts
        indices = input_batch.idx_mapping_np[: input_batch.num_reqs].tolist()
        texts = self._states.all_token_ids.gpu[indices].numpy()
        lens = self._states.total_len.gpu[indices].numpy()
        sampled = [
            text[end - count : end].tolist()
            for text, end, count in zip(texts, lens, num_sampled.tolist(), strict=True)
        ]
        found = self._proposer.propose(sampled, lens, texts, slot_mappings=slot_mappings)
        self._drafts = [one[:num_speculative_tokens] for one in found]
        for row, one in zip(drafts, self._drafts, strict=True):
            row[: len(one)] = torch.tensor(one, dtype=torch.int64)
        return drafts

    def set_draft_tokens(self, input_batch: Any, *args: Any) -> None:
        """Record the step's requests, as vLLM's `DraftTokensHandler` does."""
        self._request_ids = input_batch.req_ids

    def get_draft_tokens(self) -> DraftTokenIds:
        """Return the drafts of the step's requests for the scheduler."""
        return DraftTokenIds(self._request_ids, self._drafts)
