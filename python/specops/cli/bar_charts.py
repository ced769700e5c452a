# SPDX-License-Identifier: Apache-2.0
"""Bar charts in one SVG that is readable on light and dark pages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

_PANEL_WIDTH, _PANEL_GAP, _MARGIN = 272, 24, 18
_LABEL_WIDTH, _VALUE_WIDTH, _CHARACTER = 94, 44, 7
_HEADING_TOP, _HEADING_STEP, _HEADING_CHARACTER = 30, 18, 6
_FIRST_BAR, _BAR_HEIGHT, _BAR_STEP, _BELOW = 72, 18, 28, 16
_BACKGROUND, _BORDER, _TEXT, _FAINT = "#f6f8fa", "#d1d9e0", "#1f2328", "#59636e"
_HIGHLIGHTED, _OTHERS = "#1a7f37", "#8c959f"
_STYLE = f"""  <style>
    text {{ font: 13px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif }}
    text {{ fill: {_TEXT} }}
    .title {{ font-weight: 600; font-size: 14px }}
    .note {{ fill: {_FAINT}; font-size: 11.5px }}
    .ours {{ font-weight: 600 }}
  </style>"""


@dataclass(frozen=True)
class Panel:
    """One bar chart.

    Attributes:
        title: line above the chart.
        notes: two lines of small print.
        values: value by name; None draws no bar.
        reach: by name, the value at which a thin line behind the bar ends, such as a percentile.
    """

    title: str
    notes: tuple[str, str]
    values: Mapping[str, float | None]
    reach: Mapping[str, float | None] = field(default_factory=dict)


def picture(
    panels: Sequence[Panel],
    title: str,
    *,
    highlighted: Collection[str],
    columns: int = 3,
    heading: Sequence[str] = (),
) -> str:
    """Return the whole SVG.

    Args:
        panels: charts, all with the same names.
        title: text for screen readers.
        highlighted: names to highlight.
        columns: number of charts per row.
        heading: lines above all charts; the first is set as a title.
    """
    names = list(panels[0].values)
    label_width = max(_LABEL_WIDTH, *(_CHARACTER * len(name) + 8 for name in names))
    step = _PANEL_WIDTH - _LABEL_WIDTH + label_width + _PANEL_GAP
    row_height = _FIRST_BAR + _BAR_STEP * len(names) + _BELOW
    width = 2 * _MARGIN + step * min(columns, len(panels)) - _PANEL_GAP
    above = _HEADING_TOP + _HEADING_STEP * (len(heading) - 1) if heading else 0
    height = above + row_height * -(-len(panels) // columns)
    width = max(width, *(2 * _MARGIN + _HEADING_CHARACTER * len(line) for line in ("", *heading)))
    body = [
        _text(_MARGIN, _HEADING_TOP + _HEADING_STEP * row, line, "note" if row else "title")
        for row, line in enumerate(heading)
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        left, top = _MARGIN + column * step, above + row * row_height
        body += _panel(panel, left, top, label_width, highlighted)
    frame = f'width="{width - 1}" height="{height - 1}" rx="6" fill="{_BACKGROUND}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"  <title>{escape(title)}</title>",
            _STYLE,
            f'  <rect x="0.5" y="0.5" {frame} stroke="{_BORDER}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(
    panel: Panel, left: int, above: int, label_width: int, highlighted: Collection[str]
) -> list[str]:
    """Return the SVG lines of a chart with its top left corner at (`left`, `above`)."""
    bar_left = left + label_width
    shown = [*panel.values.values(), *panel.reach.values()]
    largest = max((value for value in shown if value is not None), default=0.0)
    scale = (_PANEL_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / largest if largest else 0.0
    lines = [_text(left, above + 26, panel.title, "title")]
    lines += [
        _text(left, above + 44 + 14 * row, note, "note") for row, note in enumerate(panel.notes)
    ]
    for row, (name, value) in enumerate(panel.values.items()):
        top = above + _FIRST_BAR + _BAR_STEP * row + 4
        style = "ours" if name in highlighted else ""
        lines.append(_text(left, top + 13, name, style))
        if value is None:
            lines.append(_text(bar_left + 8, top + 13, "-", "note"))
            continue
        width = max(value * scale, 2.0)  # keeps a bar of value 0 visible
        size = f'width="{width:.1f}" height="{_BAR_HEIGHT}" rx="2"'
        color = _HIGHLIGHTED if name in highlighted else _OTHERS
        lines.append(f'  <rect x="{bar_left}" y="{top}" {size} fill="{color}"/>')
        reach = panel.reach.get(name)
        if reach is not None and reach * scale > width:
            middle = top + _BAR_HEIGHT // 2
            ends = f'x1="{bar_left + width:.1f}" x2="{bar_left + reach * scale:.1f}"'
            lines.append(f'  <line {ends} y1="{middle}" y2="{middle}" stroke="{color}"/>')
            width = reach * scale
        lines.append(_text(bar_left + width + 6, top + 13, _number(value), style))
    return lines


def _text(x: float, y: float, text: str, style: str) -> str:
    kind = f' class="{style}"' if style else ""
    return f'  <text x="{x:.4g}" y="{y}"{kind}>{escape(text)}</text>'


def _number(value: float) -> str:
    """Format a value: no decimals if it is integral or at least 100, else one decimal."""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"
