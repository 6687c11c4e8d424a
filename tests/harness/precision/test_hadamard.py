"""The random Hadamard transform: orthogonal, no trace in an unquantised product, an outlier spread."""

from __future__ import annotations

import pytest
import torch

from harness.precision.hadamard import SIGNS, matrix, transform

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 4, 16, 32, 64])
def test_the_matrix_is_orthogonal_with_equal_magnitudes(size: int) -> None:
    basis = matrix(size, CPU)
    assert torch.allclose(basis @ basis.t(), torch.eye(size), atol=1e-6)
    assert torch.allclose(basis.abs(), torch.full((size, size), size**-0.5))


def test_the_signs_come_before_the_hadamard_matrix() -> None:
    """v S H / 4: the first column of H is ones, so the first output is the signed sum of the block over 4."""
    v = torch.arange(1.0, 17.0)
    wanted = sum(sign * value for sign, value in zip(SIGNS, v.tolist(), strict=True)) / 4
    assert float(transform(v[None], 16, along=1)[0, 0]) == pytest.approx(wanted)
    assert len(set(SIGNS)) == 2


@pytest.mark.parametrize("tokens", [16, 48, 50, 7, 0])
def test_a_product_of_two_transformed_operands_is_unchanged(tokens: int) -> None:
    """Whole blocks are transformed, a remainder left alone on both sides."""
    generator = torch.Generator().manual_seed(0)
    g, x = (torch.randn(tokens, width, generator=generator) for width in (5, 9))
    product = transform(g, 16, along=0).t() @ transform(x, 16, along=0)
    assert torch.allclose(product, g.t() @ x, atol=1e-5)
    assert torch.equal(transform(x, 16, along=0)[tokens // 16 * 16 :], x[tokens // 16 * 16 :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_either_dimension_and_any_strides(dtype: torch.dtype) -> None:
    x = torch.randn(32, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    by_rows = transform(x, 16, along=0)
    assert by_rows.dtype == torch.float32
    assert torch.allclose(transform(x.t(), 16, along=1).t(), by_rows, atol=1e-6)
    assert torch.allclose(by_rows[:16], matrix(16, CPU).t() @ x[:16].float(), atol=1e-6)


def test_no_size_is_no_transform() -> None:
    x = torch.randn(4, 4)
    assert transform(x, 0, along=1) is x


def test_an_outlier_is_spread_over_its_block() -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = 100
    y = transform(x, 16, along=1)
    assert torch.equal(y[0, :16].abs(), torch.full((16,), 25.0))
    assert torch.equal(y[0, 16:], torch.zeros(16))
