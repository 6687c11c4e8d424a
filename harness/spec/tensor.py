"""Synthetic tensors that a cast is tried on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from harness.spec.base import Frozen


class TensorSpec(Frozen):
    """A matrix of random numbers, as a linear's operand [tokens, features], with outliers put in; or a sequence of
    them, as one linear sees step after step."""

    rows: int = Field(default=1024, ge=1)
    cols: int = Field(default=1024, ge=1)
    distribution: Literal["normal", "student_t", "log_uniform"] = "normal"
    """Of the bulk, scaled to standard deviation 1. student_t has 4 degrees of freedom; log_uniform has magnitudes over
    16 binades, each as likely as any other."""
    outlier_sigmas: float = Field(default=0.0, ge=0)
    """Magnitude of the outliers in standard deviations of the bulk; 0: none."""
    outliers: Literal["isolated", "channels", "tokens"] = "isolated"
    """Where they stand: single elements anywhere, whole columns, or whole rows."""
    outlier_share: float = Field(default=1e-3, gt=0, le=1)
    """Share of the elements, columns or rows."""
    outlier_spread: float = Field(default=0.0, ge=0)
    """Binades below `outlier_sigmas` that the outliers' magnitudes are spread over, each as likely; 0: all alike."""
    steps: int = Field(default=1, ge=1)
    """Tensors in the sequence; each has its own bulk, and outliers stand at the same places in all."""
    outlier_from: int = Field(default=1, ge=1)
    """The first step with outliers."""
    outlier_until: int = Field(default=0, ge=0)
    """The last step with outliers; 0: the last of all."""

    @model_validator(mode="after")
    def _check_steps(self) -> TensorSpec:
        if self.outlier_from > self.steps or self.outlier_until > self.steps:
            raise ValueError(f"outliers come and go within the {self.steps} steps of the sequence")
        if 0 < self.outlier_until < self.outlier_from:
            raise ValueError(f"outlier_until {self.outlier_until} is before outlier_from {self.outlier_from}")
        return self

    def has_outliers(self, step: int) -> bool:
        """Whether the tensor of `step` (from 1) has outliers."""
        return self.outlier_sigmas > 0 and self.outlier_from <= step <= (self.outlier_until or self.steps)
