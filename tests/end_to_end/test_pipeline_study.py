"""A pipeline of sleeping stages through the real command: two ranks, PyTorch's schedule, a verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASE = """\
question: How many microbatches does a schedule hold?
task: pipeline
base: {pipeline: {forward_ms: 1, input_ms: 1, weight_ms: 1}}
matrix:
  parallelism: [{name: plain, pp: 2, microbatches: 4}, {name: v, pp: 2, microbatches: 4, schedule: zbv}]
claims:
  - id: as-the-formula
    measure: pipeline_in_flight_worst_gap[:formula]
    of: {parallelism: [plain, v]}
    against: {parallelism: [plain, v]}
    expect: {at_most: 0}
  - id: all-of-them
    measure: pipeline_in_flight
    of: {parallelism: v}
    expect: {within: [4, 4]}
"""


@pytest.mark.slow
def test_ranks_measure_and_rank_0_records(tmp_path: Path) -> None:
    (tmp_path / "case.yaml").write_text(CASE)

    def suite(*arguments: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "suite", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    suite("run", "case.yaml", "--jobs", "1")
    verdicts = json.loads(suite("claims", "case.yaml", "--json"))
    assert {each["claim_id"]: each["verdict"] for each in verdicts} == {
        "as-the-formula": "reproduced",
        "all-of-them": "reproduced",
    }
