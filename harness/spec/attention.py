"""How attention is computed, and the ties put into it on purpose."""

from __future__ import annotations

from harness.spec.base import Frozen


class AttentionSpec(Frozen):
    """Arithmetic of the softmax product."""
