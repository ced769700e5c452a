# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI in bf16: one row per request in continuous batching, more in its paged model.

One row per request is a `step()` of `ContinuousBatchingPipeline`. Several rows per request are a
call of the same model after the paged-attention transform, which its speculating pipelines use,
with argmax of every row.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino._offline_transformations import paged_attention_transformation
from protocol import Answer, serve

_state: dict[str, Any] = {}


def start(threads: int) -> Answer:
    """Set the number of threads; return the version."""
    _state["options"] = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    return {"version": openvino_genai.__version__.split("-")[0]}


def load(model: str) -> Answer:
    """Record the exported model; pipelines are created when a request needs one."""
    _state.update(model=model, pipeline=None, infer=None)
    return {}


def prepare(batch: int, kv_len: int, rows: int) -> Answer:
    """Bring `batch` requests to `kv_len` positions, by prefill or in a filled cache."""
    _state.update(pipeline=None, infer=None)
    generator = np.random.default_rng(0)
    if rows == 1:
        _state["pipeline"] = pipeline = _pipeline(lookup=0)
        # A request is dropped when its handle is deleted.
        _state["handles"] = [
            pipeline.add_request(
                request,
                openvino.Tensor(generator.integers(0, _vocab_size(), (1, kv_len))),
                _greedy(100_000, 0),
            )
            for request in range(batch)
        ]
        for _ in range(10):
            pipeline.step()
    else:
        _state["infer"] = _paged(batch, kv_len, rows, generator)
        for _ in range(3):
            step(1)
    return {}


def step(steps: int) -> Answer:
    """Return the mean seconds of one step."""
    begun = time.perf_counter()
    for _ in range(steps):
        if _state["pipeline"]:
            _state["pipeline"].step()
        else:
            _state["infer"].infer()
            _state["infer"].get_tensor("logits").data.argmax(-1)
    return {"seconds": (time.perf_counter() - begun) / steps}


def generate(prompts: list[list[int]], max_tokens: int, lookup: int) -> Answer:
    """Return greedy tokens after each prompt, ignoring end-of-text; `lookup`: use prompt lookup."""
    _state.update(pipeline=None, infer=None)
    pipeline = _pipeline(lookup)
    token_ids = []
    for prompt in prompts:
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        [result] = pipeline.generate([ids], [_greedy(max_tokens, lookup)])
        token_ids.append([int(token) for token in result.m_generation_ids[0]][:max_tokens])
    return {"token_ids": token_ids}


def first_token(length: int) -> Answer:
    """Return the seconds from a prompt of `length` random tokens to its first token."""
    _state.update(pipeline=None, infer=None)
    pipeline = _pipeline(lookup=0)
    ids = np.random.default_rng(0).integers(0, _vocab_size(), (1, length))
    begun = time.perf_counter()
    pipeline.generate([openvino.Tensor(ids)], [_greedy(1, 0)])
    return {"seconds": time.perf_counter() - begun}


def _pipeline(lookup: int) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 8192
    scheduler.enable_prefix_caching = False
    options = {**_state["options"], **({"prompt_lookup": True} if lookup else {})}
    return openvino_genai.ContinuousBatchingPipeline(_state["model"], scheduler, "CPU", options)


def _greedy(max_tokens: int, lookup: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.do_sample = False
    config.set_eos_token_id(0)
    config.ignore_eos = True
    if lookup:
        config.num_assistant_tokens = lookup
        config.max_ngram_size = 3
    return config


def _vocab_size() -> int:
    model = openvino.Core().read_model(Path(_state["model"]) / "openvino_model.xml")
    return int(model.output("logits").partial_shape[2].get_length())


def _paged(batch: int, kv_len: int, rows: int, generator: np.random.Generator) -> Any:
    core = openvino.Core()
    model = core.read_model(Path(_state["model"]) / "openvino_model.xml")
    vocab_size = model.output("logits").partial_shape[2].get_length()
    paged_attention_transformation(model)
    compiled = core.compile_model(model, "CPU", _state["options"])
    infer = compiled.create_infer_request()
    page_size = 32
    pages = -(-(kv_len + rows) // page_size)
    for tensor in compiled.inputs:
        if "_cache." in tensor.get_any_name():
            shape = [batch * pages, *(tensor.partial_shape[i].get_length() for i in (1, 2, 3))]
            cache = openvino.Tensor(tensor.element_type, openvino.Shape(shape))
            # Random bit patterns of bf16 numbers between 0.0078 and 1.
            words = generator.integers(0x3C00, 0x3F80, shape, dtype=np.uint16)
            np.asarray(cache.data).view(np.uint16)[...] = words
            infer.set_tensor(tensor.get_any_name(), cache)
    values = {
        "input_ids": generator.integers(0, vocab_size, batch * rows),
        "position_ids": np.tile(np.arange(kv_len, kv_len + rows), batch),
        "max_context_len": np.array(kv_len + rows, dtype=np.int32),
        "past_lens": np.full(batch, kv_len, dtype=np.int32),
        "subsequence_begins": np.arange(batch + 1, dtype=np.int32) * rows,
        "block_indices_begins": np.arange(batch + 1, dtype=np.int32) * pages,
        "block_indices": np.arange(batch * pages, dtype=np.int32),
    }
    for name, value in values.items():
        infer.set_tensor(name, openvino.Tensor(value))
    return infer


if __name__ == "__main__":
    serve(
        {
            "start": start,
            "load": load,
            "prepare": prepare,
            "step": step,
            "generate": generate,
            "first_token": first_token,
        }
    )
