"""Recipes as the presets write them, and the recipe classes of an installed Transformer Engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from harness.spec import PrecisionSpec, QuantizerSpec, RecipeSpec
from harness.spec.notation import parse_cast


def cast(text: str, **more: Any) -> QuantizerSpec:
    return parse_cast(text).model_copy(update=more)


def recipe(activations: str, weights: str = "", gradients: str = "", **more: Any) -> RecipeSpec:
    """A recipe of casts in short notation; weights and gradients are cast like activations where not given."""
    return RecipeSpec(
        activations=cast(activations),
        weights=cast(weights or activations),
        gradients=cast(gradients or activations),
        **more,
    )


def nvfp4(rounding: str = "sr", rht: int = 16, weights: str = "nvfp4:2d") -> RecipeSpec:
    """NVFP4 with its ingredients: stochastic gradients, Hadamard on wgrad, 16x16 weight blocks."""
    gradients = f"nvfp4:{rounding}" if rounding else "nvfp4"
    wgrad: dict[str, Any] = {}
    if rht:
        wgrad = {
            "wgrad": {"activations": cast(f"nvfp4:rht{rht}"), "gradients": cast(f"{gradients}:rht{rht}")}
        }
    return RecipeSpec.model_validate(
        {"activations": cast("nvfp4"), "weights": cast(weights), "gradients": cast(gradients), **wgrad}
    )


def precision(recipe: RecipeSpec | None, **more: Any) -> PrecisionSpec:
    return PrecisionSpec(**{"name": "p", "compute": "bf16", **more, "recipe": recipe})


@pytest.fixture(scope="session")
def te_module() -> ModuleType:
    """`transformer_engine.common.recipe`. Its file needs no GPU, so it is read even where the package's compiled parts
    are absent and importing the package itself fails."""
    name = "transformer_engine.common.recipe"
    try:
        files = importlib.metadata.files("transformer-engine") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Transformer Engine is not installed")
    for file in files:
        if str(file) == "transformer_engine/common/recipe/__init__.py":
            spec = importlib.util.spec_from_file_location(name, str(file.locate()))
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            finally:
                del sys.modules[name]
            return module
    pytest.skip("the installed Transformer Engine carries no recipe classes")
