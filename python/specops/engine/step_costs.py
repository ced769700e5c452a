# SPDX-License-Identifier: Apache-2.0
"""Measurements of the duration of steps and rows, done at engine start."""

import json
import math
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch

import specops
from specops.api.config import EngineConfig
from specops.api.methods import default_method
from specops.api.outputs import PromptLogprobs
from specops.api.sampling_params import WHOLE_RANGES, SamplingParams
from specops.api.speculative_config import SpeculativeConfig
from specops.api.tokenizer import TextStream, Tokenizer
from specops.engine.device import Device
from specops.engine.drafters.drafting import Drafting
from specops.engine.memory.kv_cache import PagePool
from specops.engine.models import CachedWeights
from specops.engine.parallel.ranks import ALONE, Ranks
from specops.engine.plan import Part, Plan
from specops.engine.prompt_logprobs import PromptRows
from specops.engine.request import DraftState, Placement, Request
from specops.engine.steps.runner import Runner

_ROUNDS = 4  # maximum; a GPU runs all: one builds a step, the next captures it
_ROW_ROUNDS = 20  # maximum; larger, since rounds are short and easily disturbed
_SECONDS = 1.0  # no new round starts after this time
# Measuring stops after the first step that takes longer than this multiple of the one-row step,
# scaled by the bytes read. Times of longer steps are extrapolated linearly.
_FACTOR = 3.0
# Upper bound of the cost of a step in rows, which bounds the measured time of a row from below.
_MOST_FREE_ROWS = 1024


def known_steps(
    cached: CachedWeights | None,
    config: EngineConfig,
    measure: Callable[[], list[float]],
    count: int,
    *,
    what: str = "steps",
) -> list[float]:
    """Return the numbers of a measurement, from the weight cache if they are stored there.

    Args:
        cached: the model's entry of the weight cache; None: measure always.
        config: the engine's configuration.
        measure: function that calls `measure_steps` or `measure_row_costs`.
        count: how many numbers `measure` returns.
        what: name of the measurement.
    """
    if cached is None or config.tensor_parallel_size > 1:  # either all ranks measure or none
        return measure()
    sizes = (config.max_num_batched_tokens, config.max_model_len, config.page_size)
    kinds = (config.dtype, config.kv_cache_dtype, config.quantization, config.quantize_head)
    machine = (specops.runtime.get_cpu_name(), specops.get_num_threads())
    return cached.numbers(json.dumps([what, *sizes, *kinds, *machine]), measure, count)


@torch.no_grad()
def measure_steps(
    tokenizer: Tokenizer,
    runner: Runner,
    drafting: Drafting,
    pool: PagePool,
    device: Device,
    bytes_read: Callable[[int], float],
    *,
    vocab_size: int,
    max_rows: int,
    max_model_len: int,
    ranks: Ranks = ALONE,
) -> list[float]:
    """Time steps of 1, 2, 4, ... rows in an engine without requests.

    Args:
        tokenizer, runner, drafting, pool, device: parts of the engine. All pages are free before
            and after the call.
        bytes_read: returns the bytes of weights that a step reads, by its number of rows. For an
            MoE model, steps up to a larger number of rows are measured, as more rows read more
            experts.
        vocab_size: the target's vocabulary size.
        max_rows: maximum number of rows of a step.
        max_model_len: tokens of the longest request.
        ranks: tensor-parallel group; all ranks use the times of rank 0.

    Returns:
        Seconds by the number of rows, from 0 to `max_rows`: the minimum of a few runs of each step,
        made non-decreasing, interpolated and extrapolated linearly.
    """
    most = max(min(max_rows, max_model_len // 2), 1)
    counts = [1 << i for i in range(most.bit_length())]
    of_first = ranks.of_first
    request = _trial(tokenizer, pool, counts[-1])
    runner.start(request)
    seconds: dict[int, float] = {}
    begun = math.inf
    try:
        for number in range(-1, _ROUNDS):
            passed = of_first(time.perf_counter() - begun)
            if number == 0:
                begun, seconds = time.perf_counter(), {}  # the round before only built the steps
            elif number and not device.is_async and passed > _SECONDS:
                break
            for count in counts:
                # Use different tokens, or all rows would be routed to the same experts.
                tokens = drafting.proposals.token_ids
                tokens[:] = np.arange(tokens.shape[1]) % vocab_size
                plan = _plan(request, count)
                started = time.perf_counter()
                runner.launch(plan)
                runner.collect(plan)
                taken = of_first(time.perf_counter() - started)
                seconds[count] = min(taken, seconds.get(count, taken))
                share = of_first(bytes_read(count) / bytes_read(1))
                if taken > _FACTOR * seconds[1] * share:
                    break
    finally:
        runner.leave(request)
        pool.release(request.pages)
        runner.memory.forget()
        drafting.forget()
    return _line(seconds, max_rows)


@torch.no_grad()
def measure_row_costs(
    tokenizer: Tokenizer,
    runner: Runner,
    drafting: Drafting,
    pool: PagePool,
    *,
    num_rows: int,
    num_before: int,
    ranks: Ranks = ALONE,
) -> list[float]:
    """Time a decode row, a short and a long prompt chunk, and the long chunk with logprobs.

    Args:
        tokenizer, runner, drafting, pool: parts of an engine without requests. All pages are free
            before and after the call.
        num_rows: rows of the long chunk, at least 2.
        num_before: number of tokens before the rows; their keys and values may be anything.
        ranks: tensor-parallel group; all ranks use the times of rank 0.

    Returns:
        The fields of `RowCosts` in seconds, each computed from the minimum of a few runs.
    """
    of_first = ranks.of_first
    num_alternatives = min(WHOLE_RANGES["prompt_logprobs"][1] or 0, tokenizer.vocab_size)
    # Use different tokens, or all rows would be routed to the same experts.
    tokens = [token % tokenizer.vocab_size for token in range(num_before + num_rows + 1)]
    request = _trial(tokenizer, pool, num_before + num_rows, tokens)
    runner.start(request)
    decode = _chunk(request, num_before, 1)
    decode.parts[0].emits = True
    kinds = [decode, _chunk(request, num_before, 1), _chunk(request, num_before, num_rows)]
    kinds.append(_chunk(request, num_before, num_rows, num_alternatives))
    seconds = [math.inf] * len(kinds)
    begun = math.inf
    try:
        for number in range(-1, _ROW_ROUNDS):
            passed = of_first(time.perf_counter() - begun)
            if number == 0:
                begun, seconds = time.perf_counter(), [math.inf] * len(kinds)
            elif number > 0 and passed > _SECONDS:
                break
            for index, plan in enumerate(kinds):
                started = time.perf_counter()
                runner.launch(plan)
                runner.collect(plan)
                taken = of_first(time.perf_counter() - started)
                seconds[index] = min(seconds[index], taken)
    finally:
        runner.leave(request)
        pool.release(request.pages)
        runner.memory.forget()
        drafting.forget()
    one, short, long, scored = seconds
    row = min(max((long - short) / (num_rows - 1), one / _MOST_FREE_ROWS), one)
    return [one - row, row, max((scored - long) / num_rows, 0.0)]


def _chunk(
    request: Request, begin: int, num_rows: int, num_alternatives: int | None = None
) -> Plan:
    """Return a plan with one prompt chunk, scored unless `num_alternatives` is None."""
    end = begin + num_rows
    part = Part(request, begin, num_rows, num_drafts=0, emits=False)
    if num_alternatives is not None:
        requested = PromptLogprobs(request.token_ids, num_alternatives)
        requested.num_scored = begin
        name, slot = request.request_id, request.slot
        part.prompt_rows = PromptRows.missing(name, slot, requested, begin, end)
    return Plan(parts=[part])


def _plan(request: Request, count: int) -> Plan:
    """Return a plan with `count` rows, which verifies `count - 1` drafts."""
    return Plan([Part(request, begin=0, num_rows=count, num_drafts=count - 1, emits=True)])


def _line(seconds: dict[int, float], max_rows: int) -> list[float]:
    """Return seconds for 0 to `max_rows` rows, interpolated from a few measured row counts."""
    rows = np.array(list(seconds))
    values = np.maximum.accumulate(list(seconds.values()))
    slope = np.diff(values[-2:]).sum() / max(np.diff(rows[-2:]).sum(), 1)
    at = np.arange(max_rows + 1)
    line = np.interp(at, rows, values) + slope * np.maximum(at - rows[-1], 0)
    return line.tolist()  # type: ignore[no-any-return]


def _trial(
    tokenizer: Tokenizer, pool: PagePool, most: int, tokens: Sequence[int] = (1,)
) -> Request:
    """Return a trial request with pages for `most` rows; no tokens are committed to it."""
    speculative = SpeculativeConfig(
        method=default_method(), num_speculative_tokens=most, accept_policy="reject_all"
    )
    pages = array("i", pool.allocate(-(-(1 + most) // pool.page_size)) or ())
    return Request(
        request_id="trial",
        arrival=-1,  # real requests have numbers from 0
        params=SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True),
        speculative=speculative,
        seed=0,
        choice_index=0,
        prompt_len=1,
        max_len=1 + most,
        token_ids=list(tokens),
        stream=TextStream(tokenizer, ()),
        drafts=DraftState.of(speculative),
        placement=Placement(slot=0, pages=pages),
    )
