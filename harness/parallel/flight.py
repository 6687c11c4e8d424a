"""What a rank communicated last, in a small file that outlives it: `rankN.flight` in the run's folder.

    flight = FlightWriter(run_dir / "rank0.flight", rank=0, num_ranks=2)
    flight.at_step(5)
    number = flight.begin("all_reduce", 4096, "float32", (0, 1))
    ...the collective...
    flight.end(number)

    read_flight(path).records[-1]       # Record(number=1, step=5, op="all_reduce", num_bytes=4096, ...)

The file is mapped into memory, so that a record costs about a microsecond and no system call, and the kernel keeps what
a killed process wrote. It is a ring: of a long run it holds the last `slots` records. Reading needs no torch.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"flight2\n"
_HEADER = struct.Struct(
    "<8sIIIId"
)  # magic, slots, rank, ranks of the run, bytes of names, seconds of at_step
_STEP = struct.Struct("<q")
_STEP_AT = 40
_RECORD = struct.Struct("<QQIIidd")  # number, bytes, number in its group, name, step, started, ended
_ENDED_AT = _RECORD.size - 8
_ENDED = struct.Struct("<d")
_NAMES_AT = 64
_NAMES_BYTES = 65536 - _NAMES_AT
"""Room for the names: each kind of operation on each group is spelt out once, as a line of JSON."""
_RECORDS_AT = _NAMES_AT + _NAMES_BYTES

SLOTS = 8192
POINT_TO_POINT = ("send", "recv")
"""Operations of two ranks, which the others of their group know nothing of."""


@dataclass(frozen=True)
class Record:
    """One operation of one rank."""

    number: int
    """Counted from 1 over all operations of the rank."""
    place: int
    """Counted from 1 over its group's collectives, which the ranks of a group must issue alike; sends and receives have
    their own count."""
    step: int
    op: str
    num_bytes: int
    dtype: str
    group: tuple[int, ...]
    """Ranks taking part, in order."""
    started: float
    """Seconds on the machine's monotonic clock."""
    ended: float | None
    """None: it had not come back."""


@dataclass(frozen=True)
class Flight:
    """What a rank's file says."""

    rank: int
    num_ranks: int
    step: int
    """The training step the rank was at; 0 before the first."""
    step_at: float
    """When it began that step, on the machine's monotonic clock."""
    records: tuple[Record, ...]
    """Oldest first."""


def _truncate(fd: int, _start: int, size: int) -> None:
    os.ftruncate(fd, size)


class FlightWriter:
    """Writes one rank's file. Not thread-safe: a rank issues its operations from one thread at a time."""

    def __init__(self, path: Path, rank: int, num_ranks: int, slots: int = SLOTS) -> None:
        self._slots, self._rank, self._num_ranks = slots, rank, num_ranks
        size = _RECORDS_AT + slots * _RECORD.size
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            # Taken from the disk now: on a full one, writing to a mapped hole would kill the process.
            getattr(os, "posix_fallocate", _truncate)(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._count = 0
        self._step = 0
        self._names: dict[tuple[str, str, tuple[int, ...]], tuple[int, int]] = {}
        """(op, dtype, group) -> (number of its name, index of its counter)."""
        self._counters: dict[tuple[tuple[int, ...], bool], int] = {}
        self._places: list[int] = []
        self._names_bytes = 0
        self._is_full = False
        self._write_header()

    def at_step(self, step: int) -> None:
        """The rank begins this training step."""
        self._step = step
        _STEP.pack_into(self._map, _STEP_AT, step)
        self._write_header()

    def begin(self, op: str, num_bytes: int, dtype: str, group: tuple[int, ...]) -> int:
        """An operation is about to be issued; returns its number, for `end`."""
        found = self._names.get((op, dtype, group))
        name, counter = found if found is not None else self._add_name(op, dtype, group)
        self._count = number = self._count + 1
        self._places[counter] = place = self._places[counter] + 1
        _RECORD.pack_into(
            self._map, _RECORDS_AT + number % self._slots * _RECORD.size,
            number, num_bytes, place, name, self._step, time.monotonic(), 0.0,
        )  # fmt: skip
        return number

    def end(self, number: int) -> None:
        """The operation has come back; nothing happens when the ring has gone round since."""
        if self._count - number < self._slots:
            at = _RECORDS_AT + number % self._slots * _RECORD.size + _ENDED_AT
            _ENDED.pack_into(self._map, at, time.monotonic())

    def _add_name(self, op: str, dtype: str, group: tuple[int, ...]) -> tuple[int, int]:
        counter = self._counters.setdefault((group, op in POINT_TO_POINT), len(self._places))
        if counter == len(self._places):
            self._places.append(0)
        line = json.dumps([op, dtype, group], separators=(",", ":")).encode() + b"\n"
        if self._names_bytes + len(line) > _NAMES_BYTES:
            self._is_full = True
        if not self._is_full:  # the reader finds a name by its line's number, so none may be left out between
            at = _NAMES_AT + self._names_bytes
            self._map[at : at + len(line)] = line
            self._names_bytes += len(line)
            self._write_header()
        found = self._names[op, dtype, group] = len(self._names), counter
        return found

    def _write_header(self) -> None:
        _HEADER.pack_into(
            self._map, 0, _MAGIC, self._slots, self._rank, self._num_ranks, self._names_bytes, time.monotonic()
        )  # fmt: skip


def flight_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's file lies."""
    return run_dir / f"rank{rank}.flight"


def read_flight(path: Path) -> Flight:
    """A rank's file, also while it is being written. Raises ValueError where it is none, OSError where it is absent."""
    data = path.read_bytes()
    if len(data) < _RECORDS_AT or data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} is not a flight file")
    _, slots, rank, num_ranks, names_bytes, step_at = _HEADER.unpack_from(data)
    names = [json.loads(line) for line in data[_NAMES_AT : _NAMES_AT + names_bytes].splitlines()]
    records = []
    for slot in range(min(slots, (len(data) - _RECORDS_AT) // _RECORD.size)):
        at = _RECORDS_AT + slot * _RECORD.size
        number, num_bytes, place, name, step, started, ended = _RECORD.unpack_from(data, at)
        if number == 0 or number % slots != slot:
            continue
        op, dtype, group = names[name] if name < len(names) else ("operation", "", [])
        records.append(
            Record(number, place, step, op, num_bytes, dtype, tuple(group), started, ended or None)
        )
    records.sort(key=lambda record: record.number)
    (step,) = _STEP.unpack_from(data, _STEP_AT)
    return Flight(rank, num_ranks, step, step_at, tuple(records))


def read_flights(run_dir: Path) -> dict[int, Flight]:
    """Rank -> what its file says, for the ranks of a run that have a readable one."""
    flights = {}
    for path in run_dir.glob("rank*.flight"):
        try:
            flight = read_flight(path)
        except (OSError, ValueError):
            continue
        flights[flight.rank] = flight
    return dict(sorted(flights.items()))
