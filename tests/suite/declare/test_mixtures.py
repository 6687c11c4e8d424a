"""What a mixture of experts is refused with, before anything runs."""

from __future__ import annotations

import pytest

from harness.spec import AgeingSpec, ParallelismSpec, PrecisionSpec, QuantizerSpec, RecipeSpec, RunSpec
from suite.declare import presets
from suite.declare.feasible import mixture_problem
from suite.declare.meshes import mesh_problems

MOE = presets("models")["moe-0.5m"]
FP8 = PrecisionSpec(name="fp8", recipe=RecipeSpec(weights=QuantizerSpec(format="e4m3")))
FP32 = PrecisionSpec(name="fp32")


def run(**changes: object) -> RunSpec:
    return RunSpec(**{"model": MOE, "precision": FP32, "tokens": 1000, **changes})  # type: ignore[arg-type]


def test_a_plain_one_is_not_refused() -> None:
    assert mixture_problem(run()) is None
    assert not mesh_problems(run(parallelism=ParallelismSpec(ep=2)))


def test_recipes_and_ageing_are_of_dense_models() -> None:
    assert "whose operands precision fp8 casts" in str(mixture_problem(run(precision=FP8)))
    aged = run(ageing=AgeingSpec(name="a", kind="static", log2=4))
    assert "ageing puts outliers into dense feed-forwards" in str(mixture_problem(aged))
    assert mixture_problem(run(model=presets("models")["llama-0.3m"], precision=FP8)) is None


@pytest.mark.parametrize(
    ("mesh", "moe", "reason"),
    [
        ({"tp": 3}, {}, "tp 3 cuts no experts"),
        ({"ep": 3}, {}, "ep 3 does not divide the 4 experts of moe-0.5m"),
        (
            {"cp": 2},
            {"capacity_factor": 1.0},
            "cp 2 cuts sequences, and the experts' capacity is of a whole one",
        ),
    ],
)
def test_meshes_that_no_mixture_fits(mesh: dict[str, int], moe: dict[str, float], reason: str) -> None:
    assert MOE.moe is not None
    model = MOE.model_copy(update={"moe": MOE.moe.model_copy(update=moe)})
    found = mesh_problems(run(model=model, batch_size=12, parallelism=ParallelismSpec(**mesh)))
    assert any(reason in each for each in found), found
