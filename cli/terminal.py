"""Progress and notes on standard error: bars only on a terminal, so that files and pipes stay clean."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn

_CONSOLE = Console(stderr=True)


def note(message: str) -> None:
    """One line on standard error."""
    click.echo(message, err=True)


def show_log_messages() -> None:
    """Let the library's own notes (compiling, warnings) appear on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("mvllm: %(message)s"))
    logger = logging.getLogger("mvllm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


@contextmanager
def download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for downloads on a terminal; one line at the start of a download elsewhere."""
    announced: set[str] = set()

    def announce(what: str, done: int, total: int) -> None:
        if what not in announced:
            announced.add(what)
            note(f"mvllm: fetching {what} ({total / 2**20:.0f} MiB)")

    if not _CONSOLE.is_terminal:
        yield announce
        return
    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=_CONSOLE, transient=True, redirect_stdout=False) as bar:
        tasks = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield update


@contextmanager
def prompt_progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar that counts finished prompts, on a terminal only."""
    if not _CONSOLE.is_terminal:
        yield lambda finished: None
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=_CONSOLE, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda finished: bar.update(task, completed=finished)
