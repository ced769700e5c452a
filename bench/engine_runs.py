# SPDX-License-Identifier: Apache-2.0
"""Engine drivers of the benchmarks: steps at a fixed length, and generations."""

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any
from unittest import mock

import torch
from specops import _C
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters.base import Drafter, DrafterStep, TargetStep, stage_limit
from specops.engine.memory.step_memory import Array, Layout
from specops.engine.memory.step_shape import StepShape
from specops.engine.models.families import read_model_config
from specops.engine.plan import Part

from bench.checkpoints import Checkpoint


class FixedDrafter(Drafter):
    """Drafter that proposes a fixed number of distinct tokens per step, to time verification."""

    name = "ngram"  # replaces the n-gram drafter

    def __init__(self, slots: int, device: torch.device) -> None:
        self._slots = slots
        # On the device, because a step's launches may be captured in a CUDA graph.
        self._num_drafts = torch.zeros(1, dtype=torch.int32, device=device)

    def set_num_drafts(self, num_drafts: int) -> None:
        """Set the number of drafts, from the next step on."""
        self._num_drafts.fill_(num_drafts)

    def plan(self, parts: Sequence[Part], shape: StepShape) -> Hashable | None:
        """Return a constant key, since the drafter always drafts."""
        return True

    def new_step(
        self, key: Hashable, shape: StepShape, inputs: Layout, results: Layout
    ) -> DrafterStep:
        """Return the drafter's part of the steps of one shape."""
        return _FixedStep(self._num_drafts, inputs.int32(self._slots), self.name)


class _FixedStep(DrafterStep):
    def __init__(self, num_drafts: torch.Tensor, limits: Array, name: str) -> None:
        self._num_drafts, self._limits, self._name = num_drafts, limits, name

    def fill(self, parts: Sequence[Part]) -> None:
        self._limits.host.fill(0)
        for part in parts:
            self._limits.host[part.request.slot] = stage_limit(part, self._name)

    def launch(self, target: TargetStep) -> None:
        torch.minimum(self._limits.device, self._num_drafts, out=target.num_draft_tokens)
        # Draft 1, 2, 3, ..., since rows of equal tokens would use the same experts.
        target.draft_token_ids.fill_(1).cumsum_(1)


class Stepper:
    """Engine with `batch` decoding requests of `kv_len` tokens, for timing steps.

    All drafts are rejected, so a step adds one token to each request, however many rows it has.
    Prompts differ, so that they share no page. If `quantization` quantizes the layers, the head has
    8 bits.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        batch: int,
        kv_len: int,
        drafts: int,
        num_threads: int | None = None,
        device: str = "cpu",
        load_format: str = "auto",
        quantization: str = "none",
    ) -> None:
        config = SpeculativeConfig(method="naive")
        if drafts:
            config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts, accept_policy="reject_all"
            )
        limit = read_model_config(checkpoint.path).max_model_len
        max_model_len = min(limit, kv_len + 512)
        self._drafter = FixedDrafter(batch, torch.device(device))
        self._names: list[str] = []
        self._lengths: list[float] = []
        self._steps = self._starts = 0
        with mock.patch("specops.engine.drafters.ngram.load", lambda _: self._drafter):
            self.engine = Engine(
                EngineConfig(
                    model=str(checkpoint.path),
                    device=device,
                    load_format=load_format,
                    quantization=quantization,
                    quantize_head="none" if quantization == "none" else "wint8",
                    speculative_config=config,
                    max_num_seqs=batch,
                    max_model_len=max_model_len,
                    enable_prefix_caching=False,
                    num_threads=num_threads,
                )
            )
            self._shape = (batch, kv_len, max_model_len - kv_len)
            self._start()

    def _start(self) -> None:
        """Replace the current requests by new ones, and prefill them."""
        batch, kv_len, room = self._shape
        for name in self._names:
            self.engine.abort(name)
        generator = torch.Generator().manual_seed(self._starts)
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        self._names = [
            self.engine.add_request(
                torch.randint(0, self.engine.vocab_size, (kv_len,), generator=generator).tolist(),
                params,
            )
            for _ in range(batch)
        ]
        self._starts += 1
        # The first request already decodes while the others are prefilled.
        self._steps = 1
        while len(self.engine.step()) < batch:
            self._steps += 1

    def _make_room(self, steps: int) -> None:
        """Start new requests if the current ones would end within `steps` steps."""
        if self._steps + steps >= self._shape[2]:
            self._start()

    def step(self, steps: int, drafts: int = 0) -> float:
        """Return the mean seconds of one `Engine.step` with 1 + `drafts` rows per request."""
        self._make_room(steps + 1)
        self._drafter.set_num_drafts(drafts)
        self.engine.step()  # untimed step, which drafts for the next one
        self._steps += 1
        begun = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        seconds = time.perf_counter() - begun
        self._steps += steps
        self._lengths.append(self._shape[1] + self._steps - steps / 2)
        return seconds / steps

    @property
    def kv_len(self) -> float:
        """Mean length of a request over all timed steps so far."""
        return mean(self._lengths)

    def host_seconds(self, steps: int) -> float:
        """Return the mean seconds that a step spends outside the compiled ops."""
        self._make_room(steps)
        inside = [0.0]

        def timed(function: Any) -> Any:
            def call(*arguments: Any) -> Any:
                begun = time.perf_counter()
                result = function(*arguments)
                inside[0] += time.perf_counter() - begun
                return result

            return call

        ops = {name: op for name, op in vars(_C).items() if callable(op)}
        with mock.patch.multiple(_C, **{name: timed(op) for name, op in ops.items()}):
            return self.step(steps) - inside[0] / steps


@dataclass(frozen=True)
class Decoding:
    """Generated tokens, and the seconds from the first token to the last."""

    token_ids: list[int]
    seconds: float
    num_steps: int  # steps that emitted the tokens after the first
    num_tokens: int = 0  # tokens emitted in that time


def decode_together(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    speculative_config: Mapping[str, object],
) -> Decoding:
    """Generate all prompts together; time from the end of the last prefill to the last token.

    The result has the tokens of all prompts, concatenated, including tokens from before the timing.
    """
    names = [
        engine.add_request(prompt, one, speculative_config=speculative_config)
        for prompt, one in zip(prompts, params, strict=True)
    ]
    waiting, first = set(names), 0
    while waiting:
        for output in engine.step():
            waiting.discard(output.request_id)
            first += len(output.token_ids)
    begun, steps = time.perf_counter(), 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    seconds = time.perf_counter() - begun
    tokens = [token for name in names for token in engine.completion(name).token_ids]
    return Decoding(tokens, seconds, steps, len(tokens) - first)


def decode(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams,
    speculative_config: Mapping[str, object],
) -> Decoding:
    """Generate one prompt alone; time from the end of the prefill."""
    name = engine.add_request(prompt, params, speculative_config=speculative_config)
    while not engine.step():
        pass
    begun, steps = time.perf_counter(), 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    seconds = time.perf_counter() - begun
    return Decoding(engine.completion(name).token_ids, seconds, steps)
