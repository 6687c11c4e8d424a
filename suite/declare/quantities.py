"""Quantities as people write them: 400k, 2M, 1.5B, 2T (counts), 16GB (decimal), 80GiB (binary bytes)."""

from __future__ import annotations

import re
from decimal import Decimal

_FACTORS = {
    **dict.fromkeys(("k", "K", "kB", "KB"), 10**3),
    **dict.fromkeys(("M", "MB"), 10**6),
    **dict.fromkeys(("G", "B", "GB"), 10**9),
    **dict.fromkeys(("T", "TB"), 10**12),
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_PATTERN = re.compile(r"([-+]?\d{1,18}(?:\.\d{0,18})?)\s?([A-Za-z]{1,3})", re.ASCII)


def parse_quantity(text: str) -> int | float | None:
    """The number that `text` stands for, an int where it is whole; None where it is no quantity,
    or one beyond 64 bits.

    >>> parse_quantity("400k"), parse_quantity("1.5B"), parse_quantity("2GiB"), parse_quantity("fast")
    (400000, 1500000000, 2147483648, None)
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[2] not in _FACTORS:
        return None
    number = Decimal(match[1]) * _FACTORS[match[2]]
    if abs(number) >= 2**63:
        return None
    return int(number) if number == number.to_integral_value() else float(number)
