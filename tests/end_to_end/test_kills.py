"""kill -9 at random moments: nothing lost, nothing twice, no orphan, and the curves of an undisturbed run.

Moments are seeded. SUITE_KILL_ROUNDS=20 kills twenty parents and twenty workers.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench import Bench, Command, measurements, recorded, until

if TYPE_CHECKING:
    from results.store import Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the command's processes in /proc"),
]

ROUNDS = int(os.environ.get("SUITE_KILL_ROUNDS", "3"))
# Everything a resume point must carry is in here: AdamW's moments, amax histories, smooth scales, ageing.
CASE = """
question: Does a run that was killed end as one that was not?
base:
  model: llama-0.3m
  tokens: 12k
  batch_size: 4
  seq_len: 64
  val_tokens: 1k
  checkpoint_every_s: 0.2
  data: {rare_token_every: 4}
start_from: {precision: bf16, tokens: 8k, seed: 100, data: {rare_token_every: 0}}
matrix:
  precision: [bf16, fp8-delayed]
  model.ffn: [smooth-swiglu]
  ageing: [sporadic-8]
  seed: [0, 1]
probes: {loss: 1, gradients: 1, quantization: 4}
claims:
  - id: same
    measure: final_loss_gap
    of: {precision: fp8-delayed}
    against: {precision: bf16}
    expect: {non_inferior_within: 0.5}
"""
SAME = ("loss", "val_loss", "learning_rate", "gradient_norm", "quant_amax", "quant_scale", "quant_sqnr_db")
"""Metrics of the numbers themselves; times differ."""

Curves = dict[tuple[str, str, str, int], float]


def curves(store: Store) -> Curves:
    """(key, metric, scope, step) -> value of every run, attempts joined."""
    keys = [row.key for row in store.runs()]
    return {tuple(point): value for *point, value in store.values(keys, SAME)}


class Ordeal:
    """One out folder after another, in each of which the case is killed until it is done."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        undisturbed = bench.run("run", bench.case, out="undisturbed")
        assert undisturbed.code == 0, undisturbed.stderr
        self.seconds = undisturbed.seconds
        self.expected = curves(bench.store("undisturbed"))
        assert len(self.expected) > 1000
        self._stored: set[tuple[object, ...]] = set()
        self._number = 0

    @property
    def out(self) -> str:
        return f"out{self._number}"

    def start(self) -> Command:
        return self.bench.start("run", self.bench.case, out=self.out)

    def look(self) -> None:
        """After a kill: no process is left, and what was in the database still is."""
        self.bench.assert_no_orphan()
        if (self.bench.folder / self.out / "suite.duckdb").exists():
            stored = measurements(self.bench.store(self.out))
            assert self._stored <= stored, "something that had been ingested is lost"
            self._stored = stored

    def finish(self) -> None:
        """The next command does the rest; then everything is as if nothing had happened."""
        ended = self.start().wait()
        assert ended.code == 0, ended.stderr
        self.look()
        out = self.bench.folder / self.out
        assert recorded(out) == self._stored, "the journals and the database differ"
        assert curves(self.bench.store(self.out)) == self.expected
        assert [path.suffix for path in (out / "checkpoints").iterdir()] == [".safetensors"], "litter"
        assert (out / "site" / "index.html").exists()
        assert (
            "0 runs made, 5 were done before" in self.bench.run("run", self.bench.case, out=self.out).stderr
        )
        self._number, self._stored = self._number + 1, set()


@pytest.fixture
def ordeal(make_bench: Callable[[str], Bench]) -> Ordeal:
    return Ordeal(make_bench(CASE))


def test_kill_of_the_parent(ordeal: Ordeal) -> None:
    """At moments spread over the whole command: importing, training, ingesting, judging, drawing."""
    moments = random.Random(3)
    num_killed = 0
    while num_killed < ROUNDS:
        command = ordeal.start()
        time.sleep(moments.uniform(0.2, ordeal.seconds))
        if command.popen.poll() is not None:
            ordeal.finish()
            continue
        command.popen.kill()
        num_killed += command.popen.wait() == -9
        ordeal.look()
    ordeal.finish()


def test_kill_of_a_worker(ordeal: Ordeal) -> None:
    """The command goes on without it; what was killed twice in one command is left to the next."""
    moments = random.Random(4)
    command = ordeal.start()
    num_killed = 0
    while num_killed < ROUNDS:
        until(
            lambda command=command: command.popen.poll() is not None or ordeal.bench.workers(command), "a run"
        )
        time.sleep(moments.uniform(0.0, 1.2))
        victims = ordeal.bench.workers(command)
        if victims:
            os.kill(moments.choice(sorted(victims)), 9)
            num_killed += 1
        elif command.popen.poll() is not None:
            assert command.wait().code in (0, 3)
            ordeal.look()
            ordeal.finish()
            command = ordeal.start()
    assert command.wait().code in (0, 3)
    ordeal.look()
    ordeal.finish()
