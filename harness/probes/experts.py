"""Experts of a training step."""

from __future__ import annotations

from harness.probes.base import Probe


class Experts(Probe):
    name = "experts"
