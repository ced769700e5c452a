# SPDX-License-Identifier: Apache-2.0
"""Command-line options of sessions that are kept in files."""

import argparse
from typing import TYPE_CHECKING

from specops.cli import byte_size, shown_bytes
from specops.cli.options import CACHE, group

if TYPE_CHECKING:
    from specops.service.wire import SessionSettings


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of sessions: the directory of their files, and its size."""
    add = group(parser, CACHE).add_argument
    add(
        "--session-dir",
        metavar="DIR",
        help="directory in which the KV cache of a conversation is kept between its turns, for "
        "requests with session_id; created if it does not exist. Its files contain the texts of "
        "clients (default: none)",
    )
    add(
        "--session-bytes",
        type=byte_size,
        default=16 << 30,
        metavar="SIZE",
        help="maximum total size of the files in --session-dir; the least recently used ones are "
        f"removed (default: {shown_bytes(16 << 30)})",
    )


def session_settings(args: argparse.Namespace) -> "SessionSettings | None":
    """Return the settings of sessions; None if there are none.

    Raises:
        ValueError: an option is out of range, or cannot be combined with another one.
    """
    if args.session_dir is None:
        return None
    if args.session_bytes < 1:
        raise ValueError(f"session_bytes must be at least 1, got {args.session_bytes}")
    if args.in_process:
        raise ValueError("session_dir requires an engine in its own process; remove --in-process")
    if args.enable_prefix_caching is False:
        raise ValueError("session_dir requires a prefix cache; remove --no-enable-prefix-caching")
    if args.role is not None:
        raise ValueError(f"session_dir must be absent with a role, got role {args.role}")
    if (args.tensor_parallel_size or 1) > 1:
        raise ValueError(
            "session_dir must be absent with several ranks, got tensor_parallel_size "
            f"{args.tensor_parallel_size}"
        )
    from specops.service.wire import SessionSettings

    return SessionSettings(args.session_dir, args.session_bytes)
