"""The wheel, unpacked into an empty place: it lists, plans and runs the built-in cases and builds their site."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "--set",
    "model=llama-0.3m",
    "--set",
    "tokens=1k",
    "--set",
    "val_tokens=1k",
    "--set",
    "start_from.tokens=1k",
]
ONE_ARM = ["--only", "seed=0", "--only", "precision=bf16", "--only", "ageing=none"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="building needs hatchling"),
]

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    code = "import sys, hatchling.build as build; build.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def python(wheel: Path, tmp_path: Path) -> Python:
    """Run Python in an empty folder, where the wheel's packages come before those of the source tree."""
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(installed)
    empty.mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_data_files_are_inside(wheel: Path) -> None:
    """Every file of cases/ and site/, and the schema of the database."""
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [path for folder in ("cases", "site") for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert len(shipped) > 10
    assert {f"suite/data/{path.relative_to(ROOT)}" for path in shipped} <= names
    assert "results/schema.sql" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "out/"))]


def test_a_built_in_case_runs_from_an_empty_folder(python: Python, tmp_path: Path) -> None:
    where = python("-c", "import suite, harness, results.store; print(suite.__file__, harness.__file__)")
    assert where.stdout.count(str(tmp_path)) == 2, "the source tree was used instead"
    listed = python("-m", "suite", "list")
    assert "fp8_long_horizon" in listed.stdout, listed.stderr
    done = python("-m", "suite", "run", "fp8_long_horizon", "--size", "laptop", *SMALL, *ONE_ARM)
    assert done.returncode == 0, done.stderr
    assert "2 runs made" in done.stderr
    assert "base-needs-its-feed-forward" in done.stdout
    site = tmp_path / "empty" / "out" / "site"
    assert (site / "index.html").is_file() and list((site / "static").rglob("*.css"))
    planned = python("-m", "suite", "plan", "fp8_long_horizon", "--size", "laptop", *SMALL)
    assert planned.returncode == 0, planned.stderr
