"""PyTorch's own CPU kernels on the tied problem, and what its exp(0) is."""

from __future__ import annotations

import pytest
import torch
from attention_problems import measure, small

from harness.attention import native
from harness.attention.problem import build
from harness.attention.statistics import bias_of
from harness.attention.tiled import exact
from harness.run import Skipped

CPU = torch.device("cpu")


def _bias(kernel: str, **fields: float) -> float:
    problem = build(small(kernel=kernel, **fields), 0)
    q, k, v = (x.to(torch.bfloat16) for x in (problem.q, problem.k, problem.v))
    out, _ = native.attend(kernel, q, k, v, problem.scale)
    ideal = exact(problem.q, problem.k, problem.v, scale=problem.scale)
    return bias_of(out.float(), ideal.out)["attention_bias_ulp"]


@pytest.mark.parametrize("kernel", ["eager", "flash", "math"])
def test_native_kernels_do_attention(kernel: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, 64, generator=generator).bfloat16() for n in (20, 50, 50))
    out, lse = native.attend(kernel, q, k, v, 0.125)
    ideal = exact(q.float(), k.float(), v.float(), scale=0.125)
    assert out.shape == (3, 20, 64)
    assert float((out.double() - ideal.out).abs().max()) < 0.02
    if lse is not None:
        assert float((lse.double() - ideal.lse).abs().max()) < 2e-3


def test_the_emulation_and_eager_bf16_agree_on_two_ties() -> None:
    assert abs(_bias("eager") - measure(small())["attention_bias_ulp"]) < 0.01


def test_torchs_flash_kernel_has_an_inexact_exp_of_zero() -> None:
    error = native.sum_of_equal("flash", 1024, 64, CPU)
    assert error is not None
    if abs(error) < 1e-6:
        pytest.skip(f"this CPU's kernel ({torch.backends.cpu.get_cpu_capability()}) has exp(0) = 1")
    assert abs(error - -5.34e-5) < 2e-6
    # It decides ties at any gap, where an exact exp(0) leaves them to even.
    assert abs(_bias("flash", gap=28) - -0.208) < 0.02
    assert abs(_bias("math", gap=28)) < 0.02


def test_missing_kernels_say_so() -> None:
    q = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    for kernel, word in (("cudnn", "cpu"), ("efficient", "cpu"), ("fa2", "CUDA"), ("fa3", "CUDA")):
        with pytest.raises(Skipped, match=word):
            native.attend(kernel, q, q, q, 1.0)
    with pytest.raises(ValueError, match="not a native kernel"):
        native.attend("paper", q, q, q, 1.0)
