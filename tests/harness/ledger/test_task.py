"""The study `ledger` records what is predicted, under the names that trace and step use."""

from pathlib import Path

from harness.ledger.predict import predict_ranks
from harness.ledger.step import CATEGORIES
from harness.spec import ParallelismSpec, RunSpec
from harness.tasks.ledger import ledger
from suite.declare import presets


class Notes:
    """The part of a journal that a study writes to."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}
        self.notes: dict[str, object] = {}

    def measure(self, step, values, scope=""):
        self.values |= {(name, scope): value for name, value in values.items()}

    def note(self, name, value, reason):
        self.notes[name] = value

    def beat(self) -> None: ...


def test_records_one_rank_of_each_stage():
    mesh = ParallelismSpec(pp=2, dp=2)
    spec = RunSpec(
        task="ledger",
        model=presets("models")["llama-1m"],
        precision=presets("precisions")["bf16"],
        parallelism=mesh,
        batch_size=16,
        seq_len=64,
    )
    notes = Notes()
    assert ledger(spec, {}, notes, Path()) == []
    ranks = predict_ranks(spec, 272)
    for each in ranks:
        found = {
            category: notes.values["peak_bytes", f"rank{each.rank}.{category}"] for category in CATEGORIES
        }
        assert found == dict(each.peak)
    worst = max(ranks, key=lambda each: each.total)
    assert notes.values["peak_bytes", "total"] == worst.total
    assert notes.values["step_flops", ""] == max(each.flops for each in ranks)
    count = notes.values["num_parameters", ""]
    assert notes.values["bytes_per_parameter", "weights"] * count == notes.values["state_bytes", "weights"]
    assert ("comm_bytes", "pp.send") in notes.values
