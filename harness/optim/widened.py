"""FP32 arithmetic for BF16 weights: an FP32 copy that the optimizer updates, FP32 states, FP32 gradients.

    master     w32 <- update(w32, g32);  w <- BF16(w32)        12 bytes a parameter beside weight and gradient (AdamW)
    without    w <- BF16(update(FP32(w), g32))                  8 bytes; an update below half a unit in the last place
                                                                of w is lost, as without FP32 states

Works on plain tensors and on DTensors alike, one parameter at a time: what is wide for the moment is one parameter's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
MASTER = "master"


class Widened(torch.optim.Optimizer):
    """An optimizer of FP32 copies in the place of one of the parameters."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make: Make,
        lr: float,
        keep: bool,
        gradient: Callable[[nn.Parameter], Tensor | None],
    ) -> None:
        """`make`: the algorithm over given groups. `keep`: keep the copies (master weights). `gradient`: where a
        parameter's lies, in any dtype."""
        super().__init__(groups, {"lr": lr})
        self._gradient = gradient
        self._inner: dict[nn.Parameter, tuple[nn.Parameter, torch.optim.Optimizer]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                wide = nn.Parameter(parameter.detach().float(), requires_grad=False)
                self._inner[parameter] = wide, make([{**group, "params": [wide]}])
                if keep:
                    self.state[parameter] = {MASTER: wide.data}
                else:
                    _hold(wide, _nothing_like(wide))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = self._gradient(parameter)
                if gradient is not None:
                    self._step_one(parameter, gradient, group["lr"])

    def _step_one(self, parameter: nn.Parameter, gradient: Tensor, lr: float) -> None:
        wide, inner = self._inner[parameter]
        state = self.state[parameter]
        master = state.get(MASTER)
        _hold(wide, parameter.detach().float() if master is None else master)
        wide.grad = gradient.float()
        inner.state[wide] = {slot: value for slot, value in state.items() if slot != MASTER}
        for group in inner.param_groups:
            group["lr"] = lr
        inner.step()
        parameter.copy_(wide)
        state.update(inner.state[wide])
        wide.grad = None
        if master is None:
            _hold(wide, _nothing_like(wide))


def _hold(wide: nn.Parameter, values: Tensor) -> None:
    """Put `values` in the place of what `wide` holds: a DTensor's `data`, assigned, leaves its local part as it is."""
    if hasattr(wide, "_local_tensor"):
        wide._local_tensor = getattr(values, "_local_tensor", values)
    else:
        wide.data = values


def _nothing_like(tensor: Tensor) -> Tensor:
    """Holds its place, and no memory."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
