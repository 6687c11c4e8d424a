"""Rows of `suite list precisions`, `formats` and `casts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]

SCALINGS = {
    "none": "scale 1, values beyond the format's range clipped",
    "static=S": "scale S, given",
    "delayed=H": "from the largest amax of the last H steps; training only",
    "current": "from the tensor's own amax",
    "row": "one scale per row of the operand",
    "blockM": "one scale per M elements along the contraction",
    "blockNxM": "one scale per M elements along the contraction and N across it",
    "groupM": "the same as blockM",
    "mx": "power-of-two (E8M0) scales per 1x32",
    "nvfp4": "E4M3 scales per 1x16 under one FP32 scale per tensor",
}
"""Scaling, as written after a format -> what it does."""

OPTIONS = {
    "pow2": "scales rounded down to a power of two",
    "up": "MX scale: the smallest that clips nothing",
    "even": "MX scale: of the amax rounded to the element's mantissa",
    "floor": "MX scale by the OCP text, the default",
    "2d": "square blocks of mx (32x32) and nvfp4 (16x16)",
    "sr": "stochastic rounding",
    "away": "ties away from zero",
    "topK": "the K largest magnitudes of each block kept unquantised",
    "margin=K": "scale divided by 2^K",
    "special": "overflow as the format's own cast has it, not saturating",
    "rhtN": "random Hadamard transform of size N along the contraction, on both operands of a GEMM",
}
"""Option, as written after a scaling -> what it does."""


def precision_rows() -> Rows:
    """Preset recipes with their paper and what it takes to run them natively."""
    from harness.precision.backends.requirements import native_requirements
    from harness.spec import PrecisionSpec
    from suite.declare import preset_texts, presets

    specs = presets("precisions")
    rows = []
    for name, text in preset_texts("precisions").items():
        spec = specs[name]
        assert isinstance(spec, PrecisionSpec)
        rows.append(
            {
                "name": name,
                "about": text.about.get("about", ""),
                "paper": spec.paper or text.about.get("source"),
                "native": str(native_requirements(spec)),
            }
        )
    return rows


def format_rows() -> Rows:
    """Number formats and their constants, all derived from the format's description."""
    from harness.precision.formats import FORMATS, FloatFormat, IntFormat

    rows = []
    for fmt in FORMATS.values():
        row: dict[str, Any] = {"name": fmt.name, "bits": fmt.bits, "max": _whole(fmt.max)}
        if isinstance(fmt, FloatFormat):
            specials = [word for word, has in (("Inf", fmt.has_infinity), ("NaN", fmt.has_nan)) if has]
            row |= {
                "min_normal": fmt.min_normal,
                "min_positive": fmt.min_positive,
                "epsilon": fmt.epsilon,
                "binades": fmt.binades,
                "specials": " ".join(specials) or "none",
            }
        else:
            least = 1.0 if isinstance(fmt, IntFormat) else min(level for level in fmt.levels if level > 0)
            row |= {
                "min_normal": None,
                "min_positive": least,
                "epsilon": 1.0 if isinstance(fmt, IntFormat) else None,
                "binades": None,
                "specials": "none",
            }
        rows.append({**row, "about": fmt.about})
    return rows


def _whole(value: float) -> float:
    """An int where the value is a whole number short enough to be written out."""
    return int(value) if float(value).is_integer() and value < 1e6 else value


def cast_rows() -> Rows:
    """How a cast is written: short names, then scalings and options."""
    from harness.spec.notation import SHORT_NAMES

    names = [
        {
            "name": name,
            "kind": "short name",
            "meaning": f"{long}: {SCALINGS[long.split(':')[1]]}",
        }
        for name, long in SHORT_NAMES.items()
    ]
    return [
        *names,
        *({"name": name, "kind": "scaling", "meaning": meaning} for name, meaning in SCALINGS.items()),
        *({"name": name, "kind": "option", "meaning": meaning} for name, meaning in OPTIONS.items()),
        {
            "name": "FORMAT[:SCALING][:OPTION]...",
            "kind": "notation",
            "meaning": "e4m3:block128x128:pow2, int4:group128, mxfp8:up ...; formats: `suite list formats`",
        },
    ]
