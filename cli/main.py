"""The `mvllm` command: joins the sub-commands and turns the project's errors into messages."""

from __future__ import annotations

import importlib.metadata
import io
import os
import signal
import sys
from typing import Any

import click

from mvllm.core.errors import ConfigError, MvllmError

_COMMANDS = {
    "bench": "mvllm.cli.bench:bench",
    "compare": "mvllm.cli.compare:compare",
    "generate": "mvllm.cli.generate:generate",
    "inspect": "mvllm.cli.inspect:inspect",
    "models": "mvllm.cli.models:models",
    "profile": "mvllm.cli.profile:profile",
}


class LazyGroup(click.Group):
    """Imports a command's module only when that command is used, so that `--help` and errors are quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        except MvllmError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("mvllm-engine"), prog_name="mvllm")
def cli() -> None:
    """Run language models on this machine.

    Answers go to standard output, everything else to standard error.
    """


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        _prepare_output()
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would only disturb Python's own way out
        sys.exit(130)
    except OSError as error:
        click.echo(f"Error: {error}", err=True)
        _discard_output()
        sys.exit(1)
    sys.exit(status or 0)


def _prepare_output() -> None:
    """Files and pipes get UTF-8, whatever the locale; a terminal shows "?" for what it can't show.

    Raises:
        click.ClickException: standard output is closed.
    """
    if sys.stdout is None:
        raise click.ClickException("standard output is closed, so there is no place for the answer")
    if isinstance(sys.stdout, io.TextIOWrapper):
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="replace")
        else:
            sys.stdout.reconfigure(encoding="utf-8")


def _discard_output() -> None:
    """Keep Python from writing what is still buffered when it exits: it would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
