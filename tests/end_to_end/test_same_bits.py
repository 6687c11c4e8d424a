"""The real command twice, launched differently: the same numbers to the bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench import Bench

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")]

CASE = """
question: Do the numbers depend on how a run is launched?
base: {model: llama-0.3m, tokens: 2k, batch_size: 4, seq_len: 64, val_tokens: 1k}
matrix: {precision: [bf16, fp8-delayed], seed: [0, 1]}
"""
SAME = ["loss", "val_loss", "gradient_norm"]


def test_forked_side_by_side_or_spawned_one_by_one(
    make_bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(CASE)
    found: list[list[tuple[Any, ...]]] = []
    for mode, jobs in (("fork", "2"), ("spawn", "1")):
        monkeypatch.setenv("SUITE_LAUNCH", mode)
        ended = bench.run("run", bench.case, "--no-report", "--jobs", jobs, out=mode)
        assert ended.code == 0, ended.stderr
        store = bench.store(mode)
        found.append(sorted(store.values([run.key for run in store.runs()], SAME)))
    assert len(found[0]) == 4 * (8 + 2 + 8)
    assert found[0] == found[1]
