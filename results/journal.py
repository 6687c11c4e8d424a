"""Append-only journals: what a rank of a run has done so far, readable up to the last whole record.

One record a line: `<number of bytes of JSON> <CRC-32 of JSON, 8 hex digits> <JSON>` and a newline. Each
record is one `write` to the file, so a killed process loses nothing that it recorded; records that change a
run's state are synced to the disk too, for a machine that dies. Reading stops at the first line that is not
whole.

Look at one:  python -m results.journal out/journals/KEY/1/rank0.journal
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from results.records import STATUSES

MEASURE_PREFIX = b'{"k":"m"'
"""How every measurement record starts, so that a reader can skip them without parsing."""

_BEAT_S = 1.0


class JournalWriter:
    """Writes the journal of one rank.

    An existing file is continued after its last whole record. Floats come back bit for bit (JSON of
    shortest exact decimals, with NaN, Infinity and -Infinity as literals). Not thread-safe.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.truncate(path, read_journal(path).num_bytes)
        self._file = path.open("ab", buffering=0)
        self._last_write = 0.0

    def start(self, environment: dict[str, Any], rank: int = 0) -> None:
        """The rank is alive: when, where (`describe_environment()`) and as which process."""
        record = {
            "k": "start",
            "t": time.time(),
            "environment": environment,
            "pid": os.getpid(),
            "rank": rank,
        }
        self._write_json(record, sync=True)

    def measure(self, step: int, values: Mapping[str, float | None], scope: str = "") -> None:
        """Values of one step by metric name (floats, or scalars that `float` takes); None is a missing value,
        whose reason a note gives.

        Step 0 is before training, steps 1..num_steps are those of training.
        """
        record: dict[str, Any] = {"k": "m", "s": int(step)}
        if scope:
            record["c"] = scope
        record["v"] = dict(values)
        # pydantic's writer is as exact as json's, and several times faster at floats.
        self._write(to_json(record, inf_nan_mode="constants", fallback=float))

    def note(self, name: str, value: Any, reason: str) -> None:
        """A value chosen automatically, or a missing one (None), with the reason."""
        self._write_json({"k": "note", "n": name, "v": value, "r": reason}, sync=True)

    def checkpoint(self, step: int, sha256: str, final: bool = False) -> None:
        """A checkpoint, already on disk, holding the state after `step`; `final` for the run's result."""
        self._write_json({"k": "checkpoint", "s": step, "sha256": sha256, "final": final}, sync=True)

    def beat(self) -> None:
        """Sign of life without data: touches the file, at most once a second."""
        if time.monotonic() - self._last_write > _BEAT_S:
            self._write_json({"k": "beat"})

    def end(self, status: str, reason: str = "") -> None:
        """The run's outcome as the rank itself sees it; `status` is one of STATUSES."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is not one of {', '.join(STATUSES)}")
        self._write_json({"k": "end", "t": time.time(), "status": status, "reason": reason}, sync=True)

    def close(self) -> None:
        self._file.close()

    def _write_json(self, record: dict[str, Any], *, sync: bool = False) -> None:
        self._write(json.dumps(record, separators=(",", ":")).encode())
        if sync:
            os.fsync(self._file.fileno())

    def _write(self, body: bytes) -> None:
        line = b"%d %08x %b\n" % (len(body), zlib.crc32(body), body)
        written = self._file.write(line)
        while written < len(line):  # a nearly full disk takes a part; the next write raises
            written += self._file.write(line[written:])
        self._last_write = time.monotonic()


@dataclass(frozen=True)
class Journal:
    """What could be read of a journal."""

    records: list[dict[str, Any]]
    num_bytes: int
    """Bytes of whole records, from the beginning."""
    cut: bool
    """True where bytes follow that are no whole record."""


def read_journal(path: Path) -> Journal:
    """All whole records of a journal, up to the first damaged or unfinished line."""
    data = path.read_bytes()
    records: list[dict[str, Any]] = []
    num_bytes = 0
    for num_bytes, body in split_records(data):  # noqa: B007
        records.append(json.loads(body))
    return Journal(records, num_bytes, num_bytes < len(data))


def split_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset just past the record's line, its JSON) for every whole record from the beginning of `data`."""
    position = 0
    while True:
        space = data.find(b" ", position, position + 12)
        digits = data[position:space]
        if space < 0 or not digits.isdigit():
            return
        begin = space + 10
        end = begin + int(digits)
        body = data[begin:end]
        if data[end : end + 1] != b"\n" or data[space + 1 : begin] != b"%08x " % zlib.crc32(body):
            return
        position = end + 1
        yield position, body


if __name__ == "__main__":
    for line in read_journal(Path(sys.argv[1])).records:
        print(json.dumps(line))
