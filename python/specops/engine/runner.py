# SPDX-License-Identifier: Apache-2.0
"""Runs one planned step: drafts, index arrays, the model, verification. Tensors in, tokens out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specops import batching, sampling
from specops.batching import OutputMode
from specops.engine.drafters import DraftBatch, Drafter, make_drafter
from specops.engine.models import StepBatch, Transformer
from specops.engine.outputs import TokenLogprob
from specops.engine.request import Request
from specops.engine.scheduler import Scheduled
from specops.sampling import AcceptPolicy, VerifyStrategy

_STRATEGIES = {"greedy": VerifyStrategy.GREEDY, "target_match": VerifyStrategy.TARGET_MATCH}
_POLICIES = {
    "normal": AcceptPolicy.NORMAL,
    "accept_all": AcceptPolicy.ACCEPT_ALL,
    "reject_all": AcceptPolicy.REJECT_ALL,
}


@dataclass(frozen=True)
class Emitted:
    """What a step emitted for one request, before stop conditions are looked at."""

    request: Request
    token_ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprob]  # filled when the request asks for them


class _Column:
    """An array with one element per slot, seen by numpy and by torch."""

    def __init__(self, slots: int, dtype: torch.dtype, width: int | None = None) -> None:
        shape = (slots,) if width is None else (slots, width)
        self.tensor = torch.zeros(shape, dtype=dtype)
        self.array: NDArray[np.generic] = self.tensor.numpy()


class _Proposals:
    """A drafter and what it proposed for the coming step."""

    def __init__(self, drafter: Drafter, slots: int, width: int) -> None:
        self.drafter = drafter
        self.max_drafts = _Column(slots, torch.int32)
        self.counts = _Column(slots, torch.int32)
        self.drafts = _Column(slots, torch.int32, width)

    def widen(self, width: int) -> None:
        """Makes room for a request with more drafts; those already proposed are kept."""
        old = self.drafts.array
        if width > old.shape[1]:
            self.drafts = _Column(old.shape[0], torch.int32, width)
            self.drafts.array[:, : old.shape[1]] = old


class Runner:
    """Owns the model, its cache and the per-slot arrays."""

    def __init__(self, model: Transformer, *, num_pages: int, page_size: int, slots: int) -> None:
        self.model = model
        self._cache = model.new_kv_cache(num_pages, page_size)
        self._page_size = page_size
        self._slots = slots
        self._proposals: dict[str, _Proposals] = {}  # by method
        self._history = _Column(slots, torch.int32, model.max_model_len)
        self._lens = _Column(slots, torch.int32)
        self._temperature = _Column(slots, torch.float32)
        self._top_k = _Column(slots, torch.int32)
        self._top_p = _Column(slots, torch.float32)
        self._min_p = _Column(slots, torch.float32)
        self._seed = _Column(slots, torch.int64)
        self._choice = _Column(slots, torch.int32)
        self._strategy = _Column(slots, torch.int32)
        self._policy = _Column(slots, torch.int32)

    def start(self, request: Request) -> None:
        """Writes a request that got a slot into the per-slot arrays."""
        slot, params, config = request.slot, request.params, request.speculative
        self._history.array[slot, : len(request.token_ids)] = request.token_ids
        self._temperature.array[slot] = params.temperature
        self._top_k.array[slot] = params.top_k
        self._top_p.array[slot] = params.top_p
        self._min_p.array[slot] = params.min_p
        self._seed.array[slot] = request.seed
        self._choice.array[slot] = request.choice_index
        self._strategy.array[slot] = _STRATEGIES[config.verify_strategy]
        self._policy.array[slot] = _POLICIES[config.accept_policy]
        self._lens.array[slot] = len(request.token_ids)
        if config.method != "naive":
            if config.method not in self._proposals:
                drafter = make_drafter(config.method, self._slots)
                self._proposals[config.method] = _Proposals(drafter, self._slots, 1)
            proposals = self._proposals[config.method]
            proposals.widen(config.num_speculative_tokens)
            proposals.drafter.start(request)

    def stop(self, request: Request) -> None:
        """Forgets a request that loses its slot."""
        self._lens.array[request.slot] = 0
        if request.speculative.method != "naive":
            proposals = self._proposals[request.speculative.method]
            proposals.counts.array[request.slot] = 0
            proposals.drafter.stop(request)

    def propose(self, requests: Sequence[Request], room: int) -> None:
        """Drafts for the decoding requests, at most `room` tokens each."""
        for method, proposals in self._proposals.items():
            limits = proposals.max_drafts.array
            limits[:] = 0
            proposals.counts.array[:] = 0
            members = [r for r in requests if r.speculative.method == method]
            for request in members:
                wanted = min(request.speculative.num_speculative_tokens, request.draft_limit)
                limits[request.slot] = max(min(wanted, room), 0)
            if limits.any():
                proposals.drafter.propose(
                    DraftBatch(
                        requests=members,
                        token_ids=self._history.tensor,
                        lens=self._lens.tensor,
                        max_draft_tokens=proposals.max_drafts.tensor,
                        draft_token_ids=proposals.drafts.tensor,
                        num_draft_tokens=proposals.counts.tensor,
                    )
                )

    def num_drafts(self, request: Request) -> int:
        """How many drafts the last `propose` found for a request."""
        proposals = self._proposals.get(request.speculative.method)
        return 0 if proposals is None else int(proposals.counts.array[request.slot])

    def execute(self, plan: Sequence[Scheduled]) -> list[Emitted]:
        """Computes the rows of a step and returns what each request emitted, in plan order."""
        slots = [part.request.slot for part in plan]
        history = self._history.array
        # Drafts stand behind the known tokens in the history, so a request's rows are one slice.
        pieces, pages = [], []
        lens = np.empty((3, len(plan)), dtype=np.int32)  # rows, keys and values, output mode
        kv_indptr = np.zeros(len(plan) + 1, dtype=np.int32)
        for index, part in enumerate(plan):
            request, slot = part.request, slots[index]
            known = len(request.token_ids)
            if part.num_drafts:
                history[slot, known : known + part.num_drafts] = self._drafts_of(part)
            end = request.num_computed + part.num_rows
            pieces.append(history[slot, request.num_computed : end])
            mode = OutputMode.ALL if part.num_drafts else OutputMode.LAST
            lens[:, index] = part.num_rows, end, mode if part.emits else OutputMode.NONE
            pages.extend(request.pages)
            kv_indptr[index + 1] = len(pages)
        rows = int(lens[0].sum())
        outputs = sum(1 + part.num_drafts for part in plan if part.emits)
        tensors = torch.from_numpy(lens)
        kv_lens = tensors[1]
        page_starts = torch.from_numpy(kv_indptr)
        page_ids = torch.tensor(pages, dtype=torch.int32)
        indices = batching.prepare_batch(
            tensors[0],
            kv_lens,
            tensors[2],
            page_starts,
            page_ids,
            page_size=self._page_size,
            total_rows=rows,
            num_output_rows=outputs,
        )
        step = StepBatch(
            token_ids=torch.from_numpy(np.concatenate(pieces)),
            positions=indices.positions,
            cache_slots=indices.cache_slots,
            qo_indptr=indices.qo_indptr,
            kv_indptr=page_starts,
            kv_indices=page_ids,
            kv_lens=kv_lens,
        )
        hidden = self.model.forward(step, self._cache)
        if outputs == 0:
            return [Emitted(part.request, [], 0, []) for part in plan]
        if outputs != rows:
            hidden = batching.gather_output_rows(hidden, indices.output_rows)
        logits = self.model.logits(hidden)
        return self._verify(plan, slots, indices.output_indptr, logits)

    def _verify(
        self, plan: Sequence[Scheduled], slots: list[int], output_indptr: Tensor, logits: Tensor
    ) -> list[Emitted]:
        width = max(part.num_drafts for part in plan)
        chosen = np.array(slots)
        drafts = np.full((len(plan), width), -1, dtype=np.int32)
        for index, part in enumerate(plan):
            if part.num_drafts:
                drafts[index, : part.num_drafts] = self._drafts_of(part)
        wanted = max(
            (p.request.params.logprobs for p in plan if p.request.params.logprobs is not None),
            default=None,
        )
        logprobs = None
        if wanted is not None:
            logprobs = torch.empty(len(plan), width + 1, dtype=torch.float32)

        def column(values: _Column) -> Tensor:
            return torch.from_numpy(values.array[chosen])

        tokens, accepted = sampling.verify(
            logits,
            output_indptr,
            torch.from_numpy(drafts),
            positions=column(self._lens),
            strategy=column(self._strategy),
            policy=column(self._policy),
            temperature=column(self._temperature),
            top_k=column(self._top_k),
            top_p=column(self._top_p),
            min_p=column(self._min_p),
            seeds=column(self._seed),
            choice_index=column(self._choice),
            logprobs=logprobs,
        )
        token_rows, counts = tokens.tolist(), accepted.tolist()
        emitted = []
        for index, part in enumerate(plan):
            count = counts[index] + 1 if part.emits else 0
            emitted.append(Emitted(part.request, token_rows[index][:count], counts[index], []))
        if logprobs is not None and wanted is not None:
            _attach_logprobs(emitted, logits, output_indptr, logprobs, wanted)
        return emitted

    def commit(self, request: Request) -> None:
        """Takes over the request's newest tokens into the history."""
        slot, known = request.slot, int(self._lens.array[request.slot])
        total = len(request.token_ids)
        self._history.array[slot, known:total] = request.token_ids[known:]
        self._lens.array[slot] = total

    def _drafts_of(self, part: Scheduled) -> NDArray[np.generic]:
        drafts = self._proposals[part.request.speculative.method].drafts.array
        row: NDArray[np.generic] = drafts[part.request.slot, : part.num_drafts]
        return row


def _attach_logprobs(
    emitted: Sequence[Emitted],
    logits: Tensor,
    output_indptr: Tensor,
    logprobs: Tensor,
    num_alternatives: int,
) -> None:
    """Adds the log-probabilities (and alternatives, if any are wanted) to what was emitted."""
    chosen = logprobs.tolist()
    starts = output_indptr.tolist()
    ids: list[list[int]] = []
    values: list[list[float]] = []
    if num_alternatives > 0:
        top_ids, top_logprobs = sampling.top_logprobs(logits, num_alternatives)[:2]
        ids, values = top_ids.tolist(), top_logprobs.tolist()
    for index, part in enumerate(emitted):
        count = part.request.params.logprobs
        if count is None:
            continue
        for column, token_id in enumerate(part.token_ids):
            row = starts[index] + column
            alternatives = (
                tuple(zip(ids[row][:count], values[row][:count], strict=True)) if count else ()
            )
            part.logprobs.append(TokenLogprob(token_id, chosen[index][column], alternatives))
