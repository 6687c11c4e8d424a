"""Starting up: quick because nothing heavy is loaded, and the same name and version everywhere."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import suite
from suite.cli import VERBS, main

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "pandas", "scipy", "duckdb", "numpy", "jinja2")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["list"], ["list", "models"], ["list", "metrics"], ["--version"]],
)
def test_nothing_heavy_is_loaded(arguments: list[str]) -> None:
    script = (
        f"import sys; from suite.cli import main; code = main({arguments!r}); "
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == "0 []\n"
    assert done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: suite {verb}")
    assert "--help" in text


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert suite.__version__ == project["version"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{suite.__version__}\n"


def test_reader_that_goes_away() -> None:
    command = f"{sys.executable} -m suite list metrics | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("name")
    assert done.stderr == ""
