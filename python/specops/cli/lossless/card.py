# SPDX-License-Identifier: Apache-2.0
"""The verdict as a picture to share: one SVG that is readable on light and dark pages."""

from collections.abc import Sequence
from html import escape
from textwrap import wrap

from specops.cli.lossless.modes import ALONE, BESIDE, GREEDY, SEEDED
from specops.cli.lossless.verdict import DIFFERS, LOSSLESS, UNKNOWN, Comparison

_WIDTH, _MARGIN, _LINE, _ROW = 640, 24, 20, 22
_ENDS = (340, 430, 526, 616)  # right edges of the columns of numbers
_TITLE, _SENTENCE, _TABLE_GAP = 52, 84, 18
_LETTERS = 90  # maximum characters per line
_BACKGROUND, _BORDER, _TEXT, _FAINT = "#f6f8fa", "#d1d9e0", "#1f2328", "#59636e"
_COLORS = {LOSSLESS: "#1a7f37", DIFFERS: "#cf222e", UNKNOWN: "#9a6700"}
_SIGNS = {LOSSLESS: "✓", DIFFERS: "✗", UNKNOWN: "?"}
_STYLE = f"""  <style>
    text {{ font: 13px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif }}
    text {{ fill: {_TEXT} }}
    .title {{ font-weight: 600; font-size: 26px }}
    .note {{ fill: {_FAINT}; font-size: 11.5px }}
    .end {{ text-anchor: end }}
  </style>"""


def card(
    status: str, sentence: str, comparisons: Sequence[Comparison], footer: Sequence[str]
) -> str:
    """Return the whole SVG.

    Args:
        status: status of the verdict.
        sentence: sentence of the verdict.
        comparisons: up to four comparisons per mode; a mode is a row.
        footer: lines of small print.
    """
    lines = wrap(sentence, _LETTERS)
    body = [
        _text(_MARGIN, _TITLE, f"{_SIGNS[status]} {status}", "title", _COLORS[status]),
        *(_text(_MARGIN, _SENTENCE + _LINE * row, line) for row, line in enumerate(lines)),
    ]
    top = _SENTENCE + _LINE * len(lines) + _TABLE_GAP
    body.append(_text(_MARGIN, top + _ROW, "outputs that differ", "note"))
    for place, settings in ((0, ALONE), (2, BESIDE)):
        body.append(_text(_ENDS[place + 1], top, settings, "note end"))
        for end, sampling in zip(_ENDS[place:], (GREEDY, SEEDED), strict=False):
            body.append(_text(end, top + _ROW, sampling, "note end"))
    rows: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        rows.setdefault(comparison.mode, []).append(comparison)
    for row, (mode, of_mode) in enumerate(rows.items(), start=2):
        body.append(_text(_MARGIN, top + _ROW * row, _short(mode)))
        for comparison in of_mode:
            place = 2 * (comparison.setting == BESIDE) + (comparison.sampling == SEEDED)
            cell = f"{len(comparison.differences)} of {comparison.num_compared}"
            color = ""
            if comparison.differences:
                color = _COLORS[DIFFERS]
            body.append(_text(_ENDS[place], top + _ROW * row, cell, "end", color))
    top += _ROW * (len(rows) + 2) + 4
    small = [line for long in footer for line in wrap(long, _LETTERS + 16)]
    body += [_text(_MARGIN, top + 16 * row, line, "note") for row, line in enumerate(small)]
    height = top + 16 * len(small) + 4
    frame = f'width="{_WIDTH - 1}" height="{height - 1}" rx="6" fill="{_BACKGROUND}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"  <title>{escape(sentence)}</title>",
            _STYLE,
            f'  <rect x="0.5" y="0.5" {frame} stroke="{_BORDER}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _short(text: str) -> str:
    return text if len(text) <= 32 else f"{text[:31]}…"


def _text(x: int, y: int, text: str, style: str = "", color: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    fill = f' style="fill: {color}"' if color else ""
    return f'  <text x="{x}" y="{y}"{kind}{fill}>{escape(text)}</text>'
