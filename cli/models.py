"""`mvllm models`: what can be had by name, and where it is."""

from __future__ import annotations

import click

from mvllm.cli.terminal import download_progress
from mvllm.core.errors import ModelFileError
from mvllm.core.load.catalog import CATALOG, ModelStore
from mvllm.llm import default_cache_dir


@click.group()
def models() -> None:
    """List, fetch and locate models."""


@models.command("list")
def list_models() -> None:
    """List the catalog; fetched models are marked with *."""
    store = ModelStore(default_cache_dir())
    for entry in CATALOG.values():
        mark = "*" if store.find(entry.name) else " "
        click.echo(f"{mark} {entry.name:24} {entry.summary}")


@models.command("pull")
@click.argument("name")
def pull_model(name: str) -> None:
    """Fetch a catalog model or a hub repository and print its path."""
    with download_progress() as progress:
        path = ModelStore(default_cache_dir()).resolve(name, progress)
    click.echo(path)


@models.command("path")
@click.argument("name")
def model_path(name: str) -> None:
    """Print the path of a model that is on this machine; never touches the network."""
    path = ModelStore(default_cache_dir()).find(name)
    if path is None:
        hint = f"; fetch it with: mvllm models pull {name}" if name in CATALOG or "/" in name else ""
        raise ModelFileError(f"{name} is not on this machine{hint}")
    click.echo(path)
