"""Benches for the real command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench import Bench


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    """Benches in this test's own folder; what a failed test left running is ended."""
    benches: list[Bench] = []

    def make(case: str) -> Bench:
        folder = tmp_path / f"bench{len(benches)}"
        folder.mkdir()
        benches.append(Bench(folder, case))
        return benches[-1]

    yield make
    for bench in benches:
        for process in bench.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, 9)
