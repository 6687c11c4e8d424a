"""Storages whose category is known by what holds them: parameters, buffers, gradients, an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies on this rank; other tensors as they are."""
    inner = getattr(tensor, "_local_tensor", None)
    return tensor if inner is None else inner


def weights(models: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers, as they lie between steps."""
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            yield local(tensor)


def gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """What the parameters' .grad holds now."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield local(parameter.grad)


def optimizer_tensors(optimizers: Sequence[object], models: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Every tensor reachable from the optimizers' attributes that is no parameter, buffer or gradient of the models:
    the moments, and FP32 master weights, wherever an optimizer that wraps another keeps them."""
    stored = {tensor.untyped_storage()._cdata for tensor in weights(models)}
    parameters = [parameter for model in models for parameter in model.parameters()]
    stored |= {tensor.untyped_storage()._cdata for tensor in gradients(parameters)}
    for tensor in _reachable(list(optimizers), set()):
        if local(tensor).untyped_storage()._cdata not in stored:
            yield local(tensor)


def _reachable(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif isinstance(value, torch.optim.Optimizer) or type(value).__module__.startswith("harness.optim"):
        inner = vars(value).values()
    else:
        return
    seen.add(id(value))
    for each in list(inner):
        yield from _reachable(each, seen)
