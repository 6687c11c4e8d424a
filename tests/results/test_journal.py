"""What is written is read back; what is damaged ends the reading and nothing else."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results.journal import JournalWriter, read_journal, split_records


def write_example(path: Path) -> bytes:
    writer = JournalWriter(path)
    writer.start({"hostname": "h", "packages": {"torch": "2"}})
    writer.measure(0, {"num_parameters": 7, "val_loss": 5.5})
    writer.note("mfu", None, "peak of this CPU is not known")
    writer.measure(1, {"loss": 2.25, "learning_rate": 1e-3})
    writer.measure(1, {"quant_amax": 3.0, "quant_sqnr_db": None}, "layers.0.ffn.down.activations")
    writer.checkpoint(1, "ab" * 32)
    writer.measure(2, {"loss": float("nan"), "gradient_norm": float("-inf")})
    writer.end("diverged", "loss is nan at step 2 – größer")
    writer.close()
    return path.read_bytes()


def test_records_come_back(tmp_path: Path) -> None:
    write_example(tmp_path / "j")
    journal = read_journal(tmp_path / "j")
    assert not journal.cut
    assert journal.num_bytes == (tmp_path / "j").stat().st_size
    assert [record["k"] for record in journal.records] == [
        "start",
        "m",
        "note",
        "m",
        "m",
        "checkpoint",
        "m",
        "end",
    ]
    start, first, note, _, scoped, checkpoint, last, end = journal.records
    assert start["pid"] == os.getpid() and start["rank"] == 0
    assert first == {"k": "m", "s": 0, "v": {"num_parameters": 7.0, "val_loss": 5.5}}
    assert note == {"k": "note", "n": "mfu", "v": None, "r": "peak of this CPU is not known"}
    assert scoped["c"] == "layers.0.ffn.down.activations" and scoped["v"]["quant_sqnr_db"] is None
    assert checkpoint == {"k": "checkpoint", "s": 1, "sha256": "ab" * 32, "final": False}
    assert math.isnan(last["v"]["loss"]) and last["v"]["gradient_norm"] == -math.inf
    assert (end["status"], end["reason"]) == ("diverged", "loss is nan at step 2 – größer")


def test_cut_at_every_byte_keeps_the_whole_records_before(tmp_path: Path) -> None:
    data = write_example(tmp_path / "j")
    ends = [0, *(end for end, _ in split_records(data))]
    records = read_journal(tmp_path / "j").records
    for size in range(len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:size])
        journal = read_journal(tmp_path / "cut")
        num_whole = sum(end <= size for end in ends) - 1
        assert str(journal.records) == str(records[:num_whole])  # as text: NaN is not equal to itself
        assert (journal.num_bytes, journal.cut) == (ends[num_whole], size != ends[num_whole])


def test_every_flipped_bit_ends_the_reading_at_its_record(tmp_path: Path) -> None:
    data = write_example(tmp_path / "j")
    bodies = [body for _, body in split_records(data)]
    ends = [end for end, _ in split_records(data)]
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            num_before = sum(end <= position for end in ends)
            assert [body for _, body in split_records(bytes(damaged))] == bodies[:num_before]


def test_an_existing_journal_is_continued_after_its_last_whole_record(tmp_path: Path) -> None:
    data = write_example(tmp_path / "j")
    (tmp_path / "j").write_bytes(data[:-5])
    writer = JournalWriter(tmp_path / "j")
    writer.measure(3, {"loss": 1.0})
    writer.close()
    journal = read_journal(tmp_path / "j")
    assert not journal.cut
    assert [record["k"] for record in journal.records[-2:]] == ["m", "m"]


@settings(max_examples=200, deadline=None)
@given(
    values=st.dictionaries(
        st.text(max_size=12), st.none() | st.floats() | st.integers() | st.booleans(), max_size=8
    ),
    scope=st.text(max_size=20),
)
def test_values_are_exact(
    values: dict[str, float | None], scope: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    writer = JournalWriter(path)
    writer.measure(3, values, scope)
    writer.close()
    (record,) = read_journal(path).records
    assert (record["s"], record.get("c", "")) == (3, scope)
    assert json.dumps(record["v"]) == json.dumps(values)  # repr is exact, and the same text for every NaN


def test_scalars_of_other_kinds_become_floats(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j")
    writer.measure(
        np.int64(2), {"loss": np.float32(0.1), "mfu": np.float64(0.25), "quant_amax": np.array(3.0)}
    )  # type: ignore[arg-type]
    (record,) = read_journal(tmp_path / "j").records
    assert record == {"k": "m", "s": 2, "v": {"loss": float(np.float32(0.1)), "mfu": 0.25, "quant_amax": 3.0}}


def test_a_killed_process_loses_nothing_it_recorded(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from results.journal import JournalWriter\n"
        "writer = JournalWriter(Path(sys.argv[1]))\n"
        "for step in range(1, 1001): writer.measure(step, {'loss': 1 / step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "j")], check=False)
    assert done.returncode == -signal.SIGKILL
    journal = read_journal(tmp_path / "j")
    assert [record["v"]["loss"] for record in journal.records] == [1 / step for step in range(1, 1001)]
    assert not journal.cut


def test_beat_touches_the_file_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("results.journal.time.monotonic", lambda: clock[0])
    writer = JournalWriter(tmp_path / "j")
    for clock[0] in (100.0, 100.5, 101.1, 101.2, 103.0):
        writer.beat()
    assert len(read_journal(tmp_path / "j").records) == 3


def test_end_takes_known_statuses_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ok, oom, diverged"):
        JournalWriter(tmp_path / "j").end("fine")
