"""Stages that only sleep: what a pipeline's schedule itself costs, whatever the machine computes."""

from __future__ import annotations

from pydantic import Field

from harness.spec.base import Frozen


class PipelineSpec(Frozen):
    """Time that a stage takes for one microbatch."""

    forward_ms: float = Field(default=20.0, gt=0, le=1000)
    input_ms: float = Field(default=20.0, gt=0, le=1000)
    """Backward pass, gradient of the stage's input (B)."""
    weight_ms: float = Field(default=20.0, ge=0, le=1000)
    """Backward pass, gradient of its weights (W)."""
