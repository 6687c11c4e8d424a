"""What is alive while a piece of a step runs, and the moment at which that is most.

A tape is played: `hold` what comes to life, `drop` what dies. It starts at zero, so what was there before the piece
and dies within it counts as negative; the largest sum, by category, is the piece's rise above its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.ledger.step import CATEGORIES, Category

Bytes = dict[Category, int]
GRADIENT = "gradient for "
"""How names of parameters' gradients begin."""


def nothing() -> Bytes:
    return dict.fromkeys(CATEGORIES, 0)


def add(*parts: Mapping[Category, int]) -> Bytes:
    """Category by category."""
    found = nothing()
    for part in parts:
        for category, num_bytes in part.items():
            found[category] += num_bytes
    return found


def scaled(part: Mapping[Category, int], count: int) -> Bytes:
    return {category: count * num_bytes for category, num_bytes in part.items()}


@dataclass(frozen=True)
class Played:
    """A piece of a step, relative to its start."""

    rise: Bytes
    """At its largest moment."""
    name: str
    """What ran then."""
    end: Bytes
    """When it is over."""
    left: int
    """Bytes of weights' gradients among it."""


class Tape:
    """Holds and drops of one piece."""

    def __init__(self) -> None:
        self._now = nothing()
        self._alive: dict[str, tuple[Category, int]] = {}
        self._best, self._best_total, self._name = nothing(), 0, "start"
        self._doing = "start"

    def doing(self, name: str) -> None:
        """What the following holds and drops belong to."""
        self._doing = name

    def there(self, name: str, num_bytes: int, category: Category = "activations") -> None:
        """Something alive since before the start; dropping it counts as negative."""
        self._alive[name] = (category, num_bytes)

    def hold(self, name: str, num_bytes: int, category: Category = "temporary") -> None:
        self._alive[name] = (category, num_bytes)
        self._now[category] += num_bytes
        total = sum(self._now.values())
        if total > self._best_total:
            self._best, self._best_total, self._name = dict(self._now), total, self._doing

    def drop(self, *names: str) -> None:
        """The end of each; of what was never held, nothing."""
        for name in names:
            category, num_bytes = self._alive.pop(name, ("temporary", 0))
            self._now[category] -= num_bytes

    def gone(self, num_bytes: int, category: Category) -> None:
        """Part of something that lies there since before the start ends."""
        self._now[category] -= num_bytes

    def played(self) -> Played:
        left = sum(num_bytes for name, (_, num_bytes) in self._alive.items() if name.startswith(GRADIENT))
        return Played(self._best, self._name, self._now, left)
