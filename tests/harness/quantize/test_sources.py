"""Reading tensor files one tensor at a time, and what is wrong with those that cannot be read."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.quantize.sinks import narrowest, open_sink
from harness.quantize.sources import BadFile, open_source


def test_arrays(tmp_path: Path) -> None:
    """Big-endian, in Fortran's order, of no dimension, empty, half precision, and what is no float."""
    x = np.random.default_rng(0).standard_normal((3, 4))
    arrays = {
        "big": x.astype(">f8"), "fortran": np.asfortranarray(x, np.float32), "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.float16), "whole": np.arange(3), "complex": x.astype(complex),
    }  # fmt: skip
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    source = open_source(tmp_path / "x.npz")
    assert [(e.name, e.is_float) for e in source.entries] == [
        ("big", True), ("fortran", True), ("scalar", True), ("empty", True), ("whole", False), ("complex", False),
    ]  # fmt: skip
    for entry in source.entries:
        loaded = source.load(entry.name)
        assert isinstance(loaded, Tensor) == entry.is_float
        assert tuple(loaded.shape) == entry.shape
        assert np.array_equal(np.asarray(loaded), arrays[entry.name])


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}]), allow_pickle=True)
    source = open_source(tmp_path / "x.npy")
    assert not source.entries[0].is_float
    with pytest.raises(BadFile, match="allow_pickle=False"):
        source.load("x")


def test_every_kind_round_trips(tmp_path: Path) -> None:
    """What was not cast is copied, in its own dtype."""
    tensors = {
        "w": torch.randn(3, 5), "h": torch.randn(4).half(), "b": torch.randn(2, 2).bfloat16(),
        "d": torch.tensor(1.5, dtype=torch.float64), "i": torch.arange(4), "e": torch.zeros(0, 2),
        "f8": torch.randn(8).to(torch.float8_e4m3fn), "flag": torch.tensor([True, False]),
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "note": "ü"})
    source = open_source(tmp_path / "x.safetensors")
    with open_sink(tmp_path / "y.safetensors", source.kind, source.entries, source.metadata) as sink:
        for entry in source.entries:
            sink.add(entry.name, source.load(entry.name))
    copied = load_file(tmp_path / "y.safetensors")
    assert copied.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert copied[name].dtype == tensor.dtype and copied[name].shape == tensor.shape
        assert torch.equal(copied[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert open_source(tmp_path / "y.safetensors").metadata == {"format": "pt", "note": "ü"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.safetensors", "y.safetensors"]


def test_an_unfinished_file_is_not_left(tmp_path: Path) -> None:
    for kind in ("safetensors", "npz", "npy"):
        with pytest.raises(ZeroDivisionError), open_sink(tmp_path / f"x.{kind}", kind, [], {}):
            raise ZeroDivisionError
    assert [*tmp_path.iterdir()] == []


def test_two_writers_of_one_name_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npy"
    with open_sink(path, "npy", [], {}) as first:
        first.add("x", torch.ones(3))
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with open_sink(path, "npy", [], {}) as second:
            second.add("x", torch.zeros(5))
        assert np.array_equal(np.load(path), np.zeros(5))
    assert np.array_equal(np.load(path), np.ones(3))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.npy"]


def test_the_own_dtype_is_kept_where_it_is_exact() -> None:
    values = torch.tensor([1.0, -0.5, torch.nan, torch.inf])
    assert narrowest(values, torch.bfloat16).dtype is torch.bfloat16
    assert narrowest(values, torch.float64).dtype is torch.float64
    assert narrowest(torch.tensor([1 + 2.0**-12]), torch.bfloat16).dtype is torch.float32
    assert narrowest(torch.tensor([2.0**20]), torch.float16).dtype is torch.float32


BROKEN = {
    "deep.safetensors.index.json": (b"[" * 20_000, "weight_map"),
    "torn.npz": (b"PK\x03\x04 torn", "not a readable .npz"),
    "torn.npy": (b"\x93NUMPY\x01\x00v\x00{'descr'", "not a readable .npy"),
    "empty.npy": (b"", "not a readable .npy"),
    "torn.safetensors": (b"\x10\0\0\0\0\0\0\0{}", "not a readable safetensors"),
    "x.safetensors.index.json": (b"{}", "weight_map"),
    "y.safetensors.index.json": (b'{"weight_map": {"a": "../../etc/passwd"}}', "must lie beside it"),
    "z.safetensors.index.json": (
        b'{"weight_map": {"a": "gone.safetensors"}}',
        "gone.safetensors is not beside it",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path: Path, name: str) -> None:
    content, words = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadFile, match=words) as raised:
        open_source(tmp_path / name)
    assert name in str(raised.value)


def test_a_truncated_array_is_told_of_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(100))
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-100])
    with pytest.raises(BadFile, match=r"x\.npy: .* takes 800 bytes, 700 are there"):
        open_source(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("shape", "version", "words"),
    [
        ("(1000000000, 1000000000)", (1, 0), "4000000000000000000 bytes"),
        ("(-1, 4)", (1, 0), "gives the shape"),
        ("(True, 4)", (1, 0), "gives the shape"),
        ("(2,)", (9, 0), "version 9.0"),
        ("('a',)", (1, 0), "not a readable .npy"),
        ("(__import__('os'),)", (1, 0), "not a readable .npy"),
    ],
)
def test_headers_that_lie(tmp_path: Path, shape: str, version: tuple[int, int], words: str) -> None:
    """No memory is asked for and no value is read before the header is known to fit the file."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY" + bytes(version) + length + header + bytes(64))
    with pytest.raises(BadFile, match=words):
        open_source(path)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.write(path, "x.npy")
    with pytest.raises(BadFile, match=words.replace(".npy", ".npz")):
        open_source(tmp_path / "x.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_array_twice_in_an_archive_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for _ in range(2):
            archive.write(tmp_path / "x.npy", "a.npy")
    with pytest.raises(BadFile, match="'a' is in it twice"):
        open_source(tmp_path / "x.npz")


def test_damaged_compressed_data_are_told_of(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.random.default_rng(0).standard_normal(4000))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[20_000:20_100] = b"\xff" * 100
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(BadFile, match=r"x\.npz: array 'a'"):
        open_source(tmp_path / "x.npz").load("a")


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"no \.safetensors in this folder"):
        open_source(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "2.safetensors")
    with pytest.raises(BadFile, match=r"'a' is in 1\.safetensors too"):
        open_source(tmp_path)
    index = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadFile, match="no tensor 'b', which the index says"):
        open_source(tmp_path)
    (tmp_path / "n.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadFile, match="name one of them"):
        open_source(tmp_path)
