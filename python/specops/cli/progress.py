# SPDX-License-Identifier: Apache-2.0
"""A bar for work that takes a while."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int, *, is_shown: bool) -> Iterator[Callable[[str, int], None]]:
    """A bar on standard error, if that is a terminal and rich is there to draw it.

    Args:
        total: of what is counted.
        is_shown: whether it is wanted.

    Yields:
        To be called with what was done, and how much of the total that is.
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
    # Standard output may go elsewhere than the bar.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=is_off
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, count: bar.update(task, advance=count, description=f"{text} is done")
