# SPDX-License-Identifier: Apache-2.0
"""How the engine is driven by the benches: steps at a fixed length, and single generations."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from specops import _C
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters import DraftBatch
from specops.engine.request import Request
from torch import Tensor

from bench.checkpoints import Checkpoint


class FixedDrafter:
    """Proposes the same number of arbitrary tokens at every step, to time verification."""

    def __init__(self) -> None:
        self.num_drafts = 0

    def propose(self, batch: DraftBatch) -> None:
        """Every slot that may draft gets `num_drafts` tokens."""
        counts = batch.max_draft_tokens.clamp(max=self.num_drafts)
        batch.num_draft_tokens.copy_(counts)
        batch.draft_token_ids.fill_(1)

    def start(self, request: Request) -> None:
        """Keeps nothing."""

    def observe(
        self, requests: Sequence[Request], hidden: Tensor, row_indptr: Sequence[int]
    ) -> None:
        """Keeps nothing."""

    def stop(self, request: Request) -> None:
        """Keeps nothing."""


class Stepper:
    """An engine with `batch` decoding requests of `kv_len` tokens, ready to be stepped.

    Drafts are rejected, so a step moves every request by one token, however many rows it has.
    Prompts differ and share no page.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, batch: int, kv_len: int, drafts: int, num_threads: int
    ) -> None:
        config = SpeculativeConfig(method="naive")
        if drafts:
            config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts, accept_policy="reject_all"
            )
        limit = checkpoint.config["max_position_embeddings"]
        max_model_len = min(limit, kv_len + 512)
        self._drafter = FixedDrafter()
        with mock.patch("specops.engine.runner.make_drafter", lambda *_: self._drafter):
            self.engine = Engine(
                EngineConfig(
                    model=str(checkpoint.path),
                    speculative_config=config,
                    max_num_seqs=batch,
                    max_model_len=max_model_len,
                    enable_prefix_caching=False,
                    num_threads=num_threads,
                )
            )
            self._start(batch, kv_len, max_model_len)
        self._kv_len = kv_len
        self._steps = 0

    def _start(self, batch: int, kv_len: int, max_model_len: int) -> None:
        generator = torch.Generator().manual_seed(0)
        params = SamplingParams(max_tokens=max_model_len - kv_len, temperature=0.0, ignore_eos=True)
        for _ in range(batch):
            ids = torch.randint(0, self.engine.vocab_size, (kv_len,), generator=generator)
            self.engine.add_request(ids.tolist(), params)
        while len(self.engine.step()) < batch:
            pass

    def step(self, steps: int, drafts: int = 0) -> float:
        """Mean seconds of one `Engine.step` with 1 + `drafts` rows a request."""
        self._drafter.num_drafts = drafts
        begun = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        self._steps += steps
        if not self.engine.has_unfinished():
            raise RuntimeError("the requests have ended: fewer steps, or a longer context")
        return (time.perf_counter() - begun) / steps

    @property
    def kv_len(self) -> float:
        """Mean length of a request over the steps so far."""
        return self._kv_len + self._steps / 2

    def host_seconds(self, steps: int) -> float:
        """Mean seconds of a step outside the compiled ops."""
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
    """One prompt's tokens and the seconds from the first of them to the last."""

    token_ids: list[int]
    seconds: float
    num_steps: int  # steps that emitted the tokens after the first


def decode(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams,
    speculative_config: Mapping[str, object],
) -> Decoding:
    """Generates alone in the engine; the prefill is not timed."""
    name = engine.add_request(prompt, params, speculative_config=speculative_config)
    while not engine.step():
        pass
    begun, steps = time.perf_counter(), 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    seconds = time.perf_counter() - begun
    return Decoding(engine.completion(name).token_ids, seconds, steps)
