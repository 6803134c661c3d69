"""Rules of the repository itself: import directions, packaging, documentation."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mvllm.cli.main import cli
from tests.paths import ROOT

PACKAGES = {"mvllm": "mvllm", "core": "mvllm.core", "backends": "mvllm.backends", "cli": "mvllm.cli"}

CORE_TIERS = [
    {"types", "errors", "config", "cache_folder", "interrupts", "trace"},
    {"request", "step", "tensor"},
    {"kv", "sched", "batch", "spec", "sampling", "model", "load", "text"},
    {"engine"},
]
"""Inside core a module imports its own tier and those before it; `model.spec` belongs to the first."""

FORBIDDEN_IN_CORE = (
    "mvllm.backends",
    "mvllm.server",
    "mvllm.cli",
    "mvllm.bench",
    "mvllm.llm",
    "numba",
    "mlx",
)


def _modules(folder: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        yield path, ".".join((PACKAGES[folder], *(part for part in parts if part != "__init__")))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize(("path", "module"), list(_modules("core")), ids=lambda value: str(value)[-40:])
def test_core_imports_no_hardware_no_front_door_and_no_later_tier(path: Path, module: str) -> None:
    for imported in _imports(path):
        assert not imported.startswith(FORBIDDEN_IN_CORE), f"{module} imports {imported}"
        if imported.startswith("mvllm.core."):
            assert _tier(imported) <= _tier(module), f"{module} imports {imported}"


def _tier(module: str) -> int:
    if module == "mvllm.core.model.spec":
        return 0
    part = module.split(".")[2] if module.count(".") >= 2 else "types"
    return next(tier for tier, names in enumerate(CORE_TIERS) if part in names)


@pytest.mark.parametrize("name", ["reference", "cpu", "mlx", "fake"])
def test_a_backend_imports_the_core_and_itself_only(name: str) -> None:
    for path in sorted((ROOT / "backends" / name).rglob("*.py")):
        for imported in _imports(path):
            if imported.startswith("mvllm."):
                assert imported.startswith(("mvllm.core", f"mvllm.backends.{name}")), f"{path}: {imported}"


def test_importing_mvllm_loads_no_backend_library_and_compiles_nothing() -> None:
    script = "import sys, mvllm; print([m for m in ('numba', 'mlx', 'llvmlite') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_package_is_in_the_distribution() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        module
        for folder in (*PACKAGES, "bench")
        for path in (ROOT / folder).rglob("__init__.py")
        for module in [
            ".".join(("mvllm", *path.parent.relative_to(ROOT).parts)).replace("mvllm.mvllm", "mvllm")
        ]
    }
    assert listed == present


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _commands(child, f"{path} {name}")


COMMANDS = dict(_commands(cli, "mvllm"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name: str) -> None:
    assert COMMANDS[name].help, f"{name} has no help"
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts[-1]} has no help"


def test_every_command_and_option_stands_in_the_docs() -> None:
    script = ROOT / "docs" / "write_cli_reference.py"
    written = runpy.run_path(str(script))["reference"]()
    assert (ROOT / "docs" / "cli.md").read_text() == written, f"run: python {script.relative_to(ROOT)}"


def test_every_invariant_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "INVARIANTS.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 40
    for file, function in named:
        source = (ROOT / file).read_text()
        assert re.search(rf"\b{function}\b", source), f"{file} has no {function}"


def test_links_in_the_docs_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
