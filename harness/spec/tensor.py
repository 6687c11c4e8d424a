"""Synthetic tensors that a cast is tried on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from harness.spec.base import Frozen


class TensorSpec(Frozen):
    """A matrix of random numbers, as a linear's operand [tokens, features], with outliers put in."""

    rows: int = Field(default=1024, ge=1)
    cols: int = Field(default=1024, ge=1)
    distribution: Literal["normal", "student_t", "log_uniform"] = "normal"
    """Of the bulk, scaled to standard deviation 1; student_t has 4 degrees of freedom."""
    outlier_sigmas: float = Field(default=0.0, ge=0)
    """Magnitude of the outliers in standard deviations of the bulk; 0: none."""
    outliers: Literal["isolated", "channels", "tokens"] = "isolated"
    """Where they stand: single elements anywhere, whole columns, or whole rows."""
    outlier_share: float = Field(default=1e-3, gt=0, le=1)
    """Share of the elements, columns or rows."""
