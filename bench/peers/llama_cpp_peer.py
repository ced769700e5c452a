# SPDX-License-Identifier: Apache-2.0
"""llama.cpp in bf16 (KV in f16, its default) through its C API, without per-token Python layers.

Flash attention is off and sequences have their own KV streams: its faster settings on a CPU. Greedy
decoding is a numpy argmax of its logits; above temperature 0, llama.cpp's sampler draws each token,
with a seed per prompt. Prompt lookup drafts by llama-cpp-python's own rule.
"""

import time
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Answer, serve

_state: dict[str, Any] = {}


def start(threads: int) -> Answer:
    """Set the number of threads; return the version."""
    llama_cpp.llama_backend_init()
    _state["threads"] = threads
    return {"version": f"llama-cpp-python {llama_cpp.__version__}"}


def load(model: str, mapped: bool = True) -> Answer:
    """Map a GGUF file, or read it."""
    params = llama_cpp.llama_model_default_params()
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mapped else llama_cpp.LLAMA_LOAD_MODE_NONE
    _state["model"] = llama_cpp.llama_model_load_from_file(model.encode(), params)
    if not _state["model"]:
        raise ValueError(f"llama.cpp does not load {model}")
    vocab = llama_cpp.llama_model_get_vocab(_state["model"])
    _state["vocab_size"] = llama_cpp.llama_vocab_n_tokens(vocab)
    return {}


def prepare(batch: int, kv_len: int, rows: int) -> Answer:
    """Prefill one sequence of random tokens and copy its KV to the others."""
    _new_context(kv_len + rows, batch)
    generator = np.random.default_rng(0)
    for begin in range(0, kv_len, 512):
        stop = min(begin + 512, kv_len)
        prompt = generator.integers(0, _state["vocab_size"], stop - begin)
        _decode(
            [
                (0, position, token)
                for position, token in zip(range(begin, stop), prompt, strict=True)
            ],
            outputs=1,
        )
    memory = llama_cpp.llama_get_memory(_state["context"])
    for sequence in range(1, batch):
        llama_cpp.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
    entries = [
        (sequence, kv_len + row, int(generator.integers(0, _state["vocab_size"])))
        for sequence in range(batch)
        for row in range(rows)
    ]
    _state.update(entries=entries, kv_len=kv_len, batch=batch)
    step(2)
    return {}


def step(steps: int) -> Answer:
    """Return the mean seconds of one step: `rows` new tokens per request, argmax of every row."""
    memory = llama_cpp.llama_get_memory(_state["context"])
    begun = time.perf_counter()
    for _ in range(steps):
        logits = _decode(_state["entries"], outputs=len(_state["entries"]))
        logits.argmax(-1)
        for sequence in range(_state["batch"]):
            llama_cpp.llama_memory_seq_rm(memory, sequence, _state["kv_len"], -1)
    return {"seconds": (time.perf_counter() - begun) / steps}


def generate(
    prompts: list[list[int]], max_tokens: int, lookup: int, temperature: float = 0.0
) -> Answer:
    """Return tokens after each prompt, ignoring end-of-text; `lookup`: draft by prompt lookup."""
    _new_context(max(map(len, prompts)) + max_tokens + lookup + 1, 1)
    done = []
    for seed, prompt in enumerate(prompts):
        choose = _sampler(temperature, seed) if temperature else _argmax
        done.append(_generate(prompt, max_tokens, lookup, choose))
    return {
        "token_ids": [token_ids for token_ids, _ in done],
        "decode_seconds": sum(seconds for _, seconds in done),
    }


def _argmax(logits: np.ndarray, row: int) -> int:
    return int(logits[row].argmax())


def _sampler(temperature: float, seed: int) -> Callable[[np.ndarray, int], int]:
    """Return a sampler of the batch's last tokens; it uses one random number per call."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))

    def choose(logits: np.ndarray, row: int) -> int:
        # Index from the end: the output of a prompt is not at its batch position.
        return llama_cpp.llama_sampler_sample(chain, _state["context"], row - len(logits))

    return choose


def _generate(
    prompt: list[int], max_tokens: int, lookup: int, choose: Callable[[np.ndarray, int], int]
) -> tuple[list[int], float]:
    """Return tokens, and the seconds from the first of them to the last."""
    memory = llama_cpp.llama_get_memory(_state["context"])
    llama_cpp.llama_memory_clear(memory, False)
    for begin in range(0, len(prompt), 512):
        chunk = prompt[begin : begin + 512]
        logits = _decode([(0, begin + i, token) for i, token in enumerate(chunk)], outputs=1)
    tokens = [*prompt, choose(logits, 0)]
    begun = time.perf_counter()
    while len(tokens) < len(prompt) + max_tokens:
        drafts: list[int] = []
        if lookup:
            found = LlamaPromptLookupDecoding.find_candidate_pred_tokens(
                np.array(tokens, dtype=np.intc), 3, lookup
            )
            drafts = [int(token) for token in found]
        base = len(tokens) - 1
        rows = [(0, base + i, token) for i, token in enumerate([tokens[-1], *drafts])]
        logits = _decode(rows, outputs=len(rows))
        accepted, chosen = 0, choose(logits, 0)
        while accepted < len(drafts) and drafts[accepted] == chosen:
            tokens.append(chosen)
            accepted += 1
            chosen = choose(logits, accepted)
        tokens.append(chosen)
        if accepted < len(drafts):
            llama_cpp.llama_memory_seq_rm(memory, 0, len(tokens) - 1, -1)
    seconds = time.perf_counter() - begun
    return tokens[len(prompt) : len(prompt) + max_tokens], seconds


def first_token(length: int) -> Answer:
    """Return the seconds from a prompt of `length` random tokens to its first token."""
    _new_context(length + 1, 1)
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, _state["vocab_size"], length).tolist()
    begun = time.perf_counter()
    _generate(prompt, 1, 0, _argmax)
    return {"seconds": time.perf_counter() - begun}


def replay(prompts: list[list[int]], replies: list[list[int]], lookup: int) -> Answer:
    """Return accepted drafts and rows of every prompt-lookup step on given texts, without a model.

    The prompt's step emits the first token of a reply.
    """
    steps = []
    for prompt, reply in zip(prompts, replies, strict=True):
        text, done = np.array([*prompt, *reply], dtype=np.intc), len(prompt) + 1
        while done < len(text):
            found = LlamaPromptLookupDecoding.find_candidate_pred_tokens(text[:done], 3, lookup)
            follows = text[done : done + len(found)]
            same = found[: len(follows)] == follows
            accepted = min(int(np.cumprod(same).sum()), len(text) - done - 1)
            steps.append((accepted, 1 + len(found)))
            done += accepted + 1
    return {"steps": steps}


def _new_context(length: int, sequences: int) -> None:
    if _state.get("context"):
        llama_cpp.llama_batch_free(_state["batch_buffer"])
        llama_cpp.llama_free(_state["context"])
    params = llama_cpp.llama_context_default_params()
    # A stream holds a multiple of 256 positions.
    params.n_ctx = -(-length // 256) * 256 * sequences
    params.n_batch = params.n_ubatch = 512
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = _state["threads"]
    params.flash_attn_type = 0
    params.kv_unified = False
    params.no_perf = True
    _state["context"] = llama_cpp.llama_init_from_model(_state["model"], params)
    if not _state["context"]:
        raise ValueError("llama.cpp makes no context")
    _state["batch_buffer"] = llama_cpp.llama_batch_init(512, 0, 1)


def _decode(entries: list[tuple[int, int, int]], outputs: int) -> np.ndarray:
    """Run one llama_decode of (sequence, position, token) rows; return `outputs` last logits."""
    batch, context = _state["batch_buffer"], _state["context"]
    batch.n_tokens = len(entries)
    for i, (sequence, position, token) in enumerate(entries):
        batch.token[i] = int(token)
        batch.pos[i] = position
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = i >= len(entries) - outputs
    status = llama_cpp.llama_decode(context, batch)
    if status != 0:
        raise ValueError(f"llama_decode returned {status}")
    # Waits for the results; the pointer is valid until the next decode.
    pointer = llama_cpp.llama_get_logits(context)
    return np.ctypeslib.as_array(pointer, shape=(outputs, _state["vocab_size"]))


if __name__ == "__main__":
    serve(
        {
            "start": start,
            "load": load,
            "prepare": prepare,
            "step": step,
            "generate": generate,
            "first_token": first_token,
            "replay": replay,
        }
    )
