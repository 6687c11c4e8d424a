"""Loss scaling for FP16 gradients: PyTorch's, and one whose ranks skip an update together."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from harness.parallel import recorder
from harness.spec import PrecisionSpec


class AgreedGradScaler(torch.amp.GradScaler):
    """A loss scaler whose ranks skip an update together: where a rank's part of the gradients is not finite, all
    know."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        gradients = [
            getattr(parameter.grad, "_local_tensor", parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        found_inf, inv_scale = found_inf.clone(), inv_scale.clone()
        for kind in {gradient.dtype for gradient in gradients}:
            same = [gradient for gradient in gradients if gradient.dtype == kind]
            torch._amp_foreach_non_finite_check_and_unscale_(same, found_inf, inv_scale)
        with recorder.control():
            distributed.all_reduce(found_inf, op=distributed.ReduceOp.MAX)
        return {found_inf.device: found_inf}


def loss_scaler(precision: PrecisionSpec, device: torch.device) -> torch.amp.GradScaler:
    """The run's loss scaler; disabled where the precision has none."""
    enabled = precision.loss_scaling == "dynamic"
    several = distributed.is_available() and distributed.is_initialized()
    kind = AgreedGradScaler if enabled and several else torch.amp.GradScaler
    scaler = kind(device.type, enabled=enabled)
    scaler.scale(torch.zeros((), device=device))  # from here on it has a scale
    return scaler
