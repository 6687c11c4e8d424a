"""From a case to its runs: axes, sizes, include, exclude, shared bases, overrides, labels and keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from suite.declare import CaseError, Plan, expand, load_case
from suite.declare import plan as plan_module

WritePlan = Callable[..., Plan]

HEAD = "question: Does it hold?\nbase: {model: llama-0.3m, tokens: 4k, precision: bf16}\n"
MATRIX = HEAD + "matrix:\n  precision: [bf16, fp8-delayed]\n  seed: [0, 1]\n"


def labels(plan: Plan) -> list[dict[str, Any]]:
    return [run.labels for run in plan.runs if run.role == "arm"]


def test_the_product_of_the_axes_in_order(plan_of: WritePlan) -> None:
    plan = plan_of(MATRIX)
    assert labels(plan) == [
        {"precision": "bf16", "seed": 0},
        {"precision": "bf16", "seed": 1},
        {"precision": "fp8-delayed", "seed": 0},
        {"precision": "fp8-delayed", "seed": 1},
    ]
    assert [run.spec.precision.name for run in plan.runs] == ["bf16", "bf16", "fp8-delayed", "fp8-delayed"]
    assert [run.spec.seed for run in plan.runs] == [0, 1, 0, 1]
    assert all(run.key == run.spec.key and run.depends_on is None for run in plan.runs)
    assert (plan.size, plan.size_reason) == ("default", "the case has one size only")


def test_a_case_without_a_matrix_is_one_run(plan_of: WritePlan) -> None:
    (run,) = plan_of(HEAD).runs
    assert run.labels == {} and run.spec.tokens == 4000


def test_dotted_axes_and_quantities(plan_of: WritePlan) -> None:
    plan = plan_of(HEAD + "matrix:\n  model.ffn: [swiglu, gelu]\n  tokens: [4k, 1e4, 2M]\n")
    assert [run.spec.tokens for run in plan.runs][:3] == [4000, 10000, 2000000]
    assert {run.spec.model.ffn for run in plan.runs} == {"swiglu", "gelu"}
    assert plan.select({"tokens": "2M"}) == plan.select({"tokens": 2000000}) == plan.select({"tokens": 2e6})
    assert len(plan.select({"tokens": ["4k", 10000], "model.ffn": "gelu"})) == 2
    assert plan.select({"ageing": "none"}) == []


def test_inline_mappings_are_labelled(plan_of: WritePlan) -> None:
    plan = plan_of(
        HEAD + "matrix:\n"
        "  optimizer: [adamw, {label: fast, lr: 1e-2}, {label: none, preset: adamw, weight_decay: 0}]\n"
        "  fault: [null, {label: nan, kind: nan, step: 2}]\n"
    )
    assert [run.labels["optimizer"] for run in plan.runs[::2]] == ["adamw", "fast", "none"]
    assert plan.select({"optimizer": "fast"})[0].spec.optimizer.lr == 1e-2
    assert plan.select({"optimizer": "none"})[0].spec.optimizer.weight_decay == 0
    assert [run.spec.fault for run in plan.select({"fault": "none"})] == [None] * 3
    assert plan.select({"fault": "nan"})[0].spec.fault is not None


def test_exclude_and_include(plan_of: WritePlan) -> None:
    plan = plan_of(
        MATRIX + "exclude: [{precision: fp8-delayed, seed: [1]}]\n"
        "include:\n  - {precision: fp32, seed: [0, 1], tokens: 8k}\n  - {precision: fp8-current}\n"
    )
    assert labels(plan) == [
        {"precision": "bf16", "seed": 0},
        {"precision": "bf16", "seed": 1},
        {"precision": "fp8-delayed", "seed": 0},
        {"precision": "fp32", "seed": 0},
        {"precision": "fp32", "seed": 1},
        {"precision": "fp8-current"},
    ]
    assert [run.spec.tokens for run in plan.runs][3:] == [8000, 8000, 4000]


def test_an_included_field_that_tells_runs_apart_is_a_label(plan_of: WritePlan) -> None:
    text = MATRIX + (
        "include:\n  - {precision: bf16, optimizer.weight_decay: [0, 1], tokens: 8k}\n"
        "  - {precision: bf16, optimizer.beta2: 0.99}\n"
        "claims: [{id: a, measure: final_loss, of: {optimizer.beta2: 0.99}, expect: {below: 9}}]\n"
    )
    assert labels(plan_of(text))[4:] == [
        {"precision": "bf16", "optimizer.weight_decay": 0},
        {"precision": "bf16", "optimizer.weight_decay": 1},
        {"precision": "bf16", "optimizer.beta2": 0.99},
    ]


def test_the_plain_run_of_a_case_has_the_labels_that_include_gives_it(plan_of: WritePlan) -> None:
    claim = "claims: [{id: a, measure: final_loss, of: {precision: bf16}, expect: {below: 9}}]\n"
    plan = plan_of(HEAD + "include: [{precision: bf16}, {precision: fp32}]\n" + claim)
    assert labels(plan) == [{"precision": "bf16"}, {"precision": "fp32"}]


def test_equal_runs_are_one(plan_of: WritePlan) -> None:
    plan = plan_of(HEAD + "matrix: {seed: [0, 0, 1]}\ninclude: [{seed: 1}, {seed: 2}]\n")
    assert labels(plan) == [{"seed": 0}, {"seed": 1}, {"seed": 2}]


def test_sizes_scale_and_reshape(plan_of: WritePlan) -> None:
    text = MATRIX + (
        "sizes:\n"
        "  laptop: {}\n"
        "  gpu: {model: llama-125m, tokens: 2B, device: cuda, matrix: {seed: [0]},"
        " include: [{precision: fp32}], exclude: [{precision: fp8-delayed}]}\n"
        "  node: {matrix: {seed: null}}\n"
    )
    assert len(plan_of(text, size="laptop").runs) == 4
    gpu = plan_of(text, size="gpu")
    assert labels(gpu) == [{"precision": "bf16", "seed": 0}, {"precision": "fp32"}]
    assert {(run.spec.model.name, run.spec.tokens, run.spec.device) for run in gpu.runs} == {
        ("llama-125m", 2_000_000_000, "cuda")
    }
    assert labels(plan_of(text, size="node")) == [{"precision": "bf16"}, {"precision": "fp8-delayed"}]
    with pytest.raises(CaseError, match=r"--size gup: unknown size \(got 'gup'\).*did you mean 'gpu'"):
        plan_of(text, size="gup")


@pytest.mark.parametrize(
    ("visible", "sizes", "size", "reason"),
    [
        (False, ["gpu", "laptop"], "laptop", "no NVIDIA device is visible"),
        (True, ["laptop", "gpu"], "gpu", "an NVIDIA device is visible"),
        (True, ["node", "laptop"], "laptop", "an NVIDIA device is visible, and the case has no size gpu"),
        (False, ["node", "gpu"], "node", "no NVIDIA device is visible, and the case has no size laptop"),
    ],
)
def test_default_size(
    monkeypatch: pytest.MonkeyPatch, visible: bool, sizes: list[str], size: str, reason: str
) -> None:
    monkeypatch.setattr(plan_module, "nvidia_visible", lambda: visible)
    assert plan_module.default_size(sizes) == (size, reason)


def test_hidden_devices_are_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not plan_module.nvidia_visible()


def test_arms_share_their_base(plan_of: WritePlan) -> None:
    text = (
        "question: Why?\nbase: {model: llama-0.3m, tokens: 4k, probes: {loss: 1}}\nprobes: {memory: 5}\n"
        "matrix: {precision: [bf16, fp8-delayed], ageing: [none, static-12], seed: [3]}\n"
        "start_from: {precision: bf16, tokens: 1M}\n"
        "include:\n"
        "  - {precision: bf16, seed: 3, start_from: null}\n"
        "  - {precision: bf16, seed: 3, start_from: {precision: bf16, tokens: 2M}}\n"
        "sizes: {laptop: {batch_size: 4, start_from: {seed: 9}}, gpu: {start_from: null}}\n"
    )
    plan = plan_of(text, size="laptop")
    bases = [run for run in plan.runs if run.role == "base"]
    assert [(run.spec.tokens, run.spec.seed, run.spec.batch_size) for run in bases] == [
        (1_000_000, 9, 4),
        (2_000_000, 9, 4),
    ]
    base = bases[0]
    assert plan.runs[:2] == tuple(bases)
    assert base.labels == {} and base.spec.keep_checkpoint and base.spec.start_from is None
    assert base.spec.ageing.kind == "none" and base.spec.probes == {"memory": 5, "loss": 1}
    arms = plan.select({"ageing": ["none", "static-12"]})
    assert len(arms) == 4
    assert {run.depends_on for run in arms} == {base.key}
    assert all(run.spec.start_from is not None and run.spec.start_from.key == base.key for run in arms)
    (scratch,) = plan.select({"start_from": "none"})
    assert scratch.depends_on is None and scratch.spec.start_from is None
    (own,) = plan.select({"start_from": "own"})
    assert own.depends_on == bases[1].key
    assert all(run.depends_on is None for run in plan_of(text, size="gpu").runs[:4])


def test_a_base_that_is_an_arm_too_is_trained_once(plan_of: WritePlan) -> None:
    plan = plan_of(
        HEAD + "start_from: {seed: 0}\nmatrix: {ageing: [none, static-12], seed: [0]}\n"
        "include: [{seed: 0, start_from: null}]\n"
    )
    assert len(plan.runs) == 3
    base = plan.runs[0]
    assert (
        base.role == "arm" and base.labels == {"seed": 0, "start_from": "none"} and base.spec.keep_checkpoint
    )
    assert {run.depends_on for run in plan.runs[1:]} == {base.key}


def test_overrides(plan_of: WritePlan) -> None:
    text = MATRIX + "start_from: {precision: fp32, seed: 7}\ninclude: [{precision: fp32, seed: 5}]\n"
    plan = plan_of(
        text, "seed=[3, 4]", "optimizer.lr=2e-3", "start_from.tokens=1M", "matrix.ageing=[static-9]"
    )
    arms = [run for run in plan.runs if run.role == "arm"]
    assert {run.labels["seed"] for run in arms} == {3, 4} == {run.spec.seed for run in arms}
    assert all(run.labels.get("ageing") == "static-9" for run in arms if run.labels["precision"] != "fp32")
    assert {run.spec.optimizer.lr for run in plan.runs} == {2e-3}
    (base,) = [run for run in plan.runs if run.role == "base"]
    assert (base.spec.tokens, base.spec.seed) == (1_000_000, 7)
    assert plan.case.overrides[0] == "seed=[3, 4]"


def test_an_override_may_leave_a_claim_without_runs(plan_of: WritePlan) -> None:
    claim = "claims: [{id: a, measure: final_loss, of: {precision: bf16}, expect: {below: 9}}]\n"
    assert plan_of(MATRIX + claim, "precision=fp8-delayed").select({"precision": "bf16"}) == []


def test_names_replace_and_single_fields_stay(plan_of: WritePlan) -> None:
    text = (
        "question: Why?\n"
        "base: {model.ffn: gelu, tokens: 4k, precision: {preset: bf16, weights: bf16},"
        " optimizer: {preset: adamw, lr: 0.5}}\n"
        "matrix: {precision: [fp32], optimizer: [adamw-llama2, {label: slow, lr: 1e-6}]}\n"
        "sizes: {laptop: {model: llama-0.3m}}\n"
    )
    llama2, slow = plan_of(text, size="laptop").runs
    assert llama2.spec.model.name == "llama-0.3m" and llama2.spec.model.ffn == "gelu"
    assert llama2.spec.precision.weights == "fp32"
    assert (llama2.spec.optimizer.lr, slow.spec.optimizer.lr) == (3e-4, 1e-6)


def test_a_changed_mesh_does_not_keep_the_presets_name(plan_of: WritePlan) -> None:
    (run,) = plan_of(HEAD.replace("bf16}", "bf16, parallelism: single}"), "parallelism={dp: 2, zero: 1}").runs
    assert (run.spec.parallelism.name, run.spec.parallelism.dp) == ("custom", 2)


def test_extends(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        MATRIX + "claims:\n"
        "  - {id: a, measure: final_loss, expect: {below: 1}}\n"
        "  - {id: b, measure: final_loss, expect: {below: 1}}\n"
    )
    (tmp_path / "child.yaml").write_text(
        "extends: parent.yaml\nbase: {tokens: 8k}\nmatrix: {seed: [5]}\n"
        "claims:\n"
        "  - {id: b, measure: final_loss, expect: {below: 2}}\n"
        "  - {id: c, measure: final_loss, expect: {below: 3}}\n"
    )
    case = load_case(tmp_path / "child.yaml")
    assert case.name == "child" and case.question == "Does it hold?"
    assert [(claim.id, claim.expect.below) for claim in case.claims] == [("a", 1), ("b", 2), ("c", 3)]
    plan = expand(case)
    assert labels(plan) == [{"precision": "bf16", "seed": 5}, {"precision": "fp8-delayed", "seed": 5}]
    assert {run.spec.tokens for run in plan.runs} == {8000}


def test_keys_are_stable(plan_of: WritePlan) -> None:
    """What was measured last year is found again: change this only with a page in docs/decisions."""
    plan = plan_of(
        HEAD + "start_from: {tokens: 1M}\nmatrix: {precision: [fp8-delayed], ageing: [static-12]}\n"
    )
    assert [run.key for run in plan.runs] == ["93ad947afd70b9fa", "9385f063893b2bce"]


def test_an_override_may_suit_one_size_alone(plan_of: WritePlan) -> None:
    sizes = "sizes:\n  laptop: {seq_len: 128}\n  gpu: {seq_len: 512, model: llama-15m}\n"
    text = HEAD + sizes
    short = "model.max_seq_len=256"
    assert {run.spec.seq_len for run in plan_of(text, short, size="laptop").runs} == {128}
    with pytest.raises(CaseError, match="max_seq_len 256"):
        plan_of(text, short, size="gpu")
    with pytest.raises(CaseError, match="max_seq_len 64"):
        plan_of(text, "model.max_seq_len=64", size="laptop")
