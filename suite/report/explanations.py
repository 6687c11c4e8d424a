"""Drawings that explain one case's finding: case -> function that makes its markup."""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from suite.report import tie_rounding

EXPLANATIONS: dict[str, Callable[[], Markup]] = {"flash_attention_bias": tie_rounding.explanation}


def explanation(case_name: str) -> Markup:
    """The drawing of a case; empty for most."""
    make = EXPLANATIONS.get(case_name)
    return make() if make is not None else Markup("")
