"""Several processes on one database, and processes that die in the middle."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from results.database import DatabaseBusy
from results.journal import read_journal, split_records
from results.store import Store

Make = Callable[..., Any]

HOLD = """
    import sys, time
    from pathlib import Path
    from results.store import Store
    with Store(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
"""
INGEST_TREE = """
    import sys
    from pathlib import Path
    from results.store import Store
    print(Store(Path(sys.argv[1])).ingest_tree(Path(sys.argv[2])))
"""
GROW_AND_INGEST = """
    import sys
    from pathlib import Path
    from results.store import Store
    store = Store(Path(sys.argv[1]))
    journals = sorted(Path(sys.argv[2]).glob("*/*/rank0.journal"))
    print("ready", flush=True)
    for journal in journals:
        data = journal.with_suffix(".full").read_bytes()
        while (size := journal.stat().st_size) < len(data):
            with journal.open("ab") as file:
                file.write(data[size : size + 3000])
            store.ingest(journal.parent)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_busy_database_is_waited_for(store: Store) -> None:
    holder = start(HOLD, store.path, 1.5)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    told: list[str] = []
    with pytest.raises(DatabaseBusy, match=f"process {holder.pid}"):
        Store(store.path, wait_s=0.2, on_wait=told.append).runs()
    with pytest.raises(DatabaseBusy):
        Store(store.path, read_only=True, wait_s=0.0).runs()
    assert Store(store.path, on_wait=told.append).runs() == []
    assert len(told) == 2
    assert all("waiting for" in line and f"process {holder.pid}" in line for line in told)
    assert holder.wait() == 0


def test_readers_share(store: Store) -> None:
    store.runs()
    with Store(store.path, read_only=True, wait_s=0.0):
        reader = start(HOLD.replace("argv[1])", "argv[1]), read_only=True, wait_s=0.0"), store.path, 0)
        assert reader.communicate(timeout=60)[0] == "held\n"


def test_two_processes_ingest_one_tree(run_folder: Make, store: Store, tmp_path: Path) -> None:
    for number in range(12):
        run_folder(f"k{number}").train(range(1, 51))
    pair = [start(INGEST_TREE, store.path, tmp_path / "journals") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert sum(int(output) for output in outputs) == 12
    assert store.query("SELECT count(*), count(DISTINCT (run_id, step, metric)) FROM measurements")[1] == [
        (1200, 1200)
    ]


def test_killed_ingestion_loses_and_doubles_nothing(run_folder: Make, store: Store, tmp_path: Path) -> None:
    journals = tmp_path / "journals"
    for number in range(8):
        run = run_folder(f"k{number}").train(range(1, 301))
        run.journal.rename(run.journal.with_suffix(".full"))
        run.journal.touch()
    randomness = random.Random(0)
    num_kills = 0
    for _ in range(10):
        process = start(GROW_AND_INGEST, store.path, journals)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(randomness.uniform(0.0, 0.2))
        process.kill()
        num_kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
        if store.path.exists():
            check_exact(Store(store.path, read_only=True), journals)
    assert num_kills >= 3
    process = start(GROW_AND_INGEST, store.path, journals)
    assert process.wait(timeout=60) == 0
    store.ingest_tree(journals)
    check_exact(store, journals)
    assert store.query("SELECT status, count(*) FROM runs GROUP BY ALL")[1] == [("ok", 8)]
    assert store.query("SELECT count(*) FROM measurements")[1] == [(8 * 300 * 2,)]


def check_exact(store: Store, journals: Path) -> None:
    """What is stored of each run is what its journal holds up to the stored offset."""
    with store:
        for row in store.runs():
            path = journals / row.key / "1" / "rank0.journal"
            offset = row.journal_bytes["0"]
            assert offset <= read_journal(path).num_bytes
            ends = [end for end, _ in split_records(path.read_bytes()) if end <= offset]
            assert ends[-1:] == ([offset] if offset else [])
            records = [r for r in read_journal(path).records[: len(ends)] if r["k"] == "m"]
            assert store.curve(row.key, "loss") == [(record["s"], record["v"]["loss"]) for record in records]
    assert store.query("SELECT count(*) - count(DISTINCT (run_id, rank, step, metric)) FROM measurements")[
        1
    ] == [(0,)]
