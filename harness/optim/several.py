"""Optimizers that share a model's parameters between them, as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Several(torch.optim.Optimizer):
    """Steps each of `parts`; its groups are theirs, so that a learning rate set here is set there, and so are its
    states."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.state = _States(self.parts)  # type: ignore[assignment]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)


class _States(MutableMapping[Tensor, dict[str, Any]]):
    """Parameter -> its slots, read and written where the optimizer that steps it keeps them.

    Not a ChainMap: the parts' states are defaultdicts, so the first of them would answer for every parameter.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self._part_of: dict[Tensor, torch.optim.Optimizer] = {
            parameter: part for part in parts for group in part.param_groups for parameter in group["params"]
        }

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        slots: dict[str, Any] = self._part_of[parameter].state[parameter]
        return slots

    def __setitem__(self, parameter: Tensor, slots: dict[str, Any]) -> None:
        self._part_of[parameter].state[parameter] = slots

    def __delitem__(self, parameter: Tensor) -> None:
        del self._part_of[parameter].state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)
