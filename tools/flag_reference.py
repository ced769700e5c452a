# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.flag_reference`: write docs/flags.md from the options of `specops serve`.

The page has a table for each group of options, with the text of --help.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from specops.cli.environment import flag_variables
from specops.cli.serve import _parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"

INTRODUCTION = """# Flags of specops serve

<!-- Written by `python -m tools.flag_reference`; run that instead of editing this file. -->

This page lists every option of `specops serve`, with the text of `specops serve --help`.
[Serving over HTTP](server.md#options) explains the groups, and how to set options in a YAML file.

The variable in the second column sets the option from the environment. The command line takes
precedence over the environment, and the environment over the file of `--config`.
"""


def document() -> str:
    """Return the text of the page."""
    parser = _parser("specops serve")
    variables = {flag: name for name, (flag, _) in flag_variables(parser).items()}
    parts = [INTRODUCTION]
    for group in parser._action_groups:
        rows = list(_rows(group, variables))
        if rows:
            name = group.title or "options"
            title = name[:1].upper() + name[1:]
            table = [["option", "variable", "meaning"], ["---"] * 3, *rows]
            parts.append(f"\n## {title}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in table))
    return "".join(parts)


def _rows(group: argparse._ArgumentGroup, variables: dict[str, str]) -> Iterator[list[str]]:
    """Yield the cells of each option of a group; those without help are skipped.

    Args:
        group: group of options.
        variables: environment variable of each flag.
    """
    formatter = argparse.HelpFormatter("")
    for action in group._group_actions:
        if action.help in (None, argparse.SUPPRESS) or isinstance(action, argparse._HelpAction):
            continue
        names = [variables[flag] for flag in action.option_strings if flag in variables]
        own = ", ".join(f"`{name}`" for name in names)
        yield [_invocation(action), own, _prose(formatter._expand_help(action))]


def _invocation(action: argparse.Action) -> str:
    """Return the names of an option and its values as inline code."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    flags = list(action.option_strings)
    if isinstance(action, argparse.BooleanOptionalAction):
        flags = [f"--[no-]{flags[0].removeprefix('--')}"]
    if action.nargs != 0:
        metavar = action.metavar or "|".join(map(str, action.choices or [action.dest.upper()]))
        flags[-1] += f" {_cell(str(metavar))}" + " .." * (action.nargs == "+")
    return ", ".join(f"`{flag}`" for flag in flags)


def _prose(text: str) -> str:
    """Return a help text as Markdown: flags and JSON in code, other marks escaped."""
    text = re.sub(r"([*<])", r"\\\1", _cell(text))
    code = re.compile(r"(?<![\w-])--[a-z][a-z-]+|'(\{.*?\})'")
    return code.sub(lambda one: f"`{one[1] or one[0]}`", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(document())
