"""Recipes become Transformer Engine's, with arguments that its classes have; what it lacks is named."""

from __future__ import annotations

import importlib.metadata
import inspect
from types import ModuleType
from typing import Any

import pytest

from harness.precision.backends.errors import NotExpressibleError
from harness.precision.backends.requirements import parse_version
from harness.precision.backends.te_recipe import build, te_recipe
from harness.precision.backends.te_table import ADDED, QPARAMS, RECIPES
from harness.spec import RecipeSpec

from .conftest import cast, nvfp4, recipe

HYBRID = ("e4m3:{}", "e4m3:{}", "e5m2:{}")


def hybrid(scaling: str) -> RecipeSpec:
    return recipe(*(text.format(scaling) for text in HYBRID))


MAPPED: list[tuple[str, RecipeSpec, str, dict[str, Any], dict[str, dict[str, Any]]]] = [
    (
        "delayed",
        hybrid("delayed"),
        "DelayedScaling",
        {"margin": 0, "fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"},
        {},
    ),
    (
        "delayed-most-recent",
        RecipeSpec(
            **dict.fromkeys(
                ("activations", "weights", "gradients"),
                cast("e4m3:delayed=1024:margin=2", amax="most_recent"),
            )
        ),
        "DelayedScaling",
        {"margin": 2, "fp8_format": "E4M3", "amax_history_len": 1024, "amax_compute_algo": "most_recent"},
        {},
    ),
    (
        "current",
        hybrid("current"),
        "Float8CurrentScaling",
        {"use_power_2_scales": False, "fp8_format": "HYBRID"},
        {},
    ),
    (
        "current-pow2",
        hybrid("current:pow2"),
        "Float8CurrentScaling",
        {"use_power_2_scales": True, "fp8_format": "HYBRID"},
        {},
    ),
    (
        "block-pow2",
        recipe("e4m3:block128:pow2", "e4m3:block128x128:pow2"),
        "Float8BlockScaling",
        {
            "fp8_format": "E4M3",
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
        },
        {},
    ),
    (
        "block-fp32",
        recipe("e4m3:block128", "e4m3:block128x128"),
        "Float8BlockScaling",
        {
            "fp8_format": "E4M3",
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
        },
        {
            f"fp8_quant_{name}": {"power_2_scale": False, "amax_epsilon": 0.0}
            for name in ("fwd_inp", "fwd_weight", "bwd_grad")
        },
    ),
    ("mxfp8", recipe("mxfp8:up"), "MXFP8BlockScaling", {"fp8_format": "E4M3"}, {}),
    (
        "mxfp8-2d-weights",
        recipe("mxfp8:up", "mxfp8:2d:up", "mxfp8-e5m2:up"),
        "MXFP8BlockScaling",
        {"fp8_format": "HYBRID", "enable_2d_quantization": True},
        {},
    ),
    *(
        (
            f"nvfp4-{name}",
            spec,
            "NVFP4BlockScaling",
            dict(
                zip(
                    ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"),
                    disabled,
                    strict=True,
                )
            ),
            {},
        )
        for name, spec, disabled in (
            ("full", nvfp4(), (False, False, False)),
            ("no-sr", nvfp4(rounding=""), (False, True, False)),
            ("no-rht", nvfp4(rht=0), (True, False, False)),
            ("no-2d", nvfp4(weights="nvfp4"), (False, False, True)),
        )
    ),
]


@pytest.mark.parametrize(
    ("spec", "class_name", "arguments", "attributes"), [row[1:] for row in MAPPED], ids=[r[0] for r in MAPPED]
)
def test_mapping(
    spec: RecipeSpec,
    class_name: str,
    arguments: dict[str, Any],
    attributes: dict[str, dict[str, Any]],
) -> None:
    planned = te_recipe(spec)
    assert (planned.class_name, planned.arguments, planned.attributes) == (class_name, arguments, attributes)
    table = {**RECIPES[class_name], **ADDED[class_name]}
    assert planned.arguments.keys() <= table.keys(), "the recorded table has these parameters"
    assert all(fields.keys() <= QPARAMS.keys() for fields in planned.attributes.values())
    for name, value in planned.arguments.items():
        assert type(value) is type(table[name])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (recipe("e4m3:static=2"), "static scaling"),
        (recipe("e4m3:none"), "none scaling"),
        (recipe("e4m3:row"), "row scaling"),
        (recipe("e4m3:current", "e4m3:delayed"), "weights delayed"),
        (recipe("e5m2:current"), "E5M2 for gradients alone"),
        (recipe("e4m3-ieee:current"), "e4m3-ieee"),
        (recipe("e4m3:delayed:pow2"), "power-of-two"),
        (recipe("e4m3:delayed=4", "e4m3:delayed=8"), "one history"),
        (recipe("e4m3:current:margin=1"), "margin"),
        (recipe("e4m3:block64"), "1x128 or 128x128"),
        (recipe("e4m3:block128x128"), "no two operands"),
        (recipe("mxfp8"), "rounds MX scales up"),
        (recipe("mxfp6:up"), "e3m2"),
        (recipe("int4:group128"), "1x128 or 128x128|int4"),
        (recipe("e4m3:current", gradients="e5m2:current:sr"), "stochastic"),
        (recipe("e4m3:current:special"), "saturate"),
        (recipe("e4m3:current", accumulation={}), "accumulator"),
        (recipe("e4m3:current", wgrad={"quantized": False}), "wgrad: is set"),
        (RecipeSpec(activations=cast("e4m3:current"), weights=cast("e4m3:current")), "gradients is left out"),
        (nvfp4(rht=32), "16-point Hadamard"),
        (recipe("nvfp4:2d"), "activations are 1x16"),
    ],
)
def test_what_te_lacks_is_named(spec: RecipeSpec, words: str) -> None:
    with pytest.raises(NotExpressibleError, match=words):
        te_recipe(spec)


def test_the_table_is_that_of_the_installed_release(te_module: ModuleType) -> None:
    version = parse_version(importlib.metadata.version("transformer-engine"))
    for name, parameters in RECIPES.items():
        signature = inspect.signature(getattr(te_module, name)).parameters
        found = {key: _plain(parameter.default, te_module) for key, parameter in signature.items()}
        assert parameters.items() <= found.items()
        if version >= (2, 20):
            assert ADDED[name].items() <= found.items()
    qparams = inspect.signature(te_module.QParams).parameters
    assert {name: parameter.default for name, parameter in qparams.items()} == QPARAMS


@pytest.mark.parametrize(("spec", "class_name"), [row[1:3] for row in MAPPED], ids=[r[0] for r in MAPPED])
def test_the_installed_classes_take_it(spec: RecipeSpec, class_name: str, te_module: ModuleType) -> None:
    planned = te_recipe(spec)
    if not planned.arguments.keys() <= inspect.signature(getattr(te_module, class_name)).parameters.keys():
        pytest.skip("the installed release is older than this parameter")
    made = build(planned, te_module)
    for name, value in planned.arguments.items():
        assert _plain(getattr(made, name), te_module) == value
    for name, fields in planned.attributes.items():
        assert {key: getattr(getattr(made, name), key) for key in fields} == fields


def test_block_scales_stay_powers_of_two_without_attributes(te_module: ModuleType) -> None:
    """Why FP32 scales are set as attributes: the constructor's argument for them reaches no cast."""
    made = te_module.Float8BlockScaling(use_f32_scales=True)
    assert made.fp8_quant_fwd_inp.power_2_scale
    assert build(
        te_recipe(recipe("e4m3:block128:pow2", "e4m3:block128x128:pow2")), te_module
    ).fp8_quant_fwd_weight
    assert not build(
        te_recipe(recipe("e4m3:block128", "e4m3:block128x128")), te_module
    ).fp8_quant_bwd_grad.power_2_scale


def _plain(value: Any, module: ModuleType) -> Any:
    if isinstance(value, module.Format):
        return value.name
    if isinstance(value, module.MMParams):
        return {"use_split_accumulator": value.use_split_accumulator}
    return value
