# SPDX-License-Identifier: Apache-2.0
"""`--config FILE`: options in YAML, keyed by the names of the flags."""

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from specops.cli.fastdeploy import require_known


def arguments_of(file: str, parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a file as arguments; the caller puts them before the command line's.

    A flag's name may have hyphens or underscores. A list repeats a flag, a mapping becomes its
    JSON text, and true or false sets or clears a flag without a value.

    Args:
        file: path of a YAML file that holds a mapping.
        parser: parser that defines the flags.

    Raises:
        ValueError: the file cannot be read, has an unknown flag, or has a flag twice.
    """
    options = _read(file)
    flags = {name: action for action in parser._actions for name in action.option_strings}
    arguments: list[str] = []
    for name, value in options.items():
        flag = f"--{str(name).replace('_', '-')}"
        if flag not in flags:
            require_known(flag)
        if flag not in flags or flag in ("--config", "--help"):
            matches = difflib.get_close_matches(flag, flags, n=1)
            hint = f"; the nearest is {matches[0].removeprefix('--')}" if matches else ""
            raise ValueError(f"--config {file} must hold names of flags, got {name!r}{hint}")
        arguments += _flag_arguments(flag, value, flags)
    return arguments


def _flag_arguments(flag: str, value: Any, flags: dict[str, argparse.Action]) -> list[str]:
    if flags[flag].nargs == 0:  # a flag without a value
        if not isinstance(value, bool):
            raise ValueError(f"{flag} must be true or false in --config, got {value!r}")
        absent = f"--no-{flag.removeprefix('--')}"
        return [flag] if value else [absent] if absent in flags else []
    if isinstance(value, list):
        return [argument for element in value for argument in _flag_arguments(flag, element, flags)]
    if value is None or isinstance(value, bool):
        raise ValueError(f"{flag} must have a value in --config, got {value!r}")
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def _read(file: str) -> dict[Any, Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError(
            "--config needs pyyaml, which is not installed: pip install 'specops[server]'"
        ) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML loader that rejects duplicate keys; PyYAML would keep the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [self.construct_object(key, deep=True) for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(
                        f"--config {file} must hold every name once, got {name!r} twice"
                    )
            return dict(super().construct_mapping(node, deep))

    try:
        options = yaml.load(Path(file).read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config must be a YAML file, got {file}: {reason}") from None
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ValueError(
            f"--config {file} must hold a mapping of flags to values, got {options!r:.80}"
        )
    return options
