# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampling step and its verification of drafts, by `specops.sampling`.

The strategy is `target_match` unless SPECOPS_VLLM_VERIFY names another one: each row samples the
token that plain decoding would sample there, with a random number that depends on the request's
seed and the token's position, and a draft is accepted if it equals this token. Under `rejection`
and `block`, drafts count as drawn with probability 1. That is correct for any drafter that does not
look at the random numbers used for verification: texts follow the model's distribution, and equal
plain decoding at temperature 0.

This module imports vLLM, so only the plug-in imports it, in a process of vLLM.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from specops import sampling
from specops.integrations.vllm import step_requests, threads
from specops.integrations.vllm.request_parameters import BatchParameters
from specops.integrations.vllm.settings import STRATEGIES, strategy_of
from specops.integrations.vllm.step_requests import Row

_STATE = "_specops_batch"
_STRATEGIES = {name: sampling.VerifyStrategy[name.upper()] for name in STRATEGIES}


@dataclass(frozen=True)
class Step:
    """The inputs of sampling for one step.

    Attributes:
        logits: [rows, vocab_size].
        positions: [batch], int32. Number of tokens of each request, which is its next token's
            position.
        parameters: temperature, filters and seeds; None if every row is greedy.
        processors: logits processors, which are applied first.
        num_logprobs: number of most probable tokens to report; None: no logprobs are requested.
        is_processed: whether logprobs are those of the sampled distribution.
        drafts: the drafts and the number of logits rows of each request; None: one row each, no
            drafts.
    """

    logits: Tensor
    positions: Tensor
    parameters: sampling.SamplingTensors | None
    processors: sampling.LogitsProcessors | None
    num_logprobs: int | None
    is_processed: bool
    drafts: sampling.Drafts | None = None

    def results(self, *shape: int) -> dict[str, Tensor]:
        """Allocate outputs for logprobs and ranks of the chosen tokens, if requested."""
        if self.num_logprobs is None:
            return {}
        return {
            "logprobs": torch.empty(shape, dtype=torch.float32),
            "ranks": torch.empty(shape, dtype=torch.int32),
        }

    def run(self) -> SamplerOutput:
        """Sample, or verify drafts.

        Returns:
            The tokens, [batch, 1] or [batch, maximum drafts + 1] padded with -1, and the requested
            logprobs.
        """
        return _sample(self) if self.drafts is None else _verify(self)


def sample_step(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
    """Sample a step's tokens; replaces `GPUModelRunner._sample`.

    Args:
        self: the runner.
        logits: [rows, vocab_size].
        spec_decode_metadata: vLLM's description of the drafts; None if there are none.

    Returns:
        The tokens, [batch, 1] or [batch, maximum drafts + 1] padded with -1, and the requested
        logprobs.
    """
    assert logits is not None
    threads.start()
    input_batch = self.input_batch
    rows = []
    for request_id in input_batch.req_ids:
        state = self.requests[request_id]
        rows.append(Row(request_id, state.num_prompt_tokens, state.sampling_params))
    step_requests.note(rows)
    parameters = parameters_of(self, rows, self.model_config.seed or 0, logits.shape[-1])
    # Remove the requests' generators: they are unused, and vLLM fails on a CPU when it resets them.
    input_batch.generators.clear()
    count = len(rows)
    positions = input_batch.num_tokens_no_spec_cpu_tensor[:count].to(torch.int32, copy=True)
    num_logits, drafts = [1] * count, None
    if spec_decode_metadata is not None:
        num_drafts: list[int] = spec_decode_metadata.num_draft_tokens
        num_logits = [1 + number for number in num_drafts]
        indptr = torch.zeros(count + 1, dtype=torch.int32)
        indptr[1:] = spec_decode_metadata.cu_num_sampled_tokens
        drafts = sampling.Drafts(indptr, _padded(spec_decode_metadata.draft_token_ids, num_drafts))
    return Step(
        # vLLM applies logits processors in float32 as well.
        logits if parameters.processors is None else logits.float(),
        positions,
        parameters.sampling(),
        parameters.processors_of(rows, positions, num_logits, input_batch.token_ids_cpu_tensor),
        input_batch.sampling_metadata.max_num_logprobs,
        self.sampler.logprobs_mode == "processed_logprobs",
        drafts,
    ).run()


def parameters_of(
    holder: Any, rows: list[Row], engine_seed: int, vocab_size: int
) -> BatchParameters:
    """Return the parameters of a step's requests; read them again only if the batch has changed.

    Args:
        holder: object that keeps the parameters between steps.
        rows: the requests.
        engine_seed: source of seeds for requests without one.
        vocab_size: columns of the logits.
    """
    batch: tuple[list[Row], BatchParameters] | None = vars(holder).get(_STATE)
    if batch is None or not _is_same(batch[0], rows):
        batch = rows, BatchParameters.of(rows, engine_seed, vocab_size)
        setattr(holder, _STATE, batch)
    return batch[1]


def _is_same(kept: list[Row], rows: list[Row]) -> bool:
    return len(kept) == len(rows) and all(
        one.request_id == other.request_id and one.sampling_params is other.sampling_params
        for one, other in zip(kept, rows, strict=True)
    )


def _sample(step: Step) -> SamplerOutput:
    """Sample one token of each request."""
    results = step.results(len(step.positions))
    tokens = sampling.sample(
        step.logits,
        step.positions,
        sampling=step.parameters,
        processors=step.processors,
        processed_logprobs=step.is_processed,
        outputs=sampling.SampleOutputs(**results),
    )
    tensors = None
    if step.num_logprobs is not None:
        tensors = _beside(tokens, results, *_top(step))
    return SamplerOutput(sampled_token_ids=tokens[:, None], logprobs_tensors=tensors)


def _verify(step: Step) -> SamplerOutput:
    """Verify drafts: return each request's accepted drafts and one more token."""
    assert step.drafts is not None
    batch, max_drafts = step.drafts.token_ids.shape
    results = step.results(batch, max_drafts + 1)
    tokens, _ = sampling.verify(
        step.logits,
        step.drafts,
        step.positions,
        strategy=_STRATEGIES[strategy_of()],
        sampling=step.parameters,
        processors=step.processors,
        processed_logprobs=step.is_processed,
        outputs=sampling.VerifyOutputs(**results),
    )
    tensors = None
    if step.num_logprobs is not None:
        # vLLM needs a row of logprobs for each column of the tokens, and drops the unused rows.
        rows = step.drafts.output_indptr[:-1, None] + torch.arange(max_drafts + 1)
        rows = rows.clamp(max=len(step.logits) - 1).flatten()
        ids, values = _top(step)
        tensors = _beside(tokens.flatten(), results, ids[rows], values[rows])
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=tensors)


def _padded(flat: Tensor, counts: list[int]) -> Tensor:
    """Return the drafts of each request, [batch, max_count] int32, padded with -1."""
    max_count = max(counts)
    every = flat.tolist()
    rows = []
    at = 0
    for count in counts:
        rows.append(every[at : at + count] + [-1] * (max_count - count))
        at += count
    return torch.tensor(rows, dtype=torch.int32).view(len(counts), max_count)


def _top(step: Step) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens of every row of logits, and their logprobs."""
    assert step.num_logprobs is not None
    if not step.is_processed:
        ids, values, _ = sampling.top_logprobs(step.logits, step.num_logprobs)
        return ids, values
    ids, values, _ = sampling.top_logprobs(
        step.logits,
        step.num_logprobs,
        processed_logprobs=True,
        drafts=step.drafts,
        positions=step.positions,
        sampling=step.parameters,
        processors=step.processors,
    )
    return ids, values


def _beside(
    tokens: Tensor, results: dict[str, Any], ids: Tensor, values: Tensor
) -> LogprobsTensors:
    """Combine logprobs in vLLM's order: the chosen token, then the most probable tokens."""
    return LogprobsTensors(
        torch.cat([tokens[:, None], ids], dim=1),
        torch.cat([results["logprobs"].flatten()[:, None], values], dim=1),
        results["ranks"].flatten(),
    )
