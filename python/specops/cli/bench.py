# SPDX-License-Identifier: Apache-2.0
"""`specops bench`: load generator and latency measurement for OpenAI-compatible servers."""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import aiohttp
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from specops._cpu_name import cpu_name
from specops.cli import Parser, fail, finite, json_object, require_url, require_writable, write_file
from specops.cli.load.answers import Answer, ask
from specops.cli.load.arrivals import due_times, keep_busy, send_at
from specops.cli.load.figures import PERCENTILES, figures, request_records
from specops.cli.load.rounds import compare
from specops.cli.load.server import draft_counts, first_model
from specops.cli.prompts import PROMPTS, read_prompts
from specops.cli.results import KIND, VERSION

_LATE_MS = 10.0  # report late sending by the generator only if its p99 exceeds this


def main(arguments: Sequence[str], program: str) -> int:
    """Measure, print, and return the exit code: 1 for a failed request, 2 for an invalid option."""
    args = _parser(program).parse_args(arguments)
    try:
        if args.json is not None:
            require_writable("--json", args.json)
        rounds = asyncio.run(_bench(args))
        results = rounds[0][0] if len(rounds[0]) == 1 else _print_comparison(rounds)
        if len(rounds[0]) == 1:
            _print_table(results)
        if args.json is not None:
            write_file("--json", args.json, json.dumps(results, indent=1) + "\n")
    except (OSError, ValueError) as error:
        return fail(str(error))
    return int(any(run["figures"]["num_failed"] for runs in rounds for run in runs))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Send streaming requests to an OpenAI-compatible server (specops, vLLM or "
        "another) and measure the time to the first token, the time per output "
        "token, and the total time. --json saves the figures, and `specops plot` "
        "draws several such files.",
    )
    add = parser.add_argument
    add(
        "--url",
        default="http://127.0.0.1:8000",
        help="base URL of the server, without /v1 (default: %(default)s)",
    )
    add(
        "--model",
        metavar="NAME",
        help="name of the model (default: the first that the server lists)",
    )
    add(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SPECOPS_API_KEY"),
        help="bearer token (default: the environment variable SPECOPS_API_KEY)",
    )
    _add_load(parser)
    _add_request(parser)
    _add_other(parser)
    add(
        "--timeout",
        type=finite,
        default=300.0,
        metavar="SECONDS",
        help="time without any data after which a request fails (default: %(default)s)",
    )
    add("--name", help="name of this run in plots (default: the model's name)")
    add(
        "--json",
        metavar="FILE",
        help="write the options, the figures and every request to this file",
    )
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--requests",
        type=int,
        default=64,
        metavar="N",
        help="number of measured requests (default: %(default)s)",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="number of requests in flight: each answer triggers the next request (default: 8)",
    )
    load.add_argument(
        "--rate",
        type=finite,
        metavar="R",
        help="requests per second, sent at random times whether or not earlier ones are answered",
    )
    add("--even", action="store_true", help="send the requests of --rate at equal intervals")
    add(
        "--warm-up",
        type=int,
        default=1,
        metavar="N",
        help="number of requests sent one by one before the measurement (default: %(default)s)",
    )


def _add_request(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompt-file",
        metavar="FILE",
        help="prompts: a JSON list of strings, or one prompt per line (default: 20 built-in "
        "prompts). Prompts are repeated if there are fewer than requests, which a prefix "
        "cache makes faster",
    )
    add("--chat", action="store_true", help="send prompts as messages to /v1/chat/completions")
    add(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="maximum number of output tokens per request (default: %(default)s)",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="generate --max-tokens tokens even after an end-of-sequence token (specops, vLLM)",
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
        metavar="P",
        help="nucleus sampling threshold (default: the server's)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the first request and of random sending times; each further request adds 1 "
        "(default: %(default)s)",
    )
    add(
        "--body",
        metavar="JSON",
        help='further fields of every request, such as \'{"speculative_config": {"method": '
        '"naive"}}\'',
    )


def _add_other(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--against",
        metavar="URL",
        help="base URL of a second server that is measured alternately with --url, with the first "
        "model that it lists",
    )
    add(
        "--against-body",
        metavar="JSON",
        help="fields of its requests instead of --body; without --against, both runs use --url",
    )
    add("--against-name", metavar="NAME", help="name of its runs (default: the other)")
    add(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="runs of each of the two servers (default: %(default)s)",
    )


@dataclass(frozen=True)
class _Target:
    """A server to measure.

    Attributes:
        url: base URL without /v1.
        bodies: request bodies without model and seed, one per prompt.
        model: model name; None: the first that the server lists.
        name: name of the server's runs; None: the model's name.
    """

    url: str
    bodies: list[dict[str, Any]]
    model: str | None
    name: str | None


def _targets(args: argparse.Namespace) -> list[_Target]:
    """Return the server to measure, or two servers that are to be measured in turn.

    Raises:
        OSError: a file cannot be read.
        ValueError: an option is out of range, or is not a JSON object.
    """
    _check(args)
    bodies = _bodies(args, "--body", args.body)
    targets = [_Target(_base(args.url), bodies, args.model, args.name)]
    if args.against is None and args.against_body is None:
        return targets
    bodies = _bodies(args, "--against-body", args.against_body)
    url = args.url if args.against is None else args.against
    model = args.model if args.against is None else None
    return [*targets, _Target(_base(url), bodies, model, args.against_name or "the other")]


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


async def _bench(args: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Return the results of every round: one run, or one run of each of the two servers."""
    targets = _targets(args)
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {args.api_key}"} if args.api_key else {},
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=args.timeout, sock_read=args.timeout
        ),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        rounds = []
        for index in range(args.rounds if len(targets) > 1 else 1):
            # Alternate which server goes first, so that drift of the machine affects both equally.
            order = targets[:: -1 if index % 2 else 1]
            runs = [await _measure(args, session, target, is_first=not index) for target in order]
            rounds.append(runs[:: -1 if index % 2 else 1])
    return rounds


async def _measure(
    args: argparse.Namespace, session: aiohttp.ClientSession, target: _Target, *, is_first: bool
) -> dict[str, Any]:
    """Return the results of one run. Warm-up requests precede the first run of a server."""
    url, bodies = target.url, target.bodies
    endpoint = f"{url}/v1/chat/completions" if args.chat else f"{url}/v1/completions"
    model = target.model or await first_model(session, url)

    async def send(index: int, due: float) -> Answer:
        body = {"model": model, **_seed(args, index), **bodies[index % len(bodies)]}
        return await ask(session, endpoint, body, due, time.perf_counter)

    for index in range(args.warm_up if is_first else 0):
        first = await send(index, time.perf_counter())
        if first.error is not None:
            raise ValueError(f"the server refused a request: {first.error}")
    before = await draft_counts(session, url)
    started = datetime.now(timezone.utc)
    answers = await _run(args, send)
    after = await draft_counts(session, url)
    counted = None if before is None or after is None else after.since(before)
    return {
        "kind": KIND,
        "version": VERSION,
        "name": target.name or model,
        "model": model,
        "started": started.isoformat(timespec="seconds"),
        "client": f"{len(os.sched_getaffinity(0))} CPUs of {cpu_name()}",
        "options": {**_options(args), "url": url},
        "figures": figures(answers, counted),
        "requests": request_records(answers),
    }


async def _run(args: argparse.Namespace, send: Callable[[int, float], Any]) -> list[Answer]:
    """Send all requests; show the number of answers as a progress bar."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    clock = time.perf_counter
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=args.requests, speed="")
        begin = clock()
        tokens = failed = 0

        async def counted(index: int, due: float) -> Answer:
            nonlocal tokens, failed
            answer: Answer = await send(index, due)
            tokens += answer.completion_tokens
            failed += answer.error is not None
            speed = f"{tokens / (clock() - begin):,.0f} tokens/s"
            progress.update(task, advance=1, speed=speed + (f", {failed} failed" if failed else ""))
            return answer

        if args.rate is None:
            return await keep_busy(args.requests, args.concurrency or 8, counted, clock)
        times = due_times(args.requests, args.rate, even=args.even, seed=args.seed)
        return await send_at(times, counted, clock, asyncio.sleep)


def _bodies(args: argparse.Namespace, option: str, fields: str | None) -> list[dict[str, Any]]:
    """Return one request body per prompt, with the option's fields, without model and seed."""
    prompts = list(PROMPTS) if args.prompt_file is None else read_prompts(args.prompt_file)
    common: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.top_p is not None:
        common["top_p"] = args.top_p
    if args.ignore_eos:
        common["ignore_eos"] = True
    if fields is not None:
        common |= json_object(option, fields)
    if args.chat:
        return [{"messages": [{"role": "user", "content": p}], **common} for p in prompts]
    return [{"prompt": prompt, **common} for prompt in prompts]


def _check(args: argparse.Namespace) -> None:
    least = {"requests": 1, "concurrency": 1, "max_tokens": 1, "warm_up": 0, "rounds": 1}
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    for name in ("rate", "timeout"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name} must be above 0, got {value:g}")
    require_url("--url", args.url)
    if args.against is not None:
        require_url("--against", args.against)
    if args.even and args.rate is None:
        raise ValueError("--even requires --rate")


def _seed(args: argparse.Namespace, index: int) -> dict[str, int]:
    return {"seed": args.seed + index} if args.temperature > 0 else {}


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the run, without secrets."""
    options = {name: value for name, value in vars(args).items() if name not in ("api_key", "json")}
    if args.rate is None:
        options["concurrency"] = args.concurrency or 8
    return options


def _print_table(results: dict[str, Any]) -> None:
    run = results["figures"]
    console = Console(highlight=False)
    rows = {
        "first token": run["first_token_ms"],
        "per output token": run["per_output_token_ms"],
        "whole": run["whole_ms"],
    }
    for name, times in (run["server_ms"] or {}).items():
        rows[f"server: {name}"] = times
    console.print(_times_table(console, {name: row for name, row in rows.items() if row}))
    console.print(_sentences(run), soft_wrap=True)


def _times_table(console: Console, rows: dict[str, dict[str, float]]) -> Table:
    """Return a table of times, without some percentiles where the console is narrow."""
    names = ["mean", *(f"p{p}" for p in PERCENTILES), "max"]
    for shown in (names, ["mean", "p50", "p99", "max"], ["p50", "p99"], ["p50"]):
        table = Table("milliseconds")
        for name in shown:
            table.add_column(name, justify="right", no_wrap=True)
        for title, times in rows.items():
            of_name = dict(zip(names, times.values(), strict=True))
            table.add_row(title, *(f"{of_name[name]:,.1f}" for name in shown))
        unbounded = console.options.update(max_width=1000)
        if Measurement.get(console, unbounded, table).minimum <= console.width:
            break
    return table


def _print_comparison(rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Print the medians of two servers and their ratios; return both as a JSON object."""
    names = [str(run["name"]) for run in rounds[0]]
    rows = compare([(first["figures"], second["figures"]) for first, second in rounds])
    console = Console(highlight=False)
    table = Table("", *names, "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        cells = [
            f"{spread.middle:,.1f} ({spread.low:,.1f} to {spread.high:,.1f})"
            for spread in row.of_each
        ]
        ratio = row.ratio
        table.add_row(
            row.title, *cells, f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    console.print(table)
    console.print(
        f"{len(rounds)} alternating rounds: medians and quartiles. Ratios are {names[0]} / "
        f"{names[1]} within a round.",
        soft_wrap=True,
    )
    for runs in zip(*rounds, strict=True):
        failed = sum(run["figures"]["num_failed"] for run in runs)
        if failed:
            console.print(f"{failed} requests to {runs[0]['name']} failed")
    return {
        "kind": f"{KIND} comparison",
        "version": VERSION,
        "names": names,
        "figures": {row.title: asdict(row) for row in rows},
        "rounds": rounds,
    }


def _sentences(run: dict[str, Any]) -> str:
    num_successful = run["num_requests"] - run["num_failed"]
    lines = [
        f"{num_successful} requests in {run['seconds']:.2f} s: "
        f"{run['requests_per_s']:,.2f} requests/s, "
        f"{run['output_tokens_per_s']:,.1f} output tokens/s "
        f"({run['completion_tokens']:,} tokens, counted by {run['tokens_are_counted_by']})"
    ]
    accepted = run["acceptance"]
    if accepted is not None:
        length = accepted["mean_length"]
        longer = "" if length is None else f", {length:.2f} tokens a step with drafts"
        lines.append(
            f"{accepted['num_accepted_tokens']:,} of {accepted['num_draft_tokens']:,} drafts "
            f"accepted ({accepted['rate']:.0%}){longer}, by the server's {accepted['source']}"
        )
    lateness = run["sent_late_ms"]
    if lateness is not None and lateness["p99"] > _LATE_MS:
        lines.append(
            f"Requests were sent up to {lateness['max']:,.0f} ms late: this machine is "
            "too slow to send them. The latencies include the delay."
        )
    for message, count in run["failures"].items():
        lines.append(f"{count} failed: {message}")
    return "\n".join(lines)
