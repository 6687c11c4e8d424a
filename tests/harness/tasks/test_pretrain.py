"""Whole runs: deterministic, started from other runs, measured as they should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.checkpoint import checkpoint_path
from harness.spec import AgeingSpec, DataSpec, LimitsSpec, OptimizerSpec, RunSpec
from harness.tasks import pretrain

from .conftest import NUM_STEPS, PRECISIONS, SPORADIC, Outcome, Runs

Spec = Callable[..., RunSpec]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_spec_gives_the_same_bits(runs: Runs, spec: Spec, precision: str) -> None:
    one, other = runs(spec(precision=precision)), runs(spec(precision=precision))
    assert one.end == other.end == ("ok", "")
    assert list(one.losses) == list(range(1, NUM_STEPS + 1))
    assert one.losses == other.losses
    assert one.values["val_loss"] == other.values["val_loss"]
    assert one.values["gradient_norm"] == other.values["gradient_norm"]
    assert one.values["val_loss"][NUM_STEPS] < one.values["val_loss"][0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp8-delayed"])
def test_one_thread_or_two_the_same_bits(runs: Runs, spec: Spec, precision: str) -> None:
    """At a shape where two threads do share the work of GEMMs, norms and element-wise passes."""
    shape = {"d_model": 128, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 352}
    size = {"model": shape, "seq_len": 128, "batch_size": 8, "tokens": 3 * 1024, "val_tokens": 1024}
    one, two = (runs(spec(precision=precision, threads=threads, **size)) for threads in (1, 2))
    assert torch.get_num_threads() == 2
    assert one.losses == two.losses
    assert one.values["gradient_norm"] == two.values["gradient_norm"]
    assert one.values["val_loss"] == two.values["val_loss"]


def test_seed_changes_data_and_weights(runs: Runs, spec: Spec) -> None:
    one, other = runs(spec()), runs(spec(seed=1))
    assert all(one.losses[step] != other.losses[step] for step in one.losses)


def test_probes_change_no_loss(runs: Runs, spec: Spec, high_loss_scale: None) -> None:
    every = dict.fromkeys(
        ["throughput", "weights", "alignment", "activations", "quantization", "ablation", "memory"], 1
    )
    for precision in ("fp8-delayed", "fp16"):
        plain = runs(spec(precision=precision))
        watched = runs(spec(precision=precision, probes=every))
        assert watched.end == ("ok", "")
        for metric in ("loss", "val_loss", "loss_scale", "num_skipped_steps"):
            assert plain.values.get(metric) == watched.values.get(metric), metric


def test_every_step_is_recorded(runs: Runs, spec: Spec) -> None:
    done = runs(spec(optimizer=OptimizerSpec(lr=3e-3, warmup_ratio=0.25)))
    assert done.values["num_parameters"] == {0: pytest.approx(30_000, rel=0.2)}
    assert list(done.values["val_loss"]) == [0, NUM_STEPS]
    rates = [done.values["learning_rate"][step] for step in range(1, NUM_STEPS + 1)]
    assert rates[:2] == [1.5e-3, 3e-3] and rates[-1] == pytest.approx(3e-4)
    assert {*done.values["rare_tokens_in_batch"].values()} == {0, 1}
    assert done.values["train_seconds"][NUM_STEPS] > 0
    assert not done.checkpoints(final=True) and not done.checkpoints()


def test_gradients_are_clipped(runs: Runs, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded before, used after: AdamW sees a norm of at most clip_norm."""
    seen: list[float] = []
    original = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        seen.append(float(torch.nn.utils.get_total_norm(gradients)))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    done = runs(spec(optimizer=OptimizerSpec(clip_norm=0.25)))
    assert all(norm > 0.25 for norm in done.values["gradient_norm"].values())
    assert seen == pytest.approx([0.25] * NUM_STEPS, rel=1e-3)
    seen.clear()
    free = runs(spec(optimizer=OptimizerSpec(clip_norm=0)))
    assert seen == pytest.approx(list(free.values["gradient_norm"].values()), rel=1e-5)


def start(runs: Runs, base: RunSpec, **request: Any) -> tuple[Outcome, str]:
    """Train `base`; its outcome and the checkpoint it left."""
    trained = runs(base, **request)
    ((step, sha256),) = trained.checkpoints(final=True)
    assert step == base.num_steps
    return trained, sha256


def test_start_from_begins_with_the_base_s_weights(runs: Runs, spec: Spec) -> None:
    base = spec(keep_checkpoint=True)
    trained, sha256 = start(runs, base)
    arm = runs(spec(start_from=base), start_checkpoint=sha256)
    assert arm.end == ("ok", "")
    assert arm.values["val_loss"][0] == trained.values["val_loss"][NUM_STEPS]
    assert arm.losses[1] < trained.losses[1] - 0.5
    assert arm.losses[NUM_STEPS] < trained.losses[NUM_STEPS]  # and goes on, with a schedule of its own


def test_start_from_another_precision_and_form(runs: Runs, spec: Spec) -> None:
    base = spec(precision="fp32", keep_checkpoint=True)
    trained, sha256 = start(runs, base)
    for precision in ("fp8-delayed", "bf16-pure"):
        arm = spec(start_from=base, precision=precision, model={"ffn": "smooth-swiglu"})
        found = runs(arm, start_checkpoint=sha256).values["val_loss"][0]
        assert found == pytest.approx(trained.values["val_loss"][NUM_STEPS], abs=0.05)


@pytest.mark.parametrize("ageing", [AgeingSpec(name="static-8", kind="static", log2=8), SPORADIC])
def test_the_weights_of_an_aged_base_are_those_of_its_function(
    runs: Runs, spec: Spec, ageing: AgeingSpec
) -> None:
    base = spec(keep_checkpoint=True, ageing=ageing)
    trained, sha256 = start(runs, base)
    arm = runs(spec(start_from=base), start_checkpoint=sha256)
    assert arm.values["val_loss"][0] == trained.values["val_loss"][NUM_STEPS]


def test_start_from_a_checkpoint_that_is_gone_or_does_not_fit(runs: Runs, spec: Spec) -> None:
    base = spec(keep_checkpoint=True)
    gone = runs(spec(start_from=base), start_checkpoint="0" * 64)
    assert gone.code == 1 and gone.end[0] == "crashed"
    assert "is missing; the next `suite run` makes it anew" in gone.end[1]
    _, sha256 = start(runs, base)
    other = runs(spec(start_from=base, model={"d_ffn": 64}), start_checkpoint=sha256)
    assert other.end[0] == "crashed" and "[96, 32] in the checkpoint, [128, 32] here" in other.end[1]


def test_the_kept_checkpoint_holds_the_weights_alone(runs: Runs, spec: Spec) -> None:
    done, sha256 = start(runs, spec(keep_checkpoint=True, checkpoint_every_s=1e-9, precision="fp8-delayed"))
    tensors = load_file(checkpoint_path(runs.out / "checkpoints", sha256))
    assert sum(tensor.numel() for tensor in tensors.values()) == done.values["num_parameters"][0]
    assert [path.stem for path in (runs.out / "checkpoints").iterdir()] == [sha256]  # no resume point is left


@pytest.mark.parametrize("ageing", [AgeingSpec(name="static-8", kind="static", log2=8), SPORADIC])
def test_ageing_is_recorded(runs: Runs, spec: Spec, ageing: AgeingSpec) -> None:
    done = runs(spec(ageing=ageing))
    notes = {record["n"]: (record["v"], record["r"]) for record in done.records if record["k"] == "note"}
    channels, reason = notes["aged_channels"]
    assert len(channels) == 2 and ageing.name in reason
    young = runs(spec())
    if ageing.kind == "static":
        assert done.values["function_change"] == {0: 0}
        assert done.losses == young.losses  # BF16: ageing alone makes no difference, to the bit
    else:
        assert 0 < done.values["function_change"][0] < 1


def test_loss_that_stays_high_is_divergence(runs: Runs, spec: Spec) -> None:
    done = runs(spec(limits=LimitsSpec(loss_above=1.0)))
    assert (done.code, done.end[0]) == (11, "diverged")
    assert done.end[1].startswith("the loss was above 1.0 for 3 steps, ") and done.end[1].endswith(
        "at step 3"
    )
    assert list(done.losses) == [1, 2, 3]
    assert runs(spec(limits=LimitsSpec(loss_above=50.0))).end == ("ok", "")


def test_a_loss_that_comes_down_between_has_not_diverged(
    runs: Runs, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights = iter([9.0, 9.0, 1.0, 9.0, 9.0, 1.0, 9.0, 9.0])
    original = pretrain.training_step

    def step(run: Any, *args: Any) -> None:
        original(run, *args)
        run.loss = next(heights)

    monkeypatch.setattr(pretrain, "training_step", step)
    assert runs(spec(limits=LimitsSpec(loss_above=5.0))).end == ("ok", "")


def test_fp16_scales_its_loss_and_skips_steps_that_overflow(
    runs: Runs, spec: Spec, request: pytest.FixtureRequest
) -> None:
    calm = runs(spec(precision="fp16"))
    assert set(calm.values["loss_scale"].values()) == {65536}
    assert set(calm.values["num_skipped_steps"].values()) == {0}
    bf16 = runs(spec(precision="bf16"))
    assert calm.losses[NUM_STEPS] == pytest.approx(bf16.losses[NUM_STEPS], abs=0.05)
    assert "loss_scale" not in bf16.values

    request.getfixturevalue("high_loss_scale")
    loud = runs(spec(precision="fp16"))
    scales, skipped = loud.values["loss_scale"], loud.values["num_skipped_steps"]
    assert loud.end == ("ok", "")
    assert scales[1] == 2**24 and skipped[1] == 1
    assert scales[2] == 2**23  # halved after the step that overflowed
    assert skipped[NUM_STEPS] == math.log2(scales[1] / scales[NUM_STEPS])
    assert loud.losses[NUM_STEPS] < loud.losses[1]


def test_scales_follow_the_history_of_earlier_steps(runs: Runs, spec: Spec) -> None:
    """The quantisers are told when a step ends, and delayed scales come from the three steps before."""
    done = runs(spec(precision="fp8-delayed", probes={"quantization": 1}))
    for role, top in (("activations", 448.0), ("weights", 448.0), ("gradients", 57344.0)):
        scope = f"layers.1.ffn.down.{role}"
        found = [record["v"] for record in done.records if record.get("c") == scope]
        amax, scale = ([values[name] for values in found] for name in ("quant_amax", "quant_scale"))
        assert len(amax) == NUM_STEPS
        for step in range(1, NUM_STEPS):
            assert scale[step] == pytest.approx(top / max(amax[max(0, step - 3) : step])), (role, step)


def test_no_validation_where_none_is_asked(runs: Runs, spec: Spec) -> None:
    assert "val_loss" not in runs(spec(val_tokens=0)).values


def test_the_rare_token_comes_only_where_asked(runs: Runs, spec: Spec, corpus: Any) -> None:
    plain = runs(spec(data=DataSpec(corpus=str(corpus))))
    rare = runs(spec())
    assert "rare_tokens_in_batch" not in plain.values
    first = min(step for step, count in rare.values["rare_tokens_in_batch"].items() if count)
    assert all(plain.losses[step] == rare.losses[step] for step in range(1, first))
    assert plain.losses[first] != rare.losses[first]
