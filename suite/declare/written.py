"""What the models of written files have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Provenance = Literal["read", "secondary", "recalled", "derived"]
"""How a number was obtained: in the source itself, in another's account, from memory, computed."""


class Written(BaseModel):
    """Base of what is written in files: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
