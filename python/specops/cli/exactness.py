# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.engine verify-exactness`: check that speculation changes no token.

Every prompt is decoded plainly and alone; then all prompts are decoded together with drafts.
Tokens, text, ranks and the bits of every logprob are compared, also of the top alternatives.
"""

import argparse
import contextlib
import json
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from specops.api.config import ALL_METHODS, EngineConfig
from specops.api.errors import EngineError
from specops.api.methods import method_choices, method_of
from specops.api.outputs import Completion, TokenLogprob
from specops.api.sampling_params import SamplingParams
from specops.api.speculative_config import SpeculativeConfig
from specops.cli import Parser, fail, finite, require_writable, write_file
from specops.cli.options import add_draft_lengths, add_model_options, engine_settings
from specops.cli.progress import loading_shown, progress
from specops.cli.prompts import PROMPTS, read_prompts

if TYPE_CHECKING:
    from specops.engine import Engine

_SHOWN = 40  # characters of a prompt that are printed
_ALTERNATIVES = 5  # top tokens per position that are compared by id and logprob
_MAX_TOKENS_WITHOUT_DRAFTS = 3  # an output of at most this length may have no draft

# Methods to compare by default, if the model can run them.
METHODS = method_choices()


@dataclass
class Comparison:
    """Result of comparing one method at one temperature with plain decoding."""

    method: str
    num_speculative_tokens: int
    temperature: float
    num_prompts: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_different: int = 0  # number of prompts
    num_failures: int = 0  # number of failures of drafters
    lost_drafts: str | None = None  # a sentence, if a drafter failed or drafted nothing
    differences: list[str] = field(default_factory=list)  # one text per differing prompt

    @property
    def title(self) -> str:
        """Name of the comparison."""
        return f"{self.method}, temperature {self.temperature:g}"

    def row(self) -> list[str]:
        """Return the comparison's row of the table."""
        acceptance = f"{self.num_accepted / self.num_drafts:.0%}" if self.num_drafts else "-"
        return [
            self.method,
            str(self.num_speculative_tokens),
            f"{self.temperature:g}",
            str(self.num_tokens),
            f"{self.num_tokens / max(self.num_steps, 1):.2f}",
            str(self.num_drafts),
            acceptance,
            str(self.num_different),
        ]


_COLUMNS = (
    "method", "k", "temp.", "tokens", "tokens/step", "drafts", "accepted", "differences",
)  # fmt: skip


def main(arguments: Sequence[str], program: str) -> int:
    """Compare, print, and return the exit code.

    The code is 1 if anything differs or a drafter failed or drafted nothing, and 2 for an invalid
    option.
    """
    args = _parser(program).parse_args(arguments)
    if args.json != "-":
        return _run(args)
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        return _run(args, out)


def _run(args: argparse.Namespace, json_out: TextIO | None = None) -> int:
    """Run with parsed options; the JSON goes to `json_out`, if given, instead of a file."""
    try:
        if args.json is not None and json_out is None:
            require_writable("--json", args.json)
        comparisons, contract, warnings = _compare_all(args)
    except (EngineError, OSError, ValueError) as error:
        return fail(str(error))
    if args.json is not None:  # before anything is printed, since the reader may close a pipe
        results = {
            "contract": contract,
            "comparisons": [asdict(comparison) for comparison in comparisons],
        }
        text = json.dumps(results, indent=2) + "\n"
        if json_out is not None:
            json_out.write(text)
        else:
            write_file("--json", args.json, text)
    print(_verdict(comparisons))
    if not args.quiet:
        for line in [*_differences(comparisons), *_doubts(comparisons), *warnings, ""]:
            print(line)
        _print_table(comparisons)
    return int(
        any(comparison.num_different or comparison.lost_drafts for comparison in comparisons)
    )


def _verdict(comparisons: Sequence[Comparison]) -> str:
    different = sum(comparison.num_different for comparison in comparisons)
    if different:
        outputs = sum(comparison.num_prompts for comparison in comparisons)
        return f"{different} of {outputs} outputs differ: speculation changed the output."
    tokens = sum(comparison.num_tokens for comparison in comparisons)
    if without_drafts := [comparison for comparison in comparisons if comparison.lost_drafts]:
        return f"No verdict on {without_drafts[0].title}: {without_drafts[0].lost_drafts}"
    return (
        f"No difference in {tokens:,} tokens: all tokens, ranks and logprob bits, including those "
        "of alternatives, equal plain decoding."
    )


def _differences(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for comparison in comparisons:
        if comparison.differences:
            yield f"\n{comparison.title}"
            yield from comparison.differences


def _doubts(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a caution for each comparison in which all drafts or none were accepted."""
    return [
        f"At temperature {comparison.temperature:g}, {comparison.num_accepted} of "
        f"{comparison.num_drafts} drafts of {comparison.method} were accepted; compare more tokens "
        "for a stronger result."
        for comparison in comparisons
        if not comparison.num_different and not 0 < comparison.num_accepted < comparison.num_drafts
    ]


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Decode prompts without speculation, one by one, and again with "
        "speculation, together. Compare every token, its rank, and the bits of its "
        "logprob and of its alternatives.",
        epilog="`specops verify-exactness --url URL` checks any OpenAI-compatible server "
        "instead; add --help for its options.",
    )
    add = parser.add_argument
    add_model_options(parser)
    add(
        "--method",
        nargs="+",
        help=f"methods to compare: {', '.join(METHODS)} (default: all that the model supports)",
    )
    add_draft_lengths(parser)
    add(
        "--speculative-config",
        metavar="JSON",
        help="speculative configuration to compare, as for a server; with --method, the fields "
        "that the methods leave open",
    )
    add("--prompts", type=int, metavar="N", help="use the first N prompts (default: all)")
    add(
        "--prompt-file",
        metavar="FILE",
        help="prompts: a JSON list of strings, or one prompt per line (default: 20 built-in "
        "prompts)",
    )
    add(
        "--max-tokens",
        type=int,
        default=128,
        metavar="M",
        help="maximum number of output tokens per prompt (default: 128)",
    )
    add(
        "--temperature",
        type=finite,
        nargs="+",
        default=[0.0, 0.8],
        metavar="T",
        help="sampling temperatures; 0 is greedy (default: 0 0.8)",
    )
    add(
        "--top-p",
        type=finite,
        default=0.95,
        metavar="P",
        help="nucleus sampling threshold (default: 0.95)",
    )
    add(
        "--repetition-penalty",
        type=finite,
        default=1.0,
        metavar="R",
        help="repetition penalty (default: 1, off)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        dest="first_seed",
        help="seed of the first prompt; each further prompt adds 1 (default: 0)",
    )
    add(
        "--json",
        metavar="FILE",
        help="write the table and the engine's execution contract to this file; with -, to "
        "standard output, and everything else to standard error",
    )
    add(
        "--max-num-seqs",
        type=int,
        default=8,
        metavar="N",
        help="number of prompts that are decoded together (default: 8)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--verbose", action="store_true", help="print a line for every prompt")
    output.add_argument("--quiet", action="store_true", help="print only the verdict, in one line")
    return parser


def _compare_all(
    args: argparse.Namespace,
) -> tuple[list[Comparison], dict[str, Any], list[str]]:
    """Return the comparisons, the engine's contract, and warnings about its drafters."""
    from specops.engine import Engine
    from specops.service.contract import contract_of

    prompts = list(PROMPTS) if args.prompt_file is None else read_prompts(args.prompt_file)
    if args.prompts is not None:
        if not 1 <= args.prompts <= len(prompts):
            raise ValueError(f"--prompts must be 1 to {len(prompts)}, got {args.prompts}")
        prompts = prompts[: args.prompts]
    if args.max_tokens == 0:  # no output to compare
        raise ValueError("--max-tokens must be at least 1, got 0")
    settings = {"speculative_config": SpeculativeConfig(), **engine_settings(args)}
    config = settings["speculative_config"]
    # Decoding with drafts must compute the prompt again, not reuse pages of plain decoding.
    settings["enable_prefix_caching"] = False
    settings.setdefault("methods", (ALL_METHODS,))
    with loading_shown():
        engine = Engine(EngineConfig(**settings))
    engine.check_drafters()
    compared = _to_compare(args, config, engine.runnable_methods)
    for _, speculative_config in compared:
        # Reject an invalid configuration before computing anything.
        engine.config.speculative_for(
            speculative_config, engine.runnable_methods, engine.missing_methods
        )
    if not args.quiet:
        _print_heading(engine, len(prompts), args.max_tokens)
    comparisons: list[Comparison] = []
    total = len(args.temperature) * (1 + len(compared)) * len(prompts)
    with progress(total, is_shown=not (args.quiet or args.verbose)) as advance:
        for temperature in args.temperature:
            params = _params(args, temperature, len(prompts), engine.vocab_size)
            plain = []
            for prompt, prompt_params in zip(prompts, params, strict=True):
                plain += engine.generate(
                    [prompt], prompt_params, speculative_config={"method": "naive"}
                )
                advance(f"plain, temperature {temperature:g}", 1)
            for method, speculative_config in compared:
                # Drafters must not draft from the texts that the previous comparison decoded.
                forget_responses(engine)
                failures = num_failures(engine)
                drafted = engine.generate(prompts, params, speculative_config=speculative_config)
                full_config = config.override(speculative_config)
                comparison = Comparison(method, full_config.num_speculative_tokens, temperature)
                comparison.num_failures = num_failures(engine) - failures
                comparison.lost_drafts = lost_drafts(full_config, drafted, comparison.num_failures)
                lines = [
                    _compare(engine, comparison, *texts)
                    for texts in zip(prompts, plain, drafted, strict=True)
                ]
                if args.verbose:
                    print("\n".join([comparison.title, *lines, ""]))
                comparisons.append(comparison)
                advance(comparison.title, len(prompts))
    warnings = [
        f"{sentence[0].upper()}{sentence[1:]}." for sentence in engine.stats.drafter_warnings
    ]
    return comparisons, contract_of(engine), warnings


def _print_heading(engine: "Engine", num_prompts: int, max_tokens: int) -> None:
    print(
        f"{engine.model_name} on {engine.device}: {num_prompts} prompts, up to {max_tokens} tokens "
        "each"
    )


def _params(
    args: argparse.Namespace, temperature: float, count: int, vocab_size: int
) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt; each prompt has a different seed."""
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
    """Return the methods to compare: (name, speculative_config of its requests)."""
    fixed = {"adaptive_verification": False}  # verify drafts even if they save no time
    lengths = {
        name: getattr(args, name)
        for name in ("num_speculative_tokens", "num_model_steps")
        if getattr(args, name) is not None
    }
    if args.method is None and config.method != "naive":
        return [(config.method, fixed | lengths)]
    if config.method == "naive":
        lengths.setdefault("num_speculative_tokens", 4)
    steps = lengths.pop("num_model_steps", None)
    compared = []
    for method in args.method or METHODS:
        if method not in METHODS:
            raise ValueError(f"--method must be one of {', '.join(METHODS)}, got {method}")
        first = method_of(method.partition("+")[0])
        if args.method is None and first.name not in runnable:
            continue
        speculative_config: dict[str, Any] = {"method": method, **lengths, **fixed}
        if first.needs_weights:
            speculative_config["num_model_steps"] = steps
        compared.append((method, speculative_config))
    if not compared:
        raise ValueError(
            f"no method to compare: the engine supports only {', '.join(runnable)}; choose one "
            "with --speculative-config"
        )
    return compared


def _compare(
    engine: "Engine", comparison: Comparison, prompt: str, plain: Completion, drafted: Completion
) -> str:
    """Add one prompt to a comparison; return the line that describes it."""
    stats = drafted.stats
    comparison.num_prompts += 1
    comparison.num_tokens += len(drafted.token_ids)
    comparison.num_steps += stats.num_steps
    comparison.num_drafts += stats.num_draft_tokens
    comparison.num_accepted += stats.num_accepted_tokens
    difference = first_difference(plain, drafted)
    verdict = "equal" if difference is None else "DIFFERENT"
    shown_prompt = prompt if len(prompt) <= _SHOWN else prompt[:_SHOWN] + "..."
    line = (
        f"  {len(drafted.token_ids):5d} tokens, {stats.num_accepted_tokens:4d} of "
        f"{stats.num_draft_tokens:4d} drafts accepted, {verdict}: {shown_prompt!r}"
    )
    if difference is None:
        return line
    for name, completion in (("plain", plain), ("drafted", drafted)):
        description = f"the end ({completion.finish_reason})"
        if difference < len(completion.token_ids):
            description = _describe(engine, completion.logprobs[difference])
        line += f"\n        {name + ':':8} output token {difference} is {description}"
    comparison.num_different += 1
    comparison.differences.append(line)
    return line


def _describe(engine: "Engine", token: TokenLogprob) -> str:
    text = engine.tokenizer.decode([token.token_id], skip_special_tokens=False)
    others = ", ".join(f"{token_id} {logprob!r}" for token_id, logprob in token.alternatives)
    return (
        f"token {token.token_id} {text!r}, logprob {token.logprob!r}, rank {token.rank}, "
        f"of [{others}]"
    )


def num_failures(engine: "Engine") -> int:
    """Return the total number of failures of an engine's drafters."""
    return sum(engine.stats.drafter_failures.values())


def lost_drafts(
    config: SpeculativeConfig, drafted: Sequence[Completion], num_failures: int
) -> str | None:
    """Return a sentence about lost drafts; None if none were lost.

    Args:
        config: speculative configuration of the requests.
        drafted: completions of these requests.
        num_failures: failures of drafters meanwhile.
    """
    if num_failures:
        return (
            f"the drafter of {config.method} failed {num_failures} times (see the log), "
            "and requests were decoded without drafts"
        )
    # A lookup may find nothing, but a drafter with weights drafts something for any longer text.
    drafts = sum(completion.stats.num_draft_tokens for completion in drafted)
    needs_weights = config.stages and method_of(config.stages[0]).needs_weights
    is_long = (
        max((len(completion.token_ids) for completion in drafted), default=0)
        > _MAX_TOKENS_WITHOUT_DRAFTS
    )
    if needs_weights and is_long and not (drafts or config.selects_drafts):
        return f"{config.method} drafted nothing"
    return None


def first_difference(first: Completion, second: Completion) -> int | None:
    """Return the index of the first output token in which two completions differ, or None.

    Tokens are compared by id, by rank, and by the bits of their logprob and of the alternatives'
    logprobs. Completions are also compared by text, finish reason and stop reason.
    """
    for index, (a, b) in enumerate(zip(_bits(first), _bits(second), strict=False)):
        if a != b:
            return index
    if len(first.token_ids) != len(second.token_ids) or first.text != second.text:
        return min(len(first.token_ids), len(second.token_ids))
    if (first.finish_reason, first.stop_reason) != (second.finish_reason, second.stop_reason):
        return len(first.token_ids)
    return None


def _bits(completion: Completion) -> list[tuple[Any, ...]]:
    """Return for each token a tuple of everything to compare."""
    if len(completion.logprobs) != len(completion.token_ids):
        raise ValueError(
            f"every output token must have a logprob, got {len(completion.logprobs)} for "
            f"{len(completion.token_ids)} tokens"
        )
    return [
        (
            token_id,
            token.token_id,
            token.rank,
            _float_bits(token.logprob),
            [(other, _float_bits(logprob)) for other, logprob in token.alternatives],
        )
        for token_id, token in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def forget_responses(engine: "Engine") -> None:
    """Clear the texts that drafters store, so that repeated decoding does not use them."""
    for drafter in engine.drafters.values():
        drafter.forget()


def _float_bits(value: float) -> bytes:
    return struct.pack("<f", value)


def _print_table(comparisons: Sequence[Comparison]) -> None:
    rows = [list(_COLUMNS), *(comparison.row() for comparison in comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
