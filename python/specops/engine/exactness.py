# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.engine verify-exactness`: does speculation change a token? Try it yourself.

Every prompt is decoded plainly, alone; then all of them together with drafts. Tokens, text, ranks
and the bits of every logprob are compared, those of the likeliest alternatives too.
"""

import argparse
import contextlib
import json
import struct
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from specops.engine.config import EngineConfig
from specops.engine.contract import contract_of
from specops.engine.drafters.suffix import SuffixDrafter
from specops.engine.engine import Engine
from specops.engine.errors import EngineError
from specops.engine.options import add_draft_lengths, add_model_options, engine_settings
from specops.engine.outputs import Completion, TokenLogprob
from specops.engine.sampling_params import SamplingParams
from specops.engine.speculative_config import SpeculativeConfig
from specops.prompts import PROMPTS, read_prompts

_SHOWN = 40  # characters of a prompt
_ALTERNATIVES = 5  # of every token, compared by id and logprob

# What is compared unless something is chosen, as far as the model runs it.
METHODS = ("ngram", "suffix", "mtp", "mtp+ngram", "mtp+suffix")


@dataclass
class Comparison:
    """One method at one temperature against plain decoding."""

    method: str
    num_speculative_tokens: int
    temperature: float
    num_prompts: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_different: int = 0  # prompts

    def row(self) -> list[str]:
        """Its line of the table."""
        share = f"{self.num_accepted / self.num_drafts:.0%}" if self.num_drafts else "-"
        return [
            self.method,
            str(self.num_speculative_tokens),
            f"{self.temperature:g}",
            str(self.num_prompts),
            str(self.num_tokens),
            f"{self.num_tokens / max(self.num_steps, 1):.2f}",
            str(self.num_drafts),
            share,
            str(self.num_different),
        ]


_COLUMNS = (
    "method", "k", "temperature", "prompts", "tokens", "tokens/step", "drafts", "accepted",
    "differences",
)  # fmt: skip


def main(arguments: Sequence[str], program: str) -> int:
    """Compares, prints, and returns the exit code: 1 for any difference, 2 for a mistake."""
    args = _parser(program).parse_args(arguments)
    if args.json != "-":
        return _run(args)
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        return _run(args, out)


def _run(args: argparse.Namespace, json_out: TextIO | None = None) -> int:
    """The same, with the options read; the table in JSON goes to `json_out` instead of a file."""
    try:
        comparisons, contract = _compare_all(args)
    except (EngineError, OSError, ValueError) as error:
        print(f"specops: {error}", file=sys.stderr)
        return 2
    print()
    _print_table(comparisons)
    different = sum(one.num_different for one in comparisons)
    if args.json is not None:
        found = {"contract": contract, "comparisons": [asdict(one) for one in comparisons]}
        text = json.dumps(found, indent=2) + "\n"
        if json_out is not None:
            json_out.write(text)
        else:
            Path(args.json).write_text(text, encoding="utf-8")
    if different:
        print(f"\n{different} outputs differ: speculation changed what the model says.")
        return 1
    print(
        "\nNo difference: every token and rank, and every logprob bit, is plain decoding's, "
        "alternatives included."
    )
    for one in comparisons:
        if not 0 < one.num_accepted < one.num_drafts:
            print(
                f"But at temperature {one.temperature:g}, {one.method} had {one.num_accepted} of "
                f"{one.num_drafts} drafts accepted: more tokens would say more."
            )
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Decodes prompts plainly, one by one, and again with speculation, together; "
        "compares every token, its rank, and the bits of its logprob and of its alternatives'.",
    )
    add = parser.add_argument
    add_model_options(parser)
    add(
        "--method",
        nargs="+",
        help=f"methods to compare: {', '.join(METHODS)} (default: all that the model runs)",
    )
    add_draft_lengths(parser)
    add(
        "--speculative-config",
        metavar="JSON",
        help="the server's: it is compared as it is; with --method, what the methods leave open",
    )
    add("--prompts", type=int, metavar="N", help="use the first N prompts (default: all)")
    add(
        "--prompt-file",
        metavar="FILE",
        help="prompts of your own: a JSON list of texts, or a text per line (default: 20 built in)",
    )
    add("--max-tokens", type=int, default=128, metavar="M", help="per prompt (default: 128)")
    add(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0, 0.8],
        metavar="T",
        help="0 is greedy (default: 0 0.8)",
    )
    add("--top-p", type=float, default=0.95, metavar="P", help="(default: 0.95)")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="(default: 1, off)")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        dest="first_seed",
        help="of the first prompt (default: 0)",
    )
    add(
        "--json",
        metavar="FILE",
        help="write the table there, with the engine's contract; - is standard output, and all "
        "else goes to standard error",
    )
    add("--max-num-seqs", type=int, default=8, metavar="N", help="together (default: 8)")
    return parser


def _compare_all(args: argparse.Namespace) -> tuple[list[Comparison], dict[str, Any]]:
    prompts = list(PROMPTS) if args.prompt_file is None else read_prompts(args.prompt_file)
    if args.prompts is not None:
        if not 1 <= args.prompts <= len(prompts):
            raise ValueError(f"--prompts must be 1 to {len(prompts)}, got {args.prompts}")
        prompts = prompts[: args.prompts]
    if args.max_tokens == 0:  # there would be nothing to compare
        raise ValueError("max_tokens must be at least 1, got 0")
    settings = {"speculative_config": SpeculativeConfig(), **engine_settings(args)}
    config = settings["speculative_config"]
    # A prompt's second computation must not find the first one's.
    settings["enable_prefix_caching"] = False
    engine = Engine(EngineConfig(**settings))
    compared = _to_compare(args, config, engine.runnable_methods)
    for _, own in compared:
        # Before anything is computed.
        engine.config.speculative_for(own, engine.runnable_methods, engine.missing_methods)
    ours = engine.config.has_exact_attention
    backend = "" if ours else f", attention by {engine.config.attention_backend}"
    print(
        f"{engine.model_name} on {engine.device}{backend}: {len(prompts)} prompts, up to "
        f"{args.max_tokens} tokens each"
    )
    if backend:
        print("not exact: differences are to be expected")
    comparisons = []
    for temperature in args.temperature:
        params = _params(args, temperature, len(prompts), engine.vocab_size)
        plain = [
            engine.generate([prompt], one, speculative_config={"method": "naive"})[0]
            for prompt, one in zip(prompts, params, strict=True)
        ]
        for method, own in compared:
            forget_responses(engine)
            drafted = engine.generate(prompts, params, speculative_config=own)
            k = config.override(own).num_speculative_tokens
            comparison = Comparison(method, k, temperature)
            print(f"\n{method}, temperature {temperature:g}")
            for prompt, left, right in zip(prompts, plain, drafted, strict=True):
                _compare(engine, comparison, prompt, left, right)
            comparisons.append(comparison)
    return comparisons, contract_of(engine)


def _params(
    args: argparse.Namespace, temperature: float, count: int, vocab_size: int
) -> list[SamplingParams]:
    """The sampling parameters of each prompt, which has a seed of its own."""
    return [
        SamplingParams(
            max_tokens=args.max_tokens,
            temperature=temperature,
            top_p=args.top_p,
            repetition_penalty=args.repetition_penalty,
            seed=args.first_seed + index,
            logprobs=min(_ALTERNATIVES, vocab_size),
        )
        for index in range(count)
    ]


def _to_compare(
    args: argparse.Namespace, config: SpeculativeConfig, runnable: Collection[str]
) -> list[tuple[str, dict[str, Any]]]:
    """Names, and the speculative_config of the requests that have them."""
    fixed = {"adaptive_verification": False}  # where drafts gain nothing, they are compared too
    lengths = {
        name: getattr(args, name)
        for name in ("num_speculative_tokens", "num_model_steps")
        if getattr(args, name) is not None
    }
    if args.method is None and config.method != "naive":
        suffix = config.mtp_strategy.removeprefix("with_").replace("default", "")
        name = f"{config.method}+{suffix}" if suffix else config.method
        return [(name, fixed | lengths)]
    if config.method == "naive":
        lengths.setdefault("num_speculative_tokens", 4)
    steps = lengths.pop("num_model_steps", None)
    compared = []
    for method in args.method or METHODS:
        first, _, second = method.partition("+")
        if args.method is None and first not in runnable:
            continue
        own: dict[str, Any] = {"method": first, **lengths, **fixed}
        if first == "mtp":
            own |= {"mtp_strategy": f"with_{second}" if second else "default"}
            own |= {"num_model_steps": steps}
        elif second:
            raise ValueError(f"--method must be of {', '.join(METHODS)}, got {method}")
        compared.append((method, own))
    return compared


def _compare(
    engine: Engine, comparison: Comparison, prompt: str, plain: Completion, drafted: Completion
) -> None:
    """Adds one prompt to a comparison, and prints its line."""
    stats = drafted.stats
    comparison.num_prompts += 1
    comparison.num_tokens += len(drafted.token_ids)
    comparison.num_steps += stats.num_steps
    comparison.num_drafts += stats.num_draft_tokens
    comparison.num_accepted += stats.num_accepted_tokens
    difference = first_difference(plain, drafted)
    verdict = "equal" if difference is None else "DIFFERENT"
    shown = prompt if len(prompt) <= _SHOWN else prompt[:_SHOWN] + "..."
    print(
        f"  {len(drafted.token_ids):5d} tokens, {stats.num_accepted_tokens:4d} of "
        f"{stats.num_draft_tokens:4d} drafts accepted, {verdict}: {shown!r}"
    )
    if difference is None:
        return
    comparison.num_different += 1
    for name, one in (("plain", plain), ("drafted", drafted)):
        what = f"the end ({one.finish_reason})"
        if difference < len(one.token_ids):
            what = _describe(engine, one.logprobs[difference])
        print(f"        {name + ':':8} output token {difference} is {what}")


def _describe(engine: Engine, one: TokenLogprob) -> str:
    text = engine.tokenizer.decode([one.token_id], skip_special_tokens=False)
    others = ", ".join(f"{token_id} {logprob!r}" for token_id, logprob in one.alternatives)
    return f"token {one.token_id} {text!r}, logprob {one.logprob!r}, rank {one.rank}, of [{others}]"


def first_difference(left: Completion, right: Completion) -> int | None:
    """The first output token in which two completions differ; None if there is none.

    Tokens differ by id, by rank, or by a bit of a logprob, its own or an alternative's; completions
    by text and by what ended them, too.
    """
    for index, (a, b) in enumerate(zip(_bits(left), _bits(right), strict=False)):
        if a != b:
            return index
    if len(left.token_ids) != len(right.token_ids) or left.text != right.text:
        return min(len(left.token_ids), len(right.token_ids))
    if (left.finish_reason, left.stop_reason) != (right.finish_reason, right.stop_reason):
        return len(left.token_ids)
    return None


def _bits(completion: Completion) -> list[tuple[Any, ...]]:
    """What is compared of each token."""
    if len(completion.logprobs) != len(completion.token_ids):
        raise ValueError(
            f"every output token must have a logprob, got {len(completion.logprobs)} for "
            f"{len(completion.token_ids)} tokens"
        )
    return [
        (
            token_id,
            one.token_id,
            one.rank,
            _float_bits(one.logprob),
            [(other, _float_bits(logprob)) for other, logprob in one.alternatives],
        )
        for token_id, one in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def forget_responses(engine: Engine) -> None:
    """Empties the suffix cache: a text that is decoded again must not be drafted from itself."""
    cache = cast(SuffixDrafter, engine.drafters[SuffixDrafter.name]).cache
    for response in cache.cached_requests:
        cache.evict(response)
    cache.reclaim()


def _float_bits(value: float) -> bytes:
    return struct.pack("<f", value)


def _print_table(comparisons: Sequence[Comparison]) -> None:
    rows = [list(_COLUMNS), *(one.row() for one in comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
