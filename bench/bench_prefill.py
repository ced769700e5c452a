# SPDX-License-Identifier: Apache-2.0
"""Prefill: time to the first token of a prompt, beside llama.cpp, OpenVINO GenAI and torch's SDPA.

Models: Gemma 3 270M in Q4_K_M, which `make gemma` fetches; and a quarter of the layers of
Qwen3-0.6B, random, in bf16 and quantized (llama.cpp: Q8_0, Q4_0). Prompts are random tokens. A
length runs only if it takes at most `MOST_SECONDS` at the speed of the length before. The two
matrix products of attention are compared with SDPA, which computes the prompt in one call; the
engine computes chunks of 128 rows.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from specops.attention import PagedBatch, PagedKv, append_attention
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from torch import Tensor

from bench.bench_accuracy import GEMMA
from bench.bench_engine import NAMES, load_peers
from bench.bench_gemma import llama_cpp
from bench.checkpoints import qwen06_quarter
from bench.common import Bench, Figure, Peer

LENGTHS = (128, 1024, 8192, 32768)
MOST_SECONDS = 100.0
ROUNDS = 3
BRIEF_SECONDS = 5.0  # lengths that take longer run once
# Name -> (quantization, peers' kind).
FORMATS = {"bf16": ("none", "bf16"), "wint8": ("wint8", "int8"), "wint4": ("wint4", "int4")}
PEERS = ("llama_cpp_peer", "openvino_peer")
CHUNK, PAGE_SIZE = 128, 16


class Shape(NamedTuple):
    """Sizes of a model; a sliding window for all layers but every sixth, or None."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    window: int | None = None

    def linear_flops(self, length: int) -> float:
        """Return the operations of all projections of the layers."""
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        weights = self.hidden_size * (heads + 3 * self.intermediate_size)
        return 2.0 * length * self.layers * weights

    def attention_flops(self, length: int) -> float:
        """Return the operations of attention's two matrix products in all layers."""
        whole = length * (length + 1) / 2
        local = self.layers - self.layers // 6 if self.window else 0
        outside = max(0, length - (self.window or length))
        pairs = self.layers * whole - local * outside * (outside + 1) / 2
        return 4.0 * self.heads * self.head_dim * pairs


GEMMA_SHAPE = Shape(18, 640, 4, 1, 256, 2048, window=512)
QWEN_SHAPE = Shape(7, 1024, 16, 8, 128, 3072)


def run_prefill(bench: Bench) -> None:
    """Measure prompts of all lengths with each model, and attention alone."""
    if GEMMA.exists():
        peer = llama_cpp(bench)
        peers = {} if peer is None else {"llama_cpp_peer": peer}
        _lengths(bench, "gemma", GEMMA_SHAPE, _engine(bench, str(GEMMA), "none"), peers)
    checkpoint = qwen06_quarter()
    for name, (quantization, kind) in FORMATS.items():
        engine = _engine(bench, str(checkpoint.path), quantization)
        _lengths(bench, name, QWEN_SHAPE, engine, load_peers(bench, checkpoint, PEERS, kind))
    for name, shape in (("gemma", GEMMA_SHAPE), ("qwen06", QWEN_SHAPE)):
        _attention(bench, name, shape)


def _lengths(bench: Bench, name: str, shape: Shape, engine: Engine, peers: dict[str, Peer]) -> None:
    speed = 0.0  # operations per second of the slowest system
    for length in LENGTHS:
        linear, attention = shape.linear_flops(length), shape.attention_flops(length)
        expected = (linear + attention) / speed if speed else 0.0
        if expected > MOST_SECONDS:
            print(f"  no prefill.{name}.t{length}: it would take {expected:.0f} s", flush=True)
            return
        cases: dict[str, Callable[[], float]] = {"ours": partial(_first_token, engine, length)}
        for which, peer in peers.items():
            cases[which] = partial(_peer_first_token, peer, length)
        timing = bench.rounds(cases, rounds=ROUNDS if expected < BRIEF_SECONDS else 1)
        speed = (linear + attention) / max(map(timing.median, cases))
        bench.add(
            Figure(
                f"prefill.{name}.t{length}.speed",
                f"{name}, a prompt of {length:,} tokens ({linear * 1e-12:.2g} TFLOP of projections,"
                f" {attention * 1e-12:.2g} of attention): tokens per second",
                length / timing.median("ours"),
                "tok/s",
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s("ours"),
            )
        )
        for which in peers:
            bench.add(
                Figure(
                    f"prefill.{name}.t{length}.vs_{which.removesuffix('_peer')}",
                    f"{name}, a prompt of {length:,} tokens: time to the first token, times faster "
                    f"than {NAMES[which]}",
                    timing.median("ours"),
                    "s",
                    NAMES[which],
                    timing.median(which),
                    timing.ratio(which, "ours"),
                    threads=bench.num_threads,
                    read_gb_s=timing.read_gb_s("ours"),
                )
            )


def _engine(bench: Bench, model: str, quantization: str) -> Engine:
    return Engine(
        EngineConfig(
            model=model,
            device="cpu",
            quantization=quantization,
            quantize_head="none" if quantization == "none" else "wint8",
            speculative_config=SpeculativeConfig(method="naive"),
            max_num_seqs=1,
            enable_prefix_caching=False,
            num_threads=bench.num_threads,
        )
    )


def _first_token(engine: Engine, length: int) -> float:
    """Return the seconds from a prompt to its first token; one token fewer fits the context."""
    generator = torch.Generator().manual_seed(0)
    size = (min(length, engine.max_model_len - 1),)
    prompt = torch.randint(0, engine.vocab_size, size, generator=generator).tolist()
    begun = time.perf_counter()
    engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - begun


def _peer_first_token(peer: Peer, length: int) -> float:
    seconds: float = peer.ask("first_token", length=length)["seconds"]
    return seconds


def _attention(bench: Bench, name: str, shape: Shape) -> None:
    """Compare one layer without a window with torch's SDPA."""
    layer = shape._replace(layers=1, window=None)
    generator = torch.Generator().manual_seed(0)
    speed = 0.0  # operations per second of the slower system
    for length in LENGTHS:
        expected = layer.attention_flops(length) / speed if speed else 0.0
        if expected > MOST_SECONDS / ROUNDS:
            print(f"  no prefill.attention.{name}.t{length}: it would take {expected:.0f} s")
            return
        q, k, v = (
            torch.randn(length, heads, layer.head_dim, generator=generator).bfloat16()
            for heads in (layer.heads, layer.kv_heads, layer.kv_heads)
        )
        cases = {"ours": _chunks(q, k, v), "torch": _sdpa(q, k, v)}
        with torch.inference_mode():
            timing = bench.alternate(cases, rounds=ROUNDS)
        speed = layer.attention_flops(length) / max(map(timing.median, cases))
        bench.add(
            Figure(
                f"prefill.attention.{name}.t{length}",
                f"append_attention, {layer.heads}/{layer.kv_heads} heads of {layer.head_dim}, a "
                f"prompt of {length:,} tokens in chunks of {CHUNK}: times faster than torch SDPA",
                layer.attention_flops(length) * 1e-9 / timing.median("ours"),
                "GFLOP/s",
                "torch SDPA",
                layer.attention_flops(length) * 1e-9 / timing.median("torch"),
                timing.ratio("torch", "ours"),
                threads=bench.num_threads,
                read_gb_s=timing.read_gb_s(),
            )
        )


def _chunks(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], None]:
    pages = -(-len(q) // PAGE_SIZE)
    cache = PagedKv(*(one.view(pages, PAGE_SIZE, *one.shape[1:]) for one in (k, v)))
    out, calls = torch.empty_like(q), []
    for begin in range(0, len(q), CHUNK):
        end = min(begin + CHUNK, len(q))
        used = -(-end // PAGE_SIZE)
        sizes = ([0, end - begin], [0, used], range(used), [end])
        batch = PagedBatch(*(torch.tensor(one, dtype=torch.int32) for one in sizes))
        rows = slice(begin, end)
        calls.append(partial(append_attention, q[rows], cache, batch, out=out[rows]))

    def call() -> None:
        for one in calls:
            one()

    return call


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    heads = [one.transpose(0, 1)[None].contiguous() for one in (q, k, v)]
    return lambda: F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
