"""The imitated accumulator: its cut, its promotion, and the errors that others published for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.precision.accumulate import cut_mask, matmul
from harness.spec import AccumulationSpec


def operands(m: int, k: int, n: int, positive: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand if positive else torch.randn
    return draw(m, k, generator=generator), draw(k, n, generator=generator)


def largest_relative_error(k: int = 4096, **fields: int) -> float:
    """Over all outputs, |error| / |exact|, for operands uniform in [0, 1)."""
    a, b = operands(96, k, 96, positive=True)
    exact = a.double() @ b.double()
    return float(((matmul(a, b, AccumulationSpec(**fields)) - exact).abs() / exact).max())


def oracle(a: Tensor, b: Tensor, spec: AccumulationSpec) -> np.ndarray:  # type: ignore[type-arg]
    """One output at a time, in Python floats; for instructions of one product, which are exact in FP64."""
    out = np.zeros((a.shape[0], b.shape[1]))
    for i, j in np.ndindex(*out.shape):
        total = acc = 0.0
        for step, (x, y) in enumerate(zip(a[i].tolist(), b[:, j].tolist(), strict=True), start=1):
            fraction, exponent = np.frexp(np.float64(np.float32(acc + x * y)))
            acc = float(
                np.ldexp(
                    np.trunc(np.ldexp(fraction, spec.mantissa_bits + 1)), exponent - spec.mantissa_bits - 1
                )
            )
            if spec.promote_every and step % spec.promote_every == 0:
                total, acc = float(np.float32(total + acc)), 0.0
        out[i, j] = np.float32(total + acc)
    return out


@pytest.mark.parametrize("promote_every", [0, 8])
@pytest.mark.parametrize("mantissa_bits", [6, 10, 14])
def test_equals_a_scalar_oracle(mantissa_bits: int, promote_every: int) -> None:
    a, b = (x.bfloat16().float() for x in operands(3, 20, 4))  # products of such numbers are exact in FP32
    spec = AccumulationSpec(mantissa_bits=mantissa_bits, instruction_k=1, promote_every=promote_every)
    assert np.array_equal(matmul(a, b, spec).numpy(), oracle(a, b, spec).astype(np.float32))


@pytest.mark.parametrize(
    ("bits", "unpromoted", "promoted"), [(13, 0.085, 0.0029), (14, 0.044, 0.0014), (15, 0.022, 0.0007)]
)
def test_published_errors(bits: int, unpromoted: float, promoted: float) -> None:
    """A secondary account of DeepSeek-V3 gives these for K = 4096, unpromoted and promoted every 128, without saying
    what is multiplied. Cutting after every product of numbers uniform in [0, 1) gives them."""
    assert largest_relative_error(mantissa_bits=bits, instruction_k=1) == pytest.approx(unpromoted, rel=0.1)
    found = largest_relative_error(mantissa_bits=bits, instruction_k=1, promote_every=128)
    assert found == pytest.approx(promoted, rel=0.1)


def test_longer_instructions_cut_less_often() -> None:
    errors = [largest_relative_error(1024, mantissa_bits=13, instruction_k=k) for k in (1, 4, 32)]
    assert errors[0] > 2.5 * errors[1] > 6 * errors[2] > 0


def test_all_bits_and_one_instruction_is_an_ordinary_product() -> None:
    a, b = operands(5, 40, 6)
    assert torch.allclose(
        matmul(a, b, AccumulationSpec(mantissa_bits=23, instruction_k=64)), a @ b, rtol=1e-6
    )


def test_sums_are_cut_towards_zero() -> None:
    a, b = operands(30, 64, 30)
    exact = a.double() @ b.double()
    cut = matmul(a, b, AccumulationSpec(mantissa_bits=6, instruction_k=64)).double()
    assert bool((cut.abs() <= exact.abs() * (1 + 1e-6)).all()) and bool((cut.abs() < exact.abs()).any())
    assert bool((cut * exact >= 0).all())


@pytest.mark.parametrize("k", [1, 100, 128, 129])
def test_a_contraction_that_does_not_divide(k: int) -> None:
    a, b = operands(4, k, 4)
    found = matmul(a, b, AccumulationSpec(mantissa_bits=20, promote_every=128))
    assert torch.allclose(found, a @ b, rtol=1e-3, atol=1e-3)
    assert found.shape == (4, 4)


def test_the_mask_keeps_the_sign_the_exponent_and_the_upper_bits() -> None:
    assert cut_mask(23) == -1 and cut_mask(0) & 0xFFFFFFFF == 0xFF800000


def test_strided_operands() -> None:
    a, b = operands(8, 64, 8)
    spec = AccumulationSpec(mantissa_bits=12, promote_every=32)
    assert torch.equal(matmul(a.t().contiguous().t(), b, spec), matmul(a, b, spec))
