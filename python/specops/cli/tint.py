# SPDX-License-Identifier: Apache-2.0
"""Terminal colors of drafters' text."""

from typing import TextIO

# Drafter -> the terminal color (of sixteen) that is closest to the web page's.
_COLORS = {"ngram": "bright_blue", "suffix": "yellow", "mtp": "bright_magenta"}
_OTHER = "cyan"


def has_colors(stream: TextIO) -> bool:
    """Return whether text written to `stream` should be colored.

    True on a terminal that supports colors, if rich is installed and NO_COLOR is not set.
    """
    try:
        from rich.console import Console
    except ImportError:  # rich comes with specops[cli]; colors are optional
        return False
    console = Console(file=stream)
    return console.color_system is not None and not console.no_color


def tinted(text: str, drafter: str) -> str:
    """Return the text in the drafter's color. Nothing else changes: no line is wrapped."""
    from rich.color import ColorSystem
    from rich.style import Style

    style = Style(color=_COLORS.get(drafter, _OTHER))
    return style.render(text, color_system=ColorSystem.STANDARD)
