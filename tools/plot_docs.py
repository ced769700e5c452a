# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.plot_docs [RESULTS]`: draw the charts of docs/ from a results file.

docs/comparison.svg: three bar charts of specops and its peers: greedy texts that speculation
changes, and tokens per second of plain decoding on two models. docs/cascade.svg: speed-up by
sharing a prefix, by length of the prefix and number of requests. docs/grpo.svg: rewards during
training, by sampler. The charts have their own background, so they look alike on light and dark
pages.
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


Results = dict[str, Any]  # a results file


def figures_of(results: Results) -> dict[str, dict[str, float]]:
    """Return the figures of a results file by id."""
    return {figure["id"]: figure for figure in results["figures"]}


def comparison(results: Results) -> list[Panel]:
    """Return the charts that compare specops with its peers."""
    figures = figures_of(results)

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


def peers(results: Results) -> list[str]:
    """Return the heading of the comparison: machine and versions of the peers."""
    run = results["runs"]["lossless"]["versions"]
    transformers = run["transformers_peer"].partition(",")[0]
    return [
        f"Two threads of an {results['machine']['cpu']}, one request at a time",
        f"{run['llama_cpp_peer']} (its own prompt lookup, flash attention off), "
        f"OpenVINO GenAI {run['openvino_peer']}, transformers {transformers}",
    ]


def cascade(results: Results) -> list[Panel]:
    """Return the charts that compare shared prefixes with the same call without sharing."""
    figures = figures_of(results)
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


def training(results: Results) -> list[Panel]:
    """Return the charts of mean rewards in steps of GRPO, one chart per sampler."""
    names, *rows = results["notes"]["grpo"]["rows"]
    rewards = [name for name in names if name.startswith("reward")]
    return [
        Panel(
            f"Valid Python, %: {reward.partition(', ')[2]} samples",
            ("mean reward of 50 steps of GRPO,", "bundled model. More is better."),
            {f"steps {row[0]}": 100 * float(row[names.index(reward)]) for row in rows},
        )
        for reward in rewards
    ]


@dataclass(frozen=True)
class Picture:
    """A picture in docs/."""

    name: str
    title: str  # alternative text
    panels: Callable[[Results], list[Panel]]
    ours: Collection[str]
    heading: Callable[[Results], list[str]] = lambda _: []

    @property
    def path(self) -> Path:
        """Path of the committed picture."""
        return ROOT / "docs" / self.name

    def drawn(self, path: Path) -> str:
        """Return the SVG drawn from a results file.

        Raises:
            KeyError: the file lacks one of the figures.
        """
        results = json.loads(path.read_text())
        return picture(
            self.panels(results),
            self.title,
            highlighted=self.ours,
            heading=self.heading(results),
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
TRAINING = Picture(
    "grpo.svg",
    "Mean reward in 300 steps of GRPO, with rollouts of specops and of transformers",
    training,
    (),
)
PICTURES = (COMPARISON, CASCADE, TRAINING)


def main() -> None:
    """Draw the pictures, each from the first complete results file if none is named."""
    parser = argparse.ArgumentParser(prog="python -m tools.plot_docs", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path)
    named = parser.parse_args().results
    for one in PICTURES:
        results = named or next(iter(one.complete_results()), None)
        if results is None:
            parser.error(f"no file in bench/results has every figure of {one.name}")
        one.path.write_text(one.drawn(results))


if __name__ == "__main__":
    main()
