"""Number formats: one description each, from which every constant derives.

Sources: Micikevicius et al. 2022 (arXiv 2209.05433) for E4M3 and E5M2; ONNX's float8 page for the bit patterns.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals and a sign bit.

    `finite_only`: the top exponent holds ordinary numbers and only the all-ones pattern is NaN (the FN formats);
    otherwise it holds infinities and NaNs, as in IEEE 754.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    finite_only: bool = False

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def max(self) -> float:
        """Largest finite value."""
        top = 2**self.exponent_bits - 1 - self.bias
        if (
            self.finite_only
        ):  # all-ones mantissa of the top exponent is NaN, the pattern below it is the maximum
            return float((2 - 2.0 ** (1 - self.mantissa_bits)) * 2.0**top)
        return float((2 - 2.0**-self.mantissa_bits) * 2.0 ** (top - 1))

    @property
    def min_normal(self) -> float:
        return float(2.0 ** (1 - self.bias))

    @property
    def min_subnormal(self) -> float:
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))


E4M3 = FloatFormat("e4m3", 4, 3, finite_only=True)
"""E4M3FN: maximum 448, smallest normal 2^-6, smallest subnormal 2^-9. Gaudi2's E4M3 is IEEE-like, maximum 240."""

E5M2 = FloatFormat("e5m2", 5, 2)
"""Maximum 57344, smallest normal 2^-14, smallest subnormal 2^-16."""

FORMATS: dict[str, FloatFormat] = {f.name: f for f in (E4M3, E5M2)}
