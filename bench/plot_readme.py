# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.plot_readme [RESULTS]` draws docs/comparison.svg from a results file.

Three bar charts of specops beside llama.cpp, OpenVINO and transformers: the greedy texts that
speculation changes, and tokens per second of plain decoding on two models. The card has a
background of its own, so that it reads alike on light and dark pages.
"""

import argparse
import json
from pathlib import Path

from specops.cli.bar_charts import Panel, picture

BENCH = Path(__file__).resolve().parent
PICTURE = BENCH.parent / "docs" / "comparison.svg"

SYSTEMS = {
    "specops": "specops",
    "llama_cpp": "llama.cpp",
    "openvino": "OpenVINO",
    "transformers": "transformers",
}
KINDS = ("edits", "completions")


def panels(results: Path) -> list[Panel]:
    """The three charts of a results file.

    Raises:
        KeyError: the file lacks one of the figures.
    """
    figures = {figure["id"]: figure for figure in json.loads(results.read_text())["figures"]}

    def tokens_per_s(case: str) -> dict[str, float]:
        """Of one request, from milliseconds per step."""
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


def drawn(results: Path) -> str:
    """The whole SVG of a results file."""
    title = "specops beside llama.cpp, OpenVINO and transformers"
    return picture(panels(results), title, ours={"specops"})


def complete_results() -> list[Path]:
    """The committed results files that have every figure of the picture."""
    return [path for path in sorted((BENCH / "results").glob("*.json")) if _is_complete(path)]


def _is_complete(results: Path) -> bool:
    try:
        panels(results)
    except KeyError:
        return False
    return True


def main() -> None:
    """Draws the picture, from the first complete results file if none is named."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot_readme", description=__doc__)
    parser.add_argument("results", nargs="?", type=Path)
    results = parser.parse_args().results or next(iter(complete_results()), None)
    if results is None:
        parser.error("no file in bench/results has every figure of the picture")
    PICTURE.write_text(drawn(results))


if __name__ == "__main__":
    main()
