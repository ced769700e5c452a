# SPDX-License-Identifier: Apache-2.0
"""`.venv-vllm/bin/python -m tools.benches.vllm_costs`: vLLM with specops' kernels against its own.

The bundled model completes 10 edits and 10 completions, 64 greedy tokens each. Engines alternate,
each in its own process, so that other load on the machine affects all of them; the table has
medians over the rounds. The script needs the environment of `make -C tools test-vllm`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from specops.integrations.vllm.decoding import Job, Run, decode
from specops.integrations.vllm.settings import EXACT

ROOT = Path(__file__).resolve().parents[2]
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {
        "method": "ngram",
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
        "num_speculative_tokens": 4,
    },
}
KERNELS = {"vllm": "", "specops": EXACT}
BATCHES = (1, 8)
_TIMES = 2  # runs of each case, the first of which warms up


def main() -> None:
    """Measure all cases; print tokens per second and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--compiled", action="store_true", help="both compiled by torch")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    prompts = _prompts(args.prompts)
    params = [{"temperature": 0.0, "max_tokens": args.max_tokens, "ignore_eos": True}]
    runs = [Run(prompts, params * len(prompts), batch) for batch in BATCHES for _ in range(_TIMES)]
    speeds: dict[tuple[str, str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "bundled"))
        for _ in range(args.rounds):
            for method, config in METHODS.items():
                for kernels, parts in KERNELS.items():
                    engine: dict[str, Any] = {"model": model, "max_model_len": 1024}
                    engine["enforce_eager"] = not args.compiled
                    engine["enable_prefix_caching"] = False
                    if config:
                        engine["speculative_config"] = config
                    for run, done in zip(runs, decode(Job(engine, runs, parts)), strict=True):
                        tokens = sum(map(len, done.token_ids))
                        key = (method, kernels, run.batch)
                        speeds.setdefault(key, []).append(tokens / done.seconds)
    _print(speeds)


def write_model(folder: Path) -> str:
    """Write the bundled model in vLLM's layout."""
    sys.path.insert(0, str(ROOT / "tests" / "with_vllm"))
    from models import write_bundled

    return write_bundled(folder)


def _prompts(count: int) -> list[str]:
    """Return `count` prompts, half of them code edits and half completions."""
    found: list[str] = []
    for kind in ("edits", "completions"):
        texts = json.loads((ROOT / "bench" / "prompts" / f"{kind}.json").read_text())
        found += [one["text"] for one in texts[: count // 2]]
    return found


def _print(speeds: dict[tuple[str, str, int], list[float]]) -> None:
    for method in METHODS:
        for batch in BATCHES:
            # The first run of each pair warms up.
            own, ours = (
                statistics.median(speeds[method, kernels, batch][1::_TIMES]) for kernels in KERNELS
            )
            print(
                f"{method:6} batch {batch}: vLLM {own:6.0f} tokens/s, with specops {ours:6.0f}, "
                f"{ours / own:.2f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
