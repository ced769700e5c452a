# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampling step and its verification of drafts, by `specops.sampling`.

The strategy is `target_match`: every row chooses the token that plain decoding would choose there,
by a random number of the request's seed and the token's position, and drafts are compared with it.

Imports vLLM: only the plug-in imports this module, in a process of vLLM.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from specops import sampling
from specops.vllm import step_requests, threads
from specops.vllm.request_parameters import BatchParameters
from specops.vllm.step_requests import Row

_STATE = "_specops_batch"


class _Batch:
    """The requests of a runner's batch and what they ask for, until the batch changes."""

    def __init__(self, rows: list[Row], parameters: BatchParameters) -> None:
        self.rows = rows
        self.parameters = parameters

    def is_of(self, rows: list[Row]) -> bool:
        """Whether these are the same requests, in the same order."""
        return len(rows) == len(self.rows) and all(
            new.request_id == old.request_id and new.sampling_params is old.sampling_params
            for new, old in zip(rows, self.rows, strict=True)
        )


def sample_step(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
    """Takes the place of `GPUModelRunner._sample`.

    Args:
        self: the runner.
        logits: [rows, vocab_size].
        spec_decode_metadata: what vLLM knows of the drafts; None without any.

    Returns:
        The tokens, [batch, 1] or [batch, most drafts + 1] with -1 behind the accepted ones, and the
        logprobs that any request asks for.
    """
    assert logits is not None
    threads.start()
    batch = _batch_of(self, logits)
    step_requests.note(batch.rows)
    # The requests' generators are not drawn from; where vLLM sets them back, a CPU cannot.
    self.input_batch.generators.clear()
    count = len(batch.rows)
    positions = self.input_batch.num_tokens_no_spec_cpu_tensor[:count].to(torch.int32, copy=True)
    if batch.parameters.processors is not None:
        logits = logits.float()  # as vLLM edits them
    wanted = self.input_batch.sampling_metadata.max_num_logprobs
    is_processed = self.sampler.logprobs_mode == "processed_logprobs"
    if spec_decode_metadata is None:
        return _sample(batch, logits, positions, wanted, is_processed)
    return _verify(batch, logits, positions, spec_decode_metadata, wanted, is_processed)


def _batch_of(runner: Any, logits: Tensor) -> _Batch:
    """What the runner's batch asks for; read again when the batch has changed."""
    given = runner.input_batch
    rows = []
    for request_id in given.req_ids:
        state = runner.requests[request_id]
        rows.append(Row(request_id, state.num_prompt_tokens, state.sampling_params))
    batch: _Batch | None = getattr(runner, _STATE, None)
    if batch is None or not batch.is_of(rows):
        seed = runner.model_config.seed or 0
        parameters = BatchParameters.of(rows, seed, logits.shape[-1], given.token_ids_cpu_tensor)
        batch = _Batch(rows, parameters)
        setattr(runner, _STATE, batch)
    return batch


def _sample(
    batch: _Batch, logits: Tensor, positions: Tensor, wanted: int | None, is_processed: bool
) -> SamplerOutput:
    """One token of each request."""
    count = len(batch.rows)
    processors = batch.parameters.processors_of(batch.rows, positions, [1] * count)
    filters = batch.parameters.filters()
    logprobs = ranks = None
    if wanted is not None:
        logprobs = torch.empty(count, dtype=torch.float32)
        ranks = torch.empty(count, dtype=torch.int32)
    tokens = sampling.sample(
        logits,
        positions,
        processors=processors,
        processed_logprobs=is_processed,
        logprobs=logprobs,
        ranks=ranks,
        **filters,
    )
    tensors = None
    if wanted is not None:
        assert logprobs is not None and ranks is not None
        ids, values = _top(logits, wanted, batch, positions, processors, is_processed, None, None)
        tensors = _beside(tokens, logprobs, ranks, ids, values)
    return SamplerOutput(sampled_token_ids=tokens[:, None], logprobs_tensors=tensors)


def _verify(
    batch: _Batch,
    logits: Tensor,
    positions: Tensor,
    metadata: Any,
    wanted: int | None,
    is_processed: bool,
) -> SamplerOutput:
    """The accepted drafts of each request, and a token more."""
    counts: list[int] = metadata.num_draft_tokens
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    indptr[1:] = metadata.cu_num_sampled_tokens
    drafts = _padded(metadata.draft_token_ids, counts)
    num_logits = [count + 1 for count in counts]
    processors = batch.parameters.processors_of(batch.rows, positions, num_logits)
    logprobs = ranks = None
    if wanted is not None:
        shape = (len(counts), drafts.shape[1] + 1)
        logprobs = torch.empty(shape, dtype=torch.float32)
        ranks = torch.empty(shape, dtype=torch.int32)
    tokens, _ = sampling.verify(
        logits,
        indptr,
        drafts,
        positions=positions,
        processors=processors,
        processed_logprobs=is_processed,
        logprobs=logprobs,
        ranks=ranks,
        **batch.parameters.filters(),
    )
    tensors = None
    if wanted is not None:
        assert logprobs is not None and ranks is not None
        ids, values = _top(
            logits, wanted, batch, positions, processors, is_processed, indptr, drafts
        )
        # vLLM wants a row for every column of the tokens, and drops those behind the accepted.
        rows = indptr[:-1, None] + torch.arange(tokens.shape[1])
        rows = rows.clamp(max=len(logits) - 1).flatten()
        tensors = _beside(
            tokens.flatten(), logprobs.flatten(), ranks.flatten(), ids[rows], values[rows]
        )
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=tensors)


def _padded(flat: Tensor, counts: list[int]) -> Tensor:
    """[batch, most], int32: the drafts of each request, -1 behind them."""
    most = max(counts)
    every = flat.tolist()
    rows, at = [], 0
    for count in counts:
        rows.append(every[at : at + count] + [-1] * (most - count))
        at += count
    return torch.tensor(rows, dtype=torch.int32).view(len(counts), most)


def _top(
    logits: Tensor,
    wanted: int,
    batch: _Batch,
    positions: Tensor,
    processors: sampling.LogitsProcessors | None,
    is_processed: bool,
    indptr: Tensor | None,
    drafts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The most probable tokens of every row, and their logprobs."""
    if not is_processed:
        ids, values, _ = sampling.top_logprobs(logits, wanted)
        return ids, values
    filters = {k: v for k, v in batch.parameters.filters().items() if k != "seeds"}
    ids, values, _ = sampling.top_logprobs(
        logits,
        wanted,
        processed_logprobs=True,
        output_indptr=indptr,
        draft_token_ids=drafts,
        positions=positions,
        processors=processors,
        **filters,
    )
    return ids, values


def _beside(
    tokens: Tensor, logprobs: Tensor, ranks: Tensor, ids: Tensor, values: Tensor
) -> LogprobsTensors:
    """The chosen token first, then the most probable ones."""
    return LogprobsTensors(
        torch.cat([tokens[:, None], ids], dim=1),
        torch.cat([logprobs[:, None], values], dim=1),
        ranks,
    )
