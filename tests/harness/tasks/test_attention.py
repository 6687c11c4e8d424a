"""The study of tied rows, as a run: what it records for an emulated and for a native kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.registry import TASKS
from harness.run import Skipped
from harness.spec import AttentionSpec, RunSpec
from results.records import metric

SMALL = {"num_keys": 256, "num_queries": 8, "num_heads": 16}


class Records:
    """Stands for a journal."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.notes: dict[str, Any] = {}

    def measure(self, step: int, values: dict[str, float], scope: str = "") -> None:
        assert step == 0 and scope == ""
        self.values.update(values)

    def note(self, name: str, value: Any, reason: str) -> None:
        self.notes[name] = reason


def _run(seed: int = 0, **fields: Any) -> Records:
    records = Records()
    spec = RunSpec(task="attention", attention=AttentionSpec(**{**SMALL, **fields}), seed=seed)
    assert TASKS.load("attention")(spec, {}, records, Path()) == []
    return records


def test_an_emulated_kernel_records_everything() -> None:
    values = _run(kernel="paper").values
    assert {metric(name).kind for name in values} == {"attention"}
    assert set(values) == {
        *("attention_bias_ulp", "attention_bias_se_ulp", "attention_sd_ulp", "nan_share", "tied_one_share"),
        *("lse_error", "delta_bias", "delta_bias_relative", "delta_sign_p", "coherence", "dq_relative_error"),
    }
    assert values["attention_bias_ulp"] < -0.15 and values["tied_one_share"] == 1 and values["nan_share"] == 0
    assert values == _run(kernel="paper").values, "the same seed gives the same bits"
    assert values["attention_bias_ulp"] != _run(seed=1, kernel="paper").values["attention_bias_ulp"]


def test_the_exact_arithmetic_errs_by_no_more_than_fp32() -> None:
    values = _run(kernel="fp32").values
    assert values["attention_sd_ulp"] < 1e-3 and abs(values["lse_error"]) < 1e-6


def test_a_native_kernel_records_its_exp_of_zero() -> None:
    flash, math = _run(kernel="flash"), _run(kernel="math")
    assert abs(flash.values["exp_sum_error"]) < 1e-3 and "tied_one_share" not in flash.values
    assert "exp_sum_error" not in math.values and "does not return" in math.notes["lse_error"]


def test_rows_lost_to_underflow_are_counted() -> None:
    values = _run(kernel="paper", beta=7.0, logit_low=20, logit_high=20).values
    assert values["nan_share"] == 1 and "attention_bias_ulp" not in values and "delta_bias" not in values


def test_a_kernel_that_is_not_here_is_skipped() -> None:
    with pytest.raises(Skipped):
        _run(kernel="fa2")


def test_fidelity_and_keys() -> None:
    plain = RunSpec(task="attention", attention=AttentionSpec(kernel="flash"))
    assert plain.fidelity == "native"
    assert RunSpec(task="attention", attention=AttentionSpec(kernel="code")).fidelity == "emulated"
    assert plain.canonical() == {"task": "attention", "attention": {"kernel": "flash"}}
    same = RunSpec(task="attention", attention=AttentionSpec(kernel="flash", num_ties=2, tile=0))
    assert same.key == plain.key, "defaults are no part of a key"
