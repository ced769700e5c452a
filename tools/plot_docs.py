# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.plot_docs [RESULTS]`: draw the charts of docs/ from a results file.

docs/comparison.svg: three bar charts of specops and its peers: greedy texts that speculation
changes, and tokens per second of plain decoding on two models. docs/cascade.svg: speed-up by
sharing a prefix, by length of the prefix and number of requests. The charts have their own
background, so they look alike on light and dark pages.
"""

import argparse
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specops.cli.bar_charts import Panel, picture

from bench.bench_cascade import GAIN_PREFIX_LENS, GAIN_REQUESTS, OWN_LEN, gain_id
from bench.common import RESULTS, ROOT

SYSTEMS = {
    "specops": "specops",
    "llama_cpp": "llama-cpp-python",
    "openvino": "OpenVINO GenAI",
    "transformers": "transformers",
}
KINDS = ("edits", "completions")


Figures = dict[str, dict[str, float]]  # figures of a results file by id


def comparison(figures: Figures) -> list[Panel]:
    """Return the charts that compare specops with its peers."""

    def tokens_per_s(case: str) -> dict[str, float]:
        """Return the tokens per second of one request, from milliseconds per step."""
        step_ms = {name: figures[f"{case}.vs_{name}"]["peer_value"] for name in list(SYSTEMS)[1:]}
        step_ms["specops"] = figures[f"{case}.floor"]["value"]
        return {shown: 1000 / step_ms[name] for name, shown in SYSTEMS.items()}

    changed = {
        shown: sum(figures[f"lossless.{kind}.{name}"]["value"] for kind in KINDS)
        for name, shown in SYSTEMS.items()
    }
    return [
        Panel(
            "Outputs changed by speculation",
            (
                "of 40 greedy texts of 128 tokens, bundled",
                "model, 4 n-gram drafts. Fewer is better.",
            ),
            changed,
        ),
        Panel(
            "Tokens/s, bundled model",
            ("no speculation, batch 1, bf16,", "KV length 384. More is better."),
            tokens_per_s("bundled.b1.rows1"),
        ),
        Panel(
            "Tokens/s, Qwen3-0.6B shape",
            ("no speculation, batch 1, random weights,", "bf16, KV length 1,024. More is better."),
            tokens_per_s("qwen06.b1.rows1"),
        ),
    ]


def peers(results: dict[str, Any]) -> list[str]:
    """Return the heading of the comparison: machine and versions of the peers."""
    run = results["runs"]["lossless"]["versions"]
    transformers = run["transformers_peer"].partition(",")[0]
    return [
        f"Two threads of an {results['machine']['cpu']}, one request at a time",
        f"{run['llama_cpp_peer']} (its own prompt lookup, flash attention off), "
        f"OpenVINO GenAI {run['openvino_peer']}, transformers {transformers}",
    ]


def cascade(figures: Figures) -> list[Panel]:
    """Return the charts that compare shared prefixes with the same call without sharing."""
    return [
        Panel(
            f"{requests} requests",
            ("append_attention, one row each: times", f"faster by sharing; {OWN_LEN} own tokens."),
            {
                f"{length:,} tokens": figures[gain_id(requests, length)]["ratio"]
                for length in GAIN_PREFIX_LENS
            },
        )
        for requests in GAIN_REQUESTS
    ]


@dataclass(frozen=True)
class Picture:
    """A picture in docs/."""

    name: str
    title: str  # alternative text
    panels: Callable[[Figures], list[Panel]]
    ours: Collection[str]
    heading: Callable[[dict[str, Any]], list[str]] = lambda _: []

    @property
    def path(self) -> Path:
        """Path of the committed picture."""
        return ROOT / "docs" / self.name

    def drawn(self, results: Path) -> str:
        """Return the SVG drawn from a results file.

        Raises:
            KeyError: the file lacks one of the figures.
        """
        return picture(
            self.panels(figures_of(results)),
            self.title,
            highlighted=self.ours,
            heading=self.heading(json.loads(results.read_text())),
        )

    def complete_results(self) -> list[Path]:
        """Return the committed results files that have every figure of the picture."""
        return [path for path in sorted(RESULTS.glob("*.json")) if self._fits(path)]

    def _fits(self, results: Path) -> bool:
        try:
            self.drawn(results)
        except KeyError:
            return False
        return True


COMPARISON = Picture(
    "comparison.svg",
    "specops beside llama-cpp-python, OpenVINO GenAI and transformers",
    comparison,
    {"specops"},
    peers,
)
CASCADE = Picture(
    "cascade.svg",
    "Times faster by a shared prefix of 512, 2,048 and 8,192 tokens, for 4, 16 and 64 requests",
    cascade,
    {f"{length:,} tokens" for length in GAIN_PREFIX_LENS},
)


def figures_of(results: Path) -> Figures:
    """Return the figures of a results file by id."""
    return {figure["id"]: figure for figure in json.loads(results.read_text())["figures"]}


def main() -> None:
    """Draw the pictures, each from the first complete results file if none is named."""
    parser = argparse.ArgumentParser(prog="python -m tools.plot_docs", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path)
    named = parser.parse_args().results
    for one in (COMPARISON, CASCADE):
        results = named or next(iter(one.complete_results()), None)
        if results is None:
            parser.error(f"no file in bench/results has every figure of {one.name}")
        one.path.write_text(one.drawn(results))


if __name__ == "__main__":
    main()
