# SPDX-License-Identifier: Apache-2.0
"""A model's layers in one CUDA graph: gaps between kernels, and the gain of overlapping them.

The graph is one forward pass, from the embedding to the last norm, with random weights. Each case
runs twice: with kernels that start while the previous one ends
(`specops.runtime.set_kernel_overlap`), and with kernels that do not. A graph keeps the setting that
was active when it was captured.
"""

from typing import Any

import torch
from specops import runtime
from specops.engine.models import KvCache, StepBatch, Transformer, load_model

from bench.checkpoints import QWEN06, QWEN8, decode_bytes, without_weights
from bench.cuda import Call, CudaBench, bandwidth_figure, time_figure

PAGE_SIZE = 16
KV_LEN = 1024
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}
SMALL |= {"num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 256}


def run_layers_cuda(bench: CudaBench) -> None:
    """Measure the GB/s of weights and KV against the read bandwidth, and the gain of overlap."""
    shapes = {"qwen06": QWEN06, "qwen8": {**QWEN8, "num_hidden_layers": 12}}
    for name, shape in shapes.items():
        config = bench.pick(shape, {**shape, **SMALL})
        checkpoint = without_weights(bench.pick(f"layers_{name}", "rehearsal"), config)
        model = load_model(checkpoint.path, device=bench.device, load_format="dummy")
        for batch in bench.pick((1, 8, 32), (1, 2)):
            for rows in (1, 5):
                _time(bench, model, config, f"layers.{name}.b{batch}.q{rows}", batch, rows)
        del model


def _time(
    bench: CudaBench, model: Transformer, config: dict[str, Any], id: str, batch: int, rows: int
) -> None:
    step, cache = _step(bench, model, batch, rows)

    def forward(overlap: bool) -> Call:
        def call() -> None:
            runtime.set_kernel_overlap(overlap)
            model.forward(step, cache)

        return call

    try:
        timings = bench.time({"overlap": [forward(True)], "one by one": [forward(False)]})
    finally:
        runtime.set_kernel_overlap(True)
    layers = config["num_hidden_layers"]
    name = id.split(".")[1]
    what = f"{layers} layers as of {name}, kv {KV_LEN}, {batch} requests of {rows} rows"
    without_head = {**config, "vocab_size": 0}
    num_bytes = decode_bytes(without_head, batch=batch, kv_len=KV_LEN)
    text = f"{what}: weights and KV, beside the read line"
    bench.add(bandwidth_figure(timings, "overlap", id, text, num_bytes, None))
    over = ("overlap", "with overlap")
    text = f"{what}, kernels one by one"
    bench.add(time_figure(timings, "one by one", f"{id}.one_by_one", text, over=over))


def _step(bench: CudaBench, model: Transformer, batch: int, rows: int) -> tuple[StepBatch, KvCache]:
    """Return a step in which every request has KV_LEN tokens, and a cache with their pages."""
    pages = -(-KV_LEN // PAGE_SIZE)
    total = batch * rows
    positions = torch.arange(KV_LEN - rows, KV_LEN).repeat(batch)
    first_pages = torch.arange(batch).repeat_interleave(rows) * pages
    cache = model.new_kv_cache(batch * pages, PAGE_SIZE)
    for tensor in cache.tensors:
        tensor.normal_(generator=bench.generator)
    model.reserve(total)
    step = StepBatch(
        positions=bench.ints(positions),
        cache_slots=bench.ints(first_pages * PAGE_SIZE + positions, dtype=torch.int64),
        qo_indptr=bench.ints(torch.arange(batch + 1) * rows),
        kv_indptr=bench.ints(torch.arange(batch + 1) * pages),
        kv_indices=bench.ints(torch.arange(batch * pages)),
        kv_lens=bench.ints([KV_LEN] * batch),
        workspace=_floats(bench, model.workspace_size(total, batch, batch * pages, cache)),
        sums=_floats(bench, model.sums_size(total, total)),
        token_ids=bench.ints(torch.arange(total) % 251),
    )
    return step, cache


def _floats(bench: CudaBench, count: int) -> torch.Tensor:
    return torch.zeros(max(1, count), dtype=torch.float32, device=bench.device)
