# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/how_exact.md: `python -m tools.pictures`.

This script computes the numbers in them: it rounds sums to float32 as a kernel does and draws
uniforms with the engine's generator. Each picture has its own background, so that it looks the same
on light and dark pages, and is narrow enough to be readable on a phone.
"""

import struct
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from specops.reference.distribution import TARGET, philox_uniform

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, MARGIN = 560, 18
BOX_HEIGHT, GAP = 30, 6
BACKGROUND, BORDER, FAINT = "#f6f8fa", "#d1d9e0", "#59636e"
STYLE = f"""  <style>
    text {{ font: 15px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif }}
    text {{ fill: #1f2328 }}
    .title {{ font-weight: 600; font-size: 16px }}
    .note {{ fill: {FAINT}; font-size: 14px }}
    .in {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 14px }}
    .in {{ text-anchor: middle }}
    .same {{ fill: #116329; font-weight: 600 }}
    .other {{ fill: #a40e26; font-weight: 600 }}
    .text {{ fill: #ffffff; stroke: #8c959f }}
    .good {{ fill: #dafbe1; stroke: #1a7f37 }}
    .wrong {{ fill: #ffebe9; stroke: #cf222e }}
    .rule {{ stroke: {BORDER} }}
  </style>"""

TERMS = (3.1, 6.3, 3.3, 1.7, 2.9, -2.6)
LEAF, CONTEXT = 64, 256  # tokens
SEED, FIRST = 7, 10  # seed of the request whose uniforms are drawn, and its first position


def words(x: float, y: float, text: str, kind: str = "") -> str:
    """Return a line of text that begins at `x`."""
    name = f' class="{kind}"' if kind else ""
    return f'  <text x="{x:g}" y="{y:g}"{name}>{escape(text)}</text>'


def box(x: float, y: float, width: float, text: str, kind: str = "text") -> str:
    """Return a box with centered text."""
    size = f'width="{width:g}" height="{BOX_HEIGHT}" rx="4"'
    inside = f'<text x="{x + width / 2:g}" y="{y + 20:g}" class="in">{escape(text)}</text>'
    return f'  <rect x="{x:g}" y="{y:g}" {size} class="{kind}"/>{inside}'


def boxes(x: float, y: float, cells: Sequence[tuple[str, str, float]]) -> list[str]:
    """Return boxes side by side from (text, kind, width) cells; no box for cells without a kind."""
    drawn = []
    for text, kind, width in cells:
        if kind:
            drawn.append(box(x, y, width, text, kind))
        x += width + GAP
    return drawn


def rule(y: float) -> str:
    """Return a horizontal line across the picture."""
    return f'  <path d="M{MARGIN} {y:g}H{WIDTH - MARGIN}" class="rule"/>'


def picture(title: str, height: int, body: Sequence[str]) -> str:
    """Return the complete SVG."""
    frame = f'width="{WIDTH - 1}" height="{height - 1}" rx="6" fill="{BACKGROUND}"'
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"  <title>{escape(title)}</title>",
            STYLE,
            f'  <rect x="0.5" y="0.5" {frame} stroke="{BORDER}"/>',
            *body,
            "</svg>\n",
        ]
    )


def step() -> str:
    """Draw three passes of plain decoding beside one pass that verifies four drafts."""
    left, width = 150, 76
    chosen = ["range", "(", "10"]
    drafts = ["range", "(", "n", ")"]
    agreed = [draft == token for draft, token in zip(drafts, chosen, strict=False)]
    accepted = agreed.index(False)
    plain = [(token, "text", float(width)) for token in chosen]
    drafted = [
        (draft, "good" if place < accepted else "wrong", float(width))
        for place, draft in enumerate(drafts)
    ]
    emitted = [
        (token, "good" if place < accepted else "text", float(width))
        for place, token in enumerate(chosen)
    ]
    body = [
        words(MARGIN, 30, "Plain decoding: one pass of the model for each token", "title"),
        words(MARGIN, 66, "for i in"),
        *boxes(left, 46, plain),
        *[words(left + i * (width + GAP) + 14, 94, f"pass {i + 1}", "note") for i in range(3)],
        rule(112),
        words(MARGIN, 140, "Speculation: one pass verifies all drafts", "title"),
        words(MARGIN, 176, "drafts (cheap)"),
        *boxes(left, 156, drafted),
        words(MARGIN, 216, "model, one pass"),
        *boxes(left, 196, emitted),
        words(
            MARGIN,
            254,
            f"{accepted} drafts equal the choice of the model. The first one that differs is",
            "note",
        ),
        words(
            MARGIN,
            273,
            f"replaced, and the rest is dropped: {len(chosen)} tokens in one pass.",
            "note",
        ),
    ]
    return picture(
        "Plain decoding takes three passes for three tokens; one pass that verifies four drafts "
        "accepts two of them and adds the model's own token",
        292,
        body,
    )


def float32(x: float) -> float:
    """Return the nearest float32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def added(terms: Sequence[float]) -> float:
    """Return the sum of `terms` from left to right, rounded to float32 after each addition."""
    total = 0.0
    for term in terms:
        total = float32(total + float32(term))
    return total


def sums() -> str:
    """Draw a logit that is summed in two orders, and the argmax that results from each."""
    half = len(TERMS) // 2
    in_order = added(TERMS)
    in_halves = float32(added(TERMS[:half]) + added(TERMS[half:]))
    rival = float32((in_order + in_halves) / 2)
    assert min(in_order, in_halves) < rival < max(in_order, in_halves)
    width = 64.0

    def line(y: float, rows: str, how: str, logit: float) -> list[str]:
        winner = "“order”" if logit > rival else "“case”"
        return [
            words(MARGIN, y, rows),
            words(MARGIN, y + 20, how, "note"),
            words(282, y, f"{logit:.7f}", "in"),
            words(348, y, f"so {winner} is chosen", "same" if logit < rival else "other"),
        ]

    body = [
        words(MARGIN, 30, "A logit is a sum, and every addition rounds", "title"),
        *boxes(MARGIN, 44, [(f"{term:g}", "text", width) for term in TERMS]),
        words(MARGIN, 98, f"This is “order”. Nearly tied with it, “case” has {rival:.7f}.", "note"),
        rule(114),
        words(MARGIN, 140, "Usual kernels: chosen by the number of rows", "title"),
        *line(168, "1 row (plain)", "from left to right", in_order),
        *line(216, "5 rows (verifying)", "two halves, then their sum", in_halves),
        rule(254),
        words(MARGIN, 280, "specops: one order, for any number of rows", "title"),
        *line(308, "1 row (plain)", "from left to right", in_order),
        *line(356, "5 rows (verifying)", "from left to right", in_order),
    ]
    return picture(
        "Six numbers added in two orders differ in their last bits, and another token is chosen; "
        "specops adds in one order",
        394,
        body,
    )


def leaves() -> str:
    """Draw where attention splits a context: with one query row, and with five."""
    scale = (WIDTH - 2 * MARGIN) / CONTEXT

    def cut(y: float, sizes: Sequence[int], kind: str) -> list[str]:
        drawn, begin = [], 0
        for size in sizes:
            x = MARGIN + begin * scale
            drawn.append(box(x, y, size * scale - 2, f"{begin} - {begin + size - 1}", kind))
            begin += size
        assert begin == CONTEXT
        return drawn

    fixed = [LEAF] * (CONTEXT // LEAF)
    body = [
        words(MARGIN, 30, f"Attention over {CONTEXT} tokens is computed in parts", "title"),
        words(MARGIN, 52, "Each part is summed on its own. Then the parts are combined.", "note"),
        rule(68),
        words(MARGIN, 94, "Usual kernels: as many parts as the processor has room for", "title"),
        words(MARGIN, 118, "1 row: five parts", "note"),
        *cut(126, [52, 52, 52, 52, 48], "wrong"),
        words(MARGIN, 180, "5 rows: three parts, so other sums", "note"),
        *cut(188, [96, 96, 64], "wrong"),
        rule(234),
        words(
            MARGIN,
            260,
            f"specops: every {LEAF} tokens, counted from the beginning of the text",
            "title",
        ),
        words(MARGIN, 284, "1 row", "note"),
        *cut(292, fixed, "good"),
        words(MARGIN, 346, "5 rows, or beside other requests", "note"),
        *cut(354, fixed, "good"),
    ]
    return picture(
        "Usual kernels cut the context into parts by the number of rows; specops cuts it at fixed "
        "positions",
        402,
        body,
    )


def uniforms() -> str:
    """Draw random numbers by position: from a sequential generator, and keyed by position."""
    places = range(FIRST, FIRST + 5)
    width, left = 72.0, 150
    keyed = [f"{philox_uniform(SEED, place, TARGET):.3f}" for place in places]
    drawn = [
        f"{philox_uniform(SEED, place, TARGET):.3f}" for place in range(FIRST + 40, FIRST + 48)
    ]
    # Two drafts after the second token were rejected, which used up two numbers of the stream.
    speculated = [*drawn[:2], *drawn[4:7]]

    def line(y: float, name: str, values: Sequence[str], expected: Sequence[str]) -> list[str]:
        kinds = [
            "good" if one == other else "wrong" for one, other in zip(values, expected, strict=True)
        ]
        cells = [(value, kind, width) for value, kind in zip(values, kinds, strict=True)]
        return [words(MARGIN, y + 20, name), *boxes(left, y, cells)]

    body = [
        words(MARGIN, 30, "A sampled token is decided by a random number", "title"),
        words(MARGIN, 58, "position", "note"),
        *[words(left + i * (width + GAP) + 27, 58, str(p), "note") for i, p in enumerate(places)],
        rule(70),
        words(MARGIN, 96, "A usual generator: the next number of its stream", "title"),
        *line(108, "plain", drawn[:5], drawn[:5]),
        *line(144, "with drafts", speculated, drawn[:5]),
        words(
            MARGIN,
            196,
            "Two rejected drafts have used two numbers: all later tokens differ.",
            "note",
        ),
        rule(212),
        words(MARGIN, 238, "specops: made of the seed and the position", "title"),
        *line(250, "plain", keyed, keyed),
        *line(286, "with drafts", keyed, keyed),
    ]
    return picture(
        "From a stream, rejected drafts use up random numbers and later tokens get others; in "
        "specops a position always has its own number",
        334,
        body,
    )


PICTURES: dict[str, Callable[[], str]] = {
    "exact-step.svg": step,
    "exact-sums.svg": sums,
    "exact-leaves.svg": leaves,
    "exact-uniforms.svg": uniforms,
}


def main() -> None:
    """Write the pictures into docs/."""
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
