# SPDX-License-Identifier: Apache-2.0
"""`specops plot`: chart of several runs of `specops bench` in one picture."""

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specops.cli import Parser, fail, write_file
from specops.cli.bar_charts import Panel, picture
from specops.cli.results import KIND, VERSION

_TIMES = {
    "first_token_ms": "First token, ms",
    "per_output_token_ms": "Per output token, ms",
    "whole_ms": "Whole answer, ms",
}


def main(arguments: Sequence[str], program: str) -> int:
    """Draw the picture and return the exit code, 2 for an invalid option or file."""
    args = _parser(program).parse_args(arguments)
    try:
        runs = _read_all(args.results)
        figures = {name: run["figures"] for name, run in runs.items()}
        heading = [args.title, *(_facts(name, run) for name, run in runs.items())]
        drawing = picture(_panels(figures), args.title, highlighted=args.highlight, heading=heading)
        unknown = set(args.highlight) - set(runs)
        if unknown:
            raise ValueError(
                f"--highlight must name a run of {', '.join(runs)}, got {', '.join(unknown)}"
            )
        write_file("--out", args.out, drawing)
    except ValueError as error:
        return fail(str(error))
    print(f"{args.out}: {', '.join(runs)}")
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Draw several runs of `specops bench --json FILE` side by side: tokens and "
        "requests per second, accepted drafts, and latencies.",
    )
    add = parser.add_argument
    add("results", nargs="+", metavar="FILE", help="files that `specops bench --json` has written")
    add("--out", default="bench.svg", metavar="FILE", help="(default: %(default)s)")
    add("--highlight", action="append", default=[], metavar="NAME", help="a run to highlight")
    add("--title", default="Runs of specops bench", metavar="TEXT", help="(default: %(default)s)")
    return parser


def _read_all(files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the runs by name.

    Raises:
        ValueError: a file is not a result of `specops bench`, or two runs have the same name.
    """
    runs: dict[str, dict[str, Any]] = {}
    for file in files:
        results = _read(file)
        name = str(results["name"])
        if name in runs:
            raise ValueError(
                f"runs must have different names, got {name} twice; set specops bench --name"
            )
        runs[name] = results
    return runs


def _read(file: str) -> dict[str, Any]:
    try:
        results = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(
            f"{file} must be a file written by specops bench --json: {error}"
        ) from None
    kind = results.get("kind") if isinstance(results, dict) else None
    if kind != KIND:
        raise ValueError(f"{file} must be a file written by specops bench --json, got other JSON")
    if results["version"] != VERSION:
        raise ValueError(
            f"{file} must be results of version {VERSION}, got version {results['version']}"
        )
    return dict(results)


def _facts(name: str, run: dict[str, Any]) -> str:
    """Return a line that describes a run: model, server, machine, load and date."""
    options = run.get("options", {})
    facts = []
    if "model" in run:
        facts.append(f"{run['model']} at {options['url']}" if "url" in options else run["model"])
    if "client" in run:
        facts.append(f"client on {run['client']}")
    if options.get("rate") is not None:
        facts.append(f"{options['rate']:g} requests a second")
    elif options.get("concurrency") is not None:
        facts.append(f"{options['concurrency']} at a time")
    if "requests" in options:
        facts.append(f"{options['requests']} requests of up to {options['max_tokens']} tokens")
    if "started" in run:
        facts.append(datetime.fromisoformat(run["started"]).strftime("%Y-%m-%d %H:%M %Z"))
    return f"{name}: {', '.join(facts)}" if facts else name


def _panels(runs: dict[str, dict[str, Any]]) -> list[Panel]:
    def panel(title: str, note: str, better: str, values: dict[str, float | None]) -> Panel:
        return Panel(title, (note, f"{better} is better."), values)

    accepted = {name: run["acceptance"] for name, run in runs.items()}
    panels = [
        panel(
            "Output tokens a second",
            "of all requests together",
            "More",
            {name: run["output_tokens_per_s"] for name, run in runs.items()},
        ),
        panel(
            "Requests a second",
            "that were answered",
            "More",
            {name: run["requests_per_s"] for name, run in runs.items()},
        ),
        panel(
            "Drafts accepted, %",
            "of those that were verified",
            "More",
            {
                name: acceptance and 100 * acceptance["rate"]
                for name, acceptance in accepted.items()
            },
        ),
    ]
    for percentile, tail, note in (
        ("p50", "p90", "the median; the line ends at p90"),
        ("p99", "max", "p99; the line ends at the slowest"),
    ):
        for field, title in _TIMES.items():
            values, reach = (
                {name: run[field] and run[field].get(acceptance) for name, run in runs.items()}
                for acceptance in (percentile, tail)
            )
            panels.append(Panel(title, (note, "Less is better."), values, reach))
    return panels
