# SPDX-License-Identifier: Apache-2.0
"""`specops plot`: runs of `specops bench` side by side, as one picture."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specops.cli import fail, write_file
from specops.cli.bar_charts import Panel, picture
from specops.cli.results import KIND, VERSION

_TIMES = {
    "first_token_ms": "First token, ms",
    "per_output_token_ms": "Per output token, ms",
    "whole_ms": "Whole answer, ms",
}


def main(arguments: Sequence[str], program: str) -> int:
    """Draws; returns the exit code, 2 for a mistake."""
    args = _parser(program).parse_args(arguments)
    try:
        runs = _read_all(args.results)
        drawing = picture(_panels(runs), "Runs of specops bench", ours=args.highlight)
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
    parser = argparse.ArgumentParser(
        prog=program,
        description="Draws runs of `specops bench --json FILE` side by side: tokens and requests "
        "a second, accepted drafts, and latencies.",
    )
    add = parser.add_argument
    add("results", nargs="+", metavar="FILE", help="results of specops bench")
    add("--out", default="bench.svg", metavar="FILE", help="(default: %(default)s)")
    add("--highlight", action="append", default=[], metavar="NAME", help="a run that stands out")
    return parser


def _read_all(files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The runs' figures by name.

    Raises:
        ValueError: a file is none of these results, or two runs have one name.
    """
    runs: dict[str, dict[str, Any]] = {}
    for file in files:
        results = _read(file)
        name = str(results["name"])
        if name in runs:
            raise ValueError(
                f"runs must have different names, got {name} twice (specops bench --name)"
            )
        runs[name] = results["figures"]
    return runs


def _read(file: str) -> dict[str, Any]:
    try:
        results = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} must be results of specops bench: {error}") from None
    kind = results.get("kind") if isinstance(results, dict) else None
    if kind != KIND:
        raise ValueError(f"{file} must be results of specops bench, got another file")
    if results["version"] != VERSION:
        raise ValueError(
            f"{file} must be results of version {VERSION}, got version {results['version']}"
        )
    return dict(results)


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
            {name: one and 100 * one["rate"] for name, one in accepted.items()},
        ),
    ]
    for percentile, note in (("p50", "the median"), ("p99", "99 of 100 were faster")):
        for field, title in _TIMES.items():
            values = {name: run[field] and run[field][percentile] for name, run in runs.items()}
            panels.append(panel(title, note, "Less", values))
    return panels
