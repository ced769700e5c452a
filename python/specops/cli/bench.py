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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from specops._cpu_name import cpu_name
from specops.cli import Parser, fail, finite, json_object, require_url, require_writable, write_file
from specops.cli.load.answers import Answer, ask
from specops.cli.load.arrivals import due_times, keep_busy, send_at
from specops.cli.load.figures import PERCENTILES, figures, request_records
from specops.cli.load.server import draft_counts, first_model
from specops.cli.load.turns import compare
from specops.cli.prompts import PROMPTS, read_prompts
from specops.cli.results import KIND, VERSION

_LATE_MS = 10.0  # report the generator's own lateness only if p99 exceeds this


def main(arguments: Sequence[str], program: str) -> int:
    """Measure, print, and return the exit code: 1 if a request failed, 2 for an invalid option."""
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
        description="Sends streaming requests to an OpenAI-compatible server (specops', vLLM's, "
        "any other) and measures how long it takes to the first token, from token to token, and "
        "as a whole. --json keeps the figures, and `specops plot` draws several of them.",
    )
    add = parser.add_argument
    add(
        "--url",
        default="http://127.0.0.1:8000",
        help="of the server, without /v1 (default: %(default)s)",
    )
    add("--model", metavar="NAME", help="(default: the first that the server lists)")
    add(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SPECOPS_API_KEY"),
        help="bearer token (default: SPECOPS_API_KEY of the environment)",
    )
    _add_load(parser)
    _add_request(parser)
    _add_other(parser)
    add("--timeout", type=finite, default=300.0, metavar="SECONDS", help="(default: %(default)s)")
    add("--name", help="of this run in plots (default: the model's)")
    add("--json", metavar="FILE", help="write options, figures and every request there")
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=int, default=64, metavar="N", help="in all (default: %(default)s)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="requests under way at a time: the next is sent when one is answered (default: 8)",
    )
    load.add_argument(
        "--rate",
        type=finite,
        metavar="R",
        help="requests a second, sent whether or not others are answered, at random times",
    )
    add("--even", action="store_true", help="with --rate: the same time between any two")
    add(
        "--warm-up",
        type=int,
        default=1,
        metavar="N",
        help="requests before those that count, one by one (default: %(default)s)",
    )


def _add_request(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompt-file",
        metavar="FILE",
        help="prompts: a JSON list of texts, or a text per line (default: 20 built in). Each is "
        "used again when all were; a server that caches prompts then has an easier time",
    )
    add("--chat", action="store_true", help="send prompts as messages, to /v1/chat/completions")
    add("--max-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    add("--ignore-eos", action="store_true", help="continue to --max-tokens (specops, vLLM)")
    add("--temperature", type=finite, default=0.0, metavar="T", help="(default: 0, greedy)")
    add("--top-p", type=finite, metavar="P", help="(default: the server's)")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the first request and of random times; the next request has the next "
        "(default: %(default)s)",
    )
    add(
        "--body",
        metavar="JSON",
        help="further fields of every request, such as "
        '\'{"speculative_config": {"method": "naive"}}\'',
    )


def _add_other(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--against",
        metavar="URL",
        help="measure this server, too, in turn with --url, with the first model that it lists",
    )
    add(
        "--against-body",
        metavar="JSON",
        help="fields of its requests in place of --body; without --against, of the same server",
    )
    add("--against-name", metavar="NAME", help="of its runs (default: the other)")
    add(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="runs of each of the two (default: %(default)s)",
    )


@dataclass(frozen=True)
class _Target:
    """A server to measure.

    Attributes:
        url: base URL without /v1.
        bodies: request bodies without model and seed, one per prompt.
        model: model name; None: the first that the server lists.
        name: name of its runs; None: the model's name.
    """

    url: str
    bodies: list[dict[str, Any]]
    model: str | None
    name: str | None


def _targets(args: argparse.Namespace) -> list[_Target]:
    """Return the server to measure, or the two servers that are measured in turn.

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
    url, model = (args.url, args.model) if args.against is None else (args.against, None)
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
            # The servers alternate in going first, so that drift does not always hit the same one.
            order = targets[:: -1 if index % 2 else 1]
            runs = [await _measure(args, session, one, is_first=not index) for one in order]
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
    """Send all requests, with a progress bar of the answered ones."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    clock = time.perf_counter
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=args.requests, speed="")
        begin, tokens, failed = clock(), 0, 0

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
    """Return request bodies without model and seed, one per prompt, with the option's fields."""
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
        raise ValueError("--even needs --rate: it says when requests are sent at a rate")


def _seed(args: argparse.Namespace, index: int) -> dict[str, int]:
    return {"seed": args.seed + index} if args.temperature > 0 else {}


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the run, without secrets."""
    own = {name: value for name, value in vars(args).items() if name not in ("api_key", "json")}
    if args.rate is None:
        own["concurrency"] = args.concurrency or 8
    return own


def _print_table(results: dict[str, Any]) -> None:
    found, console = results["figures"], Console(highlight=False)
    table = Table("milliseconds", "mean", *(f"p{p}" for p in PERCENTILES), "max")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {
        "first token": found["first_token_ms"],
        "per output token": found["per_output_token_ms"],
        "whole": found["whole_ms"],
    }
    for name, times in (found["server_ms"] or {}).items():
        rows[f"server: {name}"] = times
    for name, times in rows.items():
        if times is not None:
            table.add_row(name, *(f"{value:,.1f}" for value in times.values()))
    console.print(table)
    console.print(_sentences(found), soft_wrap=True)


def _print_comparison(rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Print the medians of two servers and their ratios; return all of it as JSON."""
    names = [str(run["name"]) for run in rounds[0]]
    rows = compare([(first["figures"], second["figures"]) for first, second in rounds])
    console = Console(highlight=False)
    table = Table("", *names, "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        cells = [f"{one.middle:,.1f} ({one.low:,.1f} to {one.high:,.1f})" for one in row.of_each]
        ratio = row.ratio
        table.add_row(
            row.title, *cells, f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    console.print(table)
    console.print(
        f"Rounds in turn: {len(rounds)}. Medians, and the middle half of the rounds; ratios are "
        f"{names[0]} / {names[1]}, each of one round.",
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


def _sentences(found: dict[str, Any]) -> str:
    good = found["num_requests"] - found["num_failed"]
    lines = [
        f"{good} requests in {found['seconds']:.2f} s: {found['requests_per_s']:,.2f} requests/s, "
        f"{found['output_tokens_per_s']:,.1f} output tokens/s "
        f"({found['completion_tokens']:,} tokens, counted by {found['tokens_are_counted_by']})"
    ]
    accepted = found["acceptance"]
    if accepted is not None:
        length = accepted["mean_length"]
        longer = "" if length is None else f", {length:.2f} tokens a step with drafts"
        lines.append(
            f"{accepted['num_accepted_tokens']:,} of {accepted['num_draft_tokens']:,} drafts "
            f"accepted ({accepted['rate']:.0%}){longer}, by the server's {accepted['source']}"
        )
    late = found["sent_late_ms"]
    if late is not None and late["p99"] > _LATE_MS:
        lines.append(
            f"Requests were sent up to {late['max']:,.0f} ms late: this machine is too slow to be "
            "client here, and the latencies contain that."
        )
    for message, count in found["failures"].items():
        lines.append(f"{count} failed: {message}")
    return "\n".join(lines)
