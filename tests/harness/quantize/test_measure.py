"""The figures of one tensor and cast, against plain NumPy sums over the oracle's blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.precision.cast import cast, dequantize
from harness.precision.formats import find_format
from harness.quantize import measure as module
from harness.quantize.measure import flatten, measure, stored_bits
from harness.spec.notation import parse_cast

X = torch.randn(37, 90, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("text", ["mxfp4", "nvfp4:2d", "e4m3:row", "int4:block8x24", "e4m3:current", "nf4"])
def test_sums_and_worst_block(text: str, along: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)  # several chunks, that no block may straddle
    spec = parse_cast(text)
    sums, worst, values = measure(X, spec, along, seed=0)
    again = dequantize(cast(X, spec, along=along))
    assert torch.equal(values, again)
    x, y = X.numpy(), values.double().numpy()
    assert sums.signal == pytest.approx((x**2).sum(), rel=1e-12)
    assert sums.noise == pytest.approx(((x - y) ** 2).sum(), rel=1e-12)
    assert sums.num_flushed == ((x != 0) & (y == 0)).sum()
    block = (1, X.shape[along]) if spec.scaling == "row" else spec.block_shape
    if block is None:
        assert worst is None
        return
    n, m = block if along == 1 else block[::-1]
    found = {}
    for i in range(0, x.shape[0], n):
        for j in range(0, x.shape[1], m):
            one, two = x[i : i + n, j : j + m], y[i : i + n, j : j + m]
            found[i, j] = 10 * math.log10((one**2).sum() / ((one - two) ** 2).sum())
    (i, j), lowest = min(found.items(), key=lambda item: item[1])
    assert worst is not None
    assert worst.sqnr_db == pytest.approx(lowest, abs=1e-9)
    rows, cols = worst.place.strip("[]").split(", ")
    assert (int(rows.split(":")[0]), int(cols.split(":")[0])) == (i, j)


def test_any_number_of_dimensions_is_a_matrix() -> None:
    x = torch.randn(2, 3, 4, 64, generator=torch.Generator().manual_seed(1))
    spec = parse_cast("mxfp4")
    for along in (-1, 1, 0):
        sums, worst, values = measure(x, spec, along, seed=0)
        moved = x.movedim(along, -1)
        wanted = dequantize(cast(moved.reshape(-1, moved.shape[-1]), spec)).reshape(moved.shape)
        assert torch.equal(values.movedim(along, -1), wanted)
        assert sums.num_elements == x.numel()
        assert worst is not None and worst.place.count(",") == 3
    line = torch.randn(40)
    assert torch.equal(measure(line, spec, -1, 0)[2], dequantize(cast(line[None], spec))[0])
    assert measure(torch.tensor(3.0), spec, -1, 0)[2].shape == ()
    for shape in [(0,), (0, 3), (3, 0, 2), (2, 3, 0)]:
        sums, worst, values = measure(torch.zeros(shape), spec, -1, 0)
        assert (sums.num_elements, worst, tuple(values.shape)) == (0, None, shape)
        assert sums.sqnr_db is None and sums.bits_per_element is None
    assert flatten(torch.zeros(3, 0, 2), 0).matrix.shape == (0, 3)


def test_the_input_is_left_alone() -> None:
    x = X.clone()
    measure(x, parse_cast("e4m3"), -1, 0)
    y = x.float()
    measure(y, parse_cast("e4m3:none"), -1, 0)
    assert torch.equal(x, X) and torch.equal(y, X.float())


def test_exact_zero_and_undefined() -> None:
    ones = measure(torch.ones(2, 32), parse_cast("mxfp4"), -1, 0)
    assert ones[0].sqnr_db == math.inf and ones[1] is None
    assert measure(torch.zeros(2, 32), parse_cast("mxfp4"), -1, 0)[0].sqnr_db == math.inf
    gone = measure(torch.full((1, 4), 1e-9), parse_cast("e4m3:none"), -1, 0)[0]
    assert gone.sqnr_db == 0 and gone.num_flushed == 4


def test_what_is_not_finite_is_left_out_and_counted() -> None:
    x = torch.ones(2, 64)
    x[0, 1], x[1, 40] = torch.nan, -torch.inf
    sums, worst, _ = measure(x, parse_cast("mxfp8"), -1, 0)
    assert (sums.num_nonfinite, sums.num_lost, sums.signal, sums.noise) == (2, 62, 64, 0)
    assert worst is None
    beyond, _, values = measure(torch.tensor([[1e5, 1.0]]), parse_cast("fp16:none:special"), -1, 0)
    assert (beyond.num_nonfinite, beyond.num_lost, beyond.signal) == (0, 1, 1.0)
    assert values.tolist() == [[math.inf, 1.0]]
    for huge in (1e100, 1e300):
        wide = torch.tensor([[huge, 1.0]], dtype=torch.float64)
        far, _, _ = measure(wide, parse_cast("e4m3:row"), -1, 0)
        assert (far.num_nonfinite, far.num_lost, far.signal, far.noise) == (1, 0, 1.0, 0.0)


def test_a_hadamard_transform_is_undone() -> None:
    """Orthogonal: the error of the transformed tensor is that of the tensor."""
    x = torch.randn(40, 72, generator=torch.Generator().manual_seed(2))
    x[:, 5] *= 30
    for along in (0, 1):
        plain = measure(x, parse_cast("nvfp4"), along, 0)[0]
        turned, _, values = measure(x, parse_cast("nvfp4:rht16"), along, 0)
        assert turned.noise == pytest.approx(float((x - values).double().square().sum()), rel=1e-4)
        assert turned.noise != plain.noise


BITS = {
    "e4m3:none": 0, "e4m3:static=2": 0, "e4m3": 32, "e4m3:row": 10 * 32, "e4m3:block128": 10 * 2 * 32,
    "e4m3:block4x64:pow2": 3 * 4 * 8, "mxfp8": 10 * 7 * 8, "mxfp8:2d": 1 * 7 * 8, "nvfp4": 10 * 13 * 8 + 32,
    "int8:row": 10 * 32, "int4-asym:group64": 10 * 4 * (32 + 4), "nf4": 10 * 4 * 32,
    "e2m1:block128:top2": 10 * 2 * (32 + 2 * (32 + 7)),
}  # fmt: skip


@pytest.mark.parametrize("text", BITS)
def test_bits_count_scales_as_they_are_computed(text: str) -> None:
    spec = parse_cast(text)
    shape = torch.Size((10, 200))
    assert stored_bits(spec, shape, 1) == 2000 * find_format(spec.format).bits + BITS[text]
    assert stored_bits(spec, torch.Size((200, 10)), 0) == stored_bits(spec, shape, 1)
    assert np.isfinite(stored_bits(spec, shape, 0))


def test_where_nothing_can_be_compared_nothing_is_exact() -> None:
    sums, worst, _ = measure(torch.full((2, 40), torch.nan), parse_cast("int4"), -1, 0)
    assert sums.num_compared == 0 and sums.sqnr_db is None and worst is None
    sums, _, _ = measure(torch.tensor([[1e300, 1.0]], dtype=torch.float64), parse_cast("mxfp8"), -1, 0)
    assert (sums.num_nonfinite, sums.num_lost, sums.sqnr_db) == (1, 1, None)


def test_a_block_that_is_flushed_whole_has_0_db() -> None:
    _, worst, _ = measure(torch.full((1, 8), 2.0**-149), parse_cast("int4"), -1, 0)
    assert worst is not None and worst.sqnr_db == 0.0


def test_square_blocks_of_a_vector_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    pad = torch.nn.functional.pad
    monkeypatch.setattr(
        torch.nn.functional, "pad", lambda x, by: seen.append(pad(x, by).numel()) or pad(x, by)
    )
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    _, worst, values = measure(x, parse_cast("int4:block128x128:top2"), -1, 0)
    assert worst is not None and worst.place.startswith("[")
    wanted = dequantize(cast(x[None], parse_cast("int4:block128:top2")))[0]
    assert torch.equal(values, wanted)
    assert all(size < 2 * x.numel() for size in seen)
