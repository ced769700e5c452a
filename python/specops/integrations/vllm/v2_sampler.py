# SPDX-License-Identifier: Apache-2.0
"""Sampler, rejection sampler and prompt logprobs of vLLM's V2 model runner.

This module imports vLLM, so only the worker imports it, in a process of vLLM.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from specops import sampling
from specops.integrations.vllm import step_requests, threads
from specops.integrations.vllm.sample_step import Step, parameters_of
from specops.integrations.vllm.step_requests import Row

_DUMMY = SamplingParams(temperature=0.0)  # request of a dummy step


class SpecopsSampler:
    """Sampler of a runner, with and without drafts.

    It wraps vLLM's own sampler, which keeps the temperatures and seeds that vLLM's drafters read.

    Args:
        runner: vLLM's V2 model runner, whose sampler has been created.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._vllm = runner.sampler
        self._params: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of vLLM's sampler."""
        return getattr(self._vllm, name)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Record a request's parameters under its index in the runner's state."""
        self._vllm.sampling_states.add_request(req_idx, sampling_params)
        self._params[req_idx] = sampling_params

    def apply_staged_writes(self) -> None:
        """Publish the temperatures and seeds of new requests."""
        self._vllm.sampling_states.apply_staged_writes()

    def __call__(
        self,
        logits: Tensor,
        input_batch: Any,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Sample a step's tokens, and verify its drafts.

        Args:
            logits: [rows, vocab_size].
            input_batch: the step.
            draft_logits: ignored; a draft counts as drawn with probability 1.
            invalid_drafts: [rows], bool. Drafts that a grammar forbids; in a request, all drafts
                after one of them are forbidden as well. None: no draft is.

        Returns:
            The tokens, [batch, 1] or [batch, maximum drafts + 1] padded with -1; their number per
            request, which is 0 while a prompt is incomplete; and the requested logprobs.
        """
        threads.start()
        count = input_batch.num_reqs
        states = self._runner.req_states
        indices = input_batch.idx_mapping_np[:count].tolist()
        rows = [
            Row(request_id, int(states.prompt_len.np[index]), self._params.get(index, _DUMMY))
            for request_id, index in zip(input_batch.req_ids, indices, strict=True)
        ]
        step_requests.note(rows)
        seed = self._runner.model_config.seed or 0
        parameters = parameters_of(self, rows, seed, logits.shape[-1])
        indptr = torch.from_numpy(input_batch.cu_num_logits_np).to(torch.int32)
        num_scheduled = num_logits = indptr.diff()
        inputs = input_batch.input_ids[input_batch.logits_indices]
        if invalid_drafts is not None:
            logits, inputs = logits[~invalid_drafts], inputs[~invalid_drafts]
            of_row = torch.arange(count).repeat_interleave(num_logits)
            num_logits = of_row[~invalid_drafts].bincount(minlength=count).to(torch.int32)
            indptr = torch.nn.functional.pad(num_logits.cumsum(0), (1, 0)).to(torch.int32)
        lens = input_batch.seq_lens[:count]
        positions = (lens - num_scheduled + 1).to(torch.int32)
        token_ids = states.all_token_ids.gpu
        if parameters.processors is not None:
            token_ids = token_ids[indices]
        drafts = None
        if len(logits) > count:
            drafts = sampling.Drafts(indptr, _drafts_of(inputs, indptr))
        num_logprobs = self._vllm.sampling_states.max_num_logprobs(indices)
        found = Step(
            logits if parameters.processors is None else logits.float(),
            positions,
            parameters.sampling(),
            parameters.processors_of(rows, positions, num_logits.tolist(), token_ids),
            None if num_logprobs == NO_LOGPROBS else num_logprobs,
            self._vllm.logprobs_mode == "processed_logprobs",
            drafts,
        ).run()
        tokens, logprobs = found.sampled_token_ids, found.logprobs_tensors
        is_partial = lens < states.prefill_len.gpu[indices]
        num_sampled = (tokens >= 0).sum(1, dtype=torch.int32).masked_fill_(is_partial, 0)
        if logprobs is not None and drafts is not None:
            width = tokens.shape[1]
            starts = list(range(0, (count + 1) * width, width))
            logprobs = logprobs._replace(cu_num_generated_tokens=starts)
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=(num_scheduled - num_sampled).masked_fill_(is_partial, 0),
        )


class SpecopsPromptLogprobs(PromptLogprobsWorker):  # type: ignore[misc]
    """Prompt logprobs whose token ids do not depend on the other requests of a step.

    vLLM asks for the k greatest logits of all rows, where k is the maximum of the step's requests.
    Which of several equal logits these are depends on k.

    Args:
        worker: vLLM's own worker.
    """

    uses_prompt_logprobs: Any

    def __init__(self, worker: PromptLogprobsWorker) -> None:
        self.__dict__.update(vars(worker))

    def compute_prompt_logprobs(
        self, logits_fn: Any, hidden_states: Tensor, input_batch: Any, *args: Any
    ) -> dict[str, Any]:
        """Compute the logprobs of the requests with the same k together."""
        every = self.uses_prompt_logprobs
        numbers = self.num_prompt_logprobs
        indices = input_batch.idx_mapping_np
        found: dict[str, Any] = {}
        for number in sorted({*numbers[indices][every[indices]].tolist()}):
            self.uses_prompt_logprobs = every & (numbers == number)
            found |= super().compute_prompt_logprobs(logits_fn, hidden_states, input_batch, *args)
        self.uses_prompt_logprobs = every
        return found


def _drafts_of(inputs: Tensor, indptr: Tensor) -> Tensor:
    """Return each request's drafts, [batch, maximum] int32, padded with -1.

    Args:
        inputs: [rows of logits]. Input token of each row: a request's last token, then its drafts.
        indptr: [batch + 1]. First row of each request.
    """
    counts = indptr.diff() - 1
    columns = torch.arange(int(counts.max()))
    rows = (indptr[:-1, None] + 1 + columns).clamp(max=len(inputs) - 1)
    return inputs[rows].to(torch.int32).masked_fill_(columns >= counts[:, None], -1)
