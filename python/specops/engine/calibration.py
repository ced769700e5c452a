# SPDX-License-Identifier: Apache-2.0
"""Measures what steps and drafters cost on this machine, once; the table is kept in a file."""

import dataclasses
import hashlib
import logging
import time
from array import array

import torch

import specops
from specops.engine.config import EngineConfig
from specops.engine.cost_table import STEP, CostTable, cost_path
from specops.engine.drafting import Drafting
from specops.engine.errors import ModelError
from specops.engine.memory.kv_cache import PagePool
from specops.engine.plan import Part, Plan
from specops.engine.request import Request
from specops.engine.sampling_params import SamplingParams
from specops.engine.steps.runner import Runner
from specops.engine.tokenizer import TextStream, Tokenizer

logger = logging.getLogger(__name__)

_CONTEXT = 64  # tokens of the requests that are measured, where the model takes so many
_BEHIND = 32  # of these, positions that drafters have missed where catching up is measured


def costs_of(
    config: EngineConfig,
    tokenizer: Tokenizer,
    drafting: Drafting,
    max_model_len: int,
    runner: Runner,
    pool: PagePool,
) -> CostTable:
    """Returns the costs of an engine that has no request yet, from its file or measured now.

    Args:
        config: of the engine.
        tokenizer: of the model.
        drafting: of the engine.
        max_model_len: tokens of the longest request.
        runner: of the engine.
        pool: likewise; all pages are free before and after.
    """
    path = cost_path(*_identity(config))
    table = None if config.calibrate else CostTable.load(path)
    if table is None:
        begun = time.perf_counter()
        trial = _Trial(config, tokenizer, runner, drafting, pool, max_model_len)
        try:
            method = config.speculative_config.drafters_name
            table = CostTable.measure(
                trial.run,
                {method: trial.count_rows_behind()},
                max_drafts=trial.max_drafts,
                max_requests=len(trial.requests),
            )
            if drafting.num_failures:  # measured without what has failed
                raise ModelError(f"drafter {method} failed in a trial; the log says how")
        finally:
            trial.end()
        table.save(path)
        logger.info("step costs measured in %.1f s: %s", time.perf_counter() - begun, path)
    return table


def _identity(config: EngineConfig) -> list[str]:
    """Everything that costs depend on."""
    model = config.model_dir / "config.json"
    digest = hashlib.sha256(model.read_bytes() if model.is_file() else b"").hexdigest()
    if specops.has_cuda() and torch.cuda.is_available() and config.device != "cpu":
        device = torch.cuda.get_device_name()
    else:
        device = (
            f"{specops.runtime.get_cpu_name()} {specops.get_isa()} x {specops.get_num_threads()}"
        )
    settings = (config.dtype, config.kv_cache_dtype, config.page_size, config.max_num_seqs)
    rows = config.max_num_batched_tokens
    drafting = (config.speculative_config.draft_stages, config.enforce_eager)
    return [specops.__version__, digest, device, *map(str, (*settings, rows, *drafting))]


class _Trial:
    """Requests that decode the same step over and over: they commit nothing."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        runner: Runner,
        drafting: Drafting,
        pool: PagePool,
        max_model_len: int,
    ) -> None:
        self._runner, self._drafting, self._pool = runner, drafting, pool
        asked = config.speculative_config
        drafts = max(
            min(asked.num_speculative_tokens, max_model_len // 2 - 2), asked.num_model_steps
        )
        context = max(min(_CONTEXT, max_model_len - drafts - 2), 1)
        pages = -(-(context + 2 * drafts + 2) // config.page_size)
        rows = config.max_num_batched_tokens // (1 + drafts)
        count = max(min(config.max_num_seqs, pool.num_available // pages, rows), 1)
        self.max_drafts = drafts
        plain = dataclasses.replace(
            asked, accept_policy="reject_all", num_speculative_tokens=drafts
        )
        params = SamplingParams(max_tokens=drafts + 1, temperature=0.0, ignore_eos=True)
        self.requests = [
            Request(
                request_id=f"trial-{index}",
                arrival=-1 - index,  # of no request that comes
                params=params,
                speculative=plain,
                seed=0,
                choice_index=0,
                prompt_len=context + 1,  # nothing was emitted
                max_len=context + drafts + 1,
                token_ids=[1 + (index + n) % 7 for n in range(context + 1)],
                stream=TextStream(tokenizer, ()),
                num_computed=context,
                slot=index,
                pages=array("i", pool.allocate(pages) or ()),
            )
            for index in range(count)
        ]
        for request in self.requests:
            runner.start(request)
        drafting.proposals.token_ids[:] = 1
        self._known: set[tuple[int, int, int, int]] = set()

    def count_rows_behind(self) -> int:
        """How many rows drafters run again once they have missed some positions."""
        request = self.requests[0]
        self._rest(request)
        return self._drafting.num_rows_behind(request)

    def run(self, name: str, rows: int, requests: int) -> float:
        """Seconds of a step, or of one with a method's drafters behind it; as `CostTable` asks."""
        if name == STEP:
            return self._step(rows, requests, 0, 0)
        limit = self.requests[0].speculative.num_model_steps
        return self._step(requests, requests, limit, rows - requests)

    def _rest(self, request: Request) -> None:
        """Its drafters have not run for a while."""
        missed = min(_BEHIND, request.num_computed)
        self._drafting.stop(request, request.slot)
        request.num_computed -= missed
        self._drafting.start(request)
        request.num_computed += missed

    def _step(self, rows: int, requests: int, draft_limit: int, rows_behind: int) -> float:
        base, more = divmod(rows - requests, requests)
        parts = []
        for index, request in enumerate(self.requests[:requests]):
            begin, drafts = request.num_computed, base + (index < more)
            parts.append(
                Part(
                    request.request_id,
                    request.slot,
                    begin,
                    begin + 1,
                    1 + drafts,
                    drafts,
                    emits=True,
                    token_ids=request.token_ids[begin:],
                    pages=request.pages,
                    draft_limit=draft_limit,
                )
            )
        key = (sum(part.num_rows for part in parts), requests, draft_limit, rows_behind)
        for _ in range(1 if key in self._known else 3):  # it is made first, and captured
            if rows_behind:
                self._rest(self.requests[0])
            begun = time.perf_counter()
            self._execute(parts)
            taken = time.perf_counter() - begun
        self._known.add(key)
        return taken

    def _execute(self, parts: list[Part]) -> None:
        plan = Plan(parts=parts)
        self._runner.launch(plan)
        self._runner.collect(plan)
        self._runner.finish(plan)
        self._drafting.proposals.token_ids[:] = 1

    def end(self) -> None:
        """Leaves nothing behind."""
        for request in self.requests:
            self._runner.leave(request)
            self._pool.release(request.pages)
        self._runner.forget()
