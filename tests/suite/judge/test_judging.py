"""Claims over small made-up results: the word, the numbers, and that the reason names what matters."""

import dataclasses
import math

import pytest

from harness.spec import ParallelismSpec, PrecisionSpec, RecipeSpec, RunSpec
from harness.spec.notation import parse_cast
from suite.declare.plan import PlannedRun
from suite.judge import blocker, judge
from suite.judge.judging import _hardware_for
from suite.judge.verdict import WORDS


def only(verdicts):
    (verdict,) = verdicts
    assert verdict.verdict in WORDS
    assert verdict.reason.endswith(".")
    return verdict


def test_gap_reproduced(world):
    plan, store = world.two_arms([0.2, 0.21, 0.19], world.claim("final_loss_gap", {"above": 0.05}))
    verdict = only(judge(plan, store))
    assert verdict.verdict == "reproduced"
    assert verdict.effect == pytest.approx(0.2)
    assert 0.05 < verdict.low < 0.2 < verdict.high
    assert (verdict.num_pairs, verdict.confidence, verdict.unit) == (3, 0.95, "nats/token")
    assert verdict.fidelity == "emulated"
    assert verdict.machine == "2 cores"
    assert len(verdict.run_keys) == 6
    assert "nats/token" in verdict.reason
    assert "3 pairs" in verdict.reason
    assert [pair.effect for pair in verdict.pairs] == pytest.approx([0.2, 0.21, 0.19])


def test_pairing_removes_what_seeds_share(world):
    """Seeds differ by far more than the gap; paired, the gap is plain."""
    plan, store = world.two_arms([0.02, 0.021, 0.019], world.claim("final_loss_gap", {"above": 0.01}))
    assert only(judge(plan, store)).verdict == "reproduced"


def test_non_inferior_shows_the_interval_it_decides_by(world):
    plan, store = world.two_arms(
        [0.001, -0.001, 0.0], world.claim("final_loss_gap", {"non_inferior_within": 0.01})
    )
    verdict = only(judge(plan, store))
    assert verdict.verdict == "reproduced"
    assert verdict.confidence == 0.9
    assert verdict.high < 0.01


def test_inconclusive_says_how_many_would_do(world):
    plan, store = world.two_arms([0.02, 0.15, 0.07], world.claim("final_loss_gap", {"above": 0.05}))
    verdict = only(judge(plan, store))
    assert verdict.verdict == "inconclusive"
    assert verdict.seeds_needed > 3
    assert f"about {verdict.seeds_needed} pairs" in verdict.reason


def test_one_pair_is_never_enough(world):
    plan, store = world.two_arms([5.0], world.claim("final_loss_gap", {"above": 0.05}))
    verdict = only(judge(plan, store))
    assert (verdict.verdict, verdict.low, verdict.high, verdict.confidence) == (
        "inconclusive",
        None,
        None,
        None,
    )
    assert verdict.seeds_needed == 2
    assert verdict.effect == pytest.approx(5.0)


def test_ratio_works_on_logarithms(world):
    one = world.claim("peak_bytes_ratio", {"within": [0.6, 0.8]})
    plan, store = world.two_arms([0, 0, 0], one)
    for seed, ratio in enumerate((0.69, 0.7, 0.71)):
        for run in plan.select({"seed": seed}):
            value = 1e9 * (ratio if run.labels["precision"] == "fp8" else 1)
            store.finish(run, {"peak_bytes": value}, scope="total")
    verdict = only(judge(plan, store))
    assert verdict.verdict == "reproduced"
    assert verdict.effect == pytest.approx((0.69 * 0.7 * 0.71) ** (1 / 3))
    assert verdict.low * verdict.high == pytest.approx(verdict.effect**2)


def test_speed_of_emulation_is_never_judged(world):
    one = world.claim("throughput_ratio", {"at_least": 1.2})
    plan, store = world.two_arms([0, 0, 0], one)
    for run in plan.runs:
        store.finish(run, {"tokens_per_s": 1000.0})
    verdict = only(judge(plan, store))
    assert verdict.verdict == "not run"
    assert verdict.effect is None
    assert "native" in verdict.reason
    assert "3 of the 6 runs are emulated" in verdict.reason
    assert "fp8 has no native form (native products of narrow formats come out in BF16" in verdict.reason


@pytest.mark.parametrize(
    ("cast", "need"),
    [
        ("mxfp8:up", "torch: compute capability 10.0 to 11.x"),
        ("e4m3:current", "torch: compute capability 8.9 or above"),
        ("e4m3:block128", "torch: compute capability 9.x, CUDA 12.9"),
        ("mxfp6", "x has no native form"),
    ],
)
def test_the_reason_names_what_native_runs_of_the_recipe_would_take(cast, need):
    quantizer = parse_cast(cast)
    recipe = RecipeSpec(activations=quantizer, weights=quantizer, gradients=quantizer)
    spec = RunSpec(
        task="gemm", precision=PrecisionSpec(name="x", compute="bf16", recipe=recipe, backend="emulated")
    )
    assert need in _hardware_for([PlannedRun(spec.key, spec, {}, "arm")])


def test_speed_of_a_run_stored_as_less_than_native_is_never_judged(world):
    one = world.claim("throughput", {"above": 1.0}, of={"precision": "bf16"})
    plan, store = world.two_arms([0, 0], one)
    for run in plan.runs:
        store.finish(run, {"tokens_per_s": 1000.0}, fidelity="simulated")
    verdict = only(judge(plan, store))
    assert (verdict.verdict, verdict.effect) == ("not run", None)
    assert "simulated" in verdict.reason


def test_native_speed_is_judged(world):
    one = world.claim("throughput", {"above": 500}, of={"precision": "bf16"})
    plan, store = world.two_arms([0, 0, 0], one)
    for run in plan.select({"precision": "bf16"}):
        store.finish(run, {"tokens_per_s": 1000.0 + run.spec.seed})
    verdict = only(judge(plan, store))
    assert (verdict.verdict, verdict.fidelity) == ("reproduced", "native")


def test_speed_of_ranks_that_share_a_cpu_is_never_judged(world):
    one = world.claim("throughput", {"above": 500}, of={"precision": "bf16"})
    plan, store = world.two_arms([0, 0, 0], one)
    shared = [
        dataclasses.replace(
            run, spec=run.spec.model_copy(update={"parallelism": ParallelismSpec(dp=2), "device": "cpu"})
        )
        for run in plan.runs
    ]
    plan = dataclasses.replace(plan, runs=shared)
    for run in shared:
        store.finish(run, {"tokens_per_s": 1000.0 + run.spec.seed})
    verdict = only(judge(plan, store))
    assert (verdict.verdict, verdict.effect) == ("not run", None)
    assert "3 runs have ranks that share one CPU" in verdict.reason


def test_needs_native(world):
    plan, store = world.two_arms([0.2] * 3, world.claim("final_loss_gap", {"above": 0.05}, needs="native"))
    verdict = only(judge(plan, store))
    assert verdict.verdict == "not run"
    assert "needs native" in verdict.reason
    assert blocker(plan.claims[0], plan) is not None


def test_no_run_at_this_size_and_none_yet(world):
    one = world.claim("final_loss_gap", {"above": 0.05}, of={"precision": "fp4"})
    plan, store = world.two_arms([0.2] * 3, one)
    assert "no run with precision fp4" in only(judge(plan, store)).reason
    plan, store = world.two_arms([0.2] * 3, world.claim("final_loss_gap", {"above": 0.05}))
    verdict = only(judge(plan, world.FakeStore()))
    assert verdict.verdict == "not run"
    assert "None of the 6 runs" in verdict.reason
    assert blocker(plan.claims[0], plan) is None


@pytest.mark.parametrize(
    ("measure", "fields", "text"),
    [
        ("final_los_gap", {"against": {"precision": "bf16"}}, "unknown measure"),
        ("final_loss", {"against": {"precision": "bf16"}}, "final_loss_gap or final_loss_ratio"),
        ("final_loss_gap", {"against": None}, "no `against`"),
        ("final_loss_ratio", {"expect": {"above": 0}}, "above 0"),
        ("final_loss_ratio", {"expect": {"within": [0, 1]}}, "above 0"),
        ("final_loss_ratio", {"expect": {"non_inferior_within": 1.5}}, "below 1"),
        ("final_loss", {"expect": {"non_inferior_within": 0.1}}, "final_loss_gap or _ratio"),
    ],
)
def test_claims_that_cannot_be_measured_say_so(world, measure, fields, text):
    expect = fields.pop("expect", {"above": 0.05})
    plan, store = world.two_arms([0.2] * 3, world.claim(measure, expect, **fields))
    verdict = only(judge(plan, store))
    assert verdict.verdict == "not run"
    assert text in verdict.reason


def test_all_diverged(world):
    plan, store = world.two_arms([0.0] * 3, world.claim("final_loss_gap", {"above": 0.05}))
    for run in plan.select({"precision": "fp8"}):
        store.finish(run, status="diverged", reason="loss is NaN at step 7")
    verdict = only(judge(plan, store))
    assert (verdict.verdict, verdict.effect, verdict.low) == ("reproduced", math.inf, None)
    assert "3 of 3 pairs" in verdict.reason
    assert "fp8" in verdict.reason
    row = verdict.as_row()
    assert row["effect"] == math.inf
    assert row["pairs"][0]["diverged"]
    assert row["pairs"][0]["effect"] is None
    assert verdict.as_json()["effect"] is None


def test_diverged_run_is_never_non_inferior(world):
    one = world.claim("final_loss_gap", {"non_inferior_within": 0.01})
    plan, store = world.two_arms([0.0, 0.001, 0.0, 0.001], one)
    store.finish(plan.select({"precision": "fp8", "seed": 2})[0], status="diverged")
    verdict = only(judge(plan, store))
    assert verdict.verdict == "inconclusive"
    assert "1 of 4 pairs hold a diverged run" in verdict.reason
    for run in plan.select({"precision": "fp8"}):
        store.finish(run, status="diverged")
    assert only(judge(plan, store)).verdict == "differs"


def test_both_sides_diverged_is_undefined(world):
    plan, store = world.two_arms([0.1] * 3, world.claim("final_loss_gap", {"above": 0.05}))
    for run in plan.runs:
        store.finish(run, status="diverged")
    verdict = only(judge(plan, store))
    assert verdict.verdict == "inconclusive"
    assert "both sides" in verdict.reason


def test_failed_runs_drop_their_pair_and_are_named(world):
    plan, store = world.two_arms([0.2, 0.21, 0.19, 5.0], world.claim("final_loss_gap", {"above": 0.05}))
    store.finish(plan.select({"precision": "fp8", "seed": 3})[0], status="oom", reason="3.1 GiB wanted")
    verdict = only(judge(plan, store))
    assert (verdict.verdict, verdict.num_pairs) == ("reproduced", 3)
    assert "Seed 3 left out: fp8 is oom (3.1 GiB wanted)" in verdict.reason
    del store.rows[plan.select({"precision": "bf16", "seed": 2})[0].key]
    verdict = only(judge(plan, store))
    assert verdict.num_pairs == 2
    assert "bf16 has not run" in verdict.reason


def test_a_run_without_the_metric_is_named(world):
    plan, store = world.two_arms([0.2] * 3, world.claim("final_val_loss_gap", {"above": 0.05}))
    verdict = only(judge(plan, store))
    assert verdict.verdict == "not run"
    assert "recorded no val_loss" in verdict.reason


@pytest.mark.parametrize(
    "elsewhere",
    [
        ("64 cores", None, None, "2.13.0"),
        ("2 cores", None, None, "2.12.1"),
        ("2 cores", "H200", "1", "2.13.0"),
    ],
)
def test_pairs_across_environments_are_not_comparable(world, elsewhere):
    plan, store = world.two_arms([0.2] * 3, world.claim("final_loss_gap", {"above": 0.05}))
    store.environments["there"] = elsewhere
    store.finish(plan.select({"precision": "fp8", "seed": 1})[0], {"loss": 2.2}, environment="there")
    verdict = only(judge(plan, store))
    assert verdict.verdict == "not comparable"
    assert verdict.effect is None
    assert "Seed 1" in verdict.reason


def test_whole_pairs_on_different_machines_are_fine(world):
    plan, store = world.two_arms([0.2, 0.21, 0.19], world.claim("final_loss_gap", {"above": 0.05}))
    store.environments["there"] = ("64 cores", None, None, "2.13.0")
    for run in plan.select({"seed": 1}):
        store.rows[run.key].environment_id = "there"
    verdict = only(judge(plan, store))
    assert (verdict.verdict, verdict.machine) == ("reproduced", "2 cores, 64 cores")


def test_open_labels_are_averaged_so_that_seeds_stay_the_unit(world):
    """Three ageing values of two seeds are two pairs, not six."""
    plan, store = world.Plan([], [world.claim("final_loss_gap", {"above": 0.05})]), world.FakeStore()
    for seed in (0, 1):
        for ageing, gap in (("none", 0.1), ("static-8", 0.2), ("static-16", 0.3)):
            for precision, loss in (("bf16", 2.0), ("fp8", 2.0 + gap + 0.01 * seed)):
                run = world.make_run(precision, seed, ageing=ageing)
                plan.runs.append(run)
                store.finish(run, {"loss": loss})
    verdict = only(judge(plan, store))
    assert verdict.num_pairs == 2
    assert [pair.effect for pair in verdict.pairs] == pytest.approx([0.2, 0.21])
    assert "averaged over ageing" in verdict.reason
    del store.rows["fp8-static-8-1"]
    assert only(judge(plan, store)).num_pairs == 1


def test_runs_of_one_precision_at_two_ageings(world):
    """`of` and `against` may differ in any label; one that they name takes no part in the pairing."""
    one = world.claim(
        "final_loss_gap",
        {"above": 0.05},
        of={"precision": "fp8", "ageing": "static-16"},
        against={"precision": "fp8", "ageing": "none"},
    )
    plan, store = world.Plan([], [one]), world.FakeStore()
    for seed in (0, 1, 2):
        for ageing, loss in (("none", 2.0), ("static-16", 2.2 + 0.01 * seed)):
            run = world.make_run("fp8", seed, ageing=ageing)
            plan.runs.append(run)
            store.finish(run, {"loss": loss})
    verdict = only(judge(plan, store))
    assert (verdict.verdict, verdict.num_pairs) == ("reproduced", 3)


def test_without_against_the_seeds_own_values_are_judged(world):
    one = world.claim("quant_flushed_fraction[ffn.down.activations]", {"above": 0.5})
    plan, store = world.two_arms([0.0] * 3, one)
    for run in plan.select({"precision": "fp8"}):
        values = {"quant_flushed_fraction": 0.8 + 0.01 * run.spec.seed}
        store.finish(run, values, scope="layers.0.ffn.down.activations")
    verdict = only(judge(plan, store))
    assert (verdict.verdict, verdict.num_pairs) == ("reproduced", 3)
    assert verdict.pairs[0].against is None
    assert "3 seeds" in verdict.reason


def test_higher_is_better_margin(world):
    """A margin on a measure where higher is better is passed from above."""
    one = world.claim("quant_sqnr_db_gap", {"non_inferior_within": 1.0})
    plan, store = world.two_arms([0.0] * 3, one)
    for fp8, word in ((29.9, "reproduced"), (35.0, "reproduced"), (20.0, "differs")):
        store.measurements.clear()
        for run in plan.runs:
            value = (fp8 if run.labels["precision"] == "fp8" else 30.0) + 0.01 * run.spec.seed**2
            store.finish(run, {"quant_sqnr_db": value}, scope="layers.0.ffn.down.weights")
        assert only(judge(plan, store)).verdict == word


def test_one_base_under_all_seeds_is_said(world):
    plan, store = world.two_arms([0.2, 0.21, 0.19], world.claim("final_loss_gap", {"above": 0.05}))
    assert "one base" not in only(judge(plan, store)).reason
    base = plan.runs[0].spec
    for position, run in enumerate(plan.runs):
        spec = run.spec.model_copy(update={"start_from": base})
        plan.runs[position] = dataclasses.replace(run, spec=spec)
    assert "All runs start from one base" in only(judge(plan, store)).reason


def test_row_has_the_columns_of_the_table(world):
    from pathlib import Path

    import results

    schema = (Path(results.__file__).parent / "schema.sql").read_text()
    table = schema.split("CREATE TABLE verdicts (")[1].split(");")[0]
    columns = {line.split()[0] for line in table.splitlines() if line.strip()}
    plan, store = world.two_arms([0.2] * 3, world.claim("final_loss_gap", {"above": 0.05}))
    assert set(only(judge(plan, store)).as_row()) == columns
