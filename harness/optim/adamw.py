"""AdamW (Loshchilov & Hutter 2019) with linear warm-up and a cosine: PyTorch's fused kernel and a schedule.

The fused kernel reads each tensor once; on a CPU it takes a third of the time of the for-each form.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from harness.spec import OptimizerSpec


def build(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """Decay on matrices, none on norms and biases."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.lr,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        fused=True,
    )


def learning_rate(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """Rate of training step `step` (1-based): rises linearly over the warm-up, then cosine to min_lr_ratio * lr."""
    warmup = round(spec.warmup_ratio * num_steps)
    if step <= warmup:
        return spec.lr * step / warmup
    if spec.schedule == "constant":
        return spec.lr
    progress = (step - warmup) / max(1, num_steps - warmup)
    return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
