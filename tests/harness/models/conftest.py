"""Small models, random tokens and a short training, shared by the tests of the models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from harness.models.transformer import Transformer, build
from harness.optim import adamw
from harness.precision.linear import end_step
from harness.spec import ModelSpec, OptimizerSpec

VOCAB = 61
FORMS = ["swiglu", "smooth-swiglu", "smooth-swiglu-token"]


def spec(**changes: Any) -> ModelSpec:
    shape = {"num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 48}
    return ModelSpec(name="tiny", **{**shape, **changes})


def model(seed: int = 0, **changes: Any) -> Transformer:
    return build(spec(**changes), VOCAB, seed)


def tokens(seed: int = 0, batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def compute(dtype: str) -> AbstractContextManager[None]:
    return nullcontext() if dtype == "fp32" else torch.autocast("cpu", torch.bfloat16)


def losses(net: Transformer, dtype: str = "fp32", steps: int = 5, **optimizer: Any) -> list[float]:
    """Train a few steps on random tokens; the loss of each step."""
    adam = adamw.build(net, OptimizerSpec(**{"lr": 1e-2, **optimizer}))
    out = []
    for step in range(steps):
        with compute(dtype):
            loss = net.loss(tokens(step), tokens(step + 100))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        end_step(net)
        net.end_step()
        out.append(float(loss.detach()))
    return out


def fill(net: nn.Module, value: Callable[[Tensor], Tensor], seed: int = 0) -> None:
    """Set every parameter to `value` of a tensor of standard normal numbers of its shape."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(value(torch.randn(parameter.shape, generator=generator)))
