"""What is installed that a backend needs. No package is imported for it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

_DISTRIBUTIONS = ("torch", "torchao", "transformer-engine")
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)


def installed() -> dict[str, str]:
    """Distribution -> version, and `cuda` -> the CUDA that PyTorch is built for. What is absent is left out.

    Transformer Engine counts where its PyTorch extension is there too: the package of that name alone is empty.
    """
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name))}
    if "transformer-engine" in found and not _has_te_extension():
        del found["transformer-engine"]
    if cuda := torch_cuda():
        found["cuda"] = cuda
    return found


def torch_cuda() -> str | None:
    """`torch.version.cuda`, read from the file that holds it; None for builds without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = _CUDA.search(text)
    return match[1] if match else None


def _has_te_extension() -> bool:
    return (
        importlib.util.find_spec("transformer_engine_torch") is not None
        or _version("transformer-engine-torch") is not None
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
