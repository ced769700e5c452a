# SPDX-License-Identifier: Apache-2.0
"""transformers in bf16: raw forward steps over a filled cache, and `generate` with prompt lookup.

Steps are the model's forward and an argmax, without the overhead of `generate`.
"""

import time
from typing import Any

import torch
import transformers
from protocol import Answer, serve
from transformers import DynamicCache, Qwen3ForCausalLM

_state: dict[str, Any] = {}


def start(threads: int) -> Answer:
    """Set the number of threads; return the version."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return {"version": f"{transformers.__version__}, torch {torch.__version__}"}


def load(model: str) -> Answer:
    """Load a checkpoint."""
    _state["model"] = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    return {}


def prepare(batch: int, kv_len: int, rows: int) -> Answer:
    """Fill a cache of `kv_len` random positions for each of `batch` requests."""
    model = _state["model"]
    config, cache = model.config, DynamicCache()
    shape = (batch, config.num_key_value_heads, kv_len, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(shape, generator=generator).bfloat16()
        values = torch.randn(shape, generator=generator).bfloat16()
        cache.update(keys, values, layer)
    token_ids = torch.randint(0, config.vocab_size, (batch, rows), generator=generator)
    _state.update(cache=cache, token_ids=token_ids)
    return {}


def step(steps: int) -> Answer:
    """Return the mean seconds of one step: `rows` new tokens per request, argmax of every row."""
    model, cache, rows = _state["model"], _state["cache"], _state["token_ids"].shape[1]
    begun = time.perf_counter()
    for _ in range(steps):
        logits = model(_state["token_ids"], past_key_values=cache, use_cache=True).logits
        logits.argmax(-1)
        cache.crop(-rows)
    return {"seconds": (time.perf_counter() - begun) / steps}


def generate(prompts: list[list[int]], max_tokens: int, lookup: int) -> Answer:
    """Return greedy tokens after each prompt, ignoring end-of-text; `lookup`: use prompt lookup."""
    model = _state["model"]
    options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False}
    if lookup:
        options.update(prompt_lookup_num_tokens=lookup, max_matching_ngram_size=3)
    model.generation_config.eos_token_id = None
    token_ids = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        token_ids.append(out[0, len(prompt) :].tolist()[:max_tokens])
    return {"token_ids": token_ids}


if __name__ == "__main__":
    serve({"start": start, "load": load, "prepare": prepare, "step": step, "generate": generate})
