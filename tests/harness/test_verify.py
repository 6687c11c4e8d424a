"""The checks of native paths, on what a CPU can compute."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import verify
from harness.precision import twin
from harness.precision.backends.torch_native import apply_torch
from harness.spec import PrecisionSpec, QuantizerSpec, RecipeSpec
from harness.spec.notation import parse_cast

CPU = torch.device("cpu")
E4M3 = QuantizerSpec(format="e4m3", scaling="current")
E5M2 = QuantizerSpec(format="e5m2", scaling="current")


def precision(backend: str = "torch", **roles: QuantizerSpec) -> PrecisionSpec:
    casts = {"activations": E4M3, "weights": E4M3, "gradients": E5M2, **roles}
    return PrecisionSpec(name="fp8", compute="bf16", recipe=RecipeSpec(**casts), backend=backend)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's FP8 products on a CPU are plain loops."""
    for name, size in (("TOKENS", 48), ("D_IN", 64), ("D_OUT", 32)):
        monkeypatch.setattr(verify, name, size)


def test_all_casts_of_the_list_can_be_read() -> None:
    assert len({parse_cast(word).model_dump_json() for word in verify.CASTS}) == len(verify.CASTS)


@pytest.mark.parametrize(
    "roles",
    [{}, {"gradients": parse_cast("e4m3:row"), "activations": parse_cast("e4m3:row")}],
    ids=["tensor", "row"],
)
def test_a_right_native_linear_passes(roles: dict[str, QuantizerSpec]) -> None:
    found = verify.check_path(precision(**roles), CPU, apply_torch)
    assert found.status == "ok" and found.mismatches == 0
    assert found.error is not None and found.error < 0.01


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.precision.backends import torch_native

    right = torch_native.multiply
    monkeypatch.setattr(torch_native, "multiply", lambda *a, **k: right(*a, **k) * 1.2)
    found = verify.check_path(precision(), CPU, apply_torch)
    assert found.status == "wrong" and found.error == pytest.approx(0.2, abs=0.02)


def test_wrong_operands_are_found_though_the_product_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.decoded

    def one_off(operand: Any) -> torch.Tensor:
        values = right(operand).clone()
        values[1, 1] = values[1, 1] * (1 + 2**-3) + 1e-6
        return values

    monkeypatch.setattr(verify, "decoded", one_off)
    found = verify.check_path(precision(), CPU, apply_torch)
    assert found.status == "wrong" and found.mismatches == 6  # two operands of three products


def test_a_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.precision.backends import torch_native

    right = torch_native.multiply
    monkeypatch.setattr(torch_native, "multiply", lambda *a, **k: right(*a, **k) * float("nan"))
    assert verify.check_path(precision(), CPU, apply_torch).status == "wrong"


@pytest.mark.parametrize("backend", ["torch", "transformer_engine"])
def test_what_the_device_lacks_is_skipped_with_the_reason(backend: str) -> None:
    found = verify.check_path(precision(backend), CPU)
    assert found.status == "skipped" and "compute capability" in found.detail


def test_a_linear_that_the_recipe_leaves_alone_is_no_success() -> None:
    def nothing(model: nn.Module, spec: PrecisionSpec) -> None:
        return None

    assert verify.check_path(precision(), CPU, nothing).status == "skipped"


def test_casts_are_compared_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is the twin passes; one that errs in one element of each tensor does not."""
    from harness.precision.kernel import cpu

    words = ["e4m3:current", "mxfp8:up", "e4m3:row"]
    monkeypatch.setattr(cpu, "available", lambda: True)
    monkeypatch.setattr(cpu, "cast_tensor", twin.cast_tensor)
    found = verify.check_casts(words, CPU, "cpp")
    assert [f.status for f in found] == ["ok"] * 6 and {f.mismatches for f in found} == {0}

    def off(*args: Any, **kwargs: Any) -> Any:
        result = twin.cast_tensor(*args, **kwargs)
        result.values[3, 3] += 1
        return result

    monkeypatch.setattr(cpu, "cast_tensor", off)
    found = verify.check_casts(words, CPU, "cpp")
    assert [f.status for f in found] == ["wrong"] * 6 and {f.mismatches for f in found} == {4}

    monkeypatch.setattr(cpu, "cast_tensor", lambda *args, **kwargs: None)
    found = verify.check_casts(words, CPU, "cpp")
    assert {f.status for f in found} == {"skipped"}  # what the twin did itself is no success
    monkeypatch.setattr(cpu, "available", lambda: False)
    assert [f.status for f in verify.check_casts(words, CPU, "cpp")] == ["skipped"]


def test_signs_of_zero_and_nan_count_as_they_should() -> None:
    one = torch.tensor([0.0, float("nan"), 1.0])
    assert verify._num_unlike(one, torch.tensor([0.0, float("nan"), 1.0])) == 0
    assert verify._num_unlike(one, torch.tensor([-0.0, float("nan"), 1.0])) == 1
    assert verify._num_unlike(one, torch.tensor([0.0, 1.0, 1.0])) == 1
    assert verify._num_unlike(None, None) == 0 and verify._num_unlike(one, None) == 1


@pytest.fixture
def script() -> Any:
    path = Path(__file__).resolve().parents[2] / "scripts" / "native_check.py"
    spec = importlib.util.spec_from_file_location("native_check", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_says_that_nothing_was_compared(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    command = ["paths", "--device", "cpu", "--precision", "fp8-current", "--json", str(file)]
    assert script.main(command) == 3
    assert "0 ok, 0 wrong, 2 skipped" in capsys.readouterr().out
    assert [entry["status"] for entry in json.loads(file.read_text())] == ["skipped", "skipped"]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("wrong", 1)])
def test_the_script_answers_by_its_exit_status(
    script: Any, monkeypatch: pytest.MonkeyPatch, status: Any, code: int
) -> None:
    made = [verify.Finding("paths", "x", status, ""), verify.Finding("paths", "y", "ok", "")]
    monkeypatch.setattr(script, "findings", lambda *_: made)
    assert script.main(["paths", "--device", "cpu"]) == code
