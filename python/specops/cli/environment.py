# SPDX-License-Identifier: Apache-2.0
"""`SPECOPS_<FLAG>`: options in the environment, under the names of the flags."""

import argparse
import difflib
from collections.abc import Mapping

from specops.cli import Parser

_PREFIX = "SPECOPS_"
# Variables with a meaning of their own: keys besides those of --api-key, and the kernels' defaults.
_OWN = frozenset({"SPECOPS_API_KEY", "SPECOPS_ISA", "SPECOPS_NUM_THREADS"})
# Variables of the build, of its tests, and of the plug-in for vLLM.
_OTHERS = (
    "SPECOPS_CMAKE_ARGS",
    "SPECOPS_CUDA",
    "SPECOPS_ISAS",
    "SPECOPS_SIMT",
    "SPECOPS_TARGETS",
    "SPECOPS_VLLM",
    "SPECOPS_WERROR",
)
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def environment_arguments(parser: Parser, environment: Mapping[str, str]) -> list[str]:
    """Return the options in the environment as arguments, to stand before the command line's.

    The variable of a flag is its name in capitals with underscores: --max-num-seqs is
    SPECOPS_MAX_NUM_SEQS. A flag without a value takes true or false, and a flag that may be
    repeated takes values separated by spaces.

    Args:
        parser: parser that defines the flags.
        environment: the process's environment.

    Raises:
        ValueError: a flag without a value is neither true nor false.
    """
    arguments: list[str] = []
    for variable, (flag, action) in flag_variables(parser).items():
        if variable in environment and variable not in _OWN:
            of_flag = _flag_arguments(variable, environment[variable], flag, action, parser)
            parser.source = f" (from the environment variable {variable})"
            parser.parse_args(of_flag)  # reports an invalid value and the variable
            arguments += of_flag
    parser.source = ""
    return arguments


def unknown_variables(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> str:
    """Return a sentence about variables that begin like options but are none; "" without any."""
    known = {*flag_variables(parser), *_OWN}
    told = []
    for variable in sorted(environment):
        if not variable.startswith(_PREFIX) or variable in known or variable.startswith(_OTHERS):
            continue
        names = {one.removeprefix(_PREFIX) for one in known}
        nearest = difflib.get_close_matches(variable.removeprefix(_PREFIX), names, n=1)
        told.append(f"{variable} (did you mean {_PREFIX}{nearest[0]}?)" if nearest else variable)
    return f"ignoring unknown environment variables: {', '.join(told)}" if told else ""


def flag_variables(parser: argparse.ArgumentParser) -> dict[str, tuple[str, argparse.Action]]:
    """Return the flag and the action of each variable."""
    return {
        _PREFIX + flag.removeprefix("--").replace("-", "_").upper(): (flag, action)
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and not flag.startswith("--no-") and flag != "--help"
    }


def _flag_arguments(
    variable: str, value: str, flag: str, action: argparse.Action, parser: argparse.ArgumentParser
) -> list[str]:
    if action.nargs != 0:  # the flag takes a value
        repeats = isinstance(action, argparse._AppendAction)
        return [f"{flag}={one}" for one in (value.split() if repeats else [value])]
    if value.lower() not in _BOOLEANS:
        raise ValueError(f"{variable} must be true or false, got {value!r}")
    if _BOOLEANS[value.lower()]:
        return [flag]
    negated = f"--no-{flag.removeprefix('--')}"
    return [negated] if negated in parser._option_string_actions else []
