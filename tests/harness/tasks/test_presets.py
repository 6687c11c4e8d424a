"""Every precision preset trains, says what it multiplies in, and stores the health of each of its casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from harness.spec import ModelSpec, PrecisionSpec, RunSpec
from suite.declare.papers import papers
from suite.declare.presets import preset_texts, presets

from .conftest import NUM_STEPS, Outcome, Runs

Spec = Callable[..., RunSpec]
PRESETS: dict[str, PrecisionSpec] = presets("precisions")
QUANTIZED = [name for name, precision in PRESETS.items() if precision.recipe is not None]
HEALTH = {"quant_amax", "quant_clipped_fraction", "quant_flushed_fraction", "quant_sqnr_db"}


def health(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Cast -> its statistics at the last step."""
    found: dict[str, dict[str, Any]] = {}
    for record in outcome.records:
        if record["k"] == "m" and record["v"].keys() >= HEALTH:
            found[record["c"]] = record["v"]
    return found


def notes(outcome: Outcome) -> dict[str, tuple[Any, str]]:
    return {record["n"]: (record["v"], record["r"]) for record in outcome.records if record["k"] == "note"}


def check(outcome: Outcome, precision: PrecisionSpec, last: int) -> None:
    assert outcome.end == ("ok", "")
    assert all(math.isfinite(loss) for loss in outcome.losses.values()) and len(outcome.losses) == last
    found, said = health(outcome), notes(outcome)
    assert found and said["product_dtype"][0] and said["cast_implementation"][0]
    for cast, values in found.items():
        assert values["quant_amax"] > 0, cast
        assert 0 <= values["quant_clipped_fraction"] <= 1 and 0 <= values["quant_flushed_fraction"] <= 1
        assert values["quant_sqnr_db"] is not None
    roles = {cast.split(".", 4)[-1] for cast in found}
    assert precision.recipe is not None
    for role in ("activations", "weights", "gradients"):
        assert (role in roles) == (getattr(precision.recipe, role) is not None)


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_recipe_trains_a_tiny_model(runs: Runs, spec: Spec, name: str) -> None:
    """Widths that no block divides."""
    tiny = spec(probes={"loss": 1, "quantization": 4}, val_tokens=0)
    outcome = runs(tiny.model_copy(update={"precision": PRESETS[name]}))
    check(outcome, PRESETS[name], NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_every_recipe_trains_the_laptop_model(runs: Runs, spec: Spec, name: str) -> None:
    shape = {"num_layers": 5, "d_model": 128, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 352}
    laptop = spec(
        probes={"loss": 1, "quantization": 4},
        tokens=4 * 8 * 128,
        batch_size=8,
        seq_len=128,
        val_tokens=0,
    )
    model = ModelSpec(name="llama-1m", **shape)
    outcome = runs(laptop.model_copy(update={"precision": PRESETS[name], "model": model}))
    check(outcome, PRESETS[name], 4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_what_it_is_and_whose(name: str) -> None:
    preset = preset_texts("precisions")[name]
    assert preset.about["about"]
    if PRESETS[name].recipe is not None:
        assert preset.about["source"]
        assert PRESETS[name].paper in papers()


def test_no_two_presets_are_the_same() -> None:
    content = [precision.model_dump_json(exclude={"name", "paper"}) for precision in PRESETS.values()]
    assert len(set(content)) == len(content)


def test_each_ingredient_of_nvfp4_is_one_change() -> None:
    """The presets without one of them have the other three."""
    full = PRESETS["nvfp4"].recipe
    assert full is not None
    for name, changed in {
        "nvfp4-no-sr": {"gradients", "wgrad"},
        "nvfp4-no-rht": {"wgrad"},
        "nvfp4-no-2d": {"weights"},
        "nvfp4-no-high": {"high_precision_last"},
    }.items():
        recipe = PRESETS[name].recipe
        assert recipe is not None
        assert {
            field for field in type(full).model_fields if getattr(recipe, field) != getattr(full, field)
        } == changed
    plain = PRESETS["nvfp4-plain"].recipe
    assert plain is not None and plain.gradients is not None
    assert plain.gradients.rounding == "nearest" and plain.high_precision_last == 0
    assert plain.weights is not None and plain.weights.block_shape == (1, 16)
    assert all(spec is not None and spec.hadamard == 0 for spec in plain.operands("wgrad"))
