"""What all specs have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Device = Literal["cpu", "cuda"]
Fidelity = Literal["native", "emulated", "simulated", "predicted"]


class Frozen(BaseModel):
    """Base of all specs: immutable, no unknown keys, attribute docstrings become JSON Schema descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
