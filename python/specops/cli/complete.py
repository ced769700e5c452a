# SPDX-License-Identifier: Apache-2.0
"""`specops complete`: complete a text on this machine and compare with decoding without drafts."""

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specops.api.audit import STRATEGIES, AuditRecord
from specops.api.methods import METHODS, method_names
from specops.api.outputs import TARGET
from specops.api.tokenizer import TextStream
from specops.cli import Parser, fail, finite, require_writable, write_file
from specops.cli.comparison import Comparison, Decoder, Run, compare
from specops.cli.exactness import lost_drafts, num_failures
from specops.cli.options import add_draft_lengths, add_model_options, engine_settings
from specops.cli.progress import loading_shown
from specops.cli.tint import has_colors, tinted
from specops.engine import (
    Completion,
    EngineConfig,
    EngineError,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
    TokenLogprob,
)

if TYPE_CHECKING:
    from specops.engine import Engine


def main(arguments: Sequence[str], program: str) -> int:
    """Complete a text, and compare with plain decoding if `--compare` is set.

    Returns:
        The exit code: 1 if plain decoding gives another text or if drafts were lost in a
        comparison, 2 for an invalid option.
    """
    args = _parser(program).parse_args(arguments)
    try:
        return _complete(args)
    except (EngineError, ValueError) as error:
        return fail(str(error))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Complete a text with a model on this machine, and print the tokens as "
        "they are generated.",
    )
    add = parser.add_argument
    add(
        "prompt",
        nargs="?",
        default="-",
        help="text to complete, or - for standard input (default: -)",
    )
    add_model_options(parser)
    add(
        "--method",
        metavar="NAME",
        help=f"draft method: {', '.join(method_names())} (default: ngram)",
    )
    add_draft_lengths(parser)
    add(
        "--speculative-config",
        metavar="JSON",
        help="speculative configuration as for a server; --method and the numbers of drafts "
        "override its fields",
    )
    add(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="maximum number of output tokens (default: %(default)s)",
    )
    add(
        "--temperature",
        type=finite,
        default=0.0,
        metavar="T",
        help="sampling temperature (default: 0, greedy)",
    )
    add(
        "--top-p",
        type=finite,
        default=1.0,
        metavar="P",
        help="nucleus sampling threshold (default: 1, all tokens)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        dest="request_seed",
        help="seed of sampling (default: a random one)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends the output; may be repeated",
    )
    add(
        "--logprobs",
        type=int,
        default=0,
        metavar="N",
        help="number of alternatives per token, for --json and --compare (default: 0)",
    )
    add(
        "--compare",
        action="store_true",
        help="also decode without drafts, and report whether the output is identical and the "
        "speed-up. The exit code is 1 if a token or a bit of a logprob differs, or if the "
        "drafter failed or drafted nothing",
    )
    add(
        "--json",
        metavar="FILE",
        help="write token ids, logprobs, every step and a record for `specops audit` to this file; "
        "- writes them to standard output instead of the text",
    )
    add(
        "--session",
        metavar="FILE",
        help="resume the conversation in this file, if the prompt begins with it, and save it "
        "there at the end; the prompt must still be the whole text",
    )
    return parser


def _complete(args: argparse.Namespace) -> int:
    prompt = args.prompt
    if prompt == "-":
        if sys.stdin.isatty():
            print("reading the prompt from standard input; Ctrl-D ends it", file=sys.stderr)
        prompt = sys.stdin.read()
    if args.json not in (None, "-"):
        require_writable("--json", args.json)
    if args.session is not None and args.compare:
        raise ValueError("--session must be absent with --compare, which uses no earlier pages")
    settings = engine_settings(args)
    if args.compare:  # a later run must compute the prompt again, not reuse its pages
        settings["enable_prefix_caching"] = False
    if args.method is not None:  # load the named methods; unknown names are reported below
        parts = args.method.lower().split("+")
        settings["methods"] = tuple(name for name in parts if name in METHODS)
    with loading_shown():
        engine = _start(EngineConfig(max_num_seqs=1, **settings))
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
    decoder = Decoder(engine, prompt, params, chosen, keeps_responses=args.session is not None)
    session = None if args.session is None else _Session(engine, args.session, params, chosen)
    if args.json == "-":
        drafted = decoder.run()
    else:
        screen = _Screen(engine, params.stop)
        if sys.stdout.isatty():
            print(prompt, end="")
        drafted = decoder.run(show=screen.show)
        screen.end()
    if session is not None:
        session.save(drafted.completion)
    compared = compare(decoder, drafted) if args.compare else None
    for line in _summary(speculative.method, params, drafted, compared):
        print(line, file=sys.stderr)
    if args.json is not None:
        _write(args.json, _report(engine, params, speculative, drafted, compared))
    if compared is None:
        return 0
    status = _print_verdict(engine, compared, speculative.verify_strategy)
    done = [compared.drafted.completion]
    if (lost_reason := lost_drafts(speculative, done, num_failures(engine))) is not None:
        print(f"drafts were lost: {lost_reason}", file=sys.stderr)
        return 1
    return status


def _start(config: EngineConfig) -> "Engine":
    """Import torch, and make an engine."""
    from specops.engine import Engine

    engine = Engine(config)
    gc.freeze()  # modules and engine live until the end
    return engine


class _Session:
    """Session of `--session`, resumed from its file if there is one.

    Args:
        engine: the engine.
        file: path of the file.
        params: parameters of the request.
        speculative_config: the request's speculative_config.

    Raises:
        ValueError: the file cannot be read or used.
    """

    def __init__(
        self,
        engine: "Engine",
        file: str,
        params: SamplingParams,
        speculative_config: dict[str, Any] | None,
    ) -> None:
        from specops.disaggregated.sessions import Sessions

        self._file = file
        self._arguments = params, speculative_config
        self._sessions = Sessions(engine)
        try:
            self._sessions.restore(file, *self._arguments)
        except FileNotFoundError:
            folder = Path(file).absolute().parent
            if not os.access(folder, os.W_OK):
                raise ValueError(f"--session: files in {folder} cannot be written") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"--session: {file} cannot be resumed: {error}") from None

    def save(self, completion: Completion) -> None:
        """Save the conversation, and print how much of the prompt was in the file.

        Raises:
            ValueError: the file cannot be written.
        """
        try:
            self._sessions.save(self._file, completion, *self._arguments)
        except OSError as error:
            raise ValueError(f"--session: {self._file} cannot be written: {error}") from None
        found, total = completion.num_cached_tokens, len(completion.prompt_token_ids)
        print(f"session: {found} of {total} prompt tokens were resumed", file=sys.stderr)


def _chosen(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the draft options of the command line as a request's speculative_config."""
    chosen: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("method", "num_speculative_tokens", "num_model_steps")
        if getattr(args, name) is not None
    }
    return chosen or None


class _Screen:
    """Writer of text to standard output, with accepted drafts in their drafter's color."""

    def __init__(self, engine: "Engine", stop: Sequence[str]) -> None:
        self._stream = TextStream(engine.tokenizer, stop)
        self._has_colors = has_colors(sys.stdout)
        self._drafters: set[str] = set()  # drafters with a color on the screen

    def show(self, output: RequestOutput) -> None:
        """Write a step's text."""
        text = self._tinted(output) if self._has_colors else output.text
        print(text, end="", flush=True)

    def end(self) -> None:
        """End the line and print a legend of the colors."""
        print()
        if self._drafters:
            names = ", ".join(tinted(name, name) for name in sorted(self._drafters))
            print(f"colored text: accepted drafts of {names}", flush=True)

    def _tinted(self, output: RequestOutput) -> str:
        pieces = []
        for token_id, source in zip(output.token_ids, output.sources, strict=True):
            self._stream.push(token_id)
            pieces.append((self._stream.take(), source))
        if output.finish_reason is not None:
            pieces.append((self._stream.finish(), TARGET))
        if "".join(text for text, _ in pieces) != output.text:
            return output.text  # cut at a stop token or a limit, of which the stream does not know
        self._drafters.update(source for _, source in pieces if source != TARGET)
        return "".join(
            text if source == TARGET or not text else tinted(text, source)
            for text, source in pieces
        )


def _summary(
    method: str, params: SamplingParams, drafted: Run, compared: Comparison | None
) -> list[str]:
    """Return one line for plain decoding and one with drafts: tokens, steps and speed."""
    if compared is None:
        lines = [_line(method, drafted, drafted.tokens_per_s)]
    else:
        plain, with_drafts = compared.plain.tokens_per_s, drafted.tokens_per_s
        if (timed := compared.speed_up) is not None:
            plain, with_drafts = timed.plain_tokens_per_s, timed.tokens_per_s
        lines = [_line(method, drafted, with_drafts), _line("naive", compared.plain, plain)]
    if params.temperature > 0:  # a greedy text does not depend on the seed
        lines[0] += f", seed {drafted.completion.seed}"
    return lines


def _line(method: str, run: Run, tokens_per_s: float | None) -> str:
    completion, stats = run.completion, run.completion.stats
    speed = "" if tokens_per_s is None else f", {tokens_per_s:,.0f} tokens/s"
    drafts = ""
    if stats.num_draft_tokens:
        drafts = (
            f", {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts accepted "
            f"({stats.num_accepted_tokens / stats.num_draft_tokens:.0%})"
        )
    return (
        f"{method}: {len(completion.token_ids)} tokens in {stats.num_steps} steps"
        f"{speed}{drafts}; ended by {completion.finish_reason}"
    )


def _print_verdict(engine: "Engine", compared: Comparison, strategy: str) -> int:
    """Print whether both texts are identical; return the exit code."""
    plain, drafted = compared.plain.completion, compared.drafted.completion
    place = compared.first_difference
    if place is None:
        count = len(drafted.token_ids)
        print(f"identical: {count} of {count} tokens and logprobs", file=sys.stderr)
        if compared.speed_up is not None:
            per_step = compared.drafted.tokens_per_step
            print(f"{per_step:.2f} tokens per step, {compared.speed_up}", file=sys.stderr)
        return 0
    print(f"different at output token {place}:", file=sys.stderr)
    for name, completion in (("plain", plain), ("drafted", drafted)):
        print(f"  {name + ':':8} {_token_at(engine, completion, place)}", file=sys.stderr)
    if strategy not in ("target_match", "greedy"):
        print(
            f"verify_strategy {strategy} does not promise identical output (docs/exactness.md)",
            file=sys.stderr,
        )
    return 1


def _token_at(engine: "Engine", completion: Completion, place: int) -> str:
    if place >= len(completion.token_ids):
        return f"the end ({completion.finish_reason})"
    token = completion.logprobs[place]
    text = engine.tokenizer.decode([token.token_id], skip_special_tokens=False)
    return f"token {token.token_id} {text!r}, logprob {token.logprob!r}, rank {token.rank}"


def _report(
    engine: "Engine",
    params: SamplingParams,
    speculative: SpeculativeConfig,
    drafted: Run,
    compared: Comparison | None,
) -> dict[str, Any]:
    """Return all results as a JSON object."""
    from specops.service.contract import contract_of

    report = {
        "model": engine.model_name,
        "device": engine.device,
        "speculative_config": speculative.as_dict(),
        "prompt_token_ids": drafted.completion.prompt_token_ids,
        "seed": drafted.completion.seed,
        **_run_report(drafted),
    }
    if speculative.verify_strategy in STRATEGIES and speculative.accept_policy == "normal":
        record = AuditRecord.of(
            drafted.completion,
            params,
            verify_strategy=speculative.verify_strategy,
            contract=contract_of(engine)["digest"],
        )
        report["audit"] = record.as_dict()
    if compared is not None:
        report["plain"] = _run_report(compared.plain)
        report["first_difference"] = compared.first_difference
        report["identical"] = compared.first_difference is None
        report["timed_pairs"] = [
            {"plain_tokens_per_s": plain, "tokens_per_s": with_drafts}
            for plain, with_drafts in compared.pairs
        ]
        report["speed_up"] = None if compared.speed_up is None else asdict(compared.speed_up)
    return report


def _run_report(run: Run) -> dict[str, Any]:
    completion = run.completion
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "logprobs": [_logprob(token) for token in completion.logprobs],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "tokens_per_s": run.tokens_per_s,
        "tokens_per_step": run.tokens_per_step,
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


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return asdict(token) | {"alternatives": [list(other) for other in token.alternatives]}


def _write(file: str, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=1) + "\n"
    if file == "-":
        print(text, end="", flush=True)
    else:
        write_file("--json", file, text)
