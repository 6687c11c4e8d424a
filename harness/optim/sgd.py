"""SGD with momentum and decoupled weight decay (SGDW: Loshchilov & Hutter 2019), on PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SGD(torch.optim.SGD):
    """p <- (1 - lr * weight_decay) p, then a step of SGD with momentum, through which torch.optim.SGD's own decay
    goes."""

    def __init__(self, groups: Any, lr: float, momentum: float) -> None:
        in_parts = any(hasattr(each, "device_mesh") for group in groups for each in group["params"])
        super().__init__(groups, lr=lr, momentum=momentum, fused=not in_parts)  # no fused kernel of DTensors

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if moved and decay:
                torch._foreach_mul_(moved, 1 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        try:
            return super().step(closure)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
