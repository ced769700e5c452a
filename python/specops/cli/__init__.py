# SPDX-License-Identifier: Apache-2.0
"""The `specops` command. Each subcommand's module is imported only when it runs, to start fast."""

import argparse
import difflib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

_OPTIONAL = {"aiohttp", "huggingface_hub", "numpy", "rich", "safetensors", "tokenizers", "torch"}
_INTERRUPTED = 130  # the exit code that shells use for a program ended by Ctrl-C


@dataclass(frozen=True)
class Command:
    """A subcommand of `specops`.

    Attributes:
        module: name of the module that implements it.
        function: name of a function that takes the arguments and the program's name, and returns
            the exit code.
        summary: one line of the help.
        extra: pip extra that installs everything the subcommand needs.
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
    "audit": Command(
        "specops.cli.audit",
        "main",
        "derive recorded answers again, and say where one differs",
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
# `verify-exactness --url` checks a server over HTTP and needs only the standard library.
_SERVER_EXACTNESS = Command("specops.cli.lossless.command", "main", "", "cli")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: the subcommand's name and its arguments; None: those of the process.

    Returns:
        The exit code: 0, the subcommand's own, or 2 for invalid arguments. Without arguments,
        the help is printed.
    """
    arguments_given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments_given[:1] in (["-V"], ["--version"]):
        import specops

        print(f"specops {specops.__version__}")
        return 0
    if not arguments_given:
        _parser().print_help()
        return 0
    name = _parser().parse_args(arguments_given[:1]).command
    # By default, torch's threads spin for milliseconds after each op, beside the kernels' threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        command = COMMANDS[name]
        if name == "verify-exactness" and any(one.startswith("--url") for one in arguments_given):
            command = _SERVER_EXACTNESS
        function = getattr(_imported(command), command.function)
        return int(function(arguments_given[1:], f"specops {name}"))
    except ImportError as error:
        return fail(_missing(name, error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe; no traceback for that
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line and refers to --help for the rest.

    It accepts no abbreviations of options.
    """

    source = ""  # added to errors: where the arguments come from, if not from the command line

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with code 2."""
        kind, _, given = message.partition(": ")
        hint = "see"
        if kind == "unrecognized arguments":
            option, known = re.split("[ =]", given)[0], self._option_string_actions
            for nearest in difflib.get_close_matches(option, known, n=1, cutoff=0.8):
                hint = f"did you mean {nearest}? See"
        self.exit(2, f"{self.prog}: {message}{self.source}; {hint} {self.prog} --help\n")


def finite(text: str) -> float:
    """Parse a number that is neither NaN nor infinite; for use as `type` of an option.

    Raises:
        argparse.ArgumentTypeError: `text` is not a number, or is NaN or infinite. (A range check
        alone would accept NaN.)
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def byte_size(text: str) -> int:
    """Parse a number of bytes such as 1048576, 512M or 64G; for use as `type` of an option.

    Raises:
        argparse.ArgumentTypeError: `text` is not such a number.
    """
    match = re.fullmatch(r"(-?\d+)([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"must be a number of bytes, such as 1048576, 512M or 64G, got {text}"
        )
    return int(match[1]) << 10 * " kmgt".index(match[2] or " ")


def shown_bytes(size: int) -> str:
    """Return a number of bytes as `byte_size` reads it, with the largest unit that divides it."""
    power = next(power for power in (4, 3, 2, 1, 0) if size % (1 << 10 * power) == 0)
    return f"{size >> 10 * power}{' KMGT'[power].strip()}" if size else "0"


def fail(message: str) -> int:
    """Print an error on standard error and return exit code 2."""
    print(f"specops: {message}", file=sys.stderr)
    return 2


def write_file(option: str, file: str, text: str) -> None:
    """Write a result to the file named by an option.

    Raises:
        ValueError: the file cannot be written.
    """
    _open(option, file, "w", text)


def require_writable(option: str, file: str) -> None:
    """Check that a result file can be written, before hours of work on the result.

    Raises:
        ValueError: the file cannot be written.
    """
    _open(option, file, "a", "")


def json_object(option: str, text: str) -> dict[str, Any]:
    """Return the JSON object in the value of an option.

    Raises:
        ValueError: `text` is not a JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, got {text}")
    return value


def require_url(option: str, url: str) -> None:
    """Check that the value of an option is an HTTP URL.

    Raises:
        ValueError: `url` has no http:// or https:// scheme.
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


def _imported(command: Command) -> ModuleType:
    """Import a command's module; tell a terminal if that takes seconds, as PyTorch does."""
    is_slow = command.extra == "engine" and sys.stderr.isatty()
    if is_slow:
        print("importing PyTorch...", end="", file=sys.stderr, flush=True)
    try:
        return import_module(command.module)
    finally:
        if is_slow:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _missing(name: str, error: ImportError) -> str:
    """Return the advice for a missing module; re-raise `error` if no extra would install it."""
    if error.name == "specops" and "_C" in str(error):
        return "the kernels are not compiled: run `make setup`, or install the package with pip"
    package = str(error.name).partition(".")[0]
    if package not in _OPTIONAL:
        raise error
    extra = COMMANDS[name].extra
    return f"{name} needs {package}, which is not installed: pip install 'specops[{extra}]'"
