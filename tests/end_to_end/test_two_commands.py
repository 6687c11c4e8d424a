"""Two `suite run` at once on one out folder: both end well, and each run is trained once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench import Bench, measurements, recorded

pytestmark = pytest.mark.slow

CASE = """
question: Do two commands share the work?
base: {model: llama-0.3m, tokens: 4k, batch_size: 2, seq_len: 64, val_tokens: 256}
start_from: {precision: bf16, seed: 100}
matrix:
  precision: [fp32, bf16]
  seed: [0, 1]
probes: {loss: 1}
claims:
  - id: same
    measure: final_loss_gap
    of: {precision: bf16}
    against: {precision: fp32}
    expect: {non_inferior_within: 0.5}
"""


@pytest.mark.parametrize("other_size", [False, True], ids=["same case", "another case with the same base"])
def test_two_commands_at_once(make_bench: Callable[[str], Bench], other_size: bool) -> None:
    bench = make_bench(CASE)
    more = ["--set", "matrix.seed=[2, 3]"] if other_size else []
    commands = [bench.start("run", bench.case), bench.start("run", bench.case, *more)]
    for command in commands:
        ended = command.wait()
        assert ended.code == 0, ended.stderr
        assert "same" in ended.stdout
    bench.assert_no_orphan()
    _, rows = bench.store().query("SELECT key, count(*), any_value(status) FROM runs GROUP BY key")
    assert [row[1:] for row in rows] == [(1, "ok")] * (9 if other_size else 5)
    assert measurements(bench.store()) == recorded(bench.folder / "out")
    assert (bench.folder / "out" / "site" / "index.html").exists()
    for arguments in ([], more):
        assert "0 runs made, 5 were done before" in bench.run("run", bench.case, *arguments).stderr
