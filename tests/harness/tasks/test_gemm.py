"""The task that times products: what it records, what it refuses, that it notices a wrong product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.gemm import operands, timing
from harness.gemm.available import lacking
from harness.spec import RunSpec
from harness.spec.gemm import KERNELS, GemmSpec, KernelName, unfit
from harness.tasks import gemm as task

from .conftest import Runs


def product(**changes: Any) -> RunSpec:
    return RunSpec(task="gemm", gemm=GemmSpec(**{"m": 48, "k": 64, "n": 32, "rounds": 3, **changes}))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUND_S", 1e-4)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 12)


@pytest.mark.parametrize("kernel", ["fp32", "bf16"])
def test_a_cpu_times_what_it_has(runs: Runs, kernel: KernelName) -> None:
    done = runs(product(kernel=kernel))
    assert done.end == ("ok", "")
    speeds = done.values["gemm_tflops"]
    assert list(speeds) == [1, 2, 3] and all(speed > 0 for speed in speeds.values())
    assert done.values["gemm_with_cast_tflops"] == speeds  # nothing is cast
    microseconds = done.values["gemm_us"][2]
    assert speeds[2] == pytest.approx(2 * 48 * 64 * 32 / microseconds / 1e6)
    assert 0 < done.values["gemm_error"][0] < 2**-7
    assert done.values["gemm_operand_mismatches"][0] == 0
    notes = {record["n"]: record["v"] for record in done.records if record["k"] == "note"}
    assert notes["clock"] == "CPU time of the process"


@pytest.mark.parametrize(
    ("kernel", "capability"), [("fp8-tensorwise", "8.9"), ("fp8-block", "9.x"), ("nvfp4", "10.0")]
)
def test_a_cpu_has_no_speed_of_narrow_kernels(runs: Runs, kernel: KernelName, capability: str) -> None:
    done = runs(product(kernel=kernel, k=128, n=128))
    status, reason = done.end
    assert (done.code, status) == (12, "skipped")
    assert f"compute capability {capability}" in reason and "CPU" in reason
    assert "gemm_tflops" not in done.values


NEW = {"torch": "2.13.0", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("kernel", "capability", "packages", "word"),
    [
        ("fp8-tensorwise", (8, 0), NEW, "compute capability 8.9"),
        ("fp8-block", (8, 9), NEW, "compute capability 9.x"),
        ("fp8-block", (10, 0), NEW, "compute capability 9.x"),  # PyTorch has it for Hopper alone
        ("fp8-block", (9, 0), {**NEW, "cuda": "12.8"}, "cuda 12.9"),
        ("mxfp8", (9, 0), NEW, "compute capability 10.0"),
        ("nvfp4", (9, 0), NEW, "compute capability 10.0"),
        ("fp8-rowwise", (9, 0), {"torch": "2.13.0"}, "without CUDA"),
    ],
)
def test_what_a_device_lacks_is_named(
    kernel: KernelName, capability: tuple[int, int], packages: dict[str, str], word: str
) -> None:
    reason = lacking(kernel, "cuda", capability, packages)
    assert reason is not None and reason.startswith(kernel) and word in reason


def test_what_a_device_has() -> None:
    assert [name for name in KERNELS if lacking(name, "cuda", (9, 0), NEW) is None] == [
        *("fp32", "bf16", "fp8-tensorwise", "fp8-rowwise", "fp8-block"),
    ]
    assert [name for name in KERNELS if lacking(name, "cpu", None, NEW) is None] == ["fp32", "bf16"]


def test_shapes_that_no_kernel_takes(runs: Runs) -> None:
    assert unfit(GemmSpec(m=16, k=128, n=128, kernel="fp8-block")) is None
    assert "gemm.n in multiples of 16" in str(unfit(GemmSpec(m=16, k=32, n=40, kernel="fp8-rowwise")))
    status, reason = runs(product(k=0)).end
    assert status == "crashed" and "gemm.k must be at least 1" in reason


def test_a_fast_wrong_product_is_an_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(spec: GemmSpec, x: torch.Tensor, w: torch.Tensor) -> task.Calls:
        return task.Calls(lambda: x @ w.t() * 1.1, lambda: x, None)

    monkeypatch.setattr(task, "calls", wrong)
    status, reason = runs(product()).end
    assert status == "crashed" and "errs by 0.1" in reason


Check = Callable[[KernelName], tuple[float, int]]


@pytest.fixture
def check_on_cpu() -> Check:
    """The check of a kernel whose product a CPU can compute, if slowly."""

    def check(name: KernelName) -> tuple[float, int]:
        spec = GemmSpec(m=96, k=128, n=64, kernel=name)
        x, w = task.random_operands(spec, 0, torch.device("cpu"))
        found = task.calls(spec, x, w)
        assert torch.equal(found.alone(), found.together())
        return task.check(spec, x, w, found)

    return check


@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-rowwise"])
def test_the_check_passes_the_right_kernel(check_on_cpu: Check, name: KernelName) -> None:
    error, mismatches = check_on_cpu(name)
    assert 0 < error < 2**-7 and mismatches == 0


def test_the_check_catches_a_wrong_scale(check_on_cpu: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scale = operands.tensorwise(x)
        return codes, scale * 2

    monkeypatch.setitem(operands.QUANTIZERS, "fp8-tensorwise", (operands.tensorwise, wrong))
    error, mismatches = check_on_cpu("fp8-tensorwise")
    assert error > task.TOLERANCE and mismatches > 0


def test_all_rows_of_a_small_product_are_checked() -> None:
    spec = GemmSpec(m=40, k=32, n=16)
    x, w = task.random_operands(spec, 0, torch.device("cpu"))
    y = x @ w.t()
    y[39, 15] += 100
    assert task.check(spec, x, w, task.Calls(lambda: y, lambda: y, None))[0] > task.TOLERANCE
