"""The ring file of a rank's operations."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.parallel.flight import FlightWriter, read_flight, read_flights

RANKS = (0, 1)


def test_a_full_disk_is_an_error_and_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        FlightWriter(tmp_path / "rank0.flight", 0, 2)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    flight = FlightWriter(tmp_path / "rank1.flight", 1, 2)
    first = flight.begin("broadcast", 10, "int64", RANKS)
    flight.end(first)
    flight.at_step(3)
    flight.begin("all_reduce", 2**40, "float32", RANKS)
    flight.begin("send", 8, "bfloat16", RANKS)
    flight.begin("all_gather", 0, "float8_e4m3fn", (0, 1, 5))
    read = read_flight(tmp_path / "rank1.flight")
    assert (read.rank, read.num_ranks, read.step) == (1, 2, 3)
    assert [(r.number, r.place, r.step, r.op, r.num_bytes, r.dtype, r.group) for r in read.records] == [
        (1, 1, 0, "broadcast", 10, "int64", RANKS),
        (2, 2, 3, "all_reduce", 2**40, "float32", RANKS),
        (3, 1, 3, "send", 8, "bfloat16", RANKS),
        (4, 1, 3, "all_gather", 0, "float8_e4m3fn", (0, 1, 5)),
    ]
    done, *open_ones = read.records
    assert done.ended is not None and done.ended >= done.started > 0
    assert all(record.ended is None for record in open_ones)


def test_a_ring_keeps_the_last(tmp_path: Path) -> None:
    flight = FlightWriter(tmp_path / "rank0.flight", 0, 1, slots=8)
    numbers = [flight.begin("all_reduce", size, "float32", RANKS) for size in range(30)]
    flight.end(numbers[0])  # long overwritten: nothing happens
    flight.end(numbers[-1])
    records = read_flight(tmp_path / "rank0.flight").records
    assert [record.num_bytes for record in records] == list(range(22, 30))
    assert [record.place for record in records] == list(range(23, 31))
    assert [record.ended is None for record in records] == [True] * 7 + [False]


def test_more_groups_than_there_is_room_for(tmp_path: Path) -> None:
    flight = FlightWriter(tmp_path / "rank0.flight", 0, 9)
    groups = [tuple(range(first, first + 800)) for first in range(40)]
    for group in groups:
        flight.begin("all_reduce", 4, "float32", group)
    flight.begin("all_reduce", 4, "float32", (7,))
    records = read_flight(tmp_path / "rank0.flight").records
    assert len(records) == 41
    known = [record for record in records if record.op == "all_reduce"]
    assert [record.group for record in known] == groups[: len(known)]
    assert 5 < len(known) < 40
    assert {record.op for record in records[len(known) :]} == {"operation"}


def test_what_a_killed_process_wrote_is_there(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from harness.parallel.flight import FlightWriter\n"
        "flight = FlightWriter(Path(sys.argv[1]), 0, 2); flight.at_step(5)\n"
        "flight.begin('all_reduce', 4, 'float32', (0, 1)); assert 'torch' not in sys.modules\n"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path / "rank0.flight")], env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    (record,) = read_flights(tmp_path)[0].records
    assert (record.step, record.op, record.ended) == (5, "all_reduce", None)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "rank0.flight").write_bytes(b"something else" * 9000)
    (tmp_path / "rank1.flight").write_bytes(b"")
    with pytest.raises(ValueError, match="not a flight file"):
        read_flight(tmp_path / "rank0.flight")
    assert read_flights(tmp_path) == {}


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts calls in /proc")
def test_a_record_makes_no_system_call(tmp_path: Path) -> None:
    flight = FlightWriter(tmp_path / "rank0.flight", 0, 2)
    before = Path("/proc/self/io").read_text()
    for _ in range(1000):
        flight.end(flight.begin("all_reduce", 4, "float32", RANKS))
    after = Path("/proc/self/io").read_text()
    (writes,) = [line for line in before.splitlines() if line.startswith("syscw")]
    assert writes in after.splitlines()
