"""From a run's folder to rows, in one transaction that may be repeated at any time.

`runs.journal_bytes` holds, per rank, how far its journal has been read. The rows past that offset and the new
offset are committed together, so a crash leaves either both or neither, and reading again adds nothing twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results.database import StoreError
from results.journal import MEASURE_PREFIX, split_records
from results.records import COMMUNICATION, INTERRUPTED, OK, SKIPPED
from results.rows import find_run, noted_fidelity, request_columns, save_environment, to_time, write_run

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Measurement = tuple[str, int, int, str, str, float | None]


class BadRunFolder(StoreError):  # noqa: N818
    """A folder that does not hold a run's request."""


@dataclass
class Facts:
    """What the journals of one attempt say, apart from the measurements."""

    started_at: datetime | None = None
    environment: dict[str, Any] | None = None
    ends: dict[int, tuple[str, str, datetime]] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_parameters: int | None = None
    resume: tuple[str, int] | None = None
    final_checkpoint: str | None = None
    num_bytes: dict[int, int] = field(default_factory=dict)
    """rank -> bytes of whole records."""
    damage: list[str] = field(default_factory=list)


def read_request(run_dir: Path) -> dict[str, Any]:
    """The request of a run's folder, its `run.json`. Raises BadRunFolder where that is missing or damaged."""
    path = run_dir / "run.json"
    try:
        request = json.loads(path.read_bytes())
        if not isinstance(request["key"], str) or not isinstance(request["attempt"], int):
            raise BadRunFolder(f"{path}: key must be a text and attempt a whole number")
        if not isinstance(request["spec"], dict):
            raise BadRunFolder(f"{path}: spec must be a mapping")
    except FileNotFoundError:
        raise BadRunFolder(f"{run_dir} is not the folder of a run: it has no run.json") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadRunFolder(
            f"{path} is damaged ({type(error).__name__}: {error}); remove {run_dir} to forget this attempt"
        ) from None
    return request  # type: ignore[no-any-return]


def journal_sizes(run_dir: Path) -> dict[int, int]:
    """rank -> size in bytes of its journal."""
    sizes = {}
    for path in run_dir.glob("rank*.journal"):
        rank = path.name.removeprefix("rank").removesuffix(".journal")
        if rank.isdigit():
            sizes[int(rank)] = path.stat().st_size
    return dict(sorted(sizes.items()))


def ingest_run(
    connection: DuckDBPyConnection, run_dir: Path, *, status: str | None = None, reason: str | None = None
) -> bool:
    """Bring the database up to a run's folder, in the caller's transaction; False where it had everything.

    The run's status is what its journals' `end` records say, else `status`, else what the database has, else
    `interrupted`.
    """
    request = read_request(run_dir)
    contents = {rank: (run_dir / f"rank{rank}.journal").read_bytes() for rank in journal_sizes(run_dir)}
    key = request["key"]
    attempt, stored = find_run(connection, key, request["attempt"], started_at(contents.get(0, b"")))
    run_id = f"{key}.{attempt}"
    had = {int(rank): offset for rank, offset in (stored or {}).get("journal_bytes", {}).items()}
    facts, rows = _read_journals(run_id, contents, had)
    if any(facts.num_bytes.get(rank, 0) < offset for rank, offset in had.items()):
        return False  # these journals were shortened since: the database knows more than they do
    row = _run_row(request, facts, stored, len(contents), status, reason)
    row |= {"run_id": run_id, "attempt": attempt}
    if facts.environment is not None:
        row["environment_id"] = save_environment(connection, facts.environment)
    if stored is not None and _text({name: stored[name] for name in row}) == _text(row):
        return False
    if rows:
        appender = connection.appender("measurements")
        appender.append_rows(rows)
        appender.flush()
    write_run(connection, row, is_stored=stored is not None)
    return True


def _text(row: Mapping[str, Any]) -> str:
    """A row for comparison; unlike values, texts of NaN are equal."""
    return json.dumps(row, sort_keys=True, default=str)


def started_at(rank0: bytes) -> datetime | None:
    """When a run started: its rank 0 journal, or the beginning of it, says so in the first record."""
    for _, body in split_records(rank0):
        record = json.loads(body)
        return to_time(record["t"]) if record["k"] == "start" else None
    return None


def _read_journals(
    run_id: str, contents: Mapping[int, bytes], had: Mapping[int, int]
) -> tuple[Facts, list[Measurement]]:
    """Facts from the whole journals, measurements from beyond what the database has."""
    facts = Facts()
    rows: list[Measurement] = []
    for rank, data in contents.items():
        offset = had.get(rank, 0)
        position = 0
        for position, body in split_records(data):
            if not body.startswith(MEASURE_PREFIX):
                _take(facts, rank, json.loads(body))
            elif position > offset:
                record = json.loads(body)
                step, scope = record["s"], record.get("c", "")
                rows += [
                    (run_id, rank, step, name, scope, None if value is None else float(value))
                    for name, value in record["v"].items()
                ]
                if record["v"].get("num_parameters") is not None and not scope:
                    facts.num_parameters = int(record["v"]["num_parameters"])
        facts.num_bytes[rank] = position
        if position < len(data):
            facts.damage.append(f"rank {rank}'s is cut or damaged after byte {position} of {len(data)}")
    return facts, rows


def _take(facts: Facts, rank: int, record: dict[str, Any]) -> None:
    """Add a record other than a measurement."""
    kind = record["k"]
    if kind == "start" and facts.environment is None:
        facts.environment = record["environment"]
        if rank == 0:
            facts.started_at = to_time(record["t"])
    elif kind == "note":
        facts.notes.setdefault(record["n"], {"value": record["v"], "reason": record["r"]})
    elif kind == "checkpoint" and rank == 0:
        if record["final"]:
            facts.final_checkpoint = record["sha256"]
        else:
            facts.resume = (record["sha256"], record["s"])
    elif kind == "end":
        facts.ends[rank] = (record["status"], record["reason"], to_time(record["t"]))


def _run_row(
    request: Mapping[str, Any],
    facts: Facts,
    stored: Mapping[str, Any] | None,
    num_journals: int,
    status: str | None,
    reason: str | None,
) -> dict[str, Any]:
    """The columns of `runs`, run_id and attempt apart, from the request and its journals."""
    before = stored or {}
    bad = [end for end in facts.ends.values() if end[0] != OK]
    bad.sort(key=lambda end: end[1].startswith(COMMUNICATION))  # such a rank tells of another's death
    ended_at = max((end[2] for end in facts.ends.values()), default=None)
    if bad:
        status, reason, _ = bad[0]
    elif facts.ends and len(facts.ends) == max(num_journals, request.get("num_ranks", 1)):
        status, reason, _ = next(iter(facts.ends.values()))
    elif status is None and before.get("status") not in (None, SKIPPED, INTERRUPTED):
        status, reason = before["status"], before["reason"]
    elif status is None:
        status = INTERRUPTED
        missing = request.get("num_ranks", 1) - num_journals
        lost = f"{missing} of {request.get('num_ranks')} ranks' journals are missing" if missing > 0 else ""
        reason = reason or "; ".join([lost or "no journal with an end record", *facts.damage])
    resume = facts.resume or (None, None)
    columns = request_columns(request)
    return {
        **columns,
        "fidelity": noted_fidelity(facts.notes) or columns["fidelity"],
        "environment_id": before.get("environment_id"),
        "status": status,
        "reason": reason or "",
        "num_parameters": facts.num_parameters or before.get("num_parameters"),
        "started_at": facts.started_at,
        "ended_at": ended_at,
        "final_checkpoint": facts.final_checkpoint,
        "resume_checkpoint": resume[0],
        "resume_step": resume[1],
        "notes": {**(request.get("auto") or {}), **facts.notes},
        "journal_bytes": {str(rank): num_bytes for rank, num_bytes in facts.num_bytes.items()},
    }
