"""Every way a run can fail becomes its status with a reason; the others finish, and the site shows each as a cell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench import Bench, measurements, recorded

pytestmark = pytest.mark.slow

CASE = """
question: Does each way of failing become its status?
base: {model: llama-0.3m, precision: bf16, tokens: 2k, batch_size: 2, seq_len: 64, val_tokens: 256}
matrix: {seed: [0, 1, 2, 3, 4, 5, 6, 7]}
exclude:
  - {seed: [2, 3, 4, 5, 6, 7]}
include:
  - {seed: 2, fault.kind: nan, fault.step: 3}
  - {seed: 3, fault.kind: hang, fault.step: 3, limits.hang_s: 2}
  - {seed: 4, fault.kind: slow, fault.step: 3, limits.time_s: 2.5}
  - {seed: 5, limits.memory_bytes: 70MB}
  - {seed: 6, fault.kind: oom, fault.step: 3, limits.memory_bytes: 1GB}
  - {seed: 7, fault.kind: crash, fault.step: 3}
claims:
  - id: seeds-agree
    measure: final_loss_gap
    of: {seed: 1}
    against: {seed: 0}
    expect: {within: [-1, 1]}
"""
EXPECTED = {
    0: ("ok", ""),
    1: ("ok", ""),
    2: ("diverged", "the loss is nan at step 3"),
    3: ("hung", "no sign of life for 2 s (limits.hang_s is 2)"),
    4: ("timeout", "still running after 2.5 s (limits.time_s)"),
    5: ("oom", "more than 70 MB (limits.memory_bytes): "),
    6: ("oom", "more than 1,000 MB (limits.memory_bytes): "),
    7: ("crashed", "killed by signal 6 (SIGABRT)"),
}


def test_every_failure_has_a_status_a_reason_and_a_cell(make_bench: Callable[[str], Bench]) -> None:
    bench = make_bench(CASE)
    ended = bench.run("run", bench.case)
    assert ended.code == 3, ended.stderr
    bench.assert_no_orphan()
    rows = {row.labels["seed"]: row for row in bench.store().runs()}
    for seed, (status, reason) in EXPECTED.items():
        assert rows[seed].status == status, rows[seed]
        assert rows[seed].reason.startswith(reason), rows[seed]
        assert (reason == "") == (rows[seed].reason == "")
    assert measurements(bench.store()) == recorded(bench.folder / "out")

    (page,) = (bench.folder / "out" / "site" / "cases").glob("*.html")
    shown = page.read_text()
    for seed, (status, reason) in EXPECTED.items():
        assert f"runs/{rows[seed].key}.html" in shown, "each run has its cell"
        own = (bench.folder / "out" / "site" / "runs" / f"{rows[seed].key}.html").read_text()
        assert status in own
        assert reason in own

    # diverged and oom are answers; hung, timeout and crashed are tried again.
    again = bench.run("run", bench.case)
    assert again.code == 3
    assert "3 runs made, 5 were done before" in again.stderr
