# SPDX-License-Identifier: Apache-2.0
"""Accuracy of 8-bit KV caches, compared with caches of the model's dtype.

Errors of attention are measured against float64 over bf16 keys and values, for random ones and for
those of the bundled model. The bundled model also runs on texts outside its training data, for its
perplexity, the fraction of positions with the same most likely token as with a bf16 cache, and the
fraction of accepted drafts. Nothing here is timed.
"""

import json
import math
from typing import Any
from unittest import mock

import torch
from specops import attention, reference
from specops.api.config import BUNDLED_MODEL
from specops.api.tokenizer import Tokenizer
from specops.attention import PagedBatch, PagedKv
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import Transformer, load_model
from torch import Tensor

from bench.common import BENCH, Bench, Figure
from bench.recorded_logits import one_step

KINDS = {"bf16": "auto", "int8": "int8", "fp8_e4m3": "fp8_e4m3"}
DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
PROMPTS, TOKENS, NEW_TOKENS = 20, 384, 64
RANDOM_TOKENS, PAGE_SIZE = 2048, 16
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}


def run_kv_cache(bench: Bench) -> None:
    """Measure the errors of attention, then the model's perplexity, then accepted drafts."""
    tokenizer = Tokenizer.from_dir(BUNDLED_MODEL)
    texts = [
        tokenizer.encode(prompt["text"])[:TOKENS]
        for kind in ("edits", "completions")
        for prompt in json.loads((BENCH / "prompts" / f"{kind}.json").read_text())[: PROMPTS // 2]
    ]
    model = load_model(BUNDLED_MODEL)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(64, 16, 128, generator=generator).bfloat16()
    k, v = (torch.randn(RANDOM_TOKENS, 8, 128, generator=generator).bfloat16() for _ in "kv")
    _add_errors(bench, "random", "random numbers", [(q, k, v)])
    calls = [call for text in texts[:4] for call in _calls_of(model, text)]
    _add_errors(bench, "model", "the bundled model's", calls)
    _add_predictions(bench, texts)
    for name, speculative in METHODS.items():
        _add_acceptance(bench, texts, name, speculative)


def _add_errors(
    bench: Bench, id: str, what: str, calls: list[tuple[Tensor, Tensor, Tensor]]
) -> None:
    """Add the root mean square of the errors, divided by the outputs' root mean square."""
    for kind in KINDS:
        error = size = 0.0
        for q, k, v in calls:
            truth = reference.append_attention(q.double(), *_paged(k.double(), v.double(), q))[0]
            got = _attend(q, k, v, kind).double()
            error += (got - truth).square().sum().item()
            size += truth.square().sum().item()
        bench.add(
            Figure(
                f"kv_cache.{kind}.error.{id}",
                f"attention over a {kind} cache of {what}: error, share of the output",
                math.sqrt(error / size),
                "rms",
                threads=bench.num_threads,
            )
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
    cache, batch = _paged(k, v, q)
    if kind in DTYPES:
        assert cache.v is not None
        k_cache, k_scales = reference.quantized(cache.k, DTYPES[kind])
        v_cache, v_scales = reference.quantized(cache.v, DTYPES[kind])
        cache = PagedKv(k_cache, v_cache, k_scales, v_scales)
    out = attention.append_attention(q, cache, batch)
    assert isinstance(out, Tensor)
    return out


def _paged(k: Tensor, v: Tensor, q: Tensor) -> tuple[PagedKv, PagedBatch]:
    """Return one request's keys and values on pages, and their index arrays."""
    pages = -(-len(k) // PAGE_SIZE)
    caches = [one.new_zeros(pages * PAGE_SIZE, *one.shape[1:]) for one in (k, v)]
    for cache, one in zip(caches, (k, v), strict=True):
        cache[: len(one)] = one

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    whole = [cache.view(pages, PAGE_SIZE, *cache.shape[1:]) for cache in caches]
    kv_indices = torch.arange(pages, dtype=torch.int32)
    return PagedKv(*whole), PagedBatch(ints(0, len(q)), ints(0, pages), kv_indices, ints(len(k)))


def _calls_of(model: Transformer, text: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Record queries, keys and values of each layer over a text."""
    found = []
    run = attention.append_attention

    def watch(q: Tensor, cache: PagedKv, batch: PagedBatch, **options: Any) -> Any:
        assert cache.v is not None
        kv = [one.flatten(0, 1)[: len(text)].clone() for one in (cache.k, cache.v)]
        found.append((q.clone(), *kv))
        return run(q, cache, batch, **options)

    with mock.patch.object(attention, "append_attention", watch):
        one_step(model, text)
    return [(q, k, v) for q, k, v in found]


def _add_predictions(bench: Bench, texts: list[list[int]]) -> None:
    likeliest: dict[str, Tensor] = {}
    for kind, option in KINDS.items():
        model = load_model(BUNDLED_MODEL, kv_cache_dtype=option)
        tops, loss, count = [], 0.0, 0
        for text in texts:
            logits = one_step(model, text)[:-1]
            targets = torch.tensor(text[1:])
            loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count += len(targets)
            tops.append(logits.argmax(-1))
        likeliest[kind] = torch.cat(tops)
        agreement = (likeliest[kind] == likeliest["bf16"]).double().mean().item()
        for id, what, value in (
            ("perplexity", "perplexity", math.exp(loss / count)),
            ("agreement", "share of tokens that are the likeliest with bf16, too", agreement),
        ):
            bench.add(
                Figure(
                    f"kv_cache.{kind}.{id}",
                    f"bundled model, {kind} cache: {what}",
                    value,
                    "",
                    threads=bench.num_threads,
                )
            )


def _add_acceptance(
    bench: Bench, texts: list[list[int]], name: str, speculative: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, seed=0)
    config = SpeculativeConfig.from_dict({**speculative, "adaptive_verification": False})
    for kind, option in KINDS.items():
        engine = Engine(
            EngineConfig(
                device="cpu",
                speculative_config=config,
                kv_cache_dtype=option,
                num_threads=bench.num_threads,
            )
        )
        engine.generate(texts, params)
        stats = engine.stats.speculative
        bench.add(
            Figure(
                f"kv_cache.{kind}.accepted.{name}",
                f"bundled model, {kind} cache, {name}: share of drafts that are accepted",
                stats.num_accepted_tokens / stats.num_draft_tokens,
                "",
                threads=bench.num_threads,
            )
        )
