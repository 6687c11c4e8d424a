"""Matrix products that are timed."""

from __future__ import annotations

from harness.spec.base import Frozen


class GemmSpec(Frozen):
    """One product, [m, k] by [k, n]."""
