# SPDX-License-Identifier: Apache-2.0
"""Test if speculation or batching changes vLLM's output.

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
    """One run compared with plain decoding of the same prompts, each alone.

    Attributes:
        kernels: the kernels that computed both, "vllm", "specops" or a mixture.
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
    """Compare, print, return the exit code: 1 if specops' rows differ, 2 for an invalid option."""
    args = _parser().parse_args(arguments)
    try:
        found = _bisect(args) if args.bisect else _compare_all(args)
    except (DecodingError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print()
    print_table(found)
    if args.bisect:
        return _say_guilty(found)
    ours = [one for one in found if one.kernels == "specops" and _is_promised(one, args.verify)]
    wrong = sum(one.logprobs for one in ours)
    if args.verify != TARGET_MATCH:
        print(
            f"\nUnder {args.verify} drafts may change what is drawn: of these, greedy runs count."
        )
    if ours:
        print(f"\nWith specops {wrong} of {sum(one.num_prompts for one in ours)} outputs differ.")
    return int(wrong > 0)


def _is_promised(one: Difference, strategy: str) -> bool:
    """Return whether a run must not differ: only `target_match` keeps sampled tokens."""
    return strategy == TARGET_MATCH or one.temperature == 0 or one.method == "plain"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specops.integrations.vllm verify-exactness",
        description="Decodes prompts with vLLM plainly, one by one, and again in batches and with "
        "drafts; compares tokens and the bits of logprobs, with vLLM's own kernels and specops'.",
    )
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="Hugging Face directory")
    add("--kernels", nargs="+", choices=list(_KERNELS), default=list(_KERNELS))
    add("--method", nargs="+", choices=list(METHODS), default=list(_DEFAULT))
    add("--speculative-config", metavar="JSON", help="a configuration of vLLM's, compared as well")
    add("--num-speculative-tokens", type=int, default=4, metavar="K", help="(default: 4)")
    add("--verify", choices=STRATEGIES, default=TARGET_MATCH, help="(default: target_match)")
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="N", help="(default: 1 8)")
    add("--temperature", type=finite, nargs="+", default=[0.0, 0.8], metavar="T")
    add("--prompts", type=int, metavar="N", help="use the first N prompts (default: all)")
    add("--prompt-file", metavar="FILE", help="a JSON list of texts (default: 20 built in)")
    add("--max-tokens", type=int, default=64, metavar="M", help="per prompt (default: 64)")
    add("--dtype", default="auto")
    add("--compiled", action="store_true", help="by torch, as vLLM is by default (default: eager)")
    add("--max-model-len", type=int, default=1024, metavar="N")
    add(
        "--kv-cache-gib", type=finite, default=1.0, metavar="G", help="of every engine (default: 1)"
    )
    add(
        "--bisect",
        action="store_true",
        help="leave one part after the other to vLLM, the rest with specops: which one differs?",
    )
    return parser


def _compare_all(args: argparse.Namespace) -> list[Difference]:
    found = []
    for kernels in args.kernels:
        found += _compare(args, kernels, _KERNELS[kernels], _methods(args))
    return found


def _bisect(args: argparse.Namespace) -> list[Difference]:
    """Compare with every part by specops except one; a difference is then due to that part."""
    found = []
    for part in PARTS:
        others = ",".join(other for other in PARTS if other != part)
        found += _compare(args, f"vllm's {part}", others, _methods(args))
    return found


def _say_guilty(found: Sequence[Difference]) -> int:
    guilty = list(dict.fromkeys(one.kernels for one in found if one.logprobs))
    if not guilty:
        print("\nNo part of vLLM changed a bit here; more prompts or a larger model may show one.")
        return 0
    print(f"\nThe first that is not row-identical: {guilty[0]}. All: {', '.join(guilty)}.")
    return 1


def _methods(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the speculative configurations by name, plain decoding first."""
    count = {"num_speculative_tokens": args.num_speculative_tokens}
    chosen = {"plain": METHODS["plain"]}
    chosen |= {name: METHODS[name] | count for name in args.method if name != "plain"}
    if args.speculative_config:
        own = json.loads(args.speculative_config)
        chosen[str(own.get("method", "own"))] = count | own
    return chosen


def _compare(
    args: argparse.Namespace, kernels: str, parts: str, methods: dict[str, dict[str, Any]]
) -> list[Difference]:
    """Run one engine per method; compare all runs with the plain run of batch 1."""
    prompts = _prompts(args)
    runs = [(t, batch) for t in args.temperature for batch in args.batch]
    found: list[Difference] = []
    plain: dict[float, Decoded] = {}
    for method, config in methods.items():
        wanted = list(runs)
        if method == "plain":
            wanted = [(t, 1) for t in args.temperature] + [run for run in runs if run[1] != 1]
        engine = _engine(args) | ({"speculative_config": config} if config else {})
        job = Job(engine, [_run(args, prompts, *run) for run in wanted], parts, args.verify)
        print(f"{kernels}, {method}: {len(wanted)} runs of {len(prompts)} prompts", flush=True)
        for (temperature, batch), decoded in zip(wanted, decode(job), strict=True):
            base = plain.setdefault(temperature, decoded)
            if decoded is not base:
                found.append(compare(base, decoded, kernels, method, batch, temperature))
    return found


def compare(
    base: Decoded, decoded: Decoded, kernels: str, method: str, batch: int, temperature: float
) -> Difference:
    """Count the prompts with different outputs in two runs."""
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
        # vLLM's default is nearly all memory of the machine, or an error if that is in use.
        "kv_cache_memory_bytes": int(args.kv_cache_gib * (1 << 30)),
        # The second computation of a prompt must not reuse pages of the first.
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
        if not isinstance(prompts, list) or not all(isinstance(one, str) for one in prompts):
            raise ValueError(f"{args.prompt_file} must hold a JSON list of texts")
    if args.prompts is not None:
        if not 1 <= args.prompts <= len(prompts):
            raise ValueError(f"--prompts must be 1 to {len(prompts)}, got {args.prompts}")
        prompts = prompts[: args.prompts]
    return prompts


def print_table(found: Sequence[Difference]) -> None:
    """Print a row per run, and the first differing token of each run that differs."""
    rows = [list(_COLUMNS), *(one.row() for one in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for one in found:
        if one.first is not None:
            print(
                f"{one.kernels}, {one.method}, batch {one.batch}, temperature "
                f"{one.temperature:g}: prompt {one.first[0]} is the first, from output token "
                f"{one.first[1]} on"
            )
