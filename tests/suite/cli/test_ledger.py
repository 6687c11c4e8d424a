# ruff: noqa: E501  (one mistake a line)
"""`suite ledger`: its tables, its errors, what it sets side by side, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.ledger.communication import collectives
from harness.ledger.predict import predict_ranks
from harness.ledger.step import CATEGORIES, RankStep
from suite.cli import main
from suite.declare import CaseError
from suite.fitting import options
from suite.ledger import Question, ask

SEVEN = ("--model", "llama2-7b", "--parallelism", "zero=3,dp=64", "--seq-len", "4096", "--batch-size", "64")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("--model", ...)`: exit status, stdout, stderr."""

    def ledger(*arguments: str) -> tuple[int, str, str]:
        code = main(["ledger", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ledger


def test_the_table_of_the_issue_s_question(run: Run) -> None:
    code, out, err = run(*SEVEN, "--optimizer", "adamw", "--precision", "bf16", "--recompute", "full")
    assert code == 0 and not err
    for words in (
        *("llama2-7b: 6,738,415,616 parameters", "{dp: 64, zero: 3}, 64 ranks", "GiB", *CATEGORIES),
        *("total at the peak", "the peak is in", "kept for the backward pass", "FLOPs"),
        *("all_gather", "reduce_scatter", "control"),
    ):
        assert words in out, words


def test_json_is_the_prediction(run: Run) -> None:
    code, out, _ = run(*SEVEN, "--recompute", "full", "--json", "--explain")
    found = json.loads(out)
    answer = ask(
        Question("llama2-7b", parallelism="zero=3,dp=64", seq_len=4096, batch_size=64, recompute="full")
    )
    (own,) = predict_ranks(answer.spec, 32000)
    (rank,) = found["ranks"]
    assert code == 0 and rank["total"] == own.total == sum(rank["peak"].values())
    assert rank["state"] == dict(own.state)
    assert [each["num_bytes"] for each in rank["collectives"]] == [
        c.num_bytes for c in collectives(answer.spec, 32000)
    ]
    weights = 2 * 6_738_415_616  # every layer's gathered in BF16 twice, the root's once
    gathered = next(c["num_bytes"] for c in rank["collectives"] if c["op"] == "all_gather")
    assert weights < gathered < 2 * weights
    states = {t["name"]: t["num_bytes"] for t in found["terms"] if t["category"] in ("weights", "optimizer")}
    assert states["parameters"] == rank["state"]["weights"] and sum(states.values()) < own.total
    assert sum(t["num_bytes"] for t in found["traffic"]) == sum(c.num_bytes for c in own.collectives)


def test_what_was_not_given_is_said(run: Run) -> None:
    code, out, err = run("--model", "llama2-7b", "--parallelism", "dp=8,pp=2,zero=2", "--accumulation", "2")
    assert code == 0
    assert "seq_len was not given: 4096, the longest that llama2-7b takes" in err
    assert "batch_size was not given: 64" in err  # 8 shards, 2 micro-steps, 4 microbatches
    assert "batch of 64 sequences in 2 micro-steps, 4,096 tokens each" in out
    assert "pp rank 0" in out and "pp rank 1" in out and "the pipeline is idle for 20.0%" in out


def test_explain_gives_formulas_with_numbers(run: Run) -> None:
    code, out, _ = run(
        "--model",
        "llama-0.8m",
        "--parallelism",
        "zero3-2,tp=2",
        "--batch-size",
        "8",
        "--seq-len",
        "128",
        "--explain",
    )
    assert code == 0 and "{dp: 2, tp: 2, zero: 3}, 4 ranks" in out and "MiB" in out
    assert "calls · b s h e_c" in out and "8 · 4 · 128 · 128 · 2" in out
    assert "times · P_n e_p" in out and "1,048,576" in out


def test_any_other_field_is_set(run: Run) -> None:
    moe = ("--set", "model.moe={experts: 4}")
    code, out, _ = run(
        "--model", "llama-0.8m", *moe, "--parallelism", "ep=2", "--batch-size", "8", "--seq-len", "64"
    )
    assert code == 0 and "all_to_all" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "llama2-8b"), "--model llama2-8b: model: unknown preset"),
        (("--model", "llama2-7b", "--precision", "bf17"), "did you mean 'bf16'?"),
        (("--model", "llama2-7b", "--optimizer", "adam"), "did you mean 'adamw'?"),
        (("--model", "llama2-7b", "--parallelism", "zro=3"), "did you mean 'zero'?"),
        (("--model", "llama2-7b", "--parallelism", "zero=4,dp=2"), "must be at most 3 (got 4)"),
        (("--model", "llama2-7b", "--parallelism", "dp=2,zero"), "fields as A=B,C=D (got 'zero')"),
        (("--model", "llama2-7b", "--parallelism", "dp=two"), "should be a whole number"),
        (("--model", "llama2-7b", "--parallelism", "dp=2,dp=4"), "dp is written twice"),
        (("--model", "llama2-7b", "--parallelism", "tp=3"), "tp 3 does not divide num_heads 32 of llama2-7b"),
        (("--model", "llama2-7b", "--parallelism", "tp=3"), "nearest of 3 ranks: {dp: 3}"),
        (("--model", "llama2-7b", "--parallelism", "dp=8,tp=4", "--ranks", "64"), "dp 8 · tp 4 makes 32 ranks, not 64"),
        (("--model", "llama2-7b", "--parallelism", "dp=8,tp=4", "--ranks", "64"), "nearest of 64 ranks: {dp: 16, tp: 4}"),
        (("--model", "llama2-7b", "--recompute", "some"), "allowed: none, selective, full"),
        (("--model", "llama2-7b", "--seq-len", "8192"), "above max_seq_len 4096"),
        (("--model", "llama2-7b", "--device", "tpu"), "allowed: cpu, cuda"),
        (("--model", "llama2-7b", "--batch-size", "3", "--accumulation", "2"), "accumulation 2 does not divide batch_size 3"),
        (("--model", "llama2-7b", "--set", "model.ffn=relu"), "--set model.ffn=relu: "),
        (("--model", "llama2-7b", "--fits", "eighty"), "--fits takes a size such as 80GiB"),
        (("--model", "llama2-7b", "--fits", "80"), "--fits takes a size such as 80GiB"),
        (("--parallelism", "dp=2"), "Missing option '--model'"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_what_is_allowed(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and not out
    assert words in err, err
    assert "Traceback" not in err


def test_a_model_of_one_s_own_needs_no_name(run: Run) -> None:
    shape = "num_layers=2,d_model=64,num_heads=2,num_kv_heads=2,d_ffn=96,vocab_size=100,max_seq_len=32"
    code, out, err = run("--model", shape)
    assert code == 0 and out.startswith("custom: "), err


def test_a_mesh_that_contradicts_itself() -> None:
    with pytest.raises(CaseError, match="needs zero 2 or 3"):
        ask(Question("llama2-7b", parallelism="dp=4,replicas=2"))


def test_what_is_not_trained_is_still_counted(run: Run) -> None:
    code, out, err = run("--model", "llama2-7b", "--precision", "fp8-current", "--parallelism", "tp=2")
    assert code == 0 and "total at the peak" in out
    assert (
        "this suite does not train it so: casts of precision fp8-current go with dp and zero, not with tp"
        in err
    )


def test_fits_says_what_would_and_what_it_costs(run: Run) -> None:
    code, out, _ = run(
        *("--model", "llama2-7b", "--parallelism", "dp=8", "--precision", "bf16-master", "--fits", "80GiB"),
        *("--batch-size", "8", "--json"),
    )
    found = {each["change"]: each for each in json.loads(out)["fits"]["options"]}
    assert code == 0
    assert not found["as it is"]["fits"] and found["zero 3"]["fits"]
    assert found["as it is"]["flops"] == found["as it is"]["sent"] == 1
    assert found["recompute full"]["peak_bytes"] < found["as it is"]["peak_bytes"]
    assert 1.2 < found["recompute full"]["flops"] < 4 / 3  # a second forward pass, but for the head
    assert found["zero 3"]["sent"] == pytest.approx(1.5, abs=0.02)  # Rajbhandari et al. 2020


def test_options_are_what_their_predictions_say() -> None:
    spec = ask(Question("llama-0.8m", parallelism="dp=2", batch_size=8, seq_len=128)).spec
    whole = max(each.total for each in predict_ranks(spec, 272))
    found = options(spec, 272, whole)
    assert found[0].change == "as it is" and found[0].fits and found[0].peak_bytes == whole
    assert not options(spec, 272, whole - 1)[0].fits
    assert not any(each.fits for each in options(spec, 272, 1))
    assert all(each.fits for each in found if "," in each.change)
    (larger,) = [each for each in options(spec, 272, 4 * whole) if each.change.startswith("batch_size")]
    assert larger.change in ("batch_size 16", "batch_size 32") and larger.fits
    assert larger.flops == pytest.approx(1, rel=1e-6)
    (largest,) = [each for each in options(spec, 272, 2000 * whole) if each.change.startswith("batch_size")]
    assert largest.fits and 2 * largest.peak_bytes > 2000 * whole


def test_a_trace_stands_beside_the_formula(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(spec: Any) -> tuple[RankStep, ...]:
        return tuple(replace(each, saved=2 * each.saved) for each in predict_ranks(spec, 32000))

    monkeypatch.setattr("suite.tracing.trace", trace)
    code, out, err = run(*SEVEN, "--trace")
    assert code == 0 and "tracing the step" in err
    table = out[out.index("as on cuda") :].splitlines()
    assert "formula" in table[0] and "trace" in table[0]
    assert "+0.0%" in next(line for line in table if line.startswith("total"))
    assert "-50.0%" in next(line for line in table if line.startswith("kept"))


@pytest.mark.slow
def test_a_real_trace_of_a_small_model(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path))
    code, out, _ = run(
        *("--model", "llama-0.3m", "--parallelism", "zero3-2", "--batch-size", "2", "--seq-len", "64"),
        *("--trace", "--json"),
    )
    found = json.loads(out)
    assert code == 0 and found["trace"][0]["state"] == found["ranks"][0]["state"]


def test_it_answers_without_what_takes_long_to_import() -> None:
    heavy = ("torch", "numpy", "pandas", "scipy", "duckdb", "jinja2", "suite.declare.schema", "suite.judge")
    code = (
        "import sys; from suite.cli import main\n"
        "status = main(['ledger', '--model', 'llama2-7b', '--parallelism', 'zero=3,dp=64', '--fits', '80GiB'])\n"
        f"print(sorted(set({heavy}) & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
