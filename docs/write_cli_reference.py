"""Writes docs/cli.md from the commands themselves: python docs/write_cli_reference.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from mvllm.cli.main import cli

HEADER = """# Command line

Written by `docs/write_cli_reference.py`; change the commands, not this file. Answers go to standard output,
progress and notes to standard error. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([HEADER, *_sections(cli, "mvllm")]) + "\n"


def _sections(command: click.Command, path: str) -> Iterator[str]:
    arguments = "".join(f" {_argument(p)}" for p in command.params if isinstance(p, click.Argument))
    yield f"## `{path}{arguments}`\n\n{_help(command)}\n"
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    if options:
        yield "\n".join(["| option | meaning |", "|---|---|", *map(_option_row, options)]) + "\n"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _sections(child, f"{path} {name}")


def _argument(parameter: click.Argument) -> str:
    name = (parameter.name or "").upper()
    return name if parameter.required else f"[{name}]"


def _help(command: click.Command) -> str:
    lines = [line.strip() for line in (command.help or "").strip().splitlines()]
    return "\n".join(lines)


def _option_row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    kind = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    if isinstance(option.type, click.Choice):
        kind = " " + "\\|".join(option.type.choices)
    default = f" Default: {option.default}." if option.show_default else ""
    return f"| {names}{kind} | {(option.help or '').replace('|', chr(92) + '|')}{default} |"


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(reference())
