"""Helpers that write small cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from suite.declare import Plan, expand, load_case

WritePlan = Callable[..., Plan]


@pytest.fixture
def plan_of(tmp_path: Path) -> WritePlan:
    """Write a case's text, load it with overrides and expand it at a size."""

    def make(text: str, *overrides: str, size: str | None = None) -> Plan:
        path = tmp_path / "case.yaml"
        path.write_text(text)
        return expand(load_case(path, overrides), size)

    return make
