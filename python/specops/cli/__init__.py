# SPDX-License-Identifier: Apache-2.0
"""The command `specops`. A command's module is imported when it runs, so that help is instant."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

_OPTIONAL = {"aiohttp", "huggingface_hub", "numpy", "rich", "safetensors", "tokenizers", "torch"}
_INTERRUPTED = 130  # the code that a shell gives for a program ended by Ctrl-C


@dataclass(frozen=True)
class Command:
    """A command of `specops`.

    Attributes:
        module: that has it.
        function: takes the arguments and the program's name; returns the exit code.
        summary: its purpose, in a line of the help.
        extra: the package's extra with all that it needs.
    """

    module: str
    function: str
    summary: str
    extra: str


COMMANDS = {
    "serve": Command(
        "specops.cli.serve",
        "serve",
        "an OpenAI-compatible API and a page in the browser",
        "server",
    ),
    "complete": Command(
        "specops.cli.complete",
        "main",
        "complete a text here, and see whether speculation changes it",
        "engine",
    ),
    "verify-exactness": Command(
        "specops.cli.exactness",
        "main",
        "compare every token with and without speculation",
        "engine",
    ),
    "models": Command(
        "specops.cli.models",
        "main",
        "list the models of this machine that run by name",
        "engine",
    ),
    "contract": Command(
        "specops.cli.serve",
        "contract",
        "print everything that output bits depend on, and a digest of it",
        "engine",
    ),
    "bench": Command(
        "specops.cli.bench",
        "main",
        "put load on an OpenAI-compatible server, and measure it",
        "cli",
    ),
    "plot": Command(
        "specops.cli.plot",
        "main",
        "draw the results of several benches side by side",
        "cli",
    ),
}
# The same question to a server, from outside; it needs no package at all.
_SERVER_EXACTNESS = Command("specops.cli.lossless.command", "main", "", "cli")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the command's name and its arguments; None: the program's own.

    Returns:
        The exit code: 0, the command's own, or 2 for a mistake in the arguments. Without
        arguments it prints the help.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["-V"], ["--version"]):
        import specops

        print(f"specops {specops.__version__}")
        return 0
    if not given:
        _parser().print_help()
        return 0
    name = _parser().parse_args(given[:1]).command
    try:
        command = COMMANDS[name]
        if name == "verify-exactness" and any(one.startswith("--url") for one in given):
            command = _SERVER_EXACTNESS
        function = getattr(import_module(command.module), command.function)
        return int(function(given[1:], f"specops {name}"))
    except ImportError as error:
        return fail(_missing(name, error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe; no traceback for that
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class Parser(argparse.ArgumentParser):
    """Of a command's options; a mistake is one line, since --help says the rest."""

    def error(self, message: str) -> NoReturn:
        """Prints a mistake, and exits with 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def finite(text: str) -> float:
    """Read a number of a command line: the `type` of every option that is not an integer.

    Raises:
        argparse.ArgumentTypeError: it is not a number, or NaN or infinite, which comparisons with
            bounds let through.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def fail(message: str) -> int:
    """Prints a mistake on standard error, and returns the exit code for it."""
    print(f"specops: {message}", file=sys.stderr)
    return 2


def write_file(option: str, file: str, text: str) -> None:
    """Writes a result to the file that an option names.

    Raises:
        ValueError: it cannot be written.
    """
    _open(option, file, "w", text)


def require_writable(option: str, file: str) -> None:
    """Refuses a file before hours of work, if it could not be written after them.

    Raises:
        ValueError: it cannot be written.
    """
    _open(option, file, "a", "")


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that an option has.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, got {text}")
    return value


def require_url(option: str, url: str) -> None:
    """Refuses an address that is none.

    Raises:
        ValueError: it has no scheme.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{option} must begin with http:// or https://, got {url}")


def _open(option: str, file: str, mode: str, text: str) -> None:
    try:
        with open(file, mode, encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{option} must be a file to write, got {file}: {reason}") from None


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    parser = Parser(
        prog="specops",
        usage="specops COMMAND [OPTIONS]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Speculative decoding that changes no bit of a model's output.\n\n"
        "commands:\n" + "\n".join(lines),
        epilog="specops COMMAND --help lists the options of a command.",
        add_help=True,
    )
    parser.add_argument("command", choices=list(COMMANDS), help=argparse.SUPPRESS)
    parser.add_argument("-V", "--version", action="store_true", help="print the version and exit")
    return parser


def _missing(name: str, error: ImportError) -> str:
    """The advice for a missing module."""
    if error.name == "specops" and "_C" in str(error):
        return "the kernels are not compiled: run `make setup`, or install the package with pip"
    package = str(error.name).partition(".")[0]
    if package not in _OPTIONAL:
        raise error
    extra = COMMANDS[name].extra
    return f"{name} needs {package}, which is not installed: pip install 'specops[{extra}]'"
