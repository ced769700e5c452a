# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.plot_readme [RESULTS]` draws docs/comparison.svg from a results file.

Three bar charts of specops beside llama.cpp, OpenVINO and transformers: the greedy texts that
speculation changes, and tokens per second of plain decoding on two models. The card has a
background of its own, so that it reads alike on light and dark pages.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent
PICTURE = BENCH.parent / "docs" / "comparison.svg"

SYSTEMS = {
    "specops": "specops",
    "llama_cpp": "llama.cpp",
    "openvino": "OpenVINO",
    "transformers": "transformers",
}
KINDS = ("edits", "completions")
WIDTH, HEIGHT = 900, 200
PANEL_WIDTH, PANEL_GAP, MARGIN = 272, 24, 18
LABEL_WIDTH, VALUE_WIDTH = 94, 44
FIRST_BAR, BAR_HEIGHT, BAR_STEP = 72, 18, 28
BACKGROUND, BORDER, TEXT, FAINT = "#f6f8fa", "#d1d9e0", "#1f2328", "#59636e"
OURS, THEIRS = "#1a7f37", "#8c959f"
STYLE = f"""  <style>
    text {{ font: 13px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif }}
    text {{ fill: {TEXT} }}
    .title {{ font-weight: 600; font-size: 14px }}
    .note {{ fill: {FAINT}; font-size: 11.5px }}
    .ours {{ font-weight: 600 }}
  </style>"""


@dataclass(frozen=True)
class Panel:
    """One bar chart: a title, two lines of small print, a value per system."""

    title: str
    notes: tuple[str, str]
    values: Mapping[str, float]


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
        return {name: 1000 / step_ms[name] for name in SYSTEMS}

    changed = {
        name: sum(figures[f"lossless.{kind}.{name}"]["value"] for kind in KINDS) for name in SYSTEMS
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


def picture(results: Path) -> str:
    """The whole SVG of a results file."""
    body = [
        line
        for index, panel in enumerate(panels(results))
        for line in _panel(panel, MARGIN + index * (PANEL_WIDTH + PANEL_GAP))
    ]
    frame = f'width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6" fill="{BACKGROUND}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "  <title>specops beside llama.cpp, OpenVINO and transformers</title>",
            STYLE,
            f'  <rect x="0.5" y="0.5" {frame} stroke="{BORDER}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(panel: Panel, left: int) -> list[str]:
    """The chart's lines, its left edge at `left`."""
    bar_left = left + LABEL_WIDTH
    scale = (PANEL_WIDTH - LABEL_WIDTH - VALUE_WIDTH) / max(panel.values.values())
    lines = [_text(left, 26, panel.title, "title")]
    lines += [_text(left, 44 + 14 * row, note, "note") for row, note in enumerate(panel.notes)]
    for row, (name, value) in enumerate(panel.values.items()):
        top = FIRST_BAR + BAR_STEP * row + 4
        ours = name == "specops"
        width = max(value * scale, 2.0)  # a bar of nothing is still seen
        size = f'width="{width:.1f}" height="{BAR_HEIGHT}" rx="2"'
        lines += [
            _text(left, top + 13, SYSTEMS[name], "ours" if ours else ""),
            f'  <rect x="{bar_left}" y="{top}" {size} fill="{OURS if ours else THEIRS}"/>',
            _text(bar_left + width + 6, top + 13, _number(value), "ours" if ours else ""),
        ]
    return lines


def _text(x: float, y: float, text: str, style: str) -> str:
    kind = f' class="{style}"' if style else ""
    return f'  <text x="{x:.4g}" y="{y}"{kind}>{text}</text>'


def _number(value: float) -> str:
    """Whole where it is exact or large, else with one decimal."""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"


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
    PICTURE.write_text(picture(results))


if __name__ == "__main__":
    main()
