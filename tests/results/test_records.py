"""What the registry of metrics says, and how its numbers are written."""

from __future__ import annotations

import pytest

from results.records import digits_between


@pytest.mark.parametrize(
    ("low", "high", "digits"),
    [
        (1.28, 1.32, 3),
        (1.0031, 1.0036, 5),
        (-0.0171, -0.0129, 3),
        (None, 1.0, 3),
        (2.0, 2.0, 3),
        (1, 1 + 1e-12, 6),
    ],
)
def test_an_interval_gets_the_digits_it_needs(low: float | None, high: float | None, digits: int) -> None:
    assert digits_between(low, high) == digits
