"""How Transformer Engine's modules are put into a model. What they compute needs a GPU: here a stand-in does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import checkpoint
from harness.precision.backends.errors import NotExpressibleError
from harness.precision.backends.te_table import AUTOCAST, LINEAR
from harness.precision.backends.transformer_engine import apply_transformer_engine, region
from harness.precision.linear import Linear

from .conftest import precision, recipe

CURRENT = recipe("e4m3:current", gradients="e5m2:current")


class TELinear(nn.Linear):
    """The parameters that the suite passes to `te.Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: Any = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=params_dtype)
        self.regions: list[list[str]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.regions.append([*TE.open])
        return super().forward(x)

    def get_extra_state(self) -> Any:
        raise AssertionError("TE's own state is a pickle")


class Float8CurrentScaling(SimpleNamespace):
    """The recipe that is made here."""


class Format(Enum):
    E4M3 = 1
    HYBRID = 2


class TE:
    """The stand-in for transformer_engine.pytorch."""

    Linear = TELinear
    open: list[str] = []  # noqa: RUF012
    entered = 0

    @staticmethod
    @contextmanager
    def autocast(
        enabled: bool = False, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None
    ) -> Iterator[None]:
        assert enabled
        TE.open.append(type(recipe).__name__)
        TE.entered += 1
        try:
            yield
        finally:
            TE.open.pop()


@pytest.fixture
def recipes() -> Any:
    """The stand-in for transformer_engine.common.recipe."""
    return SimpleNamespace(Format=Format, Float8CurrentScaling=Float8CurrentScaling)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.odd, self.head = Linear(32, 48, bias=True), Linear(48, 40, bias=False), Linear(40, 16)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.odd(self.up(x)))
        if self.fails:
            raise RuntimeError("no")
        return y


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    TE.open, TE.entered = [], 0
    return Model()


def test_linears_are_replaced(model: Model, recipes: Any) -> None:
    x = torch.randn(4, 32)
    before = model(x)
    assert apply_transformer_engine(model, precision(CURRENT), TE, recipes) == (["up"], ["odd"])
    assert isinstance(model.up, TELinear) and type(model.odd) is Linear and type(model.head) is Linear
    assert torch.equal(model(x), before), "weights and biases came along"
    assert {name for name, _ in model.named_parameters()} == {
        *("up.weight", "up.bias", "odd.weight", "head.weight", "head.bias")
    }


def test_one_region_around_the_models_forward_pass(model: Model, recipes: Any) -> None:
    apply_transformer_engine(model, precision(CURRENT), TE, recipes)
    for passes in (1, 2):
        model(torch.randn(4, 32)).sum().backward()
        assert (TE.entered, TE.open) == (passes, [])
    assert model.up.regions == [["Float8CurrentScaling"]] * 2
    model.fails = True
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 32))
    assert TE.open == [], "closed also where the pass failed"


def test_no_weight_from_outside(model: Model, recipes: Any) -> None:
    apply_transformer_engine(model, precision(CURRENT), TE, recipes)
    with pytest.raises(NotExpressibleError, match="smooth-swiglu"):
        model.up(torch.randn(4, 32), torch.randn(48, 32))


def test_checkpoints_hold_no_pickle(model: Model, recipes: Any, tmp_path: Any) -> None:
    apply_transformer_engine(model, precision(CURRENT), TE, recipes)
    optimizer = torch.optim.SGD(model.parameters())
    sha256 = checkpoint.save_checkpoint(tmp_path, checkpoint.training_state(model, optimizer))
    tensors, _ = checkpoint.load_checkpoint(tmp_path, sha256)
    assert tensors["model.up._extra_state"].numel() == 0
    checkpoint.load_training_state(model, optimizer, tensors)


def test_before_2_9_the_region_had_another_name() -> None:
    seen: dict[str, Any] = {}
    old = SimpleNamespace(fp8_autocast=lambda **given: seen.update(given))
    region(old, "a recipe")
    assert seen == {"enabled": True, "fp8_recipe": "a recipe"}


def test_the_stand_in_has_the_recorded_parameters() -> None:
    assert (*inspect.signature(TE.autocast).parameters,) == AUTOCAST
    assert (*inspect.signature(TELinear.__init__).parameters,)[1:] == LINEAR


def test_the_installed_package_has_them_too(te_module: ModuleType) -> None:
    """Read as text: the PyTorch part of the package cannot be imported without CUDA."""
    from importlib.metadata import files

    sources = {str(file): file for file in files("transformer-engine") or []}
    quantization = sources.get("transformer_engine/pytorch/quantization.py")
    linear = sources.get("transformer_engine/pytorch/module/linear.py")
    if quantization is None or linear is None:
        pytest.skip("the installed Transformer Engine carries no sources")
    import ast

    def parameters(path: Any, name: str) -> list[str]:
        tree = ast.parse(path.locate().read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                node = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
                return [argument.arg for argument in node.args.args][1:]
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return [argument.arg for argument in node.args.args]
        raise AssertionError(f"no {name}")

    assert parameters(quantization, "autocast")[: len(AUTOCAST)] == [*AUTOCAST]
    assert {*LINEAR} <= {*parameters(linear, "Linear")}
