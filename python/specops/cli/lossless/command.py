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
from specops.cli.lossless.modes import ALONE, BESIDE, Mode, Request, modes_of, requests_of
from specops.cli.lossless.server import Server
from specops.cli.lossless.show import cautions, difference_lines, table
from specops.cli.lossless.texts import TEXTS, Text
from specops.cli.lossless.verdict import STATUSES, Comparison, total, verdict
from specops.cli.progress import progress
from specops.cli.prompts import read_prompts

_SHOWN = 3  # number of differences printed without --verbose


def main(arguments: Sequence[str], program: str) -> int:
    """Compare, print, and return the exit code: 0 lossless, 1 different, 2 unknown."""
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
        requests = requests_of(
            texts, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
        )
        comparisons = _compare(args, requests, plain, drafted)
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
        description="Send the same requests to an OpenAI-compatible server with and without "
        "speculation, one by one and together, greedy and with seeds, and compare "
        "texts, tokens, logprobs and finish reasons. The exit code is 0 if nothing "
        "differs, 1 if something differs, and 2 if there is no verdict.",
        epilog="Without --url, the command compares an engine on this machine; see "
        "`specops verify-exactness --help`.",
    )
    _add_servers(parser)
    _add_requests(parser)
    add = parser.add_argument
    add(
        "--json",
        metavar="FILE",
        help="write the verdict and all results to this file, or to standard output if it is -",
    )
    add("--card", metavar="FILE.svg", help="draw the verdict as an SVG picture")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--verbose", action="store_true", help="print every difference")
    output.add_argument("--quiet", action="store_true", help="print only the verdict, in one line")
    return parser


def _add_servers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, help="base URL of the server that speculates, without /v1")
    add(
        "--baseline-url",
        metavar="URL",
        help="base URL of a server that runs the same model without speculation (default: --url, "
        "if its requests can turn speculation off: a specops server, or one that supports "
        "the fields of --plain-body)",
    )
    add(
        "--model",
        default="",
        metavar="NAME",
        help="name of the model (default: the first that the server lists)",
    )
    add(
        "--baseline-model",
        default="",
        metavar="NAME",
        help="name of the baseline's model (default: the first that it lists)",
    )
    add(
        "--plain-body",
        metavar="JSON",
        help="fields of requests without speculation, such as '{\"speculative.n_max\": 0}' for "
        "llama-server",
    )
    add(
        "--drafted-body",
        metavar="JSON",
        action="append",
        help="fields of requests with speculation; may be repeated (default: none; on a specops "
        "server, one set of fields per method)",
    )
    add(
        "--trust-speculation",
        action="store_true",
        help="assume that the server speculates even if it reports no drafts",
    )
    add(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SPECOPS_API_KEY"),
        help="bearer token (default: the environment variable SPECOPS_API_KEY)",
    )
    add(
        "--timeout",
        type=finite,
        default=600.0,
        metavar="SECONDS",
        help="time without any data after which a request fails (default: %(default)g)",
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=int, metavar="N", help="use the first N prompts (default: all)")
    add(
        "--prompt-file",
        metavar="FILE",
        help=f"prompts: a JSON list of strings, or one prompt per line (default: {len(TEXTS)} "
        "built-in prompts: prose, code, chats, and copies of code)",
    )
    add(
        "--max-tokens",
        type=int,
        default=128,
        metavar="M",
        help="maximum number of output tokens per request (default: %(default)s)",
    )
    add(
        "--temperature",
        type=finite,
        default=0.8,
        metavar="T",
        help="sampling temperature of requests with a seed, which are sent beside greedy ones; 0: "
        "send greedy ones only (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the first prompt; each further prompt adds 1 (default: 0)",
    )
    add(
        "--concurrency",
        type=int,
        default=8,
        metavar="N",
        help="number of requests in flight when requests are sent together (default: %(default)s)",
    )


def _check(args: argparse.Namespace) -> None:
    for name, low in {"max_tokens": 1, "concurrency": 2}.items():
        value = getattr(args, name)
        if value < low:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    if args.temperature < 0:
        raise ValueError(f"--temperature must be at least 0, got {args.temperature:g}")
    if args.timeout <= 0:
        raise ValueError(f"--timeout must be above 0, got {args.timeout:g}")
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
    args: argparse.Namespace, requests: Sequence[Request], plain: Mode, drafted: Sequence[Mode]
) -> list[Comparison]:
    """Send all requests in every mode. The reference is plain decoding, one request at a time."""
    comparisons: list[Comparison] = []
    rounds = 1 + 2 * (1 + len(drafted))
    with progress(rounds * len(requests), is_shown=not args.quiet) as advance:

        def answers_of(mode: Mode, setting: str) -> list[Answer]:
            def answer_of(request: Request) -> Answer:
                answer = mode.server.send(request.text, {**request.fields, **mode.fields})
                advance(f"{mode.name}, {setting}", 1)
                return answer

            return _send_all(requests, answer_of, args.concurrency if setting == BESIDE else 1)

        expected = answers_of(plain, ALONE)
        for mode in (plain, *drafted):
            before = mode.server.counters()
            of_mode: list[Answer] = []
            for setting in (ALONE, BESIDE):
                answers = answers_of(mode, setting)
                of_mode += answers
                comparisons += _comparisons(mode, setting, requests, expected, answers)
            mode.drafts = total(answer.drafts for answer in of_mode)
            after = mode.server.counters()
            if mode.drafts is None and before is not None and after is not None:
                mode.drafts = after.since(before)
    return comparisons


def _send_all(
    requests: Sequence[Request], send: Callable[[Request], Answer], count: int
) -> list[Answer]:
    """Return all answers, with at most `count` requests in flight."""
    pool = ThreadPoolExecutor(count)
    try:
        return list(pool.map(send, requests))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for queued requests


def _comparisons(
    mode: Mode,
    setting: str,
    requests: Sequence[Request],
    expected: Sequence[Answer],
    answers: Sequence[Answer],
) -> Iterable[Comparison]:
    """Yield one comparison of the greedy answers and one of the seeded answers."""
    by_sampling: dict[str, Comparison] = {}
    for request, plain, other in zip(requests, expected, answers, strict=True):
        if request.sampling not in by_sampling:
            by_sampling[request.sampling] = Comparison(
                mode.name, mode.is_drafted, setting, request.sampling
            )
        by_sampling[request.sampling].add(request.text, plain, other)
    return by_sampling.values()


def _report(
    args: argparse.Namespace,
    status: str,
    sentence: str,
    comparisons: Sequence[Comparison],
    modes: Sequence[Mode],
) -> None:
    """Write the files that were requested, then print the verdict: a reader may close the pipe."""
    out = sys.stderr if args.json == "-" else sys.stdout
    notes = cautions(comparisons, modes)
    if args.json is not None:
        results = _as_json(args, status, sentence, comparisons, modes)
        text = json.dumps({**results, "notes": notes}, indent=1) + "\n"
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
    print(sentence, file=out)
    if not args.quiet:
        lines = difference_lines(comparisons, None if args.verbose else _SHOWN)
        print(*lines, *notes, "", *table(comparisons), sep="\n", file=out)


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
                **asdict(replace(comparison, failures=Counter(), missing=Counter())),
                "failures": dict(comparison.failures),
                "missing": dict(comparison.missing),
                "num_different": len(comparison.differences),
                "counts": comparison.counts,
                "logprob_gap": comparison.logprob_gap,
            }
            for comparison in comparisons
        ],
    }
