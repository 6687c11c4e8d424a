"""One summand of a rank's bytes, with the formula it came from: what `suite ledger --explain` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness.ledger.step import Category

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one number of a storage or compute dtype."""


@dataclass(frozen=True)
class Term:
    """So many bytes of one category, and why."""

    category: Category
    name: str
    formula: str
    """In symbols, as docs/memory.md defines them."""
    numbers: str
    """The same with this rank's numbers."""
    num_bytes: int

    def times(self, count: int, symbol: str) -> Term:
        """The term of `count` equal things."""
        if count == 1:
            return self
        return replace(
            self,
            formula=f"{symbol} · ({self.formula})",
            numbers=f"{count:,} · ({self.numbers})",
            num_bytes=count * self.num_bytes,
        )


def product(category: Category, name: str, **factors: int) -> Term:
    """The term whose bytes are the product of named factors; `e_` names are bytes an element."""
    num_bytes = 1
    for value in factors.values():
        num_bytes *= value
    symbols = " ".join(name.rstrip("_") for name in factors)
    return Term(category, name, symbols, " · ".join(f"{value:,}" for value in factors.values()), num_bytes)


def total(terms: Iterable[Term]) -> int:
    """Bytes of all terms."""
    return sum(term.num_bytes for term in terms)
