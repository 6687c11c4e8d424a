"""Writing the dequantised tensors, one at a time, in the kind of file they came from.

A file appears under its name when it is whole. Every tensor of the input is in it: what was not cast is copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.quantize.sources import BF16_IN_NUMPY, BadFile, Entry

_WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
}  # fmt: skip


class Sink(Protocol):
    """A file being written. Use as a context: left by an exception, nothing is left behind."""

    path: Path

    def add(self, name: str, tensor: Tensor | npt.NDArray[Any]) -> None: ...

    def __enter__(self) -> Sink: ...

    def __exit__(self, *error: object) -> None: ...


def open_sink(path: Path, kind: str, entries: Sequence[Entry], metadata: dict[str, str]) -> Sink:
    """A writer of `entries`, to be added in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "safetensors":
        return SafetensorsSink(path, entries, metadata)
    return NpzSink(path) if kind == "npz" else NpySink(path)


def narrowest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 `values` in `dtype` where it holds each of them exactly, else as they are."""
    if dtype in (torch.float64, torch.float32):
        return values.to(dtype)
    narrow = values.to(dtype)
    same = narrow.float() == values
    if not bool(same.all()):
        same |= values.isnan() & narrow.float().isnan()
    return narrow if bool(same.all()) else values


class _Temporary:
    """A file beside its final name until it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A name of this process alone, and never through a link: two commands may write the same file.
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        whole = False
        try:
            self.close()
            if error[0] is None:
                self._temporary.replace(self.path)
                whole = True
        finally:
            if not whole:
                with contextlib.suppress(OSError):
                    self._temporary.unlink()

    def close(self) -> None:
        raise NotImplementedError


class SafetensorsSink(_Temporary):
    """Room for the longest header is left at the start; the header is written last, padded with spaces, as the format
    allows. So a checkpoint is written once, and never held."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: dict[str, str]) -> None:
        super().__init__(path)
        self._header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        longest = {
            entry.name: {"dtype": "F8_E4M3", "shape": entry.shape, "data_offsets": [10**15, 10**15]}
            for entry in entries
        }
        self._room = len(json.dumps(self._header | longest)) // 8 * 8 + 8
        self._file = self._temporary.open("xb")
        self._file.seek(8 + self._room)
        self._at = 0

    def add(self, name: str, tensor: Tensor | npt.NDArray[Any]) -> None:
        assert isinstance(tensor, Tensor)
        if tensor.dtype not in _WORDS:
            raise BadFile(f"{self.path}: {name} is {tensor.dtype}, which cannot be written; leave --out away")
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._file.write(data.data)
        self._header[name] = {
            "dtype": _WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._at, self._at + data.nbytes],
        }
        self._at += data.nbytes

    def close(self) -> None:
        try:
            text = json.dumps(self._header).encode()
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))
        finally:
            self._file.close()


class NpySink(_Temporary):
    """One array."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = self._temporary.open("xb")

    def add(self, name: str, tensor: Tensor | npt.NDArray[Any]) -> None:
        np.lib.format.write_array(self._file, _to_numpy(tensor), allow_pickle=False)

    def close(self) -> None:
        self._file.close()


class NpzSink(_Temporary):
    """An archive as np.savez writes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._archive = zipfile.ZipFile(self._temporary, "x", allowZip64=True)

    def add(self, name: str, tensor: Tensor | npt.NDArray[Any]) -> None:
        with self._archive.open(f"{name}.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, _to_numpy(tensor), allow_pickle=False)

    def close(self) -> None:
        self._archive.close()


def _to_numpy(tensor: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BF16_IN_NUMPY)
    return tensor.contiguous().numpy()
