"""Blocks done in groups (kernel/groups.h) have the PyTorch twin's bits, whatever the blocks beside them hold."""

from __future__ import annotations

import pytest
import torch

from harness.precision import twin
from harness.precision.kernel import cpu
from harness.precision.result import CastResult
from harness.spec import QuantizerSpec
from harness.spec.notation import parse_cast

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no kernel: {cpu.reason()}")

CASTS = (
    "mxfp8", "mxfp8:up", "mxfp8:even", "e5m2:mx", "mxfp6", "e2m3:mx:up", "mxfp4", "mxfp4:even",
    "e4m3:block32", "e4m3:block128", "e5m2:block128:margin=1", "e4m3:block128:margin=-1", "e4m3:block32:special",
    "e4m3:block32:pow2", "e4m3:block128:pow2", "e5m2:block128:pow2:special", "e2m1:block128:pow2",
    "int8:group32", "int8:group128", "int4:group128", "int4:group32:pow2", "nvfp4",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 16384), (4, 4096), (3, 2144), (2, 512), (1, 33))
"""Whole groups in one row, over rows, groups and a rest, one group, less than one."""


def hard(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Every 16 elements of another size, from below FP32's subnormals to its maximum; zeros, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    pieces = -(-cols // 16)
    if seed % 2:
        powers = torch.randint(-150, 127, (rows, pieces), generator=generator)
    else:
        powers = torch.randint(-6, 7, (rows, pieces), generator=generator)
    x = torch.ldexp(x, powers.repeat_interleave(16, dim=1)[:, :cols])
    dead = torch.rand(rows, pieces, generator=generator).repeat_interleave(16, dim=1)[:, :cols]
    x = torch.where(dead < 0.05, torch.copysign(torch.zeros(()), x), x)
    if seed % 3 == 0:
        where = torch.randint(0, x.numel(), (2,), generator=generator)
        x.view(-1)[where] = torch.tensor([float("nan"), float("-inf")])
    return x


def by_twin(x: torch.Tensor, spec: QuantizerSpec, carrier: torch.dtype) -> CastResult:
    return twin.cast_tensor(
        x, spec, along=1, carrier=carrier, scale=None, amax=None, seed=None, collect=False, dequantized=False
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN payloads aside."""
    a, b = a.float(), b.float()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["from_fp32", "from_bf16"])
@pytest.mark.parametrize("carrier", DTYPES, ids=["to_fp32", "to_bf16"])
def test_groups_have_the_twins_bits(name: str, dtype: torch.dtype, carrier: torch.dtype) -> None:
    spec = parse_cast(name)
    for seed, (rows, cols) in enumerate(SHAPES * 3):
        x = hard(rows, cols, seed).to(dtype)
        ours = cpu.cast_tensor(x, spec, carrier=carrier)
        theirs = by_twin(x, spec, carrier)
        assert ours is not None
        assert same(ours.values, theirs.values), (name, rows, cols, seed)
        assert ours.amax is not None and theirs.amax is not None and same(ours.amax, theirs.amax)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "e4m3:block128", "int8:group128"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_every_maximum_a_block_can_have(name: str, dtype: torch.dtype) -> None:
    """Maxima of all exponents and of significands around each rounding step, one block each."""
    spec = parse_cast(name)
    length = {"mxfp8": 32, "nvfp4": 16}.get(name, 128)
    generator = torch.Generator().manual_seed(0)
    for powers in (range(-149, -60), range(-60, 40), range(40, 128)):
        significands = 1 + torch.arange(64) / 64 + torch.tensor([[0.0], [2.0**-7], [-(2.0**-7)]])
        tops = torch.cat([torch.ldexp(significands.flatten(), torch.tensor(power)) for power in powers])
        tops = tops[tops.isfinite()]
        tops = tops[: len(tops) // 32 * 32]
        x = torch.rand(len(tops), length, generator=generator) * 2 - 1
        x[:, 5] = 1
        x = (x * tops[:, None]).reshape(1, -1).to(dtype)
        for piece in torch.split(x, length * 32 * 6, dim=1):  # NVFP4 has one more scale for a tensor
            ours = cpu.cast_tensor(piece, spec, carrier=dtype)
            assert ours is not None
            assert same(ours.values, by_twin(piece, spec, dtype).values)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "e4m3:block128", "int4:group128"])
def test_nothing_beside_the_output_is_written(name: str) -> None:
    spec = parse_cast(name)
    for dtype in DTYPES:
        x = hard(2, 1024, 2).to(dtype)
        wide = torch.full((4, 1100), 7.0, dtype=dtype)
        ours = cpu.cast_tensor(x, spec, carrier=dtype, out=wide[1:3, 32:1056])
        assert ours is not None and same(ours.values, by_twin(x, spec, dtype).values)
        wide[1:3, 32:1056] = 7.0
        assert bool((wide == 7.0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_nvfp4_scales_at_their_ties(dtype: torch.dtype) -> None:
    """Block maxima six times the middle of two E4M3 numbers, and a few FP32 steps beside: a division that is off by its
    last bit would round to the other one. The tensor's maximum makes its own scale one."""
    steps = torch.arange(16, 1024, dtype=torch.float32) / 16
    for shift in range(-8, 9):
        tops = (
            steps * 6
            if dtype == torch.bfloat16
            else ((steps * 6).view(torch.int32) + shift).view(torch.float32)
        )
        x = torch.zeros(len(tops) + 16, 16)
        x[: len(tops), 3] = tops
        x[: len(tops), 4:] = tops[:, None] * torch.linspace(-0.9, 0.9, 12)
        x[-1, 0] = 2688.0
        x = x.reshape(1, -1).to(dtype)
        ours = cpu.cast_tensor(x, parse_cast("nvfp4"), carrier=dtype)
        assert ours is not None and x.shape[1] % 512 == 0
        assert same(ours.values, by_twin(x, parse_cast("nvfp4"), dtype).values)


@pytest.mark.parametrize("name", [*CASTS, "e4m3:block48", "e4m3:current", "bf16:none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_streaming_stores_change_nothing(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = hard(6, 4128, 2).to(dtype)
    spec = parse_cast(name)
    monkeypatch.setattr(cpu, "STREAM_BYTES", 0)
    for carrier in DTYPES:
        for along in (0, 1):
            streamed = cpu.cast_tensor(x, spec, along=along, carrier=carrier)
            monkeypatch.setattr(cpu, "STREAM_BYTES", 2**40)
            plain = cpu.cast_tensor(x, spec, along=along, carrier=carrier)
            monkeypatch.setattr(cpu, "STREAM_BYTES", 0)
            assert streamed is not None and plain is not None and same(streamed.values, plain.values)
