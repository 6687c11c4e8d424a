"""Cases of tasks that do not train, and cases that have both: fields, figures, predictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.spec import TRAINING_TASKS, RunSpec
from harness.spec.tasks import ANY_TASK, STUDY_FIELDS, STUDY_ONLY, reads
from suite.declare import CaseError, Plan, load_case
from suite.declare.predict import predict
from suite.execute.order import priorities

STUDY = """\
question: What does a cast keep?
task: tensors
base: {tensor: {rows: 8, cols: 32}}
matrix:
  cast: [e4m3:current, "mxfp8:up"]
  tensor.outlier_sigmas: [0, 1k]
  seed: [0, 1]
"""
MIXED = (
    STUDY
    + """\
include:
  - {task: pretrain, precision: [bf16], seed: [0, 1]}
sizes:
  laptop: {model: llama-0.3m, tokens: 4k}
"""
)
FIGURES = STUDY + "figures:\n  - {title: T, measure: 'quant_sqnr_db[bulk]', x: tensor.outlier_sigmas, "

WRONG = [
    (
        "cast",
        STUDY.replace('e4m3:current, "', '¶e4m3:curent, "'),
        "unknown scaling 'curent'; did you mean current?",
    ),
    ("format of a cast", STUDY.replace('"mxfp8:up"', '¶"mxpf8:up"'), "unknown format 'mxpf8'"),
    ("format", "question: Why?\ntask: formats\nmatrix: {format: [fp16, ¶fp61]}\n", "did you mean fp16?"),
    (
        "tokens nobody reads",
        STUDY.replace("base: {", "base: {¶tokens: 4k, "),
        "tokens: nothing that task tensors reads",
    ),
    ("probes nobody reads", STUDY + "¶probes: {loss: 1}\n", "probes: nothing that task tensors reads"),
    ("misspelt field", STUDY.replace("base: {", "base: {¶tokns: 4k, "), "did you mean 'tokens'?"),
    ("tensor", STUDY.replace("cols: 32", "cols: ¶0"), "must be at least 1 (got 0)"),
    ("tensor field", STUDY.replace("cols: 32", "¶colls: 32"), "did you mean 'cols'?"),
    (
        "model of the training arm",
        MIXED.replace("model: llama-0.3m, ", "").replace("  - {", "  - ¶{"),
        "model is missing",
    ),
    ("measure", STUDY + "figures:\n  - {title: T, x: cast, measure: ¶quant_sqnr}\n", "'quant_sqnr_db'"),
    (
        "gap in a figure",
        STUDY + "figures:\n  - {title: T, x: cast, measure: ¶quant_sqnr_db_gap}\n",
        "compares two sets of runs",
    ),
    (
        "scope where there is none",
        STUDY + "figures:\n  - {title: T, x: cast, measure: '¶final_loss[x]'}\n".replace("'¶", "¶'"),
        "recorded for the run as a whole",
    ),
    (
        "x",
        FIGURES.replace("x: tensor.outlier_sigmas", "x: ¶tensor.outlier_sigma") + "lines: cast}\n",
        "did you mean 'tensor.outlier_sigmas'?",
    ),
    ("lines", FIGURES + "lines: ¶casts}\n", "did you mean 'cast'?"),
    ("lines is x", FIGURES + "lines: ¶tensor.outlier_sigmas}\n", "is the figure's x already"),
    ("where", FIGURES + "where: {¶casts: mxfp8}}\n", "did you mean 'cast'?"),
    ("where value", FIGURES + "where: {cast: ¶mxfp8}}\n", "allowed: e4m3:current, mxfp8:up"),
    (
        "log of words",
        STUDY + "figures:\n  - {title: T, measure: quant_sqnr_db, x: cast, log_x: ¶true}\n",
        "no numbers from 0 on",
    ),
    ("unknown key", FIGURES + "¶line: cast}\n", "did you mean 'lines'?"),
    ("no measure", STUDY + "figures:\n  - ¶{title: T, x: cast}\n", "measure is missing"),
    (
        "rows",
        STUDY + "tables:\n  - {title: T, rows: ¶casts, columns: [quant_sqnr_db]}\n",
        "did you mean 'cast'?",
    ),
    (
        "column",
        STUDY + "tables:\n  - {title: T, rows: cast, columns: [quant_sqnr_db, ¶quant_sqnr]}\n",
        "'quant_sqnr_db'",
    ),
    ("no cast", "question: Why?\ntask: tensors\n¶base: {tensor: {rows: 8}}\n", "task tensors needs a cast"),
    ("no format", "¶question: Why?\ntask: formats\n", "task formats needs a format"),
    (
        "no shape",
        "question: Why?\ntask: gemm\nbase: {gemm: ¶{m: 8, n: 8}}\n",
        "gemm.k must be at least 1 (got 0)",
    ),
    (
        "shape that the kernel does not take",
        "question: Why?\ntask: gemm\nbase: {gemm: ¶{m: 8, n: 128, k: 64, kernel: fp8-block}}\n",
        "fp8-block takes gemm.k in multiples of 128 (got 64)",
    ),
    (
        "precision that a product does not read",
        "question: Why?\ntask: gemm\nbase: {gemm: {m: 8, n: 8, k: 8}, ¶precision: bf16}\n",
        "precision: nothing that task gemm reads",
    ),
    (
        "accumulation without one",
        "question: Why?\ntask: accumulation\nbase: {gemm: {m: 8, n: 8, k: 8}, precision: ¶fp8-current}\n",
        "needs a precision with recipe.accumulation",
    ),
    (
        "outliers that end before they come",
        "question: Why?\ntask: tensors\nbase: {cast: e4m3, tensor: ¶{steps: 4, outlier_from: 3, outlier_until: 2}}\n",
        "outlier_until 2 is before outlier_from 3",
    ),
    ("start of a study", STUDY + "start_from: ¶{seed: 9}\n", "start_from: nothing that task tensors reads"),
    ("no columns", STUDY + "tables:\n  - {title: T, rows: cast, columns: ¶[]}\n", "must not be empty"),
]


@pytest.mark.parametrize(
    ("text", "fragment"), [entry[1:] for entry in WRONG], ids=[entry[0] for entry in WRONG]
)
def test_wrong(tmp_path: Path, text: str, fragment: str) -> None:
    before, after = text.split("¶")
    path = tmp_path / "case.yaml"
    path.write_text(before + after)
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    with pytest.raises(CaseError) as caught:
        load_case(path)
    told = str(caught.value).splitlines()
    assert any(each.startswith(f"{path}:{line}:{column}: ") and fragment in each for each in told), (
        caught.value
    )


def test_a_study_needs_no_model(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(STUDY)
    assert len(plan.runs) == 8
    spec = plan.runs[0].spec
    assert (spec.task, spec.cast, spec.tensor.cols, spec.is_training, spec.num_steps) == (
        "tensors",
        "e4m3:current",
        32,
        False,
        0,
    )
    assert spec.fidelity == "emulated"
    assert RunSpec.model_validate(spec.model_dump(mode="json")).key == spec.key


def test_what_a_task_does_not_read_is_no_part_of_its_run(plan_of: Callable[..., Plan]) -> None:
    mixed = plan_of(MIXED)
    study = {run.key for run in plan_of(STUDY).runs}
    assert {run.key for run in mixed.runs if run.spec.task == "tensors"} == study
    (first, second) = (run for run in mixed.runs if run.spec.is_training)
    assert (first.spec.tokens, first.spec.model.name, first.labels) == (
        4000,
        "llama-0.3m",
        {"precision": "bf16", "seed": 0},
    )
    assert first.spec.tensor == RunSpec.model_fields["tensor"].default
    assert first.key != second.key


def test_a_shared_base_is_the_training_runs_alone(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(MIXED + "start_from: {task: pretrain, precision: bf16, seed: 9}\n")
    assert {run.spec.task for run in plan.runs if run.depends_on is not None} == {"pretrain"}
    assert [run.spec.task for run in plan.runs if run.role == "base"] == ["pretrain"]
    assert {run.key for run in plan.runs if run.spec.task == "tensors"} == {
        run.key for run in plan_of(STUDY).runs
    }


def test_an_included_field_is_a_label_where_a_figure_names_it(plan_of: Callable[..., Plan]) -> None:
    text = STUDY + "include: [{cast: mxfp4, tensor.cols: 64}]\n"
    assert plan_of(text).runs[-1].labels == {"cast": "mxfp4"}
    shown = text + "tables: [{title: T, rows: tensor.cols, columns: [quant_sqnr_db]}]\n"
    assert plan_of(shown).runs[-1].labels == {"cast": "mxfp4", "tensor.cols": 64}


def test_every_study_field_exists() -> None:
    known = set(RunSpec.model_fields)
    assert known >= ANY_TASK | STUDY_ONLY | set().union(*STUDY_FIELDS.values())
    assert all(reads(task, name) for task in TRAINING_TASKS for name in known - STUDY_ONLY)
    assert reads("somebody's own task", "gemm")


def test_predictions_of_a_study_have_no_formulas(plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    said: list[str] = []
    prediction = predict(plan_of(STUDY), tmp_path, say=said.append)
    assert not said and not list(tmp_path.glob("calibration*"))  # nothing was timed for it
    run = prediction.runs[0]
    assert (run.bytes, run.flops, run.seconds, run.task) == (None, None, None, "tensors")
    assert run.seconds_source == "no earlier run of task tensors here"
    assert prediction.wall_seconds is None


def test_studies_go_last(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(MIXED)
    cost = priorities(plan.runs)
    assert all((cost[run.key] > 0) == run.spec.is_training for run in plan.runs)
