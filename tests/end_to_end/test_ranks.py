"""Runs of several ranks that fail: the status, the culprit named, nothing left behind.

Each round is one command with a run a fault, every one of which must be told apart. SUITE_RANK_ROUNDS=20 does twenty,
in turn with two and with four ranks; SUITE_RANK_FAULTS=kill,skip-collective does those alone.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench import Bench, Command, until

from results.journal import read_journal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the command's processes in /proc"),
]

ROUNDS = int(os.environ.get("SUITE_RANK_ROUNDS", "1"))
HANG_S = 20
"""Far above the silence of a busy machine."""
SHORT_HANG_S = 6
"""Of the runs that will hang."""
CASE = """
question: What becomes of a run of several ranks when one of them fails?
base:
  model: llama-0.6m
  precision: fp32
  tokens: 1600
  batch_size: 4
  seq_len: 50
  val_tokens: 200
  limits.hang_s: {hang_s}
matrix: {{parallelism: [{scheme}], seed: [0]}}
include:
{faults}
"""
FAULTS = {
    "kill": ("crashed", r"rank {rank} was killed by signal 9 at step {step}"),
    "skip-collective": (
        "(crashed|hung)",
        r"rank {rank} (left out|issued .* in place of) .* of ranks {ranks} \([0-9,]+ bytes\) at step {step}; .*",
    ),
    "hang": ("hung", r"rank {rank} did not come to .* of ranks {ranks} \([0-9,]+ bytes\) at step {step}; .*"),
    "crash": ("crashed", r"rank {rank} was killed by signal 6 \(SIGABRT\) at step {step}"),
    "nan": ("diverged", r"the loss is nan at step {step}, first on rank {rank}"),
}
CHOSEN = os.environ.get("SUITE_RANK_FAULTS", ",".join(FAULTS)).split(",")


def write_case(scheme: str, rank: int, step: int) -> str:
    """A healthy run, and one a fault at this rank and step."""
    lines = [
        f"  - {{parallelism: {scheme}, seed: {seed}, fault.kind: {kind}, fault.step: {step}, fault.rank: {rank}"
        + (f", limits.hang_s: {SHORT_HANG_S}}}" if kind == "hang" else "}")
        for seed, kind in enumerate(CHOSEN, 1)
    ]
    return CASE.format(hang_s=HANG_S, scheme=scheme, faults="\n".join(lines))


@pytest.mark.parametrize("round", range(ROUNDS))
def test_the_culprit_is_named(make_bench: Callable[[str], Bench], round: int) -> None:
    moments = random.Random(round)
    num_ranks, scheme = ((2, "ddp-2"), (4, "ddp-4"), (2, "zero3-2"), (4, "zero3-2-tp2"))[round % 4]
    rank, step = moments.randrange(num_ranks), moments.randrange(3, 8)
    bench = make_bench(write_case(scheme, rank, step))
    ended = bench.run("run", bench.case)
    assert ended.code == 3, ended.stderr
    bench.assert_no_orphan()
    rows = {row.labels["seed"]: row for row in bench.store().runs()}
    assert rows.pop(0).status == "ok"
    for seed, kind in enumerate(CHOSEN, 1):
        row = rows[seed]
        status, reason = FAULTS[kind]
        group = r"[0-9,]+" if num_ranks == 4 else "0,1"
        assert re.fullmatch(status, row.status), (kind, row)
        assert re.fullmatch(reason.format(rank=rank, step=step, ranks=group), row.reason), (kind, row)
        folder = bench.folder / "out" / "journals" / row.key / "1"
        assert len([*folder.glob("rank*.journal")]) == num_ranks
        assert row.ended_at is not None and row.started_at is not None
        assert (row.ended_at - row.started_at).total_seconds() < HANG_S + 3.0
        # What was killed, be it by itself, is tried once more.
        assert len([*folder.parent.glob("[0-9]*")]) == (2 if kind == "kill" else 1)


def busy_ranks(bench: Bench, num_ranks: int) -> dict[int, int]:
    """Rank -> pid, once all ranks of the only run have begun."""
    found = {}
    for path in bench.folder.glob("out/journals/*/1/rank*.journal"):
        starts = [record for record in read_journal(path).records if record["k"] == "start"]
        if starts:
            found[starts[0]["rank"]] = starts[0]["pid"]
    return found if len(found) == num_ranks else {}


def start_long_run(bench: Bench) -> tuple[Command, dict[int, int]]:
    command = bench.start("run", bench.case)
    until(lambda: bool(busy_ranks(bench, 2)), "both ranks have begun")
    time.sleep(0.3)
    return command, busy_ranks(bench, 2)


LONG = """
question: Who ends what?
base: {model: llama-0.3m, precision: fp32, tokens: 4M, batch_size: 4, seq_len: 64, val_tokens: 0}
matrix: {parallelism: [ddp-2]}
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("who", ["suite", "zygote", "agent"])
def test_whoever_is_killed_takes_the_ranks_along(
    make_bench: Callable[[str], Bench], who: str, number: int
) -> None:
    bench = make_bench(LONG)
    command, ranks = start_long_run(bench)
    parents = {process.pid: process.parent for process in bench.processes()}
    agent = parents[ranks[0]]
    assert agent == parents[ranks[1]]
    victims = {"suite": command.popen.pid, "zygote": parents[agent], "agent": agent}
    assert parents[victims["zygote"]] == command.popen.pid
    os.kill(victims[who], number)
    until(lambda: not {agent, *ranks.values()} & {process.pid for process in bench.processes()}, "all dead")
    if who != "suite":
        command.popen.send_signal(signal.SIGTERM)
    command.wait()
    bench.assert_no_orphan()


def test_a_rank_killed_from_outside_is_tried_once_more(make_bench: Callable[[str], Bench]) -> None:
    bench = make_bench(LONG.replace("4M", "6k"))
    command, ranks = start_long_run(bench)
    os.kill(ranks[1], signal.SIGKILL)
    ended = command.wait()
    assert ended.code == 0, ended.stderr
    assert "rank 1 was killed by signal 9" in ended.stderr and "trying once more" in ended.stderr
    _, rows = bench.store().query("SELECT attempt, status FROM runs ORDER BY attempt")
    assert [tuple(row) for row in rows] == [(1, "crashed"), (2, "ok")]
    bench.assert_no_orphan()
