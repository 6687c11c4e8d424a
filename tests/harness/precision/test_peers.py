"""The cast against other packages: torch's own casts and fake quantisers, and torchao and bitsandbytes, live where they
are installed and as recorded everywhere. Where a peer differs from the formats' texts, the difference is pinned."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from harness.precision.cast import cast, dequantize
from harness.precision.formats import NF4
from harness.spec.notation import parse_cast

from . import record_peers
from .oracle import F32, NF4_PUBLISHED, Array, mx, mx_exponent
from .test_oracle import (
    Implementation,
    assert_same_bits,
    dequantized,
    each_implementation,
    every_16_bit_value,
)

RECORDED = record_peers.recorded()
KEYS = [key for key in RECORDED if "/" in key and not key.startswith("version/")]


def by_us(text: str, x: Array, implementation: Implementation) -> Array:
    """As the peer's values were recorded: NVFP4 without its outer scale."""
    result = cast(torch.from_numpy(x), parse_cast(text), implementation=implementation)
    return (result.values if text == "nvfp4" else dequantize(result)).numpy()


@each_implementation
@pytest.mark.parametrize("key", KEYS)
def test_recorded(key: str, implementation: Implementation) -> None:
    assert len(KEYS) == 17
    for x, wanted in zip(RECORDED["input"], RECORDED[key], strict=True):
        assert_same_bits(by_us(key.partition("/")[2], x, implementation), wanted, x)


def many() -> Array:
    """Block maxima over nearly all of FP32's range; [512, 256]."""
    rng = np.random.default_rng(21)
    x = rng.standard_normal((512, 256)) * 2.0 ** rng.integers(-3, 4, (512, 256))
    return np.ldexp(x, rng.integers(-95, 115, (512, 1))).astype(F32)


@each_implementation
def test_torchao_mx(implementation: Implementation) -> None:
    pytest.importorskip("torchao")
    x = many()
    for text, function in record_peers.torchao_mx().items():
        assert_same_bits(by_us(text, x, implementation), function(torch.from_numpy(x)).numpy(), x)


@each_implementation
def test_torchao_nvfp4(implementation: Implementation) -> None:
    """Elements and block scales are the same; the last FP32 product may differ by a rounding (docs/precision.md)."""
    pytest.importorskip("torchao")
    rng = np.random.default_rng(22)
    for x in (
        rng.standard_normal((512, 256)),
        rng.standard_normal((64, 256)) * 2.0 ** rng.integers(-4, 4, 256),
    ):
        x = x.astype(F32)
        assert_same_bits(
            by_us("nvfp4", x, implementation), record_peers.torchao_nvfp4(torch.from_numpy(x)).numpy(), x
        )


@each_implementation
def test_bitsandbytes_nf4(implementation: Implementation) -> None:
    pytest.importorskip("bitsandbytes")
    x = np.random.default_rng(23).standard_normal((512, 256)).astype(F32)
    wanted = record_peers.bitsandbytes_nf4(torch.from_numpy(x)).numpy()
    assert_same_bits(by_us("nf4:block64", x, implementation), wanted, x)


def test_the_sixteen_levels() -> None:
    assert NF4.levels == NF4_PUBLISHED


@each_implementation
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "fp16"])
def test_torch_casts(name: str, implementation: Implementation) -> None:
    """Within the range, where all releases agree."""
    dtype = {
        "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16,
    }[name]  # fmt: skip
    x = torch.from_numpy(every_16_bit_value()).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    wanted = x.to(dtype).float().numpy()
    assert_same_bits(dequantized(x, f"{name}:none", implementation), wanted, x.numpy())


def int_inputs() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(24)
    x = rng.standard_normal((37, 60)).astype(F32)
    return {
        name: torch.from_numpy(v)
        for name, v in {"normal": x, "positive": np.abs(x) + 3, "tiny": x * F32(1e-30)}.items()
    }


@each_implementation
@pytest.mark.parametrize("which", int_inputs())
@pytest.mark.parametrize("bits", [8, 4])
def test_symmetric_integers_are_torchs(bits: int, which: str, implementation: Implementation) -> None:
    x, top = int_inputs()[which], 2 ** (bits - 1) - 1
    scale = x.abs().max() / top
    wanted = torch.fake_quantize_per_tensor_affine(x, scale, torch.zeros((), dtype=torch.int32), -top, top)
    assert_same_bits(dequantized(x, f"int{bits}:current", implementation), wanted.numpy(), x.numpy())
    scales = x.abs().amax(1) / top
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    wanted = torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, -top, top)
    assert_same_bits(dequantized(x, f"int{bits}:row", implementation), wanted.numpy(), x.numpy())
    # Groups are rows of the tensor seen as [-1, 20].
    grouped = x.reshape(-1, 20)
    scales = grouped.abs().amax(1) / top
    wanted = torch.fake_quantize_per_channel_affine(
        grouped, scales, torch.zeros(len(scales), dtype=torch.int32), 0, -top, top
    ).view_as(x)
    assert_same_bits(dequantized(x, f"int{bits}:group20", implementation), wanted.numpy(), x.numpy())


@each_implementation
@pytest.mark.parametrize("which", int_inputs())
@pytest.mark.parametrize("bits", [8, 4])
def test_asymmetric_integers_are_torchs(bits: int, which: str, implementation: Implementation) -> None:
    x, top = int_inputs()[which], 2**bits - 1
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    scales = (high - low) / top
    zeros = torch.round(-low / scales).clamp(0, top).to(torch.int32)
    wanted = torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, 0, top)
    assert_same_bits(dequantized(x, f"int{bits}-asym:row", implementation), wanted.numpy(), x.numpy())


# ---- where peers and texts part; docs/precision.md lists them


def needs(package: str, version: str) -> Any:
    """The differences below are those of this release; a later one may have none."""
    try:
        installed = importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        installed = None
    return pytest.mark.skipif(installed != version, reason=f"{package} {version} is not installed")


def ours(text: str, *values: float) -> list[float]:
    x = torch.tensor([values], dtype=torch.float32)
    return [*dequantize(cast(x, parse_cast(text)))[0].tolist()]


@needs("ml_dtypes", "0.6.0")
def test_ml_dtypes_has_no_nan_below_8_bits() -> None:
    for name in ("float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn"):
        with np.errstate(invalid="ignore"):
            (peer,) = np.array([np.nan], F32).astype(getattr(ml_dtypes, name)).astype(F32)
        assert peer == 0
    assert np.isnan(ours("e2m1:none", np.nan)[0])


@needs("ml_dtypes", "0.6.0")
def test_ml_dtypes_e8m0_just_above_its_minimum() -> None:
    """1.1 x 2^-127 is nearer to 2^-127 than to 2^-126; the cast here follows ml_dtypes."""
    x = np.array([1.1 * 2.0**-127], F32)
    assert x.astype(ml_dtypes.float8_e8m0fnu).astype(F32) == 2.0**-126
    assert ours("e8m0:none", float(x[0])) == [2.0**-126]


@needs("torch", "2.13.0")
def test_torch_saturates_e4m3_and_drops_the_sign_of_e8m0() -> None:
    x = torch.tensor([500.0, torch.inf])
    assert x.to(torch.float8_e4m3fn).float().tolist() == [448, 448]
    assert all(np.isnan(ours("e4m3:none:special", 500.0, np.inf)))
    assert ours("e4m3:none", 500.0, np.inf) == [448, 448]
    e8m0 = torch.tensor([-2.0, 0.0, 1.5, 3e38]).to(torch.float8_e8m0fnu).float()
    assert e8m0[:3].tolist() == [2.0, 2.0**-127, 2.0] and bool(e8m0[3].isnan())
    negative, zero, tie = ours("e8m0:none", -2.0, 0.0, 1.5)
    assert np.isnan(negative) and np.isnan(zero) and tie == 2.0


@needs("torchao", "0.18.0")
def test_torchao_halves_blocks_at_the_smallest_scale() -> None:
    """The scale's code says 2^-127, but elements are divided by 2^-126 (floor, even) or by nothing (round-up)."""
    casts = record_peers.torchao_mx()
    x = np.zeros((1, 32), F32)
    x[0, 0] = 2.0**-121
    for rule, peer in {"floor": 2.0**-122, "even": 2.0**-122, "up": 0.0}.items():
        assert mx_exponent(2.0**-121, "e4m3", rule) == -127
        assert casts[f"e4m3:mx:{rule}"](torch.from_numpy(x))[0, 0] == peer
        assert mx(x, "e4m3", rule)[0, 0] == 2.0**-121
        assert ours(f"e4m3:mx:{rule}", *x[0])[0] == 2.0**-121


@needs("torchao", "0.18.0")
def test_torchao_keeps_an_infinity_and_zeroes_its_block() -> None:
    casts = record_peers.torchao_mx()
    x = torch.ones(1, 32)
    x[0, 3] = torch.inf
    for rule in ("floor", "up", "even"):
        peer = casts[f"e4m3:mx:{rule}"](x)[0]
        assert peer[3] == torch.inf and peer[0] == 0
        assert np.isnan(ours(f"e4m3:mx:{rule}", *x[0].tolist())).all()


@needs("torchao", "0.18.0")
def test_torchao_nvfp4_has_a_smallest_block_scale() -> None:
    """A block far below the tensor's maximum: the text stores round(amax / 6 * s), which may be a subnormal or 0."""
    x = np.zeros((1, 32), F32)
    x[0, 0], x[0, 16:] = 1.0, np.linspace(0, 1e-5, 16)
    peer = record_peers.torchao_nvfp4(torch.from_numpy(x)).numpy()
    here = by_us("nvfp4", x, "torch")
    assert peer[0, 31] > 0 and len(np.unique(peer)) < len(np.unique(here))


@needs("torchao", "0.18.0")
def test_torchao_rounds_the_scale_up_by_a_logarithm() -> None:
    """amax one unit above 448 x 2^20 needs 2^21; ceil(log2(amax / 448)) in FP32 gives 2^20."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    amax = np.nextafter(F32(448 * 2.0**20), F32(np.inf))
    x = torch.zeros(1, 32)
    x[0, 0] = float(amax)
    stored = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL).scale
    assert int(stored.view(torch.uint8)) - 127 == 20
    assert mx_exponent(float(amax), "e4m3", "up") == 21


@needs("bitsandbytes", "0.50.2")
def test_bitsandbytes_compares_with_rounded_midpoints() -> None:
    """Where a midpoint of two levels rounds up to FP32, that number itself is nearer to the upper level."""
    levels = np.array(NF4_PUBLISHED)
    middles = (levels[1:] + levels[:-1]) / 2
    x = np.zeros((1, 64), F32)
    x[0, :15], x[0, 63] = middles, 1
    peer = record_peers.bitsandbytes_nf4(torch.from_numpy(x)).numpy()[0, :15]
    here = by_us("nf4:block64", x, "torch")[0, :15]
    above = x[0, :15].astype(float) > middles
    assert above.sum() == 6
    assert np.array_equal(peer, levels[:15].astype(F32)), "the lower level everywhere"
    assert np.array_equal(here, np.where(above, levels[1:], levels[:15]).astype(F32))
