# SPDX-License-Identifier: Apache-2.0
"""`specops complete`: a text goes on, here and now; and the same text without drafts beside it."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specops.cli import fail, write_file
from specops.engine import (
    Completion,
    Engine,
    EngineConfig,
    EngineError,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
    TokenLogprob,
)
from specops.engine.exactness import first_difference
from specops.engine.options import add_draft_lengths, add_model_options, engine_settings

_PLAIN = {"method": "naive"}


@dataclass(frozen=True)
class Step:
    """One step that emitted something: when it ended, since the beginning, and what it gave."""

    seconds: float
    output: RequestOutput


@dataclass(frozen=True)
class Run:
    """A text that was completed, and how."""

    completion: Completion
    steps: list[Step]

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens behind the first step; None where there are none."""
        later = len(self.completion.token_ids) - len(self.steps[0].output.token_ids)
        seconds = self.steps[-1].seconds - self.steps[0].seconds
        return later / seconds if later > 0 and seconds > 0 else None


def main(arguments: Sequence[str], program: str) -> int:
    """Completes, and compares where that is asked for.

    Returns:
        The exit code: 1 if plain decoding says something else, 2 for a mistake.
    """
    args = _parser(program).parse_args(arguments)
    try:
        return _complete(args)
    except (EngineError, ValueError) as error:
        return fail(str(error))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Completes a text with a model of this machine, token by token as it comes.",
    )
    add = parser.add_argument
    add("prompt", nargs="?", default="-", help="the text, - for standard input (default: -)")
    add_model_options(parser)
    add("--method", metavar="NAME", help="naive, ngram, suffix or mtp (default: ngram)")
    add_draft_lengths(parser)
    add(
        "--speculative-config",
        metavar="JSON",
        help="the server's; --method and the lengths change it",
    )
    add("--max-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, the default")
    add("--top-p", type=float, default=1.0, metavar="P", help="(default: 1, all tokens)")
    add("--seed", type=int, metavar="N", dest="request_seed", help="(default: one at random)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable")
    add(
        "--logprobs",
        type=int,
        default=0,
        metavar="N",
        help="alternatives of every token, for --json and --compare (default: 0)",
    )
    add(
        "--compare",
        action="store_true",
        help="decode plainly as well: is it identical, and how much faster? 1 is the exit code if "
        "a token or a bit of a logprob differs",
    )
    add(
        "--json",
        metavar="FILE",
        help="write ids, logprobs and what every step did there; - is standard output, which has "
        "no text then",
    )
    return parser


def _complete(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    settings = engine_settings(args)
    if args.compare:  # what one computed, the other must not find
        settings["enable_prefix_caching"] = False
    engine = Engine(EngineConfig(max_num_seqs=1, **settings))
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        stop=tuple(args.stop),
        seed=engine.draw_seed() if args.request_seed is None else args.request_seed,
        logprobs=args.logprobs,
        report_drafts=True,
    )
    chosen = _chosen(args)
    speculative = engine.config.speculative_for(
        chosen, engine.runnable_methods, engine.missing_methods
    )
    show = _ignore if args.json == "-" else _print
    drafted = _run(engine, prompt, params, chosen, show)
    show("\n")
    print(_summary(speculative, drafted), file=sys.stderr)
    plain = _run(engine, prompt, params, _PLAIN, _ignore) if args.compare else None
    if args.json is not None:
        _write(args.json, _report(engine, speculative, drafted, plain))
    if plain is None:
        return 0
    print(_summary(SpeculativeConfig(), plain), file=sys.stderr)
    return _compare(engine, plain, drafted, speculative.verify_strategy)


def _chosen(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the command line says of drafts, as a request says it."""
    chosen: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("method", "num_speculative_tokens", "num_model_steps")
        if getattr(args, name) is not None
    }
    return chosen or None


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    del text


def _run(
    engine: Engine,
    prompt: str,
    params: SamplingParams,
    speculative_config: dict[str, Any] | None,
    show: Callable[[str], None],
) -> Run:
    name = engine.add_request(prompt, params, speculative_config=speculative_config)
    begin = time.perf_counter()
    steps: list[Step] = []
    while engine.has_unfinished():
        for output in engine.step():
            steps.append(Step(time.perf_counter() - begin, output))
            show(output.text)
    completion = engine.completion(name)
    if completion.error is not None:
        raise EngineError(f"the request failed: {completion.error}")
    return Run(completion, steps)


def _summary(speculative: SpeculativeConfig, run: Run) -> str:
    completion, stats = run.completion, run.completion.stats
    speed = "" if run.tokens_per_s is None else f", {run.tokens_per_s:,.0f} tokens/s"
    drafts = ""
    if stats.num_draft_tokens:
        drafts = (
            f", {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts accepted "
            f"({stats.num_accepted_tokens / stats.num_draft_tokens:.0%})"
        )
    return (
        f"{speculative.method}: {len(completion.token_ids)} tokens in {stats.num_steps} steps"
        f"{speed}{drafts}; ended by {completion.finish_reason}, seed {completion.seed}"
    )


def _compare(engine: Engine, plain: Run, drafted: Run, strategy: str) -> int:
    """Says whether both gave the same; returns the exit code."""
    left, right = plain.completion, drafted.completion
    place = first_difference(left, right)
    if place is None:
        faster = ""
        if plain.tokens_per_s is not None and drafted.tokens_per_s is not None:
            faster = f", {drafted.tokens_per_s / plain.tokens_per_s:.2f} times as fast as plain"
        count = len(right.token_ids)
        print(f"identical: {count} of {count} tokens and logprobs{faster}", file=sys.stderr)
        return 0
    print(f"different from output token {place} on:", file=sys.stderr)
    for name, one in (("plain", left), ("drafted", right)):
        print(f"  {name + ':':8} {_token_at(engine, one, place)}", file=sys.stderr)
    if strategy not in ("target_match", "greedy"):
        print(f"verify_strategy {strategy} promises no more (docs/exactness.md)", file=sys.stderr)
    return 1


def _token_at(engine: Engine, completion: Completion, place: int) -> str:
    if place >= len(completion.token_ids):
        return f"the end ({completion.finish_reason})"
    one = completion.logprobs[place]
    text = engine.tokenizer.decode([one.token_id], skip_special_tokens=False)
    return f"token {one.token_id} {text!r}, logprob {one.logprob!r}, rank {one.rank}"


def _report(
    engine: Engine, speculative: SpeculativeConfig, drafted: Run, plain: Run | None
) -> dict[str, Any]:
    """All of it for a program."""
    report = {
        "model": engine.model_name,
        "device": engine.device,
        "speculative_config": asdict(speculative),
        "prompt_token_ids": drafted.completion.prompt_token_ids,
        "seed": drafted.completion.seed,
        **_run_report(drafted),
    }
    if plain is not None:
        report["plain"] = _run_report(plain)
        report["first_difference"] = first_difference(plain.completion, drafted.completion)
        report["identical"] = report["first_difference"] is None
    return report


def _run_report(run: Run) -> dict[str, Any]:
    completion = run.completion
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "logprobs": [_logprob(one) for one in completion.logprobs],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "tokens_per_s": run.tokens_per_s,
        "stats": asdict(completion.stats),
        "steps": [
            {
                "seconds": step.seconds,
                "token_ids": step.output.token_ids,
                "drafts": None if step.output.drafts is None else asdict(step.output.drafts),
            }
            for step in run.steps
        ],
    }


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    return asdict(one) | {"alternatives": [list(other) for other in one.alternatives]}


def _write(file: str, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=1) + "\n"
    if file == "-":
        _print(text)
    else:
        write_file("--json", file, text)
