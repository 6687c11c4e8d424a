"""The constants that the cast itself reveals, against what formats are described to have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.precision.formats import FORMATS, FloatFormat
from harness.spec import RunSpec
from harness.tasks.formats import constants, formats, native_cast, num_levels

FLOATS = [name for name, fmt in FORMATS.items() if isinstance(fmt, FloatFormat)]
CPU = torch.device("cpu")


class Journal:
    """Keeps what a task records: scope -> metric -> value."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, float | None]] = {}
        self.notes: dict[str, Any] = {}

    def measure(self, step: int, values: dict[str, float | None], scope: str = "") -> None:
        assert step == 1
        self.values.setdefault(scope, {}).update(values)

    def note(self, name: str, value: Any, reason: str) -> None:
        self.notes[name] = value

    def beat(self) -> None: ...


def measured(name: str) -> Journal:
    journal = Journal()
    assert formats(RunSpec(task="formats", format=name), {}, journal, Path()) == []  # type: ignore[arg-type]
    return journal


@pytest.mark.parametrize("name", FLOATS)
def test_the_cast_has_the_constants_of_its_description(name: str) -> None:
    fmt = FORMATS[name]
    assert isinstance(fmt, FloatFormat)
    found = measured(name).values[""]
    assert found["format_max"] == fmt.max
    assert found["format_min_positive"] == fmt.min_positive
    assert found["format_min_normal"] == fmt.min_normal
    assert found["format_mantissa_bits"] == fmt.mantissa_bits
    assert found["format_binades"] == pytest.approx(fmt.binades)
    if fmt.mantissa_bits <= 10:
        assert found["format_num_magnitudes"] == fmt.num_magnitudes
    else:
        assert found["format_num_magnitudes"] is None
    assert found["format_overflows_to_infinity"] == fmt.has_infinity
    assert found["format_overflows_to_nan"] == (fmt.specials == "nan")


@pytest.mark.parametrize(
    ("name", "start"),
    [("fp16", 65520.0), ("e5m2", 61440.0), ("e4m3-ieee", 248.0), ("e2m1", None), ("fp32", None)],
)
def test_overflow_starts_half_a_step_above_the_largest(name: str, start: float | None) -> None:
    """A tie goes to the even neighbour, which is the one beyond the largest in IEEE formats."""
    assert measured(name).values[""]["format_overflow_start"] == start


def test_e4m3_overflow_starts_just_past_the_tie() -> None:
    """448 has an even mantissa, so 464, halfway to what would be 480, still rounds to it."""
    start = measured("e4m3").values[""]["format_overflow_start"]
    assert start is not None and 464 < start < 464.001


def test_spacing_at_one_is_not_the_mantissa_where_one_is_subnormal() -> None:
    found = measured("e1m2").values[""]
    assert (found["format_epsilon"], found["format_mantissa_bits"]) == (0.5, 2)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "e4m3", "e5m2"])
def test_pytorch_agrees(name: str) -> None:
    journal = measured(name)
    own, torchs, finfo = (journal.values[scope] for scope in ("", "torch", "finfo"))
    assert torchs["format_mismatches"] == 0
    for metric in ("format_max", "format_min_normal", "format_epsilon"):
        assert own[metric] == torchs[metric] == finfo[metric]
    assert journal.notes["torch_dtype"].startswith("torch.")


def test_a_wrong_cast_is_found_out() -> None:
    """The search is of what the function does: BF16 taken for FP16 has BF16's constants."""
    native = native_cast("bf16")
    assert native is not None
    found = constants(native[1], CPU)
    assert found["format_max"] == FORMATS["bf16"].max != FORMATS["fp16"].max
    cut = constants(lambda x: torch.where(x.abs() < 1e-3, 0.0, x.half().float()), CPU)
    assert cut["format_min_positive"] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "levels"), [("int8", 255), ("int8-asym", 256), ("int4", 15), ("int4-asym", 16), ("nf4", 16)]
)
def test_levels(name: str, levels: int) -> None:
    assert num_levels(name, CPU) == levels
    assert measured(name).values[""]["format_num_levels"] == levels


def test_binades_are_finite() -> None:
    assert all(
        math.isfinite(measured(name).values[""]["format_binades"] or math.nan) for name in ("e8m0", "e3m0")
    )
