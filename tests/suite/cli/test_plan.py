"""`suite plan` and `suite claims` on a small case and a database of made-up runs."""

import json
from pathlib import Path

import pytest

from harness.ledger.predict import predict_ranks
from results.database import NoDatabase
from results.environment import describe_environment
from results.journal import JournalWriter
from results.store import Store
from suite.cli.claims import claims
from suite.cli.failures import WrongCommand
from suite.cli.plan import plan
from suite.declare import expand, load_case
from suite.declare.timing import PaceBook, shape_of, wall_seconds

CASE = """\
question: Does FP8 lose?
paper: fishman2024
base: {model: llama-0.3m, optimizer: adamw, tokens: 20k, seq_len: 64, val_tokens: 0}
matrix:
  precision: [bf16, fp8-delayed]
  seed: [0, 1, 2]
sizes:
  laptop: {}
  cluster:
    {model: llama2-7b, tokens: 2T, batch_size: 256, parallelism: {name: sharded, dp: 256, zero: 3}}
claims:
  - id: gap
    paper: {says: it does, key: fishman2024}
    measure: final_loss_gap
    of: {precision: fp8-delayed}
    against: {precision: bf16}
    expect: {above: 0.05}
  - id: speed
    measure: throughput_ratio
    of: {precision: fp8-delayed}
    against: {precision: bf16}
    needs: native
    expect: {at_least: 1.2}
"""


@pytest.fixture
def case(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(CASE)
    return path


@pytest.fixture
def out(tmp_path: Path, case: Path) -> Path:
    """A results folder whose calibration is known: 10 ms a step, 0.5 s of set-up."""
    folder = tmp_path / "out"
    folder.mkdir()
    shapes = {shape_of(run.spec).key for run in expand(load_case(case), "laptop").runs}
    content = {
        "machine": describe_environment()["machine"],
        "runs": {shape: {"step_s": 0.01, "setup_s": 0.5} for shape in shapes},
        "gemm_flops_per_s": {"fp32": 1e11, "bf16": 1e11, "fp16": 1e11},
    }
    (folder / "calibration.json").write_text(json.dumps(content))
    return folder


def finish(case: Path, out: Path, losses: dict[str, float], seconds: float | None = None) -> None:
    """Journals and rows of all runs of the case, each precision at its loss."""
    for run in expand(load_case(case), "laptop").runs:
        folder = out / "journals" / run.key / "1"
        folder.mkdir(parents=True)
        request = {
            "run_id": f"{run.key}.1",
            "key": run.key,
            "attempt": 1,
            "case": "toy",
            "size": "laptop",
            "labels": run.labels,
            "role": run.role,
            "spec": run.spec.model_dump(mode="json"),
        }
        (folder / "run.json").write_text(json.dumps(request))
        journal = JournalWriter(folder / "rank0.journal")
        journal.start(describe_environment())
        for step in range(1, run.spec.num_steps + 1):
            journal.measure(step, {"loss": losses[run.labels["precision"]] + 0.001 * run.spec.seed**2})
        journal.end("ok")
        journal.close()
        Store(out / "suite.duckdb").ingest(folder)


def as_json(capsys, verb, *arguments, **options):
    """What a verb prints with --json."""
    verb(*map(str, arguments), json=True, **options)
    return json.loads(capsys.readouterr().out)


def test_plan_of_a_new_case(capsys, case, out):
    shown = as_json(capsys, plan, case, size="laptop", out=out, jobs=2)
    assert (shown["case"], shown["size"], len(shown["runs"]), shown["num_done"]) == ("toy", "laptop", 6, 0)
    run = shown["runs"][0]
    assert run["num_parameters"] == 273_888
    assert run["num_steps"] == 40
    assert run["status"] == "to do"
    assert run["bytes"]["total"] == sum(v for k, v in run["bytes"].items() if k != "total")
    assert run["seconds"] == pytest.approx(0.5 + 40 * 0.01)
    assert run["seconds_source"] == "4 timed steps"
    assert shown["wall_seconds"] == pytest.approx(3 * 0.9)  # six runs, two at a time
    assert {run["fidelity"] for run in shown["runs"]} == {"native", "emulated"}
    gap, speed = shown["claims"]
    assert (gap["decidable"], gap["reason"]) == (True, "3 pairs")
    assert not speed["decidable"]
    assert "native" in speed["reason"]


def test_plan_for_a_person(capsys, case, out):
    plan(str(case), size="laptop", out=out)
    text = capsys.readouterr().out
    for words in ("6 of 6 runs left", "273,888", "precision=bf16 seed=0", "MiB", "decidable here"):
        assert words in text


def test_what_is_done_is_not_counted_again(capsys, case, out):
    finish(case, out, {"bf16": 2.0, "fp8-delayed": 2.2})
    shown = as_json(capsys, plan, case, size="laptop", out=out)
    assert shown["num_done"] == 6
    assert {run["status"] for run in shown["runs"]} == {"done"}
    assert shown["wall_seconds"] == 0
    assert "3 earlier runs" in shown["runs"][0]["seconds_source"]


def test_a_cluster_is_beyond_this_machine(capsys, case, out):
    shown = as_json(capsys, plan, case, size="cluster", out=out)
    assert shown["wall_seconds"] is None
    assert not any(claim["decidable"] for claim in shown["claims"])
    assert "256 ranks" in shown["claims"][0]["reason"]
    assert shown["runs"][0]["num_parameters"] == 6_738_415_616


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("tokens=400B", "beyond its limit"),
        ("model=llama3-405b", "GiB"),
        ("device=cuda", "NVIDIA"),
        ("seed=0", "2 seeds"),
    ],
)
def test_why_this_machine_cannot_decide(capsys, monkeypatch, case, out, change, words):
    monkeypatch.setattr("suite.declare.predict.nvidia_visible", lambda: False)
    monkeypatch.setattr("suite.declare.timing.nvidia_visible", lambda: False)
    shown = as_json(capsys, plan, case, size="laptop", out=out, set_=[change])
    assert not shown["claims"][0]["decidable"]
    assert words in shown["claims"][0]["reason"]


def test_large_models_go_by_the_rate_of_products(capsys, case, out):
    shown = as_json(capsys, plan, case, size="laptop", out=out, set_=["model=llama3-8b"])
    bf16, fp8 = shown["runs"][0], shown["runs"][3]
    assert "matrix-product rate" in bf16["seconds_source"]
    assert "casts not counted" in fp8["seconds_source"]
    assert bf16["seconds"] == pytest.approx(bf16["flops"] / 0.5e11, rel=0.01)


def test_calibration_of_another_machine_is_not_used(case, out):
    content = json.loads((out / "calibration.json").read_text())
    (out / "calibration.json").write_text(json.dumps(content | {"machine": "another"}))
    spec = expand(load_case(case), "laptop").runs[0].spec
    assert PaceBook(out, None).pace(spec) == "not calibrated"
    (out / "calibration.json").write_text("{ torn")
    assert PaceBook(out, None).pace(spec) == "not calibrated"


def test_a_calibration_that_fails_is_a_reason(monkeypatch, case, tmp_path):
    monkeypatch.setattr("suite.declare.timing.python_command", lambda module: ["false"])
    spec = expand(load_case(case), "laptop").runs[0].spec
    book, said = PaceBook(tmp_path / "new", None), []
    book.calibrate([spec], said.append)
    assert "calibration failed" in book.pace(spec)
    assert any("calibration failed" in text for text in said)
    assert not (tmp_path / "new" / "calibration.json").exists()


@pytest.mark.slow
def test_calibration_times_real_steps(case, tmp_path):
    pytest.importorskip("torch")
    specs = [run.spec for run in expand(load_case(case), "laptop").runs]
    book = PaceBook(tmp_path / "new", None)
    book.calibrate(specs)
    paces = [book.pace(spec) for spec in specs]
    assert all(0 < pace.step_s < 30 for pace in paces)
    kept = json.loads((tmp_path / "new" / "calibration.json").read_text())
    assert len(kept["runs"]) == 2  # one a precision: seeds cost the same
    assert PaceBook(tmp_path / "new", None).pace(specs[0]) == paces[0]


RANKS = """\
question: Do ranks train as one process?
base: {model: llama-0.8m, precision: fp32, tokens: 8k, seq_len: 64, val_tokens: 0}
matrix:
  parallelism: [single, zero3-2, pp-2, zero3-64]
claims:
  - id: two
    measure: final_loss
    of: {parallelism: zero3-2}
    expect: {below: 9}
  - {id: many, measure: final_loss, of: {parallelism: zero3-64}, expect: {below: 9}}
exclude: []
include:
  - {task: step, parallelism: zero3-2}
  - {task: trace, parallelism: zero3-64}
  - {task: ledger, parallelism: zero3-64}
  - {task: pipeline, parallelism: pp-4}
"""


@pytest.fixture
def of_ranks(tmp_path: Path) -> Path:
    """A case of several meshes, in a folder whose calibration is known: 10 ms a step of one process."""
    path = tmp_path / "ranks.yaml"
    path.write_text(RANKS.replace("exclude: []\n", "").replace("seq_len: 64", "seq_len: 64, batch_size: 64"))
    (tmp_path / "out").mkdir()
    alone = next(run for run in expand(load_case(path)).runs if run.labels["parallelism"] == "single")
    content = {
        "machine": describe_environment()["machine"],
        "runs": {shape_of(alone.spec).key: {"step_s": 0.01, "setup_s": 0.5}},
        "gemm_flops_per_s": {"fp32": 1e11},
    }
    (tmp_path / "out" / "calibration.json").write_text(json.dumps(content))
    return path


def test_a_plan_of_ranks(capsys, monkeypatch, of_ranks):
    monkeypatch.setattr("suite.declare.timing.usable_cores", lambda: 1)
    shown = as_json(capsys, plan, of_ranks, out=of_ranks.parent / "out", jobs=2, trace=False)
    runs = {(run["task"], run["labels"]["parallelism"]): run for run in shown["runs"]}
    single, zero = runs["pretrain", "single"], runs["pretrain", "zero3-2"]
    assert (single["num_ranks"], zero["num_ranks"], runs["trace", "zero3-64"]["num_ranks"]) == (1, 2, 64)
    assert single["comm_bytes"] == 0 < zero["comm_bytes"]
    assert zero["bytes"]["weights"] == single["bytes"]["weights"] // 2
    assert zero["bytes"] == runs["step", "zero3-2"]["bytes"]
    assert single["seconds"] == pytest.approx(0.5 + 2 * 0.01)
    assert zero["seconds"] == pytest.approx(0.5 + 5 + 2 * 0.02)  # two ranks on one core
    assert "2 ranks on 1 core, communication not counted" in zero["seconds_source"]
    assert runs["pretrain", "zero3-64"]["seconds"] is None
    assert runs["pretrain", "pp-2"]["idle_share"] == pytest.approx(1 / 5)
    assert runs["pipeline", "pp-4"]["idle_share"] == pytest.approx(3 / 11)
    assert runs["pipeline", "pp-4"]["bytes"] is None and runs["step", "zero3-2"]["flops"] is None
    two, many = shown["claims"]
    assert "2 seeds" in two["reason"]
    assert "64 ranks" in many["reason"] and not many["decidable"]


def test_traced_peaks_stand_beside_the_formula_s(capsys, monkeypatch, of_ranks):
    asked = []

    def trace(spec, folder=None, timeout_s=0.0):
        asked.append((spec.parallelism.name, spec.seed))
        return tuple(predict_ranks(spec, 272))

    monkeypatch.setattr("suite.tracing.trace", trace)
    out = of_ranks.parent / "out"
    shown = as_json(capsys, plan, of_ranks, out=out)
    runs = {(run["task"], run["labels"]["parallelism"]): run for run in shown["runs"]}
    assert {name for name, _ in asked} == {"zero3-2", "pp-2", "zero3-64"}  # one process is not traced unasked
    assert len(asked) == 3  # a step, its training run and its formula are one question
    assert runs["pretrain", "single"]["traced_bytes"] is None
    assert runs["step", "zero3-2"]["traced_bytes"] == runs["pretrain", "zero3-2"]["bytes"]["total"]
    plan(str(of_ranks), out=out)
    text = capsys.readouterr()
    for words in ("ranks", "traced peak", "exchanged a step", "idle", "20.0%"):
        assert words in text.out, words
    assert "tracing a step, 1 of 3" in text.err
    plan(str(of_ranks), out=out, trace=True)
    assert "single" in {name for name, _ in asked}
    capsys.readouterr()
    monkeypatch.setattr("suite.tracing.MOST_UNASKED", 1)
    plan(str(of_ranks), out=out)
    assert "kinds of run not traced; `suite plan --trace` does it" in capsys.readouterr().err


def test_a_refused_run_is_told_and_not_timed(capsys, case, out):
    shown = as_json(capsys, plan, case, size="laptop", out=out, set_=["parallelism={cp: 2}"], trace=False)
    fp8 = shown["runs"][3]
    assert (fp8["status"], fp8["seconds"]) == ("refused", None)
    assert "casts of precision fp8-delayed" in fp8["seconds_source"]
    assert "this suite does not train its runs" in shown["claims"][0]["reason"]


def test_wall_time_waits_for_bases():
    runs = [("base", None, 10.0, 1), ("a", "base", 2.0, 1), ("b", "base", 2.0, 1), ("c", None, 1.0, 1)]
    assert wall_seconds(runs, 2) == 13.0
    assert wall_seconds(runs, 1) == 15.0
    assert wall_seconds([], 2) == 0.0


def test_wall_time_of_runs_that_take_a_slot_a_rank():
    runs = [("a", None, 3.0, 1), ("b", None, 2.0, 2), ("c", None, 1.0, 1)]
    assert wall_seconds(runs, 2) == 6.0
    assert wall_seconds(runs, 4) == 3.0


def test_claims_judges_what_there_is(capsys, case, out):
    finish(case, out, {"bf16": 2.0, "fp8-delayed": 2.2})
    gap, speed = as_json(capsys, claims, case, size="laptop", out=out)
    assert gap["verdict"] == "reproduced"
    assert gap["effect"] == pytest.approx(0.2)
    assert (gap["paper"], gap["unit"], gap["num_pairs"]) == ("fishman2024", "nats/token", 3)
    assert (speed["verdict"], speed["effect"]) == ("not run", None)
    claims(str(case), size="laptop", out=out)
    assert "reproduced" in capsys.readouterr().out


def test_stored_claims_and_papers(capsys, case, out):
    from suite.judge import judge

    finish(case, out, {"bf16": 2.0, "fp8-delayed": 2.0})
    store = Store(out / "suite.duckdb")
    store.save_verdicts([verdict.as_row() for verdict in judge(expand(load_case(case), "laptop"), store)])
    rows = as_json(capsys, claims, out=out)
    assert [row["verdict"] for row in rows] == ["differs", "not run"]
    assert len(as_json(capsys, claims, out=out, paper="fishman2024")) == 1
    with pytest.raises(WrongCommand, match="fishman2024"):
        claims(out=out, paper="fishman2042")


def test_claims_without_a_database(case, tmp_path):
    with pytest.raises(NoDatabase):
        claims(str(case), size="laptop", out=tmp_path / "none")
    with pytest.raises(WrongCommand, match="need a CASE"):
        claims(size="laptop", out=tmp_path / "none")
