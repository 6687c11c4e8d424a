"""Collectives of a training step."""

from __future__ import annotations

from harness.probes.base import Probe


class Collectives(Probe):
    name = "collectives"
