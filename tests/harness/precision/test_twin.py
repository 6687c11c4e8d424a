"""The cast in plain PyTorch against hand calculations, torch's own quantisers, and itself block by block."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.precision.cast import CastResult, cast, dequantize
from harness.spec.notation import parse_cast

NAN, INF = math.nan, math.inf
PER_TENSOR = ("e4m3:none", "e4m3:static=3", "e5m2:delayed", "e4m3:current", "e5m2:current:pow2", "int8:current",
              "int8-asym:current", "nf4:current", "bf16", "m3:none")  # fmt: skip
PER_ROW = ("e4m3:row", "e4m3:row:pow2", "int8:row", "int4-asym:row", "e2m1:row:margin=1")
BLOCKS = ("e4m3:block128", "e5m2:block16:pow2", "e4m3:block8x8", "mxfp8", "mxfp8-e5m2:up", "mxfp6:even", "mxfp4",
          "mxfp8:2d", "mxint8", "int4:group16", "int4:group8:top2", "int4-asym:group16", "e2m1:block4x8:top3", "nf4",
          "e4m3:block16:away")  # fmt: skip
NVFP4 = ("nvfp4", "nvfp4:2d")


def twin(x: Tensor, name: str, **more: object) -> CastResult:
    return cast(x, parse_cast(name), implementation="torch", **more)  # type: ignore[arg-type]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal values, any NaN equal to any NaN, zeros with their signs."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool(((a.view(bits) == b.view(bits)) | a.isnan()).all())


def floats(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


# one block or tensor by hand


def test_no_scale_and_a_given_one() -> None:
    x = floats([1.06, -500.0, 0.0009, -0.0])
    none, static = twin(x, "e4m3:none"), twin(x, "e4m3:static=4")
    assert none.values.tolist() == [[1.0, -448.0, 0.0, -0.0]]
    assert none.inverse is None
    assert static.values.tolist() == [[4.0, -448.0, 2.0**-9 * 2, -0.0]]  # 0.0036 is 1.84 steps of 2^-9
    assert float(static.inverse) == 0.25  # type: ignore[arg-type]
    assert static.amax == 500


def test_current_scaling_brings_the_maximum_to_the_formats() -> None:
    x = floats([0.5, -3.0, 0.1])
    result = twin(x, "e4m3:current")
    scale = torch.tensor(448.0) / torch.tensor(3.0)
    assert result.values.tolist() == [[72.0, -448.0, 15.0]]  # 74.67 -> 72, 14.93 -> 15
    assert torch.equal(result.inverse, 1 / scale)  # type: ignore[arg-type]
    halved = twin(x, "e4m3:current:margin=1")
    assert halved.values[0, 1] == -224
    power = twin(x, "e4m3:current:pow2")
    assert float(power.inverse) == 2.0**-7  # type: ignore[arg-type]
    assert power.values.tolist() == [[64.0, -384.0, 13.0]]


def test_delayed_scaling_takes_what_it_is_given() -> None:
    x = floats([1.0, -3.0])
    by_scale = twin(x, "e4m3:delayed", scale=torch.tensor(100.0))
    assert by_scale.values.tolist() == [[96.0, -288.0]]  # ties, to even
    by_amax = twin(x, "e4m3:delayed", amax=torch.tensor(1.75))
    assert by_amax.values.tolist() == [[256.0, -448.0]]
    assert by_amax.amax == by_scale.amax == 3
    assert same(twin(x, "e4m3:delayed").values, twin(x, "e4m3:current").values)


def test_scales_stay_within_their_limits() -> None:
    for value, inverse in ((1e-44, 2.0**-120), (0.0, 1.0), (INF, 1.0), (NAN, 1.0)):
        assert float(twin(floats([value, 0.0]), "e4m3:current").inverse) == inverse  # type: ignore[arg-type]
    assert float(twin(floats([3e38]), "e1m0:current").inverse) == 2.0**120  # type: ignore[arg-type]


def test_rows_are_what_the_product_crosses() -> None:
    x = floats([1.0, 7.0], [2.0, 0.0])
    by_row, by_column = twin(x, "e4m3:row"), twin(x, "e4m3:row", along=0)
    assert by_row.values.tolist() == [[64.0, 448.0], [448.0, 0.0]]
    assert by_column.values.tolist() == [[224.0, 448.0], [448.0, 0.0]]
    assert torch.allclose(by_row.inverse, torch.tensor([7 / 448, 2 / 448]))  # type: ignore[arg-type]
    assert torch.allclose(by_column.inverse, torch.tensor([2 / 448, 7 / 448]))  # type: ignore[arg-type]
    assert torch.allclose(dequantize(by_column), x)
    assert torch.allclose(dequantize(by_row), x)


def test_blocks_have_their_own_scales() -> None:
    x = floats([1.0, 2.0, 300.0, 448.0, 0.5])
    result = twin(x, "e4m3:block2")
    assert result.inverse is None
    assert torch.allclose(result.values, floats([1.0, 2.0, 288.0, 448.0, 0.5]), rtol=2.0**-22)


@pytest.mark.parametrize(
    ("rule", "of_488", "of_500"), [("floor", 448.0, 448.0), ("up", 480.0, 512.0), ("even", 448.0, 512.0)]
)
def test_mx_rules_where_they_differ(rule: str, of_488: float, of_500: float) -> None:
    """Both are above E4M3's 448. 500 = 1.953 * 2^8 rounds to 2 * 2^8 at three mantissa bits, 488 = 1.906 * 2^8 does
    not; under a scale of 2 the grid's step is 32."""
    for amax, wanted in ((488.0, of_488), (500.0, of_500)):
        result = twin(floats([amax, -0.3] + [0.0] * 30), f"mxfp8:{rule}")
        assert result.values[0, :2].tolist() == [wanted, -0.3125]


def test_even_rounds_the_maximum_first() -> None:
    """E2M1: 6.9 rounds to 1.5 * 4, the tie 7.0 (1.75 * 4) to 2 * 4. Round-up doubles the scale for both."""
    for amax, even, up in ((6.9, 6.0, 6.0), (7.0, 8.0, 8.0), (5.9, 6.0, 6.0), (6.0, 6.0, 6.0)):
        x = floats([amax] + [0.0] * 31)
        assert twin(x, "mxfp4:even").values[0, 0] == even
        assert twin(x, "mxfp4:up").values[0, 0] == up
        assert twin(x, "mxfp4:floor").values[0, 0] == 6.0


def test_mx_ends_of_the_scale() -> None:
    """Zeros, FP32 subnormals at 2^-127, its largest number, and NaN or infinity, which take their block along."""
    zeros = floats([0.0, -0.0] + [0.0] * 30)
    assert same(twin(zeros, "mxfp8").values, zeros)
    tiny = floats([2.0**-127, 2.0**-136, -(2.0**-137), 2.0**-149] + [0.0] * 28)
    assert twin(tiny, "mxfp8").values[0, :4].tolist() == [2.0**-127, 2.0**-136, -0.0, 0.0]
    huge = floats([torch.finfo(torch.float32).max, 1.0] + [0.0] * 30)
    assert twin(huge, "mxint8").values[0, 0] == 127 / 64 * 2.0**127
    assert twin(huge, "mxfp8").values[0, 0] == 448 * 2.0**119
    for bad in (NAN, INF, -INF):
        x = torch.ones(2, 64)
        x[0, 3] = bad
        got = twin(x, "mxfp4").values
        assert got[0, :32].isnan().all()
        assert not got[0, 32:].isnan().any()
        assert not got[1].isnan().any()


def test_mxint8_has_63_steps_below_one() -> None:
    x = floats([1.0, 1.99, -1.99, 0.0078, 0.0079, -0.0001] + [0.0] * 26)
    assert twin(x, "mxint8").values[0, :6].tolist() == [1.0, 127 / 64, -127 / 64, 0.0, 1 / 64, 0.0]


def test_nvfp4_by_hand() -> None:
    """Two blocks, maxima 12 and 3: the tensor's scale 2688 / 12 = 224, the blocks' scales 448 and 112."""
    x = torch.zeros(1, 32)
    x[0, :3], x[0, 16:19] = torch.tensor([12.0, -5.0, 1.0]), torch.tensor([3.0, 0.24, -0.26])
    result = twin(x, "nvfp4")
    assert torch.equal(result.inverse, torch.tensor(224.0).reciprocal())  # type: ignore[arg-type]
    assert result.values[0, :3].tolist() == [6 * 448, -2 * 448, 448 * 0.5]  # -5 is 2.5 steps: a tie, to even
    assert result.values[0, 16:19].tolist() == [6 * 112, 0.5 * 112, -0.5 * 112]
    wider = twin(x, "nvfp4", amax=torch.tensor(24.0))
    assert torch.equal(wider.inverse, torch.tensor(112.0).reciprocal())  # type: ignore[arg-type]
    assert torch.equal(dequantize(wider), dequantize(result))


def test_nvfp4_blocks_too_small_for_their_scale_are_flushed() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 1.0, 1e-7
    assert dequantize(twin(x, "nvfp4"))[0, 16] == 0
    statistics = twin(x, "nvfp4", collect=True).statistics
    assert statistics is not None
    assert (statistics.flushed, statistics.nonzero) == (1, 2)


def test_nvfp4_of_a_tiny_tensor_stays_finite() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2.0**-140, 2.0**-149
    assert dequantize(twin(x, "nvfp4")).isfinite().all()


def test_kept_values_pass_and_do_not_count() -> None:
    x = floats([100.0, 1.0, -100.0, 7.0, 100.0, -3.0, 0.2, 0.0])
    result = twin(x, "int4:group8:top2")  # the first two of the three hundreds; the third rules the scale
    assert result.values[0, :5].tolist() == [100.0, 0.0, -100.0, 0.0, 100.0]
    three = twin(x, "int4:group8:top3", collect=True)
    assert three.values.tolist() == [[100.0, 1.0, -100.0, 7.0, 100.0, -3.0, 0.0, 0.0]]
    assert three.statistics is not None
    assert (three.statistics.flushed, three.statistics.clipped, three.statistics.nonzero) == (1, 0, 7)
    everything = twin(floats([NAN, INF, 3.3]), "int4:group8:top3")
    assert same(everything.values, floats([NAN, INF, 3.3]))


def test_nf4_by_hand() -> None:
    x = floats([2.0, -2.0, 0.9, 0.0, -0.1] + [0.0] * 59)
    levels = [1.0, -1.0, 0.44070982933044434, 0.0, -0.09105003625154495]
    assert twin(x, "nf4").values[0, :5].tolist() == [2 * level for level in levels]


# integers against torch


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_integers_are_torchs_fake_quantize(bits: int) -> None:
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(bits)) * 5
    top = 2 ** (bits - 1) - 1
    step = x.abs().amax(1) / torch.tensor(float(top))
    wanted = torch.fake_quantize_per_channel_affine(x, step, torch.zeros(40, dtype=torch.int32), 0, -top, top)
    assert same(dequantize(twin(x, f"int{bits}:row")), wanted)
    whole = x.abs().max() / torch.tensor(float(top))
    wanted = torch.fake_quantize_per_tensor_affine(x, whole, torch.zeros((), dtype=torch.int32), -top, top)
    assert same(dequantize(twin(x, f"int{bits}:current")), wanted)
    assert same(twin(x[:1], f"int{bits}:group96").values, dequantize(twin(x[:1], f"int{bits}:row")))


@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_integers_are_torchs_fake_quantize(bits: int) -> None:
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(bits)) * 3 + 2
    x[3] = x[3].abs() + 1  # zero is part of the range even so
    top = torch.tensor(2.0**bits - 1)
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    step = (high - low) / top
    zero = torch.round(-low / step).clamp(0, float(top))
    wanted = torch.fake_quantize_per_channel_affine(x, step, zero, 0, 0, int(top))
    result = twin(x, f"int{bits}-asym:row", collect=True)
    assert same(dequantize(result), wanted)
    assert result.values.abs().max() <= float(top)
    assert torch.equal(result.values, result.values.round())


def test_a_tensor_without_range_has_step_one() -> None:
    for name in ("int8:current", "int8-asym:current", "nf4:current"):
        assert float(twin(torch.zeros(2, 3), name).inverse) == 1  # type: ignore[arg-type]
        assert same(twin(torch.zeros(2, 3), name).values, torch.zeros(2, 3))
        assert twin(floats([1.0, NAN]), name).values.isnan().tolist() == [[False, True]]
        assert twin(floats([2.0**-149, 0.0]), name).values.isfinite().all()


# layout


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("along", [0, 1])
def test_the_whole_is_its_blocks(name: str, along: int) -> None:
    """41 x 70: short blocks at both edges. Each block cast alone gives the same bits, special values included."""
    x = torch.randn(41, 70, generator=torch.Generator().manual_seed(1)) * 10
    x[5, 6], x[20, 30], x[40, 69], x[8:24, 32:48] = NAN, INF, -0.0, 0.0
    across, contraction = parse_cast(name).block_shape or (1, 1)
    height, width = (across, contraction) if along == 1 else (contraction, across)
    whole = twin(x, name, along=along).values
    for top, left in product(range(0, 41, height), range(0, 70, width)):
        area = (slice(top, top + height), slice(left, left + width))
        assert same(whole[area].contiguous(), twin(x[area], name, along=along).values), area


@pytest.mark.parametrize("name", [*PER_TENSOR, *PER_ROW, *BLOCKS, *NVFP4])
def test_along_strides_dtypes_and_carriers(name: str) -> None:
    x = torch.randn(37, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    base = twin(x.float(), name)
    turned = twin(x.float().t().contiguous(), name, along=0)
    assert same(base.values.t().contiguous(), turned.values)
    assert same(base.inverse, turned.inverse)
    assert same(dequantize(base).t().contiguous(), dequantize(turned))
    padded = torch.zeros(74, 150)
    padded[::2, ::3] = x
    for other in (x, padded[::2, ::3], x.double()):
        got = twin(other, name)
        assert same(got.values, base.values)
        assert got.values.is_contiguous()
    narrow = twin(x, name, carrier=torch.bfloat16)
    assert same(narrow.values, base.values.bfloat16())
    if parse_cast(name).exact_in_bf16:
        assert same(narrow.values.float(), base.values)
    assert same(twin(x, name, dequantized=True).values, dequantize(base))
    assert twin(x, name, dequantized=True).inverse is None


@pytest.mark.parametrize("name", [*PER_TENSOR, *PER_ROW, *BLOCKS, *NVFP4])
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_empty_and_single(name: str, shape: tuple[int, int]) -> None:
    for along in (0, 1):
        result = twin(torch.ones(shape), name, along=along, collect=True, carrier=torch.bfloat16)
        assert result.values.shape == shape
        assert result.values.dtype == torch.bfloat16
        assert result.amax == (1 if shape == (1, 1) else 0)
        assert dequantize(result).shape == shape
        inverse = result.inverse
        assert (inverse is not None and inverse.dim() == 1) == (parse_cast(name).scaling == "row")
        assert result.statistics is not None
        assert result.statistics.nonzero == (1 if shape == (1, 1) else 0)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=60),
    st.integers(1, 9),
    st.sampled_from([*PER_TENSOR, *PER_ROW, *BLOCKS, *NVFP4]),
    st.sampled_from([0, 1]),
)
@settings(max_examples=150, deadline=None)
def test_any_values_keep_their_promises(values: list[float], columns: int, name: str, along: int) -> None:
    """No crash; NaN only from NaN or infinity; no sign is lost; counts within the elements."""
    rows = max(len(values) // columns, 1)
    x = torch.tensor((values * columns)[: rows * columns], dtype=torch.float32).view(rows, columns)
    result = twin(x, name, along=along, collect=True)
    back = dequantize(result)
    if bool(x.isfinite().all()):
        assert not result.values.isnan().any()
        assert bool(((back == 0) | (back.sign() == x.sign())).all())
    statistics = result.statistics
    assert statistics is not None
    assert statistics.nonzero == int((x != 0).sum())
    assert 0 <= statistics.flushed <= statistics.nonzero
    assert 0 <= statistics.clipped <= statistics.nonzero or "asym" in name


# statistics


@pytest.mark.parametrize("name", [*PER_TENSOR, *PER_ROW, *BLOCKS, *NVFP4])
def test_statistics_are_those_of_the_result(name: str) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    x *= torch.exp2(torch.randint(-8, 6, x.shape, generator=torch.Generator().manual_seed(4)).float())
    x[::7, ::5] = 0
    result = twin(x, name, collect=True)
    found, back = result.statistics, dequantize(result)
    assert found is not None
    error = x.double() - back.double()
    assert found.signal == pytest.approx(float(x.double().square().sum()), rel=1e-12)
    assert found.noise == pytest.approx(float(error.square().sum()), rel=1e-9)
    assert found.nonzero == int((x != 0).sum()) < x.numel()
    assert found.flushed == int(((back == 0) & (x != 0)).sum())
    assert found.amax == float(x.abs().max())
    assert twin(x, name).statistics is None
    one_scale = parse_cast(name).block is None and name in PER_TENSOR
    assert math.isnan(found.scale) != one_scale


def test_clipped_counts_what_lies_above_the_maximum() -> None:
    x = floats([447.0, 448.0, 449.0, -1000.0, INF, NAN, 0.0])
    statistics = twin(x, "e4m3:none", collect=True).statistics
    assert statistics is not None
    assert (statistics.clipped, statistics.nonzero, statistics.flushed) == (3, 6, 0)
    benign = twin(torch.randn(100, 100), "e4m3:current", collect=True).statistics
    assert benign is not None
    assert benign.clipped == 0
    floor = twin(floats([500.0] + [1.0] * 31), "mxfp8:floor", collect=True).statistics
    assert floor is not None
    assert floor.clipped == 1


def test_statistics_of_parts_add_up() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)) * 100
    parts = [twin(part, "e4m3:none", collect=True).statistics for part in (x[:20], x[20:])]
    whole = twin(x, "e4m3:none", collect=True).statistics
    assert whole is not None
    assert parts[0] is not None
    assert parts[1] is not None
    total = parts[0] + parts[1]
    assert (total.amax, total.scale) == (whole.amax, whole.scale)
    assert (total.nonzero, total.clipped, total.flushed) == (whole.nonzero, whole.clipped, whole.flushed)
    assert total.sqnr_db == pytest.approx(whole.sqnr_db)
    assert math.isnan((total + twin(floats([NAN]), "e4m3:current", collect=True).statistics).amax)  # type: ignore[operator]
