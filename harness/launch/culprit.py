"""Which rank of a group is to blame for its end, and what it did.

Evidence, the strongest first: a rank killed by a signal; a rank's own word in its journal about an error that is not of
communication; the flight files, for ranks that waited in vain or did not fit together. What a rank says of a lost
connection is the least: it tells of somebody else. Needs no torch.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.launch.base import SIGNALLED_FROM_OUTSIDE
from harness.launch.sequence import Break, find_break
from harness.parallel.flight import Flight, flight_path, read_flight, read_flights
from results.journal import read_journal
from results.records import COMMUNICATION, ON_THIS_RANK

GAVE_UP_SHARE = 0.75
"""Of limits.hang_s; collectives time out after a little more (harness.parallel.group.TIMEOUT_SHARE)."""


@dataclass(frozen=True)
class Ended:
    """A rank that failed, and its exit status or minus its signal."""

    rank: int
    code: int


@dataclass(frozen=True)
class Outcome:
    """What became of a group."""

    status: str
    reason: str
    rank: int | None = None
    """The culprit; None where nobody in particular, or nobody knows."""
    from_outside: bool = False
    """Somebody killed a rank, which says nothing about the run."""


@dataclass(frozen=True)
class _Word:
    """A rank's end record."""

    rank: int
    status: str
    reason: str
    at: float

    @property
    def is_of_communication(self) -> bool:
        return self.reason.startswith(COMMUNICATION)


def explain_group(run_dir: Path, ends: Sequence[Ended], hang_s: float) -> Outcome:
    """What became of the group in `run_dir` whose first failed ranks are `ends`; `hang_s` as in the run's limits."""
    for end in ends:
        if -end.code in SIGNALLED_FROM_OUTSIDE:
            reason = f"rank {end.rank} was killed by signal {-end.code}{_at_step(run_dir, end.rank)}"
            return Outcome("crashed", reason, end.rank, from_outside=True)
    flights = read_flights(run_dir)
    found = find_break(flights)
    words = _words(run_dir)
    own = [word for word in words if not word.is_of_communication]
    if own:
        outcome = _own_words(own)
        if found is None or not found.differs:
            return outcome
        # Collectives that paired up wrongly brought wrong numbers before they brought an error.
        return Outcome(outcome.status, f"{found.text}; {outcome.reason}", found.rank)
    signalled = next((end for end in ends if end.code < 0), None)
    gave_up = signalled is not None and _gave_up(flights, signalled.rank, hang_s)
    if signalled is not None and not gave_up and (found is None or not found.differs):
        return Outcome("crashed", _describe_signal(run_dir, signalled), signalled.rank)
    status = "hung" if gave_up or any(word.status == "hung" for word in words) else "crashed"
    if found is not None:
        return Outcome(status, _tell(found, status == "hung", len(flights)), found.rank)
    if words:
        return Outcome(status, f"rank {words[0].rank}: {words[0].reason}")
    rank, code = (ends[0].rank, ends[0].code) if ends else (0, 1)
    return Outcome("crashed", f"rank {rank} ended with exit status {code}{_at_step(run_dir, rank)}", rank)


def _gave_up(flights: Mapping[int, Flight], rank: int, hang_s: float) -> bool:
    """Whether a rank that aborted had waited as long as a collective may: NCCL ends the process then."""
    records = flights[rank].records if rank in flights else ()
    return bool(records) and time.monotonic() - records[-1].started > GAVE_UP_SHARE * hang_s


def explain_silence(run_dir: Path) -> str:
    """Of a group that shows no sign of life: who keeps the others waiting; empty where the files do not tell."""
    flights = read_flights(run_dir)
    found = find_break(flights)
    return _tell(found, True, len(flights)) if found is not None else ""


def _tell(found: Break, hung: bool, num_ranks: int) -> str:
    """The break, and what came of it."""
    if not hung:
        return f"{found.text}; what the ranks exchanged then did not fit"
    if found.rank is None:
        return found.text
    return f"{found.text}; the other{' waits' if num_ranks == 2 else 's wait'} for it"


def _own_words(own: Sequence[_Word]) -> Outcome:
    """The reason of the first rank that failed; ranks that say the same together are no culprits."""
    first = own[0]
    here = [word for word in own if word.reason.endswith(ON_THIS_RANK)]
    if here:
        reason = here[0].reason.removesuffix(ON_THIS_RANK)
        if len(here) == len(own) > 1:
            return Outcome(here[0].status, reason)
        ranks = ",".join(str(word.rank) for word in sorted(here, key=lambda word: word.rank))
        return Outcome(
            here[0].status, f"{reason}, first on rank{'s' if len(here) > 1 else ''} {ranks}", here[0].rank
        )
    if len(own) > 1 and all((word.status, word.reason) == (first.status, first.reason) for word in own):
        return Outcome(first.status, first.reason)
    return Outcome(first.status, f"rank {first.rank}: {first.reason}", first.rank)


def _words(run_dir: Path) -> list[_Word]:
    """What ranks that failed wrote about their end, in the order of time."""
    words = []
    for path in run_dir.glob("rank*.journal"):
        number = path.stem.removeprefix("rank")
        ends = [record for record in read_journal(path).records if record["k"] == "end"]
        if number.isdigit() and ends and ends[-1]["status"] != "ok":
            words.append(_Word(int(number), ends[-1]["status"], ends[-1]["reason"], ends[-1]["t"]))
    return sorted(words, key=lambda word: (word.at, word.rank))


def _describe_signal(run_dir: Path, end: Ended) -> str:
    number = -end.code
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    return f"rank {end.rank} was killed by signal {number} ({name}){_at_step(run_dir, end.rank)}"


def _at_step(run_dir: Path, rank: int) -> str:
    """` at step 5`, where the rank's flight file says so."""
    try:
        step = read_flight(flight_path(run_dir, rank)).step
    except (OSError, ValueError):
        return ""
    return f" at step {step}" if step else ""
