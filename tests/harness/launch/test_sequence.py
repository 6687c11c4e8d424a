"""Who is to blame, from flight files of made-up groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.launch.culprit import Ended, explain_group, explain_silence
from harness.launch.sequence import find_break
from harness.parallel.flight import FlightWriter, flight_path, read_flights
from results.journal import JournalWriter
from results.records import COMMUNICATION, ON_THIS_RANK

STEP = [("all_reduce", 4096), ("all_gather", 64), ("all_reduce", 8)]
HANG_S = 60.0
TWO, FOUR = (0, 1), (0, 1, 2, 3)

Operations = Sequence[tuple[str, int]]


def fly(
    run_dir: Path, rank: int, steps: Sequence[Operations], group: tuple[int, ...] = TWO, slots: int = 1024
) -> FlightWriter:
    """A rank that went through these steps, on one group; the last operation never came back."""
    flight = FlightWriter(flight_path(run_dir, rank), rank, len(group), slots)
    number = 0
    for step, operations in enumerate(steps, 1):
        flight.at_step(step)
        for op, num_bytes in operations:
            if number:
                flight.end(number)
            number = flight.begin(op, num_bytes, "float32", group)
    return flight


def blame(run_dir: Path) -> tuple[int | None, str]:
    found = find_break(read_flights(run_dir))
    assert found is not None
    return found.rank, found.text


def test_agreeing_ranks(tmp_path: Path) -> None:
    assert find_break({}) is None
    for rank in TWO:
        fly(tmp_path, rank, [STEP, STEP[:2]])
    assert find_break(read_flights(tmp_path)) is None
    assert explain_silence(tmp_path) == ""


@pytest.mark.parametrize("odd", TWO)
def test_of_two_the_one_that_left_its_habit(tmp_path: Path, odd: int) -> None:
    """Neither could go on: each stands in another collective at the same place."""
    fly(tmp_path, 1 - odd, [STEP, STEP, STEP[:1]])
    fly(tmp_path, odd, [STEP, STEP, STEP[1:2]])
    assert blame(tmp_path) == (odd, f"rank {odd} left out all_reduce #7 of ranks 0,1 (4,096 bytes) at step 3")


@pytest.mark.parametrize("odd", FOUR)
def test_of_four_the_minority(tmp_path: Path, odd: int) -> None:
    """In the first step nobody has a habit."""
    for rank in FOUR:
        fly(tmp_path, rank, [STEP[1:2] if rank == odd else STEP[:1]], FOUR)
    left_out = f"rank {odd} left out all_reduce #1 of ranks 0,1,2,3 (4,096 bytes) at step 1"
    assert blame(tmp_path) == (odd, left_out)


@pytest.mark.parametrize("odd", TWO)
def test_an_older_likeness_is_the_weaker_one(tmp_path: Path, odd: int) -> None:
    """With FSDP step 1 lacks the first gather, so that to leave it out looks like step 1."""
    first = STEP[1:]
    fly(tmp_path, 1 - odd, [first, STEP, STEP[:1]])
    fly(tmp_path, odd, [first, STEP, STEP[1:2]])
    assert blame(tmp_path)[0] == odd


@pytest.mark.parametrize("odd", TWO)
def test_shifted_where_there_is_no_habit(tmp_path: Path, odd: int) -> None:
    fly(tmp_path, 1 - odd, [STEP[:2]])
    fly(tmp_path, odd, [STEP[1:2]])
    assert blame(tmp_path) == (odd, f"rank {odd} left out all_reduce #1 of ranks 0,1 (4,096 bytes) at step 1")


def test_nothing_to_go_by(tmp_path: Path) -> None:
    fly(tmp_path, 0, [STEP[:1]])
    fly(tmp_path, 1, [STEP[1:2]])
    rank, text = blame(tmp_path)
    assert rank is None
    assert text == (
        "rank 0 was in all_reduce #1 of ranks 0,1 (4,096 bytes) at step 1 while "
        "rank 1 was in all_gather #1 of ranks 0,1 (64 bytes) at step 1"
    )


@pytest.mark.parametrize("odd", TWO)
@pytest.mark.parametrize("slots", [1024, 16])
def test_paired_up_off_by_one_until_the_end(tmp_path: Path, odd: int, slots: int) -> None:
    """All alike, so that the hole is noticed six steps later; in a ring that has gone round meanwhile or not."""
    step = [("all_reduce", 4), ("all_reduce", 4)]
    end = [*step, ("barrier", 0)]
    fly(tmp_path, 1 - odd, [step] * 9 + [step], slots=slots)
    fly(tmp_path, odd, [step] * 5 + [step[1:]] + [step] * 3 + [end], slots=slots)
    left_out = f"rank {odd} left out one of all_reduce #11 to #12 of ranks 0,1 (4 bytes) at step 6"
    assert blame(tmp_path) == (odd, left_out)


def test_the_only_collective_of_a_step(tmp_path: Path) -> None:
    step = [("all_reduce", 4)]
    fly(tmp_path, 0, [step] * 5)
    fly(tmp_path, 1, [step] * 3 + [[]] + [step])
    assert blame(tmp_path) == (1, "rank 1 left out all_reduce #4 of ranks 0,1 (4 bytes) at step 4")


def test_the_only_collective_of_the_first_step(tmp_path: Path) -> None:
    step = [("all_reduce", 4)]
    fly(tmp_path, 0, [step] * 3)
    fly(tmp_path, 1, [[], step, step])
    assert find_break(read_flights(tmp_path)) is not None
    for rank in FOUR:
        fly(tmp_path, rank, [[], step] if rank == 2 else [step, step], FOUR)
    assert blame(tmp_path) == (2, "rank 2 left out all_reduce #1 of ranks 0,1,2,3 (4 bytes) at step 1")


def test_another_in_its_place(tmp_path: Path) -> None:
    fly(tmp_path, 0, [STEP, STEP])
    fly(tmp_path, 1, [STEP, [("all_reduce", 5000), *STEP[1:]]])
    assert blame(tmp_path) == (
        1,
        "rank 1 issued all_reduce #4 of ranks 0,1 (5,000 bytes) in place of "
        "all_reduce #4 of ranks 0,1 (4,096 bytes) at step 2",
    )


def test_uneven_exchanges_are_no_difference(tmp_path: Path) -> None:
    fly(tmp_path, 0, [[("all_to_all", 100)], [("all_to_all", 120)]])
    fly(tmp_path, 1, [[("all_to_all", 60)], [("all_to_all", 8)]])
    assert find_break(read_flights(tmp_path)) is None


@pytest.mark.parametrize("odd", FOUR)
def test_the_absent_one(tmp_path: Path, odd: int) -> None:
    for rank in FOUR:
        fly(tmp_path, rank, [STEP, STEP[:2] if rank == odd else STEP], FOUR)
    assert blame(tmp_path) == (
        odd,
        f"rank {odd} did not come to all_reduce #6 of ranks 0,1,2,3 (8 bytes) at step 2",
    )
    assert explain_silence(tmp_path).endswith("; the others wait for it")


def test_a_chain_of_waiting_ends_at_who_waits_for_nobody(tmp_path: Path) -> None:
    """Rank 0 waits for 1 on their group, 1 for 2 on theirs, and 2 stands still."""
    fly(tmp_path, 0, [[("all_reduce", 4)]], (0, 1))
    fly(tmp_path, 1, [[("all_gather", 8)]], (1, 2))
    FlightWriter(flight_path(tmp_path, 2), 2, 3).at_step(1)
    assert blame(tmp_path) == (2, "rank 2 did not come to all_gather #1 of ranks 1,2 (8 bytes) at step 1")


def test_sends_and_receives_have_their_own_count(tmp_path: Path) -> None:
    fly(tmp_path, 0, [[("send", 4), ("all_reduce", 8), ("all_reduce", 8)]])
    fly(tmp_path, 1, [[("all_reduce", 8)]])
    assert blame(tmp_path)[0] == 1
    fly(tmp_path, 0, [[("all_reduce", 8), ("recv", 4)]])
    assert blame(tmp_path) == (1, "rank 1 did not come to recv #1 of ranks 0,1 (4 bytes) at step 1")


def test_a_send_left_out(tmp_path: Path) -> None:
    """Step 1 agrees on shapes first; from step 2 on each rank has its habit, which is not that of its neighbour."""
    first, send, receive = [("send", 99), ("send", 8)], [("send", 8), ("recv", 8)], [("recv", 8), ("send", 8)]
    fly(tmp_path, 0, [first, send, send, send[1:]])
    fly(tmp_path, 1, [first, receive, receive, receive[:1]])
    assert blame(tmp_path) == (0, "rank 0 left out send #7 of ranks 0,1 (8 bytes) at step 4")
    fly(tmp_path, 0, [first, send, send, send[:1]])
    found = find_break(read_flights(tmp_path))
    assert found is None or not found.differs


# The outcome: exit statuses and the ranks' own words come before the flight files.


@pytest.fixture
def say(tmp_path: Path) -> Callable[[int, str, str], None]:
    def write(rank: int, status: str, reason: str) -> None:
        journal = JournalWriter(tmp_path / f"rank{rank}.journal")
        journal.end(status, reason)
        journal.close()
        time.sleep(0.002)

    return write


LOST = f"{COMMUNICATION}RuntimeError: Connection closed by peer"


def test_killed_from_outside(tmp_path: Path, say: Callable[[int, str, str], None]) -> None:
    say(0, "crashed", LOST)
    fly(tmp_path, 1, [STEP] * 5)
    outcome = explain_group(tmp_path, [Ended(1, -9)], HANG_S)
    assert (outcome.status, outcome.rank, outcome.from_outside) == ("crashed", 1, True)
    assert outcome.reason == "rank 1 was killed by signal 9 at step 5"


def test_an_error_of_its_own_counts_more_than_a_lost_connection(
    tmp_path: Path, say: Callable[[int, str, str], None]
) -> None:
    say(0, "crashed", LOST)
    say(1, "oom", "more than 70 MB")
    outcome = explain_group(tmp_path, [Ended(0, 1)], HANG_S)
    assert (outcome.status, outcome.reason, outcome.rank) == ("oom", "rank 1: more than 70 MB", 1)


def test_ranks_that_say_the_same_have_no_culprit(
    tmp_path: Path, say: Callable[[int, str, str], None]
) -> None:
    for rank in TWO:
        say(rank, "diverged", "the loss is nan at step 3")
    assert explain_group(tmp_path, [Ended(0, 11)], HANG_S).reason == "the loss is nan at step 3"
    say(1, "diverged", f"the loss is nan at step 3{ON_THIS_RANK}")
    outcome = explain_group(tmp_path, [Ended(0, 11)], HANG_S)
    assert (outcome.reason, outcome.rank) == ("the loss is nan at step 3, first on rank 1", 1)


def test_a_rank_left_one_out(tmp_path: Path, say: Callable[[int, str, str], None]) -> None:
    fly(tmp_path, 0, [STEP, STEP[:1]])
    fly(tmp_path, 1, [STEP, STEP[1:2]])
    say(0, "hung", f"{COMMUNICATION}RuntimeError: Timed out")
    say(1, "hung", f"{COMMUNICATION}RuntimeError: Timed out")
    hung = explain_group(tmp_path, [Ended(0, 13)], HANG_S)
    left_out = "rank 1 left out all_reduce #4 of ranks 0,1 (4,096 bytes) at step 2"
    assert (hung.status, hung.reason, hung.rank) == ("hung", f"{left_out}; the other waits for it", 1)
    # Where the sizes do not fit, gloo may abort a rank that did nothing wrong.
    for rank in TWO:
        (tmp_path / f"rank{rank}.journal").unlink()
    crashed = explain_group(tmp_path, [Ended(0, -6)], HANG_S)
    assert crashed.status == "crashed"
    assert crashed.reason == f"{left_out}; what the ranks exchanged then did not fit"


def test_a_rank_that_earned_its_signal(tmp_path: Path, say: Callable[[int, str, str], None]) -> None:
    say(0, "crashed", LOST)
    fly(tmp_path, 0, [STEP, STEP])
    fly(tmp_path, 1, [STEP])
    outcome = explain_group(tmp_path, [Ended(1, -11)], HANG_S)
    assert (outcome.status, outcome.from_outside) == ("crashed", False)
    assert outcome.reason == "rank 1 was killed by signal 11 (SIGSEGV) at step 1"


def test_without_any_word(tmp_path: Path) -> None:
    assert explain_group(tmp_path, [Ended(1, 3)], HANG_S).reason == "rank 1 ended with exit status 3"


def test_nccl_aborts_who_waited_too_long(tmp_path: Path) -> None:
    fly(tmp_path, 0, [STEP, STEP])
    fly(tmp_path, 1, [STEP])
    time.sleep(0.1)
    outcome = explain_group(tmp_path, [Ended(0, -6)], hang_s=0.1)
    missing = (
        "rank 1 did not come to all_reduce #4 of ranks 0,1 (4,096 bytes) at step 2; the other waits for it"
    )
    assert (outcome.status, outcome.reason, outcome.rank) == ("hung", missing, 1)


def test_wrong_pairs_that_made_wrong_numbers(tmp_path: Path, say: Callable[[int, str, str], None]) -> None:
    fly(tmp_path, 0, [STEP, STEP])
    fly(tmp_path, 1, [STEP, STEP[1:]])
    for rank in TWO:
        say(rank, "diverged", "the loss is nan at step 2")
    outcome = explain_group(tmp_path, [Ended(0, 11)], HANG_S)
    assert (outcome.status, outcome.rank) == ("diverged", 1)
    assert outcome.reason.startswith("rank 1 left out all_reduce #4")
    assert outcome.reason.endswith("at step 2; the loss is nan at step 2")
