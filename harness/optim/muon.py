"""Muon (Jordan et al. 2024): momentum, orthogonalised by five Newton-Schulz iterations in BF16, for the blocks'
matrices.

Embedding, head, norms and biases go to AdamW, as its authors do. The step is scaled to AdamW's root mean square (Liu et
al. 2025, "Muon is scalable"), so one learning rate serves both. A fused weight (qkv, gate_up) is one matrix.

Where FSDP2 has cut a matrix, each rank gathers the whole of its momentum (one all_gather a matrix and step, padded as
FSDP2 pads, in the momentum's dtype), does the same iterations on it and takes its rows: so the update is that of one
process, to the bit. PyTorch's own Muon would run each product of DTensors over the ranks, and round it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from harness.spec import OptimizerSpec, RunSpec

MARK = "orthogonal"
"""Key of the groups that are Muon's."""
MOMENTUM = 0.95


class Muon(torch.optim.Muon):
    """PyTorch's Muon, and the same update for matrices that lie in parts."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for matrix in group["params"]:
                if hasattr(matrix, "device_mesh") and matrix.grad is not None:
                    self._step_in_parts(matrix, group)
                    matrix.grad = None  # PyTorch's step passes it by
        return super().step(closure)

    def _step_in_parts(self, matrix: Any, group: dict[str, Any]) -> None:
        """The arithmetic of torch.optim._muon._single_tensor_muon on a DTensor."""
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        momentum, gradient = state["momentum_buffer"], matrix.grad
        momentum.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = _zeropower_via_newtonschulz(
            direction.full_tensor(), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        own = matrix._local_tensor
        own.mul_(1 - group["lr"] * group["weight_decay"])
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
        own.add_(_rows_of(whole, matrix), alpha=-rate)


def _rows_of(whole: Tensor, matrix: Any) -> Tensor:
    """This rank's rows of `whole`, as `matrix` is cut."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * matrix.device_mesh.ndim
    replicated = DTensor.from_local(whole, matrix.device_mesh, everywhere, run_check=False)
    rows: Tensor = replicated.redistribute(placements=matrix.placements).to_local()
    return rows


def takes(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is Muon's: a matrix of a block."""
    return name.startswith("layers.") and parameter.dim() == 2


def options(spec: OptimizerSpec) -> dict[str, Any]:
    """What torch.optim.Muon is given beside the parameters."""
    return {"lr": spec.lr, "momentum": MOMENTUM, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}


def problem(spec: RunSpec) -> str | None:
    """Why Muon would not be exact on the run's mesh, or None."""
    if spec.optimizer.name == "muon" and spec.parallelism.tp > 1:
        return f"Muon orthogonalises whole matrices, and tp {spec.parallelism.tp} leaves a part of each on a rank"
    return None
