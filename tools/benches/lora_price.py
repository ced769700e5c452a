# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.benches.lora_price`: measure what LoRA adapters add to a decoding step.

The model has random weights in the shape of Qwen3-0.6B with fewer layers. Every projection has an
adapter. Runs with and without adapters take turns; a row of the table is a median over all steps.
One thread runs the engine, and its processor time counts, so that other load matters less.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from specops.api.config import BUNDLED_MODEL
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig

HIDDEN, WIDTH, HEAD = 1024, 3072, 128
HEADS, KV_HEADS = 16, 8
SIZES = {  # inputs and outputs of each module
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD),
    "self_attn.o_proj": (HEADS * HEAD, HIDDEN),
    "mlp.gate_proj": (HIDDEN, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}


def write_files(folder: Path, *, layers: int, rank: int, count: int) -> None:
    """Write the model's configuration and the adapters."""
    tokenizer = (BUNDLED_MODEL / "tokenizer.json").read_text()
    vocab_size = json.loads((BUNDLED_MODEL / "config.json").read_text())["vocab_size"]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer)
    for index in range(count):
        (own := folder / f"lora{index}").mkdir()
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (own / "adapter_config.json").write_text(json.dumps(fields))
        tensors = {}
        for layer in range(layers):
            for module, (inputs, outputs) in SIZES.items():
                name = f"base_model.model.model.layers.{layer}.{module}"
                a, b = torch.randn(rank, inputs), torch.randn(outputs, rank)
                tensors[f"{name}.lora_A.weight"] = (a * 0.01).bfloat16()
                tensors[f"{name}.lora_B.weight"] = (b * 0.01).bfloat16()
        save_file(tensors, own / "adapter_model.safetensors")


def step_seconds(engine: Engine, adapters: Sequence[str | None], steps: int) -> list[float]:
    """Return the seconds of decoding steps, with one row for each adapter."""
    params = SamplingParams(max_tokens=steps + 4, temperature=0.0, ignore_eos=True)
    ids = [
        engine.add_request([5 + row] * 8, params, adapter=adapter)
        for row, adapter in enumerate(adapters)
    ]
    while engine.num_waiting or engine.stats.num_steps < 1:
        engine.step()
    engine.step()
    seconds = []
    for _ in range(steps):
        begun = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - begun)
    for request_id in ids:
        engine.abort(request_id)
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quantization", default="none")
    args = parser.parse_args()
    count = 8
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, layers=args.layers, rank=args.rank, count=count)
        names = [f"lora{index}" for index in range(count)]

        def engine(*adapters: str) -> Engine:
            return Engine(
                EngineConfig(
                    model=name,
                    load_format="dummy",
                    quantization=args.quantization,
                    device="cpu",
                    num_threads=1,
                    num_pages=1024,
                    enable_prefix_caching=False,
                    speculative_config=SpeculativeConfig(method="naive"),
                    lora_modules=tuple((one, str(folder / one)) for one in adapters),
                    max_lora_rank=args.rank,
                )
            )

        without, with_adapters = engine(), engine(*names)
        runs: dict[str, tuple[Engine, list[str | None]]] = {}
        for rows in (1, 5, 8):
            runs[f"{rows} rows, engine without adapters"] = without, [None] * rows
            runs[f"{rows} rows without adapter"] = with_adapters, [None] * rows
            runs[f"{rows} rows of one adapter"] = with_adapters, [names[0]] * rows
        runs["8 rows of eight adapters"] = with_adapters, list(names)
        seconds: dict[str, list[float]] = {key: [] for key in runs}
        for _ in range(args.rounds):
            for key, (own, adapters) in runs.items():
                seconds[key] += step_seconds(own, adapters, 12)
        for key, (_, adapters) in runs.items():
            rows = len(adapters)
            base = median(seconds[f"{rows} rows, engine without adapters"])
            own_median = median(seconds[key])
            added = (own_median - base) / rows
            print(
                f"{key:36} {1e3 * own_median:8.3f} ms, {own_median / base:5.2f}x, "
                f"{1e6 * added:7.1f} us a row more"
            )


if __name__ == "__main__":
    main()
