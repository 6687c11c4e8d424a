"""Content-addressed checkpoints: `SHA256.safetensors`, written whole or not at all.

safetensors holds tensors and strings only, so loading one runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn


class DamagedCheckpoint(Exception):  # noqa: N818
    """A checkpoint whose content is not what its name, the SHA-256, says."""


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any] | None = None) -> str:
    """Write `tensors` and the JSON-able `state`; return the file's SHA-256, which is its name."""
    data = save(
        {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()},
        metadata={"state": json.dumps(state or {})},
    )
    sha256 = hashlib.sha256(data).hexdigest()
    path = checkpoint_path(folder, sha256)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{sha256}.{os.getpid()}.partial"
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    return sha256


def load_checkpoint(folder: Path, sha256: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and state.

    FileNotFoundError when it is not in `folder`. A file that is not what its name says is removed, so that the next
    command makes it anew, and DamagedCheckpoint raised.
    """
    path = checkpoint_path(folder, sha256)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path} is missing; the next `suite run` makes it anew")
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != sha256:
        path.unlink()
        raise DamagedCheckpoint(
            f"checkpoint {path} was damaged and has been removed; the next `suite run` makes it anew"
        )
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        state: dict[str, Any] = json.loads((file.metadata() or {}).get("state", "{}"))
    return tensors, state


def checkpoint_path(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256}.safetensors"


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything a resumed run needs: parameters, quantiser and smooth scales, the optimizer's states (moments,
    step counts, FP32 copies of weights)."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            tensors[f"optimizer.{names[parameter]}.{slot}"] = torch.as_tensor(value)
    return _without_shared(tensors)


def load_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Undo `training_state`, in place."""
    own = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    load_weights(model, own)
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        slots = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if slots:
            optimizer.state[parameter] = {slot: value.to(parameter.device) for slot, value in slots.items()}


def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load parameters by name and those buffers the model has (another precision has other quantisers).

    KeyError or ValueError naming the parameter when one is missing or of another shape.
    """
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in tensors:
                raise KeyError(f"the checkpoint has no parameter {name}")
            if tensors[name].shape != parameter.shape:
                theirs, ours = list(tensors[name].shape), list(parameter.shape)
                raise ValueError(f"{name} is {theirs} in the checkpoint, {ours} here")
            parameter.copy_(tensors[name])
        for name, buffer in buffers.items():
            if name in tensors and tensors[name].shape == buffer.shape:
                buffer.copy_(tensors[name])


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters alone, for runs that start from this one."""
    return _without_shared(dict(model.named_parameters()))


def _without_shared(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """safetensors refuses two names for one storage (tied embeddings): keep the first name."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        kept[name] = tensor
    return kept
