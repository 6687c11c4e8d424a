"""The formulas against traces of the real model: recorded ones (record_traces.py), and some made again."""

import pytest

from harness.ledger.predict import predict_step

from . import record_traces

CASES = {record_traces.title(case): case for case in record_traces.cases()}
RECORDED = record_traces.recorded()
WITHIN = 0.05
"""Of the trace's total at the peak."""


@pytest.mark.parametrize("title", RECORDED)
def test_recorded(title):
    spec = record_traces.spec_of(CASES[title])
    for traced in RECORDED[title]:
        predicted = predict_step(spec, 272, traced["rank"])
        assert dict(predicted.state) == traced["state"]
        assert predicted.flops == traced["flops"]
        total = sum(traced["peak"].values())
        assert predicted.total == pytest.approx(total, rel=WITHIN)
        if spec.parallelism.pp == 1:
            assert predicted.saved == pytest.approx(traced["saved"], rel=0.02, abs=16)


def test_enough_are_recorded():
    assert len(RECORDED) >= 60
    models = {CASES[title]["model"] for title in RECORDED}
    assert len([title for title in RECORDED if CASES[title].get("accumulation", 1) > 1]) >= 20
    assert {"llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b"} <= models


@pytest.mark.slow
@pytest.mark.parametrize("title", [title for title in CASES if title.startswith("llama-0.8m")][::7])
def test_traced_again(title):
    """Fails where PyTorch or the model changed since the traces were recorded."""
    assert record_traces.trace(CASES[title]) == RECORDED[title]
