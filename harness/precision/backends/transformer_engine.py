"""Transformer Engine's modules in place of the linears that a recipe covers.

`te.Linear` holds its own casts and state; which recipe it follows is said by the region it runs in. One region is
opened around the model's whole forward pass: at a region's end TE moves the amax history of every module forward, so a
region a layer would move it many times a step. The backward pass runs outside, as TE wants it.

What differs from the emulation: delayed scaling starts at scale 1 before there is a history; statistics of casts are
not kept; and TE's state is pickled bytes, which no checkpoint of the suite holds, so a resumed run starts its history
anew.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from harness.precision.backends.errors import NotExpressibleError
from harness.precision.backends.te_recipe import build, te_recipe
from harness.precision.backends.torch_native import plain
from harness.precision.linear import QuantizedLinear, apply_recipe
from harness.spec import PrecisionSpec

MULTIPLES = {
    "DelayedScaling": 16,
    "Float8CurrentScaling": 16,
    "Float8BlockScaling": 128,
    "MXFP8BlockScaling": 32,
    "NVFP4BlockScaling": 32,
}
"""Recipe class -> what the sizes of a layer must divide by."""


def apply_transformer_engine(
    model: nn.Module, precision: PrecisionSpec, te: Any = None, recipes: Any = None
) -> tuple[list[str], list[str]]:
    """Replace every linear the recipe covers by TE's, in place, and open TE's region around the model's forward pass.

    `te` and `recipes` are transformer_engine.pytorch and transformer_engine.common.recipe where not given. Returns
    (names of the replaced linears, names of those that stay unquantised because their sizes do not divide).
    """
    if precision.recipe is None:
        return [], []
    planned = te_recipe(precision.recipe)
    te = te or importlib.import_module("transformer_engine.pytorch")
    recipes = recipes or importlib.import_module("transformer_engine.common.recipe")
    made = build(planned, recipes)
    kind = linear_class(te)
    replaced, unfit = [], []
    for name in apply_recipe(model, precision):
        old = model.get_submodule(name)
        assert isinstance(old, QuantizedLinear)
        if any(size % MULTIPLES[planned.class_name] for size in (old.in_features, old.out_features)):
            model.set_submodule(name, plain(old))
            unfit.append(name)
        else:
            model.set_submodule(name, _native(old, kind))
            replaced.append(name)
    if replaced:
        open_region(model, te, made)
    return replaced, unfit


def _native(old: QuantizedLinear, kind: type[nn.Module]) -> nn.Module:
    """TE's linear with the weight and bias of `old`."""
    new = kind(
        old.in_features,
        old.out_features,
        bias=old.bias is not None,
        params_dtype=old.weight.dtype,
        device=old.weight.device,
    )
    with torch.no_grad():
        new.weight.copy_(old.weight)  # type: ignore[operator]
        if old.bias is not None:
            new.bias.copy_(old.bias)  # type: ignore[operator]
    return new


def linear_class(te: Any) -> type[nn.Module]:
    """`te.Linear` as the suite's models call it."""

    class TransformerEngineLinear(te.Linear):  # type: ignore[misc]
        def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
            if weight is not None:
                raise NotExpressibleError(
                    "Transformer Engine's Linear multiplies its own weight alone; ageing and smooth-swiglu replace it"
                )
            y: Tensor = super().forward(x)
            return y

        def get_extra_state(self) -> Tensor:
            return torch.empty(0, dtype=torch.uint8)  # TE's own is a pickle

        def set_extra_state(self, state: Tensor) -> None:
            pass

    return TransformerEngineLinear


def region(te: Any, recipe: Any) -> AbstractContextManager[Any]:
    """The context in which TE's modules follow `recipe`."""
    if hasattr(te, "autocast"):
        made: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=recipe)
    else:  # before 2.9
        made = te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    return made


def open_region(model: nn.Module, te: Any, recipe: Any) -> None:
    """Run every forward pass of `model` in a region of its own, closed also where it fails."""
    opened: list[AbstractContextManager[Any]] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        context = region(te, recipe)
        context.__enter__()
        opened.append(context)

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
