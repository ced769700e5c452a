# SPDX-License-Identifier: Apache-2.0
"""Colours text by its drafter on a terminal, and leaves it unchanged elsewhere."""

from typing import TextIO

# The page's, as far as sixteen colours have them.
_COLOURS = {"ngram": "bright_blue", "suffix": "yellow", "mtp": "bright_magenta"}
_OTHER = "cyan"


def has_colours(stream: TextIO) -> bool:
    """Whether text written there should be coloured.

    It is on a terminal that has colours, where rich is installed and NO_COLOR is not set.
    """
    try:
        from rich.console import Console
    except ImportError:  # it comes with specops[cli], and texts can do without
        return False
    console = Console(file=stream)
    return console.color_system is not None and not console.no_color


def tinted(text: str, drafter: str) -> str:
    """The text in the drafter's colour. Nothing else is changed: no line is wrapped."""
    from rich.color import ColorSystem
    from rich.style import Style

    style = Style(color=_COLOURS.get(drafter, _OTHER))
    return style.render(text, color_system=ColorSystem.STANDARD)
