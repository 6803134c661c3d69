"""`mvllm bench` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from mvllm.cli.main import cli
from mvllm.core.errors import ConfigError
from tests.tiny_models import write_tiny_hf

QUICK = ("--seconds", "0", "--threads", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "crossover", *arguments, *QUICK])


def test_a_table_shows_every_form_and_the_choice() -> None:
    result = run("--shape", "Q4_0:64x128")
    assert result.exit_code == 0, result.output
    assert "Q4_0:64x128, GOP/s; panels" in result.stdout
    for form in ("rows", "tiles", "panels"):
        assert form in result.stdout


def test_the_json_of_a_model_has_its_different_products_once(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, layers=2, seed=3)
    result = run(str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    products = json.loads(result.stdout)["products"]
    shapes = [(p["format"], p["rows"], p["inputs"]) for p in products]
    assert len(set(shapes)) == len(shapes) > 2
    for product in products:
        forms = [sorted(timing["seconds"]) for timing in product["timings"]]
        assert forms == [["rows"]] + [["panels", "rows", "tiles"]] * (len(forms) - 1)
        assert all(t > 0 for timing in product["timings"] for t in timing["seconds"].values())
        assert product["panels_from"] is None or product["panels_from"] >= 2


def test_a_plot_is_an_svg_file(tmp_path: Path) -> None:
    picture = tmp_path / "crossover.svg"
    assert run("--shape", "F32:16x32", "--plot", str(picture)).exit_code == 0
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a model, or products with --shape"),
        (("model", "--shape", "F32:16x32"), "not both"),
        (("--shape", "Q4_K:16x32"), "multiple of 256"),
        (("--shape", "Q9:16x32"), "FORMAT:ROWSxINPUTS"),
        (("--shape", "F32:0x32"), "needs rows"),
        (("--shape", "F32:999999999x999999999"), "fewer than"),
        (("--shape", "F32:16x32", "--plot", "x.png"), "should end in .svg"),
    ],
)
def test_what_can_not_be_measured_is_refused_with_a_reason(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit | ConfigError)
    assert result.exit_code != 0
    assert message in result.output


def test_matplotlib_is_not_imported_without_a_plot() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from mvllm.cli.main import cli\n"
        f"r = CliRunner().invoke(cli, ['bench', 'crossover', '--shape', 'F32:16x32', *{QUICK!r}])\n"
        "assert r.exit_code == 0, r.output\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
