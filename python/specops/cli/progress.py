# SPDX-License-Identifier: Apache-2.0
"""Progress bar for long work."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int, *, is_shown: bool) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar on standard error, if that is a terminal and rich is installed.

    Args:
        total: number of items to count.
        is_shown: whether to show the bar.

    Yields:
        A function to call with a text that names the finished work and its number of items.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:  # it comes with specops[cli]
        yield lambda text, count: None
        return
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    is_off = not (is_shown and console.is_terminal)
    # rich must not redirect standard output, which may go to a file.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=is_off
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, count: bar.update(task, advance=count, description=f"{text} is done")
