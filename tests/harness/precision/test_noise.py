"""The noise of stochastic rounding: its definition, its uniformity, and rounding without bias."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.precision.cast import cast
from harness.precision.formats import FloatFormat, find_format
from harness.precision.noise import noise_bits, noise_keys, noise_seed, uniform
from harness.precision.rounding import round_to, round_whole
from harness.spec.notation import parse_cast

DRAWS = 10_000_000
STANDARD_ERRORS = 4


def bits_in_python(seed: int, index: int) -> int:
    """The hash once more, in Python's integers."""
    key0, key1 = noise_keys(seed)
    z = index ^ key0
    z = ((z ^ (z >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    z = (z ^ (z >> 15)) ^ key1
    z = (z * 0x846CA68B) & 0xFFFFFFFF
    return z ^ (z >> 16)


def test_the_hash_is_as_written() -> None:
    for seed in (0, 1, 2**63 + 5, 2**64 - 1):
        got = noise_bits(seed, (50, 20)).numpy().view(np.uint32).ravel()
        for index in (0, 1, 2, 19, 20, 500, 999):
            assert got[index] == bits_in_python(seed, index)


def test_keys_of_neighbouring_seeds() -> None:
    """SplitMix64's published first outputs of seed 0, and no key shared by a thousand seeds."""
    key0, key1 = noise_keys(0)
    assert (key1 << 32) | key0 == 0xE220A8397B1DCDAF
    keys = [noise_keys(seed) for seed in range(1000)]
    assert len({low for low, _ in keys}) == len({high for _, high in keys}) == 1000


def test_bits_are_uniform_and_independent() -> None:
    """Each bit set half the time; bits of neighbours and of two seeds agree half the time."""
    count = 1 << 20
    first, second = (noise_bits(seed, (count,)) for seed in (1, 2))
    bound = STANDARD_ERRORS * 0.5 / count**0.5
    for bit in range(32):
        ones = first >> bit & 1
        assert abs(float(ones.double().mean()) - 0.5) < bound
        for other in (second >> bit & 1, ones.roll(1), ones.roll(4096), first >> ((bit + 7) % 32) & 1):
            assert abs(float((ones == other).double().mean()) - 0.5) < bound
    u = uniform(first).double()
    assert 0 <= float(u.min()) < 1e-5
    assert 1 - 1e-5 < float(u.max()) < 1
    observed = torch.histc(u, 256, 0, 1)
    chi_squared = float(((observed - count / 256) ** 2 / (count / 256)).sum())
    assert abs(chi_squared - 255) < STANDARD_ERRORS * (2 * 255) ** 0.5


def test_seeds_differ_by_run_step_name_and_rank() -> None:
    base = noise_seed(7, 3, "layers.0.ffn.down.gradients", 0)
    others = {
        noise_seed(8, 3, "layers.0.ffn.down.gradients", 0),
        noise_seed(7, 4, "layers.0.ffn.down.gradients", 0),
        noise_seed(7, 3, "layers.0.ffn.up.gradients", 0),
        noise_seed(7, 3, "layers.0.ffn.down.gradients", 1),
        noise_seed(7, 3, "layers.0.ffn.down.gradients"),
    }
    assert len(others | {base}) == 6
    assert base == noise_seed(7, 3, "layers.0.ffn.down.gradients", 0)
    assert all(0 <= seed < 2**64 for seed in others)


@pytest.mark.parametrize(
    "name", ["e5m2:current:sr", "bf16:none:sr", "nvfp4:sr", "int4:group32:sr", "mxfp8:sr"]
)
def test_ranks_agree_with_a_shared_seed_and_differ_without(name: str) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    spec = parse_cast(name)
    shared, again = (cast(x, spec, seed=noise_seed(1, 2, "w"), implementation="torch").values for _ in "ab")
    rank0, rank1 = (
        cast(x, spec, seed=noise_seed(1, 2, "w", r), implementation="torch").values for r in (0, 1)
    )
    assert torch.equal(shared, again)
    for a, b in ((shared, rank0), (rank0, rank1)):
        assert float((a != b).float().mean()) > 0.1


def test_noise_belongs_to_the_place() -> None:
    """Neither strides nor the contraction's dimension change an element's noise, and a row's needs no other row."""
    x = torch.randn(48, 80, generator=torch.Generator().manual_seed(0))
    spec = parse_cast("e5m2:static=8:sr")
    whole = cast(x, spec, seed=5, implementation="torch").values
    assert torch.equal(whole, cast(x.t().contiguous().t(), spec, seed=5, implementation="torch").values)
    assert torch.equal(whole, cast(x, spec, along=0, seed=5, implementation="torch").values)
    assert torch.equal(whole[:20], cast(x[:20], spec, seed=5, implementation="torch").values)


def values_between(name: str) -> list[float]:
    """On the grid and between its values: normal, subnormal, below the smallest, of both signs."""
    fmt = find_format(name)
    assert isinstance(fmt, FloatFormat)
    tiny = fmt.min_positive
    return [
        1.0, 1 + fmt.epsilon / 4, 1 + fmt.epsilon / 1000, -(1.5 + fmt.epsilon * 0.7),
        fmt.min_normal * (1 + fmt.epsilon / 3),
        tiny * 3, tiny * 2.25, tiny * 0.7, tiny * 0.01, -tiny * 1.5,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "e2m1", "fp16"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """10^7 draws over ten values each: the mean is the value to 4 standard errors, and on the grid nothing moves."""
    fmt = find_format(name)
    assert isinstance(fmt, FloatFormat)
    values = [float(np.float32(v)) for v in values_between(name)]
    each = DRAWS // len(values)
    noise = noise_bits(noise_seed(0, 0, name), (len(values), each))
    for value, bits in zip(values, noise, strict=True):
        chunk = torch.full((each,), value)
        drawn = round_to(chunk, fmt, "stochastic", "saturate", bits).double()
        low, high = float(drawn.min()), float(drawn.max())
        chance = 0.0 if low == high else (value - low) / (high - low)
        spread = (high - low) * (chance * (1 - chance)) ** 0.5
        assert abs(float(drawn.mean()) - value) <= STANDARD_ERRORS * spread / each**0.5, value
        on_grid = float(round_to(torch.tensor(value), fmt)) == value
        assert (low == high == value) if on_grid else low < value < high


def test_whole_numbers_are_unbiased() -> None:
    for value in (0.3, -2.75, 6.01):
        bits = noise_bits(noise_seed(0, 0, str(value)), (1_000_000,))
        drawn = round_whole(torch.full((1_000_000,), value), "stochastic", bits).double()
        chance = value - np.floor(value)
        assert (
            abs(float(drawn.mean()) - value) < STANDARD_ERRORS * (chance * (1 - chance) / 1e6) ** 0.5 + 1e-7
        )
        assert set(drawn.unique().tolist()) == {np.floor(value), np.ceil(value)}
