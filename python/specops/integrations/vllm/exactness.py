# SPDX-License-Identifier: Apache-2.0
"""Check whether speculation or batching changes vLLM's output.

Usage: python -m specops.integrations.vllm verify-exactness

vLLM decodes every prompt plainly and alone, then again with other methods and batch sizes. Tokens
and the bits of logprobs are compared, with vLLM's own kernels and with specops' kernels.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specops.cli import finite
from specops.cli.prompts import PROMPTS
from specops.integrations.vllm.decoding import Decoded, DecodingError, Job, Run, decode
from specops.integrations.vllm.settings import EXACT, PARTS, STRATEGIES, TARGET_MATCH

# vLLM's own n-gram and suffix methods, and the drafters of specops.integrations.vllm.
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix"},
    "specops-ngram": {"method": "custom_class", "model": "specops.integrations.vllm.NgramProposer"},
    "specops-suffix": {
        "method": "custom_class",
        "model": "specops.integrations.vllm.SuffixProposer",
    },
}
_DEFAULT = ("plain", "ngram", "specops-ngram", "specops-suffix")
_KERNELS = {"vllm": "", "specops": EXACT}
_ALTERNATIVES = 2  # top tokens per position that are compared by id and logprob
_COLUMNS = (
    "kernels", "method", "batch", "temperature", "prompts", "tokens", "tokens/step",
    "texts differ", "logprobs differ",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Comparison of a run with plain decoding of the same prompts, one at a time.

    Attributes:
        kernels: kernels of both runs: "vllm", "specops" or a mixture.
        method: name of the draft method.
        batch: number of concurrent requests.
        temperature: 0 is greedy.
        num_prompts: number of compared prompts.
        num_tokens: output tokens of the run.
        tokens_per_step: approximate tokens per step and request, from the run's steps and batch.
        texts: number of prompts with differing tokens.
        logprobs: number of prompts with a differing token or a differing bit of a logprob.
        first: first prompt with differing tokens and the index of its first differing token; None
            if no tokens differ.
    """

    kernels: str
    method: str
    batch: int
    temperature: float
    num_prompts: int
    num_tokens: int
    tokens_per_step: float
    texts: int
    logprobs: int
    first: tuple[int, int] | None

    def row(self) -> list[str]:
        """Return the run's row of the table."""
        return [
            self.kernels, self.method, str(self.batch), f"{self.temperature:g}",
            str(self.num_prompts), str(self.num_tokens), f"{self.tokens_per_step:.2f}",
            str(self.texts), str(self.logprobs),
        ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the results, and return the exit code.

    Returns:
        1 if a run that must be exact differs or --bisect finds a part that changes bits, 2 for an
        invalid option or a failed engine, else 0.
    """
    args = _parser().parse_args(arguments)
    try:
        differences = _bisect(args) if args.bisect else _compare_all(args)
    except (DecodingError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print()
    print_table(differences)
    if args.bisect:
        return _print_changing_parts(differences)
    promised = [
        difference
        for difference in differences
        if difference.kernels == "specops" and _is_promised(difference, args.verify)
    ]
    wrong = sum(difference.logprobs for difference in promised)
    if args.verify != TARGET_MATCH:
        print(f"\nWith {args.verify}, drafts may change sampled tokens, so only greedy runs count.")
    if promised:
        total = sum(difference.num_prompts for difference in promised)
        print(f"\nWith specops, {wrong} of {total} outputs differ.")
    return int(wrong > 0)


def _is_promised(difference: Difference, strategy: str) -> bool:
    """Return whether a run must equal plain decoding; sampled runs only with `target_match`."""
    return strategy == TARGET_MATCH or difference.temperature == 0 or difference.method == "plain"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specops.integrations.vllm verify-exactness",
        description="Decode prompts with vLLM without drafts, one by one, and again in batches "
        "and with drafts. Compare tokens and the bits of logprobs, with vLLM's own "
        "kernels and with those of specops.",
    )
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="Hugging Face directory of the model")
    add("--kernels", nargs="+", choices=list(_KERNELS), default=list(_KERNELS))
    add("--method", nargs="+", choices=list(METHODS), default=list(_DEFAULT))
    add(
        "--speculative-config", metavar="JSON", help="further speculative_config of vLLM to compare"
    )
    add(
        "--num-speculative-tokens",
        type=int,
        default=4,
        metavar="K",
        help="number of drafts per step (default: 4)",
    )
    add(
        "--verify",
        choices=STRATEGIES,
        default=TARGET_MATCH,
        help="verification strategy (default: target_match)",
    )
    add(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 8],
        metavar="N",
        help="numbers of requests that are decoded together (default: 1 8)",
    )
    add("--temperature", type=finite, nargs="+", default=[0.0, 0.8], metavar="T")
    add("--prompts", type=int, metavar="N", help="use the first N prompts (default: all)")
    add(
        "--prompt-file",
        metavar="FILE",
        help="prompts: a JSON list of strings (default: 20 built-in prompts)",
    )
    add(
        "--max-tokens",
        type=int,
        default=64,
        metavar="M",
        help="maximum number of output tokens per prompt (default: 64)",
    )
    add("--dtype", default="auto")
    add(
        "--compiled",
        action="store_true",
        help="compile the model with torch, as vLLM does by default (default: eager)",
    )
    add("--max-model-len", type=int, default=1024, metavar="N")
    add(
        "--kv-cache-gib",
        type=finite,
        default=1.0,
        metavar="G",
        help="size of the KV cache of every engine in GiB (default: 1)",
    )
    add(
        "--bisect",
        action="store_true",
        help="find the part of vLLM that changes the output: replace all parts but one, for each "
        "part",
    )
    return parser


def _compare_all(args: argparse.Namespace) -> list[Difference]:
    differences = []
    for kernels in args.kernels:
        differences += _compare(args, kernels, _KERNELS[kernels], _methods(args))
    return differences


def _bisect(args: argparse.Namespace) -> list[Difference]:
    """Compare with all parts but one computed by specops, leaving out each part in turn."""
    differences = []
    for part in PARTS:
        others = ",".join(other for other in PARTS if other != part)
        differences += _compare(args, f"vllm's {part}", others, _methods(args))
    return differences


def _print_changing_parts(differences: Sequence[Difference]) -> int:
    names = [difference.kernels for difference in differences if difference.logprobs]
    changing = list(dict.fromkeys(names))
    if not changing:
        print("\nNo part of vLLM changed a bit; try more prompts or a larger model.")
        return 0
    print(f"\nFirst part that is not row-identical: {changing[0]}. All: {', '.join(changing)}.")
    return 1


def _methods(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the speculative configurations by name, plain decoding first."""
    count = {"num_speculative_tokens": args.num_speculative_tokens}
    chosen = {"plain": METHODS["plain"]}
    chosen |= {name: METHODS[name] | count for name in args.method if name != "plain"}
    if args.speculative_config:
        config = json.loads(args.speculative_config)
        chosen[str(config.get("method", "own"))] = count | config
    return chosen


def _compare(
    args: argparse.Namespace, kernels: str, parts: str, methods: dict[str, dict[str, Any]]
) -> list[Difference]:
    """Run one engine per method; compare all runs with plain decoding at batch size 1."""
    prompts = _prompts(args)
    runs = [(t, batch) for t in args.temperature for batch in args.batch]
    differences: list[Difference] = []
    plain: dict[float, Decoded] = {}
    for method, config in methods.items():
        required_runs = list(runs)
        if method == "plain":
            required_runs = [(t, 1) for t in args.temperature] + [
                run for run in runs if run[1] != 1
            ]
        engine = _engine(args) | ({"speculative_config": config} if config else {})
        job = Job(engine, [_run(args, prompts, *run) for run in required_runs], parts, args.verify)
        print(
            f"{kernels}, {method}: {len(required_runs)} runs of {len(prompts)} prompts", flush=True
        )
        for (temperature, batch), decoded in zip(required_runs, decode(job), strict=True):
            base = plain.setdefault(temperature, decoded)
            if decoded is not base:
                differences.append(compare(base, decoded, kernels, method, batch, temperature))
    return differences


def compare(
    base: Decoded, decoded: Decoded, kernels: str, method: str, batch: int, temperature: float
) -> Difference:
    """Return the comparison of two runs: the numbers of prompts with different outputs."""
    pairs = list(zip(base.token_ids, decoded.token_ids, strict=True))
    texts = [index for index, (left, right) in enumerate(pairs) if left != right]
    bits = zip(base.logprobs, decoded.logprobs, strict=True)
    logprobs = {index for index, (left, right) in enumerate(bits) if left != right}
    num_tokens = sum(map(len, decoded.token_ids))
    first = None
    if texts:
        left, right = pairs[texts[0]]
        same = [a == b for a, b in zip(left, right, strict=False)]
        first = (texts[0], same.index(False) if False in same else len(same))
    return Difference(
        kernels,
        method,
        batch,
        temperature,
        len(pairs),
        num_tokens,
        num_tokens / decoded.steps / min(batch, len(pairs)) if decoded.steps else 0.0,
        len(texts),
        len(logprobs | set(texts)),
        first,
    )


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(args.batch),
        "enforce_eager": not args.compiled,
        # By default vLLM takes nearly all memory of the machine, and fails if that is in use.
        "kv_cache_memory_bytes": int(args.kv_cache_gib * (1 << 30)),
        # Each run must compute its prompts, not reuse pages of an earlier run.
        "enable_prefix_caching": False,
    }


def _run(args: argparse.Namespace, prompts: Sequence[str], temperature: float, batch: int) -> Run:
    params = [
        {
            "temperature": temperature,
            "seed": index,
            "max_tokens": args.max_tokens,
            "logprobs": _ALTERNATIVES,
        }
        for index in range(len(prompts))
    ]
    return Run(prompts, params, batch)


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(PROMPTS)
    if args.prompt_file is not None:
        prompts = json.loads(Path(args.prompt_file).read_text(encoding="utf-8"))
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(f"{args.prompt_file} must hold a JSON list of strings")
    if args.prompts is not None:
        if not 1 <= args.prompts <= len(prompts):
            raise ValueError(f"--prompts must be 1 to {len(prompts)}, got {args.prompts}")
        prompts = prompts[: args.prompts]
    return prompts


def print_table(differences: Sequence[Difference]) -> None:
    """Print a row per run, and the first differing token of each run that differs."""
    rows = [list(_COLUMNS), *(difference.row() for difference in differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for difference in differences:
        if difference.first is not None:
            print(
                f"{difference.kernels}, {difference.method}, batch {difference.batch}, temperature "
                f"{difference.temperature:g}: first difference at prompt {difference.first[0]}, "
                f"output token {difference.first[1]}"
            )
