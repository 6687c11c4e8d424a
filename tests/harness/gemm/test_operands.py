"""Operands for scaled-product kernels: the bits of the emulation's casts, and the layouts kernels read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.gemm import kernels, operands
from harness.precision.cast import cast, dequantize
from harness.spec.gemm import KERNELS, KernelName
from harness.spec.notation import parse_cast

CASTING = [name for name, kernel in KERNELS.items() if kernel.casts is not None]


def hard_matrix(rows: int, cols: int, seed: int) -> Tensor:
    """BF16 with rows of unlike size, a block of zeros, values far below the rest and one far above."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).mul(3).exp()
    x[0] = 0
    x[1:140, :130] *= 1e-6
    x[5, 200] = 3e4
    return x.bfloat16()


def test_there_are_kernels_that_cast() -> None:
    assert len(CASTING) == 5 and set(CASTING) == set(operands.QUANTIZERS)


@pytest.mark.parametrize("name", CASTING)
@pytest.mark.parametrize("side", [0, 1])
def test_operands_are_the_emulations_bit_for_bit(name: KernelName, side: int) -> None:
    x = hard_matrix(200, 512, seed=side)
    spec = parse_cast(KERNELS[name].casts[side])  # type: ignore[index]
    wanted = dequantize(cast(x, spec, implementation="torch"))
    found = operands.dequantized(operands.operand_of(operands.QUANTIZERS[name][side](x)))
    assert found.dtype == torch.float32 and torch.equal(found, wanted)
    assert (found != 0).float().mean() > 0.5  # not equal for being empty


@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-rowwise"])
def test_the_scaled_product_is_that_of_the_operands(name: KernelName) -> None:
    """PyTorch computes these two on a CPU as well, slowly, which is enough to check scales and layouts."""
    x, w = hard_matrix(48, 256, 0), hard_matrix(208, 256, 1)
    left, right = kernels.quantize(name, x, w)
    y = kernels.multiply(name, *kernels.ready(name, left, right))
    wanted = operands.dequantized(left).double() @ operands.dequantized(right).double().t()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), wanted, rtol=2**-8, atol=1e-6 * float(wanted.abs().max()))


def test_block_scales_lie_as_the_kernel_reads_them() -> None:
    x, w = hard_matrix(40, 640, 0), hard_matrix(256, 640, 1)
    left, right = kernels.ready("fp8-block", *kernels.quantize("fp8-block", x, w))
    assert left.scales[0].shape == (40, 5) and left.scales[0].stride() == (1, 40)
    assert right.scales[0].shape == (8, 2) and right.scales[0].stride() == (1, 8)  # 5 blocks, padded to 8


def test_tiles_of_scales() -> None:
    """cuBLAS: scale (r, b) of a 128 x 4 tile stands at (r % 32) * 16 + (r // 32) * 4 + b; tiles run along a row."""
    scales = torch.arange(200 * 6, dtype=torch.int32).remainder(251).to(torch.uint8).view(200, 6)
    tiles = kernels.in_tiles(scales)
    assert tiles.shape == (2 * 2 * 512,)
    for row, block in ((0, 0), (31, 3), (32, 0), (127, 5), (128, 0), (199, 4)):
        tile = (row // 128) * 2 + block // 4
        r, b = row % 128, block % 4
        assert tiles[tile * 512 + (r % 32) * 16 + (r // 32) * 4 + b] == scales[row, block]


def test_e2m1_codes_round_ties_to_the_even_code() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -0.75, -6.0])
    assert operands._e2m1_codes(values).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 15]
