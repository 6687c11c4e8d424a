"""A recipe put into a whole model, on each backend that a CPU can stand in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.models.transformer import Transformer, build
from harness.precision.backends import apply
from harness.precision.backends.apply import apply_backend, capability, carry_out
from harness.precision.backends.errors import BackendError
from harness.precision.backends.packages import installed
from harness.precision.backends.select import Choice
from harness.precision.backends.torch_native import ScaledLinear
from harness.precision.linear import QuantizedLinear
from harness.spec import ModelSpec

from .conftest import precision, recipe

CURRENT = recipe("e4m3:current", gradients="e5m2:current")
CPU = torch.device("cpu")
NATIVE = Choice("torch", "native", "for the test")


def model(**changes: Any) -> Transformer:
    shape = {"num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 48}
    return build(ModelSpec(name="tiny", **{**shape, **changes}), vocab_size=61, seed=0)


def losses(trained: Transformer) -> list[float]:
    """Of three plain steps."""
    tokens = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = trained.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append(float(loss.detach()))
        with torch.no_grad():
            for parameter in trained.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    return found


def test_auto_on_a_cpu_is_emulated_and_says_so() -> None:
    changed = model()
    choice = apply_backend(changed, precision(CURRENT), CPU)
    assert (choice.backend, choice.fidelity) == ("emulated", "emulated")
    assert "compute capability 8.9" in choice.reason and "a CPU" in choice.reason
    emulated = [name for name, module in changed.named_modules() if isinstance(module, QuantizedLinear)]
    assert emulated and choice.replaced == tuple(emulated)
    assert not any(isinstance(module, ScaledLinear) for module in changed.modules())


def test_without_a_recipe_nothing_changes() -> None:
    changed = model()
    before = [type(module) for module in changed.modules()]
    assert apply_backend(changed, precision(None), CPU).fidelity == "native"
    assert [type(module) for module in changed.modules()] == before


@pytest.mark.parametrize("backend", ["torch", "transformer_engine"])
def test_asking_a_cpu_for_native_products(backend: str) -> None:
    changed = model()
    with pytest.raises(BackendError, match=r"8\.9"):
        apply_backend(changed, precision(CURRENT, backend=backend), CPU)
    assert not any(isinstance(module, QuantizedLinear) for module in changed.modules()), "nothing was touched"


@pytest.mark.parametrize("name", ["current", "row"])
def test_a_model_trains_alike_on_native_products(name: str) -> None:
    p = precision(CURRENT if name == "current" else recipe("e4m3:row"))
    native, emulated = model(), model()
    choice = carry_out(NATIVE, native, p)
    assert choice.fidelity == "native" and choice.replaced and not choice.unfit
    apply_backend(emulated, p, CPU)
    on_native = losses(native)
    assert torch.allclose(torch.tensor(on_native), torch.tensor(losses(emulated)), rtol=0.01)
    assert on_native != losses(model()), "something was quantised"


def test_layers_that_do_not_divide_are_named() -> None:
    changed = model(d_ffn=40)
    choice = carry_out(NATIVE, changed, precision(CURRENT))
    assert {*choice.unfit} == {f"layers.{i}.ffn.down" for i in range(2)}
    assert "2 linears stay unquantised" in choice.reason and "layers.0.ffn.down" in choice.reason
    assert choice.fidelity == "native"


def test_where_no_layer_divides_auto_emulates() -> None:
    small = {"d_model": 24, "d_ffn": 40, "num_heads": 2, "num_kv_heads": 1}
    changed = model(**small)
    choice = carry_out(NATIVE, changed, precision(CURRENT))
    assert (choice.backend, choice.fidelity) == ("emulated", "emulated")
    assert choice.replaced and "no linear" in choice.reason
    with pytest.raises(BackendError, match="no linear"):
        carry_out(NATIVE, model(**small), precision(CURRENT, backend="torch"))


def test_models_that_replace_weights_do_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"torch": "2.13", "cuda": "13.0", "transformer-engine": "2.9"}
    monkeypatch.setattr(apply, "installed", lambda: packages)
    monkeypatch.setattr(apply, "capability", lambda device: (10, 0))
    carried: list[str] = []
    monkeypatch.setattr(apply, "carry_out", lambda choice, *rest: carried.append(choice.backend))
    blocks = recipe("e4m3:block128:pow2", "e4m3:block128x128:pow2")
    for ffn in ("swiglu", "smooth-swiglu", "smooth-swiglu-token"):
        apply_backend(model(ffn=ffn), precision(blocks), torch.device("cuda"))
    assert carried == ["transformer_engine", "emulated", "transformer_engine"]
    with pytest.raises(BackendError, match="smooth-swiglu multiply weights"):
        apply_backend(
            model(ffn="smooth-swiglu"), precision(blocks, backend="transformer_engine"), torch.device("cuda")
        )


def test_what_is_installed() -> None:
    found = installed()
    assert found["torch"] == torch.__version__.split("+")[0] or found["torch"] == torch.__version__
    assert found.get("cuda") == torch.version.cuda
    assert capability(CPU) is None
