# SPDX-License-Identifier: Apache-2.0
"""Progress of long work, on standard error."""

import contextlib
import logging
import sys
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


@contextlib.contextmanager
def loading_shown() -> Iterator[None]:
    """Show the loading of large models on standard error: a bar on a terminal, otherwise lines."""
    with contextlib.ExitStack() as stack:
        handler: logging.Handler = logging.StreamHandler()
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):  # rich comes with specops[cli]
                handler = stack.enter_context(_bar())
        handler.setLevel(logging.INFO)
        log = logging.getLogger("specops.engine.models.loading")
        level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        stack.callback(log.removeHandler, handler)
        stack.callback(log.setLevel, level)
        yield


@contextlib.contextmanager
def _bar() -> Iterator[logging.Handler]:
    """Show a bar; yield a handler that updates it by the records of `log_loading`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        class Bar(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                fields = getattr(record, "fields", None)
                if fields is None:
                    bar.add_task(record.getMessage(), total=100)
                else:
                    bar.update(bar.task_ids[-1], completed=fields["percent"])

        yield Bar()
