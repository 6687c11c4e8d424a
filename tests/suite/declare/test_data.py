"""The data files: presets, papers, quantities and the built-in cases themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from suite.declare import CaseError, expand, list_cases, load_case, papers, preset_texts, presets
from suite.declare import papers as papers_of
from suite.declare.presets import KINDS
from suite.declare.quantities import parse_quantity
from suite.declare.yaml_loader import read_yaml
from suite.paths import cases_dir


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("400k", 400_000),
        ("2M", 2_000_000),
        ("1.5B", 1_500_000_000),
        ("2T", 2_000_000_000_000),
        ("80GiB", 80 * 2**30),
        ("16GB", 16_000_000_000),
        ("0.1k", 100),
        ("1.2345k", 1234.5),
        ("-3k", -3000),
        ("5 MiB", 5 * 2**20),
        ("80Gi", None),
        ("k", None),
        ("4kk", None),
        ("1e3k", None),
        ("٣k", None),
        ("99999999999T", None),
    ],
)
def test_quantities(text: str, number: float | None) -> None:
    assert parse_quantity(text) == number


@pytest.mark.parametrize("kind", list(KINDS))
def test_presets_are_valid_and_described(kind: str) -> None:
    specs, texts = presets(kind), preset_texts(kind)
    assert list(specs) == list(texts) and specs
    for name, text in texts.items():
        assert text.about.get("about") or text.about.get("source"), name
        paper = getattr(specs[name], "paper", None)
        assert paper is None or paper in papers(), name


def test_precisions() -> None:
    found = presets("precisions")
    assert set(found) >= {
        *("fp32", "bf16", "bf16-pure", "fp16"),
        *("fp8-delayed", "fp8-delayed-1024", "fp8-delayed-1", "fp8-current"),
    }
    assert (found["bf16"].compute, found["bf16"].weights) == ("bf16", "fp32")
    assert (found["bf16-pure"].compute, found["bf16-pure"].weights) == ("bf16", "bf16")
    assert (found["fp16"].compute, found["fp16"].loss_scaling) == ("fp16", "dynamic")
    windows = {"fp8-delayed": 16, "fp8-delayed-1024": 1024, "fp8-delayed-1": 1}
    for name, history in windows.items():
        recipe = found[name].recipe
        for role in (recipe.activations, recipe.weights, recipe.gradients):
            assert (role.scaling, role.history, role.amax) == ("delayed", history, "max"), name
    for name in (*windows, "fp8-current"):
        recipe = found[name].recipe
        assert [recipe.activations.format, recipe.weights.format, recipe.gradients.format] == [
            *("e4m3", "e4m3", "e5m2")
        ]
        assert found[name].compute == "bf16" and found[name].fidelity == "emulated"


def test_parallelisms() -> None:
    found, texts = presets("parallelisms"), preset_texts("parallelisms")
    assert set(found) >= {
        *(
            "single",
            "ddp-2",
            "ddp-4",
            "zero1-2",
            "zero2-2",
            "zero3-2",
            "zero1-4",
            "zero2-4",
            "zero3-4",
            "hsdp-2x2",
        ),
        *("tp-2", "tp-4", "tp-2-sp", "tp-4-sp", "pp-2", "pp-4", "cp-2", "cp-4", "ep-2", "ep-4"),
        *("dp2-tp2", "zero3-2-tp2", "zero3-2-pp2", "zero3-2-cp2", "dp2-ep2", "dp2-pp2-tp2"),
    }
    assert {text.about["source"] for text in texts.values() if "source" in text.about} <= set(papers())
    assert (found["hsdp-2x2"].num_ranks, found["hsdp-2x2"].replicas, found["dp2-pp2-tp2"].num_ranks) == (
        4,
        2,
        8,
    )


def test_bytes_a_parameter_of_the_precisions() -> None:
    """Weight, gradient, two moments and the FP32 copy, as each preset's description says."""
    from harness.ledger.parameters import num_parameters
    from harness.ledger.states import states
    from harness.spec import OptimizerSpec, RunSpec

    model = presets("models")["llama2-7b"]
    count = num_parameters(model).total
    wanted = {"fp32": 16, "bf16": 16, "bf16-pure": 8, "bf16-fp32-moments": 12, "bf16-master": 16}
    for name, each in {**wanted, "bf16-main-gradients": 18, "fp64": 32}.items():
        precision = presets("precisions")[name]
        spec = RunSpec(task="ledger", model=model, precision=precision, optimizer=OptimizerSpec())
        assert states(spec).total / count == pytest.approx(each, rel=1e-6), name


def test_every_number_of_a_paper_says_how_it_was_obtained() -> None:
    found = papers()
    assert next(iter(found)) == "fishman2024"
    for paper in found.values():
        assert paper.facts, paper.key
        for fact in (*paper.facts, *paper.disputes):
            assert fact.source or fact.provenance == "recalled", (paper.key, fact.says)


def test_the_numbers_of_fishman2024() -> None:
    facts = papers()["fishman2024"].facts
    by_value = {str(fact.value): fact.provenance for fact in facts if fact.value is not None}
    assert by_value["200000000000.0"] == "read"
    assert (by_value["1.335"], by_value["16.89"], by_value["12.65"]) == ("secondary",) * 3
    assert by_value["1.27"] == "recalled"
    assert by_value["47700.0"] == "derived"
    assert round(16.89 / 12.65, 3) == 1.335
    assert round(200e9 / 4.19e6, -2) == 47700


def test_a_wrong_paper_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "papers.yaml").write_text("x2024:\n  title: X\n  authors: Y\n  yaer: 2024\n")
    module = sys.modules[papers_of.__module__]
    monkeypatch.setattr(module, "cases_dir", lambda: tmp_path)
    with pytest.raises(CaseError, match=r"papers\.yaml:4:3: unknown key 'yaer'.*did you mean 'year'"):
        papers()


def test_built_in_cases_load_at_every_size() -> None:
    entries = list_cases()
    for entry in entries:
        case = load_case(entry.name)
        assert case.claims and len(case.claims) == entry.num_claims
        for size in case.sizes:
            plan = expand(case, size)
            assert plan.runs and len({run.key for run in plan.runs}) == len(plan.runs)
    assert {entry.name for entry in entries} == {
        path.stem for path in cases_dir().glob("*.yaml") if "question" in read_yaml(path).entries
    }


def test_a_built_in_case_by_the_path_it_has_in_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for entry in list_cases():
        assert load_case(f"cases/{entry.name}.yaml").path == entry.path


def test_importing_stays_light() -> None:
    heavy = ("torch", "pandas", "scipy", "duckdb", "numpy", "jinja2", "rich")
    code = f"import sys, suite.declare; sys.exit(', '.join(set({heavy}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
