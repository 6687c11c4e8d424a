"""Put a precision's recipe into a model, with the backend that this device can run."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from harness.precision.backends.errors import BackendError
from harness.precision.backends.packages import installed
from harness.precision.backends.requirements import Version
from harness.precision.backends.select import Choice, choose_backend
from harness.precision.backends.torch_native import apply_torch
from harness.precision.backends.transformer_engine import apply_transformer_engine
from harness.precision.linear import apply_recipe
from harness.spec import PrecisionSpec


def apply_backend(model: nn.Module, precision: PrecisionSpec, device: torch.device, seed: int = 0) -> Choice:
    """Replace the linears that the recipe covers, in place; say what runs them and why.

    Raises BackendError where a backend asked for by name cannot run here.
    """
    why = _unfit_for_transformer_engine(model)
    excluded = {} if why is None else {"transformer_engine": why}
    choice = choose_backend(precision, device.type, capability(device), installed(), excluded)
    return carry_out(choice, model, precision, seed)


def carry_out(choice: Choice, model: nn.Module, precision: PrecisionSpec, seed: int = 0) -> Choice:
    """`choice` with the linears that were replaced, after replacing them. Where no layer's sizes suit the backend, auto
    emulates after all."""
    if precision.recipe is None:
        return choice
    if choice.backend == "emulated":
        return replace(choice, replaced=tuple(apply_recipe(model, precision, seed=seed)))
    if choice.backend == "torch":
        replaced, unfit = apply_torch(model, precision, seed=seed)
    else:
        replaced, unfit = apply_transformer_engine(model, precision)
    if unfit and not replaced:
        problem = f"sizes of no linear divide as {choice.backend}'s products need"
        if precision.backend != "auto":
            raise BackendError(f"precision {precision.name}: {problem}")
        return carry_out(Choice("emulated", "emulated", problem), model, precision, seed)
    reason = choice.reason
    if unfit:
        reason += f"; {len(unfit)} linears stay unquantised, their sizes do not divide: {', '.join(unfit)}"
    return replace(choice, reason=reason, replaced=tuple(replaced), unfit=tuple(unfit))


def capability(device: torch.device) -> Version | None:
    """CUDA compute capability; None for a CPU and where PyTorch is built for other GPUs."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def _unfit_for_transformer_engine(model: nn.Module) -> str | None:
    """Why Transformer Engine's linears cannot take the model's place, if they cannot."""
    if getattr(model, "recompute", False):
        return "recompute: full runs each linear twice, and Transformer Engine would note both in its amax history"
    for module in model.modules():
        aged = any(
            getattr(module, name, None) is not None for name in ("up_scale", "gate_scale", "down_scale")
        )
        if aged or getattr(module, "kind", "") == "smooth-swiglu":
            return "ageing and smooth-swiglu multiply weights that its Linear does not hold"
    return None
