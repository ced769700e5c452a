# SPDX-License-Identifier: Apache-2.0
"""`python tests/with_vllm/campaign.py`: compare ways to decode random prompts in vLLM.

Prompts are random tokens with repetitions, in groups with common beginnings; greedy and seeded
requests with random filters and penalties run together. Each prompt is decoded alone and plainly,
and then again with each method, in batches of 1 to 32 in shuffled order, with prefix cache and
chunked prefill. The exit code is 1 if an output differs with specops; with vLLM's own kernels,
differing greedy outputs are counted. Results are stored in the folder of --keep, so that a campaign
can be interrupted and resumed.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forked import decode
from models import QUANTIZED, VOCAB, write_bundled, write_quantized, write_random
from specops.integrations.vllm.decoding import Decoded, Job, Run
from specops.integrations.vllm.exactness import Difference, compare
from specops.integrations.vllm.settings import EXACT

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "specops-suffix": {
        "method": "custom_class",
        "model": "specops.integrations.vllm.SuffixProposer",
    },
    "junk": {"method": "custom_class", "model": "junk.JunkProposer"},
}
# vLLM's own suffix decoding needs a package that `make -C tools test-vllm` does not install.
if importlib.util.find_spec("arctic_inference") is None:
    del METHODS["suffix"]
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
BATCHES = (1, 2, 3, 5, 8, 13, 21, 32)
# Random models beside the bundled one; quantized ones have the weights of "llama".
RANDOM = ("llama", "qwen2", "qwen3_moe", "glm4_moe")
MODELS = ("bundled", *RANDOM, *QUANTIZED)


def write_model(folder: Path, name: str) -> str:
    """Write one of `MODELS` into a subfolder, unless it is there, and return its path."""
    if (folder / name / "model.safetensors").exists():
        return str(folder / name)
    if name == "bundled":
        return write_bundled(folder / name)
    if name in RANDOM:
        return write_random(folder / name, name)
    return write_quantized(folder / name, write_model(folder, "llama"), name)


def prompts_of(count: int, rng: random.Random) -> list[list[int]]:
    """Return prompts of token ids: a shared beginning, and a random rest that repeats itself."""
    beginnings = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (0, 40, 200)]
    prompts = []
    for _ in range(count):
        words = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 6))] for _ in range(4)]
        rest = [token for _ in range(rng.randint(1, 25)) for token in rng.choice(words)]
        prompts.append(rng.choice(beginnings) + rest)
    return prompts


def params_of(index: int, max_tokens: int, rng: random.Random) -> dict[str, Any]:
    """Return greedy or seeded parameters; some with filters and penalties, some with logprobs."""
    params: dict[str, Any] = {
        "max_tokens": rng.randint(max_tokens // 4, max_tokens),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        "seed": index,
        "logprobs": rng.choice([0, 1, 3]),
    }
    if rng.random() < 0.3:
        params |= {"top_p": 0.9, "top_k": rng.choice([5, 50])}
    if rng.random() < 0.2:
        params |= {"repetition_penalty": 1.1, "presence_penalty": 0.3}
    if rng.random() < 0.1:
        params |= {"frequency_penalty": 0.4, "min_tokens": min(8, params["max_tokens"])}
    return params


def small(count: int = 24, max_tokens: int = 24) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Return prompts and parameters of every kind, for a test."""
    rng = random.Random(3)
    prompts = prompts_of(count, rng)
    return prompts, [params_of(index, max_tokens, rng) for index in range(count)]


def runs_of(prompts: list[list[int]], params: list[dict[str, Any]], seed: int) -> list[Run]:
    """Return runs that cover all prompts once, a fraction of them in each batch size."""
    share = -(-len(prompts) // len(BATCHES))
    return [
        Run(prompts[at : at + share], params[at : at + share], batch, seed + batch)
        for batch, at in zip(BATCHES, range(0, len(prompts), share), strict=False)
    ]


def joined(parts: list[Decoded]) -> Decoded:
    """Concatenate the runs into one."""
    whole = Decoded()
    for part in parts:
        whole.token_ids += part.token_ids
        whole.logprobs += part.logprobs
        whole.steps += part.steps
    return whole


def stored(job: Job, name: str, keep: Path | None) -> list[Decoded]:
    """Decode, or read the stored result of the same job.

    Args:
        job: what to decode.
        name: prefix of the file name, before the job's digest.
        keep: the folder; None to store nothing.
    """
    if keep is None:
        return decode(job)
    text = json.dumps(asdict(job), sort_keys=True)
    file = keep / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    if not file.exists():
        new = file.with_suffix(".new")
        new.write_text(json.dumps([asdict(one) for one in decode(job)]))
        new.rename(file)
    return [Decoded(**one) for one in json.loads(file.read_text())]


def campaign(
    model: str,
    parts: str,
    count: int,
    max_tokens: int,
    seed: int,
    methods: list[str],
    runner: int,
    more: Mapping[str, Any],
    keep: Path | None = None,
) -> list[Difference]:
    """Decode plainly and alone, by an eager engine and V1, then with every method.

    Args:
        model: folder of the model.
        parts: value of SPECOPS_VLLM.
        count: number of prompts.
        max_tokens: upper bound of an output's tokens.
        seed: seed of prompts and parameters.
        methods: names of `METHODS`.
        runner: number of vLLM's model runner, 1 or 2.
        more: further arguments of vLLM's LLM; only ranks also apply to the engine that decodes
            alone, since sums over ranks have bits of their own.
        keep: folder for results; None to store nothing.
    """
    rng = random.Random(seed)
    prompts = prompts_of(count, rng)
    params = [params_of(index, max_tokens, rng) for index in range(count)]
    if not parts:
        # vLLM's own sampler fails on a CPU: for seeded requests whose prompt is chunked, and for
        # top-k with drafts.
        params = [one | {"temperature": 0.0, "top_k": 0, "top_p": 1.0} for one in params]
    engine = {"model": model, "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 32}
    ranks = {"tensor_parallel_size": more.get("tensor_parallel_size", 1)}
    plain = engine | ranks | {"enable_prefix_caching": False}
    alone = Job(plain, [Run(prompts, params, 1)], parts)
    kernels = "specops" if parts else "vllm"
    name = f"{Path(model).name}-{kernels}"
    os.environ[RUNNER] = "0"
    base = stored(alone, f"{name}-alone", keep)[0]
    os.environ[RUNNER] = str(runner - 1)
    found = []
    for method in methods:
        config = METHODS[method]
        crowded = engine | {"enable_prefix_caching": True, "max_num_batched_tokens": 128, **more}
        if config:
            crowded["speculative_config"] = config | {"num_speculative_tokens": 5}
        job = Job(crowded, runs_of(prompts, params, seed), parts)
        whole = joined(stored(job, f"{name}-v{runner}-{method}", keep))
        one = compare(base, whole, kernels, method, max(BATCHES), 0.0)
        print(
            f"{Path(model).name:9} {kernels:8} {method:15} {one.num_prompts} prompts, "
            f"{one.num_tokens} tokens: {one.texts} texts and {one.logprobs} outputs' bits differ",
            flush=True,
        )
        found.append(one)
    return found


def main() -> int:
    """Run the campaign. The bundled model gets twice as many prompts as a random one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000, help="number for all models together")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS[:3]))
    parser.add_argument("--runner", type=int, choices=[1, 2], default=1, help="vLLM's model runner")
    parser.add_argument("--compiled", action="store_true", help="also compile the model")
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel_size")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", nargs="+", choices=["specops", "vllm"], default=["specops"])
    parser.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder of models and results, to resume from"
    )
    args = parser.parse_args()
    here = str(Path(__file__).resolve().parent)  # to find junk.JunkProposer
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    more = {"enforce_eager": not args.compiled, "tensor_parallel_size": args.ranks}
    wrong = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        shares = {name: 1 + (name == "bundled") for name in args.models}
        for kernels in args.kernels:
            parts = EXACT if kernels == "specops" else ""
            for name, share in shares.items():
                count = args.prompts * share // sum(shares.values())
                model = write_model(folder, name)
                found = campaign(
                    model,
                    parts,
                    count,
                    args.max_tokens,
                    args.seed,
                    args.method,
                    args.runner,
                    more,
                    args.keep,
                )
                wrong += sum(one.logprobs for one in found) if parts else 0
    print(f"{time.monotonic() - started:.0f} s; with specops {wrong} outputs differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
