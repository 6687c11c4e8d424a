"""Every implementation of the cast against the NumPy oracle and ml_dtypes, bit for bit."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
import torch

from harness.precision.cast import cast, dequantize
from harness.spec.notation import parse_cast

from . import oracle
from .oracle import F32, Array

Implementation = Literal["torch", "cpp", "triton"]
CUDA = torch.cuda.is_available()


def _implementations() -> list[Implementation]:
    """What this machine has. Triton's kernels run on CUDA, or anywhere under TRITON_INTERPRET=1, slowly."""
    from harness.precision.kernel import cpu

    found: list[Implementation] = ["torch"]
    if cpu.available():
        found.append("cpp")
    if importlib.util.find_spec("triton") and (CUDA or os.environ.get("TRITON_INTERPRET") == "1"):
        found.append("triton")
    return found


each_implementation = pytest.mark.parametrize("implementation", _implementations())

PEERS = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e4m3-ieee": ml_dtypes.float8_e4m3, "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m3": ml_dtypes.float6_e2m3fn, "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m4": ml_dtypes.float8_e3m4, "bf16": ml_dtypes.bfloat16, "fp16": np.float16,
}  # fmt: skip
"""All dtypes of ml_dtypes that are formats here, and NumPy's own."""


def dequantized(x: Array | torch.Tensor, text: str, implementation: Implementation, **options: Any) -> Array:
    tensor = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    if CUDA and implementation == "triton":
        tensor = tensor.cuda()
    result = dequantize(cast(tensor, parse_cast(text), implementation=implementation, **options))
    return result.cpu().numpy()


def assert_same_bits(got: Array, wanted: Array, x: Array) -> None:
    """Equal bit patterns, so the sign of zero counts; any NaN equals any NaN."""
    assert got.shape == wanted.shape and got.dtype == F32
    wanted = wanted.astype(F32)
    differ = (got.view(np.int32) != wanted.view(np.int32)) & ~(np.isnan(got) & np.isnan(wanted))
    assert not differ.any(), [(x[tuple(i)], got[tuple(i)], wanted[tuple(i)]) for i in np.argwhere(differ)[:5]]


def every_16_bit_value() -> Array:
    """All BF16 and all FP16 values, FP32 [512, 256]."""
    codes = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        both = [codes.view(dtype).astype(F32) for dtype in (ml_dtypes.bfloat16, np.float16)]
    return np.concatenate(both).reshape(512, 256)


def many_fp32_values(name: str) -> Array:
    """Random bit patterns, values within the format's range, every tie of it and its neighbours; [rows, 1024]."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, 1 << 18, dtype=np.uint32).view(F32)
    points = oracle.grid(name)
    low, high = np.log2(points[points > 0][[0, -1]])
    near = 2 ** rng.uniform(low - 3, min(high + 1, 128), 1 << 18)
    points = points if len(points) < 5000 else rng.choice(points, 5000)
    points = np.sort(points)
    ties = ((points[1:] + points[:-1]) / 2).astype(F32)
    top = F32(points[-1])
    with np.errstate(over="ignore"):
        around = [ties, np.nextafter(ties, F32(0)), np.nextafter(ties, F32(np.inf)), points.astype(F32)]
        above = top * np.linspace(1, 1.2, 257, dtype=F32)
        values = np.concatenate([near.astype(F32), *around, above])
    values = np.concatenate([patterns, values, -values])
    return np.resize(values, (-(-values.size // 1024), 1024))


@each_implementation
@pytest.mark.parametrize("name", PEERS)
def test_elements_are_those_of_ml_dtypes(name: str, implementation: Implementation) -> None:
    """Overflow to the format's own special value, as its cast does; formats without NaN make it zero there."""
    x = every_16_bit_value()
    with np.errstate(all="ignore"):
        wanted = x.astype(PEERS[name]).astype(F32)
    if name in ("e3m2", "e2m3", "e2m1"):
        wanted[np.isnan(x)] = np.nan
    assert_same_bits(dequantized(x, f"{name}:none:special", implementation), wanted, x)


@each_implementation
@pytest.mark.parametrize("overflow", ["saturate", "special"])
@pytest.mark.parametrize("ties", ["even", "away"])
@pytest.mark.parametrize("name", [name for name in oracle.FLOATS if name not in ("tf32", "fp32")])
def test_elements_are_the_nearest(
    name: str, ties: str, overflow: str, implementation: Implementation
) -> None:
    text = (
        f"{name}:none" + (":away" if ties == "away" else "") + (":special" if overflow == "special" else "")
    )
    for x in (every_16_bit_value(), many_fp32_values(name)):
        with np.errstate(invalid="ignore"):
            wanted = oracle.nearest(x, name, ties, overflow)
        assert_same_bits(dequantized(x, text, implementation), wanted, x)


@each_implementation
def test_tf32_and_fp32(implementation: Implementation) -> None:
    x = many_fp32_values("bf16")
    with np.errstate(invalid="ignore"):
        assert_same_bits(
            dequantized(x, "tf32:none:special", implementation),
            oracle.nearest(x, "tf32", overflow="special"),
            x,
        )
    assert_same_bits(dequantized(x, "fp32:none:special", implementation), x, x)


@each_implementation
def test_powers_of_two_are_those_of_ml_dtypes(implementation: Implementation) -> None:
    """E8M0 has no zero and no sign: both are NaN. Saturating, what is too large is 2^127."""
    patterns = np.random.default_rng(2).integers(0, 2**32, (64, 1024), dtype=np.uint32).view(F32)
    for x in (every_16_bit_value(), patterns):
        with np.errstate(all="ignore"):
            peer = x.astype(ml_dtypes.float8_e8m0fnu).astype(F32)
        assert_same_bits(oracle.power_of_two(x).astype(F32), peer, x)
        assert_same_bits(dequantized(x, "e8m0:none:special", implementation), peer, x)
        large = x > 2.0**127
        saturated = np.where(large, F32(2.0**127), peer)
        assert_same_bits(dequantized(x, "e8m0:none", implementation), saturated, x)


@functools.cache
def awkward_inputs() -> dict[str, Array]:
    """Sizes that no block divides, and values that trip scales up."""
    rng = np.random.default_rng(3)
    shape = (35, 203)
    normal = rng.standard_normal(shape).astype(F32)
    wide = (normal * 2.0 ** rng.integers(-30, 30, shape)).astype(F32)
    rows = np.ldexp(normal.astype(float), rng.integers(-150, 120, (shape[0], 1))).astype(F32)
    bad = normal.copy()
    bad[3, 40], bad[5, 100], bad[20, 7], bad[34, 202] = np.nan, np.inf, -np.inf, np.nan
    holes = normal.copy()
    holes[:, 32:64], holes[16:33], holes[0, ::2] = 0, 0, -0.0
    outliers = normal.copy()
    outliers[::7, ::31] *= 1e4
    return {
        "normal": normal,
        "wide": wide,
        "rows of all magnitudes": rows,
        "subnormal": np.ldexp(normal.astype(float), -140).astype(F32),
        "huge": np.clip(np.ldexp(normal.astype(float), 127), -3e38, 3e38).astype(F32),
        "NaN and infinity": bad,
        "zero blocks": holes,
        "all zero": np.zeros((2, 40), F32),
        "outliers": outliers,
        "integers with ties": np.round(normal * 8) / 4,
        "one element": np.full((1, 1), 0.3, F32),
        "one row": normal[:1],
        "one column": np.ascontiguousarray(normal[:, :1]),
    }


Oracle = Callable[[Array], Array]


def _casts() -> dict[str, Oracle]:
    o = oracle
    casts: dict[str, Oracle] = {
        "e4m3:current": lambda x: o.current(x, "e4m3"),
        "e5m2:current:special": lambda x: o.current(x, "e5m2", overflow="special"),
        "e4m3-ieee:current:margin=2": lambda x: o.current(x, "e4m3-ieee", margin=2),
        "e4m3:current:pow2": lambda x: o.current(x, "e4m3", power_of_two=True),
        "e4m3:row": lambda x: o.row(x, "e4m3"),
        "e2m1:row:pow2": lambda x: o.row(x, "e2m1", power_of_two=True),
        "e4m3:block128": lambda x: o.block(x, "e4m3", (1, 128)),
        "e4m3:block128x128:pow2": lambda x: o.block(x, "e4m3", (128, 128), power_of_two=True),
        "e4m3:block8x16": lambda x: o.block(x, "e4m3", (8, 16)),
        "e5m2:block128:away": lambda x: o.block(x, "e5m2", (1, 128), ties="away"),
        "e1m2:block64:top2": lambda x: o.block(x, "e1m2", (1, 64), keep_top=2),
        "nvfp4": o.nvfp4,
        "nvfp4:2d": lambda x: o.nvfp4(x, (16, 16)),
        "int8:current": lambda x: o.integers(x, "int8"),
        "int8:row": lambda x: o.integers(x, "int8", (1, max(1, x.shape[1]))),
        "int8:current:margin=1": lambda x: o.integers(x, "int8", margin=1),
        "int4:group128": lambda x: o.integers(x, "int4", (1, 128)),
        "int8-asym:current": lambda x: o.integers(x, "int8-asym"),
        "int4-asym:group32": lambda x: o.integers(x, "int4-asym", (1, 32)),
        "nf4": lambda x: o.nf4(x, 64),
        "mxint8": lambda x: o.mx(x, "int8"),
        "mxint8:up": lambda x: o.mx(x, "int8", "up"),
        "mxint8:even": lambda x: o.mx(x, "int8", "even"),
        "e2m1:mx:2d": lambda x: o.mx(x, "e2m1", shape=(32, 32)),
        "e4m3:mx:away": lambda x: o.mx(x, "e4m3", ties="away"),
    }
    for name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"):
        for rule in ("floor", "up", "even"):
            casts[f"{name}:mx:{rule}"] = functools.partial(o.mx, name=name, rule=rule)
    return casts


CASTS = _casts()


@functools.cache
def expected(text: str, which: str) -> Array:
    with np.errstate(all="ignore"):
        return CASTS[text](awkward_inputs()[which])


@each_implementation
@pytest.mark.parametrize("which", awkward_inputs())
@pytest.mark.parametrize("text", CASTS)
def test_scaled_casts(text: str, which: str, implementation: Implementation) -> None:
    x = awkward_inputs()[which]
    assert_same_bits(dequantized(x, text, implementation), expected(text, which), x)
    across = dequantized(np.ascontiguousarray(x.T), text, implementation, along=0)
    assert_same_bits(np.ascontiguousarray(across.T), expected(text, which), x)


@each_implementation
@pytest.mark.parametrize("text", CASTS)
def test_dtypes_and_strides(text: str, implementation: Implementation) -> None:
    """What is not FP32 is converted to it first; memory order is of no account."""
    x = torch.from_numpy(awkward_inputs()["normal"])
    views = {
        "strided": x[1::2, 2::3],
        "transposed": x.t(),
        "expanded": x[:1].expand(7, -1),
        "reversed": x.flip(1),
    }
    casted = {str(dtype): x.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)}
    for tensor in (views | casted).values():
        plain = tensor.float().contiguous().numpy().copy()
        assert_same_bits(dequantized(tensor, text, implementation), CASTS[text](plain), plain)


@each_implementation
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("text", CASTS)
def test_empty(text: str, shape: tuple[int, int], implementation: Implementation) -> None:
    assert dequantized(np.empty(shape, F32), text, implementation).shape == shape


@each_implementation
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "e3m0", "fp16"])
def test_stochastic_rounding_follows_the_noise(name: str, implementation: Implementation) -> None:
    """The very bits that the text of noise.py defines, not only one of the two neighbours."""
    x = many_fp32_values(name)
    x = x[: x.shape[0] // 2]
    x = np.where(np.isfinite(x) & (np.abs(x) <= oracle.grid(name)[-1]), x, F32(0.3))
    got = dequantized(x, f"{name}:none:sr", implementation, seed=11)
    wanted = oracle.stochastic(x, name, 11)
    assert_same_bits(got, wanted.astype(F32), x)


@each_implementation
@pytest.mark.parametrize("text", [text for text in CASTS if parse_cast(text).exact_in_bf16])
def test_bf16_carriers_hold_the_very_values(text: str, implementation: Implementation) -> None:
    for which in ("normal", "wide", "outliers", "zero blocks"):
        x = awkward_inputs()[which]
        assert_same_bits(
            dequantized(x, text, implementation, carrier=torch.bfloat16), expected(text, which), x
        )
