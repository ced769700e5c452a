# SPDX-License-Identifier: Apache-2.0
"""The verdict as a picture to share: one SVG that reads alike on light and dark pages."""

from collections.abc import Sequence
from html import escape
from textwrap import wrap

from specops.cli.lossless.verdict import DIFFERS, LOSSLESS, UNKNOWN, Comparison

_WIDTH, _MARGIN, _LINE, _ROW = 640, 24, 20, 22
_COLUMNS = (24, 300, 430, 616)  # where cells begin; the last ends there
_TITLE, _SENTENCE, _TABLE_GAP = 52, 84, 16
_LETTERS = 84  # of a line
_BACKGROUND, _BORDER, _TEXT, _FAINT = "#f6f8fa", "#d1d9e0", "#1f2328", "#59636e"
_COLOURS = {LOSSLESS: "#1a7f37", DIFFERS: "#cf222e", UNKNOWN: "#9a6700"}
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
    """The whole SVG.

    Args:
        status: of the verdict.
        sentence: of it.
        comparisons: a row each.
        footer: small print below, a line each.
    """
    lines = wrap(sentence, _LETTERS)
    body = [
        _text(_MARGIN, _TITLE, f"{_SIGNS[status]} {status}", "title", _COLOURS[status]),
        *(_text(_MARGIN, _SENTENCE + _LINE * row, line) for row, line in enumerate(lines)),
    ]
    top = _SENTENCE + _LINE * len(lines) + _TABLE_GAP
    body += _row(top, ("against plain decoding, alone", "", "", "outputs that differ"), "note")
    for row, one in enumerate(comparisons, start=1):
        cells = (one.mode, one.setting, one.sampling, f"{len(one.found)} of {one.num_compared}")
        body += _row(top + _ROW * row, cells, "", _COLOURS[DIFFERS] if one.found else "")
    top += _ROW * (len(comparisons) + 1) + 4
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


def _row(top: int, cells: Sequence[str], style: str, colour: str = "") -> list[str]:
    styles = [style] * (len(cells) - 1) + [f"{style} end".strip()]
    return [
        _text(left, top, _short(cell), kind, colour)
        for left, cell, kind in zip(_COLUMNS, cells, styles, strict=True)
        if cell
    ]


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _text(x: int, y: int, text: str, style: str = "", colour: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    fill = f' style="fill: {colour}"' if colour else ""
    return f'  <text x="{x}" y="{y}"{kind}{fill}>{escape(text)}</text>'
