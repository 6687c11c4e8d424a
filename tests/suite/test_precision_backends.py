"""Every preset recipe, on the native backends: which have it, and as what."""

from __future__ import annotations

from typing import Any

import pytest

from harness.precision.backends.requirements import native_requirements
from harness.precision.backends.te_recipe import te_recipe
from harness.spec import PrecisionSpec
from suite.declare import presets

SPECS = presets("precisions")
TE_CLASSES: dict[str, str | None] = {
    "fp8-delayed": "DelayedScaling",
    "fp8-delayed-1024": "DelayedScaling",
    "fp8-delayed-1": "DelayedScaling",
    "fp8-current": "Float8CurrentScaling",
    "fp8-row": None,
    "fp8-row-gw-hp": None,
    "fp8-block": "Float8BlockScaling",
    "fp8-deepseek": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "mxfp8-floor": None,
    "mxfp8-e5m2": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
    "nvfp4-no-sr": "NVFP4BlockScaling",
    "nvfp4-no-rht": "NVFP4BlockScaling",
    "nvfp4-no-2d": "NVFP4BlockScaling",
    "nvfp4-no-high": "NVFP4BlockScaling",
    "nvfp4-plain": "NVFP4BlockScaling",
    "fp8-mus": None,
}
"""Preset -> TE's recipe class, of those that PyTorch itself has."""
EMULATED_ONLY = {
    "fp8-deepseek-14bit": "accumulator",
    "fp8-deepseek-14bit-unpromoted": "accumulator",
    "fp16-cast": "BF16",
    "mxfp6": "e3m2",
    "mxfp4": "e2m1",
    "w4a4-int4": "keeps a block's largest values",
    "w4a4-fp4": "keeps a block's largest values",
}
"""Preset -> a word of the reason that it has no native form."""


def spec(name: str) -> PrecisionSpec:
    found = SPECS[name]
    assert isinstance(found, PrecisionSpec)
    return found


@pytest.mark.parametrize(("name", "class_name"), TE_CLASSES.items())
def test_native_presets(name: str, class_name: str | None) -> None:
    needs = native_requirements(spec(name))
    assert (needs.torch is None) is (name == "mxfp8-e5m2"), "PyTorch's MX products take E4M3 on both sides"
    assert (needs.transformer_engine is not None) is (class_name is not None)
    recipe = spec(name).recipe
    if class_name is not None and recipe is not None:
        assert te_recipe(recipe).class_name == class_name


@pytest.mark.parametrize(("name", "word"), EMULATED_ONLY.items())
def test_presets_without_a_native_form(name: str, word: str) -> None:
    needs = native_requirements(spec(name))
    assert not needs.is_possible
    assert word in needs.reason


def test_no_preset_is_forgotten() -> None:
    with_recipe = {name for name, found in SPECS.items() if getattr(found, "recipe", None) is not None}
    assert with_recipe == {*TE_CLASSES, *EMULATED_ONLY}


@pytest.mark.parametrize(
    ("name", "disabled"),
    [
        ("nvfp4", set()),
        ("nvfp4-no-sr", {"stochastic_rounding"}),
        ("nvfp4-no-rht", {"rht"}),
        ("nvfp4-no-2d", {"2d_quantization"}),
        ("nvfp4-plain", {"rht", "stochastic_rounding", "2d_quantization"}),
    ],
)
def test_each_ingredient_of_nvfp4_is_a_switch_of_te(name: str, disabled: set[str]) -> None:
    recipe = spec(name).recipe
    assert recipe is not None
    arguments: dict[str, Any] = te_recipe(recipe).arguments
    assert {key.removeprefix("disable_") for key, value in arguments.items() if value} == disabled
