"""The command line in this process, with the fake worker of tests/harness/launch and a site of one page."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import suite.pipeline
import suite.report
from suite.cli import main

FAKE_WORKER = Path(__file__).resolve().parents[2] / "harness" / "launch"
CASE = """
question: Is bf16 as good as fp32?
base: {model: llama-0.3m, tokens: 64, batch_size: 1, seq_len: 16}
matrix: {precision: [fp32, bf16], seed: [0, 1, 2]}
claims:
  - id: same
    measure: final_loss_gap
    of: {precision: bf16}
    against: {precision: fp32}
    expect: {non_inferior_within: 0.1}
  - id: worse
    measure: final_loss_gap
    of: {precision: bf16}
    against: {precision: fp32}
    expect: {above: 0.1}
"""


@dataclass
class Said:
    """What a command answered."""

    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture
def suite_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """`suite_command("run", "case.yaml")` in an empty folder that has that case."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE_WORKER))
    monkeypatch.delenv("SUITE_LAUNCH", raising=False)
    monkeypatch.setattr(
        suite.pipeline, "execute", functools.partial(suite.pipeline.execute, worker="fake_worker")
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.yaml").write_text(CASE)

    def run(*arguments: str) -> Said:
        capfd.readouterr()
        code = main(list(arguments))
        return Said(code, *capfd.readouterr())

    return run


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for the site builder; each build adds the names of its cases."""
    built: list[list[str]] = []

    def build_site(out: Path, store: Any, plans: Any, site: Path) -> Path:
        built.append([plan.case.name for plan in plans])
        site.mkdir(parents=True, exist_ok=True)
        (site / "index.html").write_text("<!doctype html>")
        return site / "index.html"

    monkeypatch.setattr(suite.report, "build_site", build_site)
    return built
