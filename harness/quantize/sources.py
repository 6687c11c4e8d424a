"""Tensor files, read one tensor at a time: .npy, .npz, .safetensors, and checkpoints of several .safetensors.

Nothing is unpickled. Only headers are read when a file is opened; a tensor is in memory from `load` until the caller
lets go of it.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SUFFIXES = (".npy", ".npz", ".safetensors")
_TORN = (
    ValueError, TypeError, EOFError, SyntaxError, OverflowError, NotImplementedError, RuntimeError, zlib.error,
    zipfile.BadZipFile,
)  # fmt: skip
"""What NumPy and zipfile raise for files that are cut off, damaged, encrypted or of another kind."""
BF16_IN_NUMPY = np.dtype("V2")
"""How NumPy saves an array of ml_dtypes.bfloat16: two raw bytes a value."""


class BadFile(Exception):  # noqa: N818
    """The file is not what its name says; the message names the file, the tensor and what is allowed."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, from its header."""

    name: str
    dtype: str
    """bf16, fp32, e4m3 ... for floats; else the file's own word."""
    shape: tuple[int, ...]
    is_float: bool


class Source(Protocol):
    """An opened file: what it holds, and its tensors by name."""

    kind: str
    paths: list[Path]
    """The files that are read."""
    entries: list[Entry]
    metadata: dict[str, str]

    def load(self, name: str) -> Tensor | npt.NDArray[Any]:
        """The tensor, in its own dtype; an array where torch has no such dtype."""


def open_source(path: Path) -> Source:
    """Open a file, a folder of .safetensors, or their index (*.safetensors.index.json). Raises BadFile."""
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".json":
        return _index(path)
    if path.suffix == ".safetensors":
        return SafetensorsSource([path])
    try:
        return NpzSource(path) if path.suffix == ".npz" else NpySource(path)
    except _TORN as error:
        raise BadFile(f"{path}: not a readable {path.suffix} file: {_first_line(error)}") from None


# ---- safetensors

_SAFE = {
    "F64": ("fp64", torch.float64), "F32": ("fp32", torch.float32), "F16": ("fp16", torch.float16),
    "BF16": ("bf16", torch.bfloat16), "F8_E4M3": ("e4m3", torch.float8_e4m3fn), "F8_E5M2": ("e5m2", torch.float8_e5m2),
}  # fmt: skip


@dataclass
class SafetensorsSource:
    """One or several .safetensors files as one set of tensors."""

    paths: list[Path]
    wanted: dict[str, Path] | None = None
    """Tensor -> file, as an index says; None: whatever the files hold."""
    kind: str = "safetensors"
    entries: list[Entry] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._where: dict[str, Path] = {}
        for path in self.paths:
            for entry in self._headers(path):
                if self.wanted is not None and self.wanted.get(entry.name) != path:
                    continue
                if entry.name in self._where:
                    raise BadFile(f"{path}: tensor {entry.name!r} is in {self._where[entry.name].name} too")
                self._where[entry.name] = path
                self.entries.append(entry)
        for name, path in (self.wanted or {}).items():
            if name not in self._where:
                raise BadFile(f"{path}: no tensor {name!r}, which the index says is there")

    def _headers(self, path: Path) -> Iterator[Entry]:
        try:
            with safe_open(path, framework="pt") as file:
                self.metadata |= file.metadata() or {}
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    part = file.get_slice(name)
                    word = part.get_dtype()
                    known = _SAFE.get(word)
                    yield Entry(name, known[0] if known else word, tuple(part.get_shape()), known is not None)
        except SafetensorError as error:
            raise BadFile(f"{path}: not a readable safetensors file: {_first_line(error)}") from None

    def load(self, name: str) -> Tensor:
        # Opened anew for each tensor: a mapped file stays in memory as long as its handle does.
        try:
            with safe_open(self._where[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except SafetensorError as error:
            raise BadFile(f"{self._where[name]}: tensor {name!r}: {_first_line(error)}") from None


def _folder(path: Path) -> Source:
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return _index(indices[0])
    if indices:
        names = ", ".join(index.name for index in indices)
        raise BadFile(f"{path}: has {len(indices)} indices ({names}); name one of them")
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if not files:
        raise BadFile(f"{path}: no .safetensors in this folder; name a file ({', '.join(SUFFIXES)})")
    return SafetensorsSource(files)


def _index(path: Path) -> Source:
    try:
        places = json.loads(path.read_text())["weight_map"]
        wanted = {str(name): str(file) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadFile(
            f"{path}: not an index of a checkpoint, which is JSON with weight_map: tensor -> file"
        ) from None
    for file in sorted(set(wanted.values())):
        if Path(file).name != file:
            raise BadFile(f"{path}: names {file!r}; the files of an index must lie beside it")
        if not (path.parent / file).is_file():
            raise BadFile(f"{path}: {file} is not beside it; download it, or name the files there are")
    files = [path.parent / file for file in sorted(set(wanted.values()))]
    return SafetensorsSource(files, {name: path.parent / file for name, file in wanted.items()})


# ---- numpy


class NpySource:
    """One array, called by the file's name."""

    kind = "npy"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.paths = [path]
        self.metadata: dict[str, str] = {}
        with path.open("rb") as file:
            self.entries = [_array_entry(path.stem, *_array_header(file, os.fstat(file.fileno()).st_size))]

    def load(self, name: str) -> Tensor | npt.NDArray[Any]:
        try:
            return _to_torch(np.load(self._path, allow_pickle=False))
        except _TORN as error:
            raise BadFile(f"{self._path}: {_first_line(error)}") from None


class NpzSource:
    """The arrays of an archive, in its order."""

    kind = "npz"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.paths = [path]
        self.metadata: dict[str, str] = {}
        self.entries: list[Entry] = []
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                name = member.filename.removesuffix(".npy")
                if any(name == entry.name for entry in self.entries):
                    raise ValueError(f"array {name!r} is in it twice")
                with archive.open(member) as file:
                    self.entries.append(_array_entry(name, *_array_header(file, member.file_size)))

    def load(self, name: str) -> Tensor | npt.NDArray[Any]:
        try:
            with np.load(self._path, allow_pickle=False) as arrays:
                return _to_torch(arrays[name])
        except _TORN as error:
            raise BadFile(f"{self._path}: array {name!r}: {_first_line(error)}") from None


def _array_header(file: Any, size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array in NumPy's format of `size` bytes. Raises ValueError where these do not hold it, so
    that no memory is taken for what is not there."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} of the format is not known")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if any(isinstance(n, bool) or n < 0 for n in shape):
        raise ValueError(f"its header gives the shape {shape}")
    wanted, held = math.prod(shape) * dtype.itemsize, size - file.tell()
    if not dtype.hasobject and wanted > held:
        raise ValueError(f"cut off: {dtype} of shape {shape} takes {wanted} bytes, {held} are there")
    return shape, dtype


def _array_entry(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Entry:
    if dtype == BF16_IN_NUMPY:
        return Entry(name, "bf16", shape, True)
    names = {"f2": "fp16", "f4": "fp32", "f8": "fp64"}
    word = names.get(dtype.str[1:])
    return Entry(name, word or str(dtype), shape, word is not None)


def _to_torch(array: npt.NDArray[Any]) -> Tensor | npt.NDArray[Any]:
    if array.dtype == BF16_IN_NUMPY:
        bits = np.ascontiguousarray(array).view(np.int16)
        return torch.from_numpy(bits.copy()).view(torch.bfloat16).reshape(array.shape)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        return array
    native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(native)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
