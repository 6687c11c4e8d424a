"""Number formats: one description each, from which every constant derives.

    find_format("e4m3").max          # 448.0
    find_format("e5m10")             # any float by its bits
    find_format("m7")                # FP32's exponent, 7 mantissa bits

Sources: Micikevicius et al. 2022 (arXiv 2209.05433) and ONNX's float8 page for E4M3 and E5M2; OCP Microscaling
Formats 1.0 for E3M2, E2M3, E2M1 and E8M0; Dettmers et al. 2023 (arXiv 2305.14314) for NF4.
This module imports no torch.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Specials = Literal["ieee", "nan", "none"]


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    `specials` says what the top codes are. ieee: the top exponent holds infinities and NaNs; nan: it holds numbers, and
    only the all-ones code is NaN (the FN formats); none: every code is a number.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Specials = "none"
    signed: bool = True
    """False: no sign bit, no zero and no subnormals (E8M0, a format of scales)."""
    about: str = ""

    @property
    def bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits + self.signed

    @property
    def significant_bits(self) -> int:
        """Bits of the significand, the hidden one included."""
        return self.mantissa_bits + 1

    @property
    def bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def max_exponent(self) -> int:
        """Power of two of the largest finite value (emax of the OCP text)."""
        return int(math.frexp(self.max)[1]) - 1

    @property
    def min_exponent(self) -> int:
        """Power of two of the smallest normal value."""
        return 1 - self.bias if self.signed else -self.bias

    @property
    def max(self) -> float:
        """Largest finite value."""
        top = 2**self.exponent_bits - 1 - self.bias
        if self.specials == "ieee" or (self.specials == "nan" and self.mantissa_bits == 0):
            return float((2 - 2.0**-self.mantissa_bits) * 2.0 ** (top - 1))
        ones = 2.0**-self.mantissa_bits if self.specials == "none" else 2.0 ** (1 - self.mantissa_bits)
        return float((2 - ones) * 2.0**top)

    @property
    def min_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def min_positive(self) -> float:
        """Smallest positive value: a subnormal where the format has them."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits) if self.signed else self.min_normal

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value; where 1 is a subnormal, their common distance."""
        return 2.0**-self.mantissa_bits if self.min_normal <= 1 else self.min_positive

    @property
    def has_infinity(self) -> bool:
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        return self.specials == "nan" or (self.specials == "ieee" and self.mantissa_bits > 0)

    @property
    def binades(self) -> float:
        """log2 of the largest over the smallest positive value."""
        return math.log2(self.max) - math.log2(self.min_positive)

    @property
    def num_magnitudes(self) -> int:
        """Finite values that are not negative."""
        exponents = self.max_exponent - self.min_exponent + 1
        below_top = (exponents - 1) << self.mantissa_bits
        in_top = int((self.max / 2.0**self.max_exponent - 1) * 2**self.mantissa_bits) + 1
        return below_top + in_top + ((1 << self.mantissa_bits) if self.signed else 0)

    def magnitudes(self) -> Iterator[float]:
        """Every finite value that is not negative, in rising order."""
        steps = 1 << self.mantissa_bits
        if self.signed:
            yield from (i * self.min_positive for i in range(steps))
        for exponent in range(self.min_exponent, self.max_exponent + 1):
            for i in range(steps):
                value = (1 + i / steps) * 2.0**exponent
                if value <= self.max:
                    yield value


@dataclass(frozen=True)
class IntFormat:
    """Whole numbers times a scale: -max to max when symmetric, else 0 to 2^bits - 1 and a zero point."""

    name: str
    bits: int
    symmetric: bool = True
    about: str = ""

    @property
    def min(self) -> int:
        return -(2 ** (self.bits - 1) - 1) if self.symmetric else 0

    @property
    def max(self) -> int:
        return int(2 ** (self.bits - 1)) - 1 if self.symmetric else int(2**self.bits) - 1

    @property
    def significant_bits(self) -> int:
        return self.bits - 1 if self.symmetric else self.bits


@dataclass(frozen=True)
class TableFormat:
    """A list of levels in [-1, 1]: the nearest one is taken, a tie goes to the lower level."""

    name: str
    levels: tuple[float, ...]
    about: str = ""

    @property
    def bits(self) -> int:
        return (len(self.levels) - 1).bit_length()

    @property
    def max(self) -> float:
        return max(self.levels)

    @property
    def significant_bits(self) -> int:
        return 24  # levels are FP32 numbers


Format = FloatFormat | IntFormat | TableFormat

FP32 = FloatFormat("fp32", 8, 23, "ieee", about="IEEE 754 single precision")
TF32 = FloatFormat("tf32", 8, 10, "ieee", about="what Ampere's tensor cores read of an FP32 operand")
BF16 = FloatFormat("bf16", 8, 7, "ieee", about="FP32's range with 8 significant bits")
FP16 = FloatFormat("fp16", 5, 10, "ieee", about="IEEE 754 half precision")
E4M3 = FloatFormat("e4m3", 4, 3, "nan", about="E4M3FN: activations and weights of FP8 training, MXFP8")
E4M3_IEEE = FloatFormat("e4m3-ieee", 4, 3, "ieee", about="E4M3 with infinities, as on Gaudi 2")
E5M2 = FloatFormat("e5m2", 5, 2, "ieee", about="gradients of FP8 training")
E3M2 = FloatFormat("e3m2", 3, 2, about="MXFP6")
E2M3 = FloatFormat("e2m3", 2, 3, about="MXFP6")
E2M1 = FloatFormat("e2m1", 2, 1, about="FP4: MXFP4, NVFP4")
E1M2 = FloatFormat("e1m2", 1, 2, about="FP4 of Stable-SPAM's set-up: evenly spaced")
E3M0 = FloatFormat("e3m0", 3, 0, about="4-bit powers of two")
E8M0 = FloatFormat("e8m0", 8, 0, "nan", signed=False, about="scales of the MX formats: powers of two")

INT8 = IntFormat("int8", 8, about="-127 to 127")
INT4 = IntFormat("int4", 4, about="-7 to 7")
INT8_ASYM = IntFormat("int8-asym", 8, symmetric=False, about="0 to 255 and a zero point")
INT4_ASYM = IntFormat("int4-asym", 4, symmetric=False, about="0 to 15 and a zero point")

NF4 = TableFormat(
    "nf4",
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    about="quantiles of a normal distribution (QLoRA)",
)  # fmt: skip

FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        FP32, TF32, BF16, FP16, E4M3, E4M3_IEEE, E5M2, E3M2, E2M3, E2M1, E1M2, E3M0, E8M0,
        INT8, INT8_ASYM, INT4, INT4_ASYM, NF4,
    )
}  # fmt: skip

_FLOAT = re.compile(r"e([1-8])m([0-9]|1[0-9]|2[0-3])(?:-(ieee|nan))?")
_TRUNCATED = re.compile(r"m([0-9]|1[0-9]|2[0-3])")


def find_format(name: str) -> Format:
    """The format called `name`: one of `FORMATS`, eXmY (with `-ieee` or `-nan` for its specials), or mY.

    eXmY without a suffix has IEEE's specials from 8 bits on and none below, as formats in use do. mY keeps Y mantissa
    bits and the exponent of FP32. Raises ValueError with what is allowed.
    """
    if name in FORMATS:
        return FORMATS[name]
    if match := _FLOAT.fullmatch(name):
        exponent_bits, mantissa_bits = int(match[1]), int(match[2])
        default: Specials = "ieee" if exponent_bits + mantissa_bits >= 7 else "none"
        specials: Specials = "ieee" if match[3] == "ieee" else "nan" if match[3] == "nan" else default
        if exponent_bits > 1 or specials == "none":
            return FloatFormat(name, exponent_bits, mantissa_bits, specials)
    if match := _TRUNCATED.fullmatch(name):
        return FloatFormat(name, 8, int(match[1]), "ieee", about="FP32 with a shorter mantissa")
    near = difflib.get_close_matches(name, FORMATS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    raise ValueError(f"unknown format {name!r}{hint} known: {', '.join(FORMATS)}, eXmY (X 1-8, Y 0-23), mY")
