# SPDX-License-Identifier: Apache-2.0
"""`specops verify-exactness --url`: check that speculation does not change a server's output."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

from specops.cli import Parser, fail, finite, json_object, require_url, require_writable, write_file
from specops.cli.lossless.answers import Answer
from specops.cli.lossless.card import card
from specops.cli.lossless.modes import ALONE, BESIDE, Ask, Mode, asks_of, modes_of
from specops.cli.lossless.server import Server
from specops.cli.lossless.show import cautions, difference_lines, table
from specops.cli.lossless.texts import TEXTS, Text
from specops.cli.lossless.verdict import STATUSES, Comparison, total, verdict
from specops.cli.progress import progress
from specops.cli.prompts import read_prompts

_SHOWN = 3  # differences that are printed without --verbose


def main(arguments: Sequence[str], program: str) -> int:
    """Compare, print, and return the exit code: 0 lossless, 1 differs, 2 cannot say."""
    args = _parser(program).parse_args(arguments)
    try:
        _check(args)
        texts = _texts(args)
        plain, *drafted = modes_of(
            _server(args, args.url, args.model),
            _server(args, args.baseline_url, args.baseline_model) if args.baseline_url else None,
            None if args.plain_body is None else json_object("--plain-body", args.plain_body),
            [json_object("--drafted-body", body) for body in args.drafted_body or ()],
        )
        asks = asks_of(
            texts, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
        )
        comparisons = _compare(args, asks, plain, drafted)
        drafts = {mode.name: mode.drafts for mode in (plain, *drafted)}
        status, sentence = verdict(comparisons, drafts, is_trusted=args.trust_speculation)
        _report(args, status, sentence, comparisons, [plain, *drafted])
    except BrokenPipeError:  # the reader closed the pipe; the caller handles that
        raise
    except (OSError, ValueError) as error:
        return fail(str(error))
    return STATUSES.index(status)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Asks a server with OpenAI's API the same with and without speculation, alone "
        "and beside others, greedy and with seeds, and compares texts, tokens, logprobs and "
        "endings. The exit code is 0: lossless, 1: something differs, 2: it cannot be said.",
        epilog="Without --url, the command compares an engine of its own: see `specops "
        "verify-exactness --help`.",
    )
    _add_servers(parser)
    _add_requests(parser)
    add = parser.add_argument
    add("--json", metavar="FILE", help="write all of it there; - is standard output")
    add("--card", metavar="FILE.svg", help="draw the verdict as a picture to share")
    told = parser.add_mutually_exclusive_group()
    told.add_argument("--verbose", action="store_true", help="every difference")
    told.add_argument("--quiet", action="store_true", help="the verdict alone, in one line")
    return parser


def _add_servers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, help="of the server that speculates, without /v1")
    add(
        "--baseline-url",
        metavar="URL",
        help="the same model without speculation (default: --url, if a request can say so there: "
        "specops' server, or one that knows the fields of --plain-body)",
    )
    add("--model", default="", metavar="NAME", help="(default: the first that the server lists)")
    add("--baseline-model", default="", metavar="NAME", help="(default: the first that it lists)")
    add(
        "--plain-body",
        metavar="JSON",
        help="fields of requests without speculation, such as llama-server's "
        "'{\"speculative.n_max\": 0}'",
    )
    add(
        "--drafted-body",
        metavar="JSON",
        action="append",
        help="fields of requests with speculation; may be repeated (default: none; on specops' "
        "server, one for each of its methods)",
    )
    add(
        "--trust-speculation",
        action="store_true",
        help="take it that the server speculates, though it reports no drafts",
    )
    add(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SPECOPS_API_KEY"),
        help="bearer token (default: SPECOPS_API_KEY of the environment)",
    )
    add("--timeout", type=finite, default=600.0, metavar="SECONDS", help="(default: %(default)g)")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=int, metavar="N", help="use the first N prompts (default: all)")
    add(
        "--prompt-file",
        metavar="FILE",
        help="prompts of your own: a JSON list of texts, or a text per line (default: "
        f"{len(TEXTS)} built in: prose, code, chats, and copies of code)",
    )
    add("--max-tokens", type=int, default=128, metavar="M", help="of each (default: %(default)s)")
    add(
        "--temperature",
        type=finite,
        default=0.8,
        metavar="T",
        help="of requests with a seed (default: %(default)s); the others are greedy",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the first prompt (default: 0)")
    add(
        "--concurrency",
        type=int,
        default=8,
        metavar="N",
        help="requests under way at a time, beside others (default: %(default)s)",
    )


def _check(args: argparse.Namespace) -> None:
    for name, low in {"max_tokens": 1, "concurrency": 2}.items():
        value = getattr(args, name)
        if value < low:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    for name in ("temperature", "timeout"):
        value = getattr(args, name)
        if not 0 < value < float("inf"):
            raise ValueError(f"--{name} must be above 0, got {value:g}")
    require_url("--url", args.url)
    if args.baseline_url is not None:
        require_url("--baseline-url", args.baseline_url)
    for name in ("json", "card"):
        file = getattr(args, name)
        if file is not None and (name, file) != ("json", "-"):
            require_writable(f"--{name}", file)


def _texts(args: argparse.Namespace) -> list[Text]:
    texts = list(TEXTS)
    if args.prompt_file is not None:
        texts = [Text("yours", prompt) for prompt in read_prompts(args.prompt_file)]
    if args.prompts is not None:
        if not 1 <= args.prompts <= len(texts):
            raise ValueError(f"--prompts must be 1 to {len(texts)}, got {args.prompts}")
        texts = texts[: args.prompts]
    return texts


def _server(args: argparse.Namespace, url: str, model: str) -> Server:
    url = url.rstrip("/").removesuffix("/v1")
    return Server(url, args.api_key, args.timeout, model)


def _compare(
    args: argparse.Namespace, asks: Sequence[Ask], plain: Mode, drafted: Sequence[Mode]
) -> list[Comparison]:
    """Send all requests, first plainly and alone: those answers are the reference."""
    comparisons: list[Comparison] = []
    rounds = 1 + 2 * (1 + len(drafted))
    with progress(rounds * len(asks), is_shown=not args.quiet) as advance:

        def ask(mode: Mode, setting: str) -> list[Answer]:
            def one(ask: Ask) -> Answer:
                answer = mode.server.ask(ask.text, {**ask.fields, **mode.fields})
                advance(f"{mode.name}, {setting}", 1)
                return answer

            return _ask_all(asks, one, args.concurrency if setting == BESIDE else 1)

        expected = ask(plain, ALONE)
        for mode in (plain, *drafted):
            before = mode.server.counters()
            of_mode: list[Answer] = []
            for setting in (ALONE, BESIDE):
                answers = ask(mode, setting)
                of_mode += answers
                comparisons += _comparisons(mode, setting, asks, expected, answers)
            mode.drafts = total(answer.drafts for answer in of_mode)
            after = mode.server.counters()
            if mode.drafts is None and before is not None and after is not None:
                mode.drafts = after.since(before)
    return comparisons


def _ask_all(asks: Sequence[Ask], one: Callable[[Ask], Answer], count: int) -> list[Answer]:
    """Return all answers, with at most `count` requests in flight."""
    pool = ThreadPoolExecutor(count)
    try:
        return list(pool.map(one, asks))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for queued requests


def _comparisons(
    mode: Mode,
    setting: str,
    asks: Sequence[Ask],
    expected: Sequence[Answer],
    answers: Sequence[Answer],
) -> Iterable[Comparison]:
    """Return one comparison for greedy and one for seeded answers."""
    found: dict[str, Comparison] = {}
    for ask, plain, other in zip(asks, expected, answers, strict=True):
        if ask.sampling not in found:
            found[ask.sampling] = Comparison(mode.name, mode.is_drafted, setting, ask.sampling)
        found[ask.sampling].add(ask.text, plain, other)
    return found.values()


def _report(
    args: argparse.Namespace,
    status: str,
    sentence: str,
    comparisons: Sequence[Comparison],
    modes: Sequence[Mode],
) -> None:
    """Print the verdict and write the files that were requested."""
    out = sys.stderr if args.json == "-" else sys.stdout
    print(sentence, file=out)
    notes = cautions(comparisons, modes)
    if not args.quiet:
        lines = difference_lines(comparisons, None if args.verbose else _SHOWN)
        print(*lines, *notes, "", *table(comparisons), sep="\n", file=out)
    if args.json is not None:
        found = _as_json(args, status, sentence, comparisons, modes)
        text = json.dumps({**found, "notes": notes}, indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            write_file("--json", args.json, text)
    if args.card is not None:
        footer = [
            f"{modes[-1].server.model}, up to {args.max_tokens} tokens each; "
            f"{datetime.now(timezone.utc):%Y-%m-%d}",
            *notes,
            "specops verify-exactness --url",
        ]
        write_file("--card", args.card, card(status, sentence, comparisons, footer))


def _as_json(
    args: argparse.Namespace,
    status: str,
    sentence: str,
    comparisons: Sequence[Comparison],
    modes: Sequence[Mode],
) -> Mapping[str, Any]:
    secrets = ("api_key", "json", "card", "quiet", "verbose")
    return {
        "kind": "specops verify-exactness",
        "version": 1,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        "options": {name: value for name, value in vars(args).items() if name not in secrets},
        "status": status,
        "sentence": sentence,
        "modes": [
            {
                "name": mode.name,
                "url": mode.server.url,
                "model": mode.server.model,
                "fields": mode.fields,
                "drafts": None if mode.drafts is None else asdict(mode.drafts),
            }
            for mode in modes
        ],
        "comparisons": [
            {
                # asdict would turn a Counter into a count of (key, count) pairs.
                **asdict(replace(one, failures=Counter(), lacks=Counter())),
                "failures": dict(one.failures),
                "lacks": dict(one.lacks),
                "num_different": len(one.found),
                "counts": one.counts,
                "logprob_gap": one.logprob_gap,
            }
            for one in comparisons
        ],
    }
