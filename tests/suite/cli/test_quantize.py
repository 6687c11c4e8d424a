"""`suite quantize` with its real worker: what it prints, writes and refuses."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suite.quantize import QuantizeError, output_paths, parse_casts

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from harness.precision.cast import cast, dequantize  # noqa: E402
from harness.spec.notation import parse_cast  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """All float dtypes, 0 to 4 dimensions, an empty and an integer tensor."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "model.safetensors"
    tensors = {
        "layer.weight": torch.randn(24, 100, generator=generator) * 0.02,
        "layer.norm": torch.linspace(0.5, 1.5, 70),
        "embedding": torch.randn(10, 64, generator=generator).bfloat16(),
        "conv": torch.randn(3, 2, 2, 40, generator=generator).half(),
        "scalar": torch.tensor(3.3, dtype=torch.float64),
        "empty": torch.zeros(0, 8),
        "ids": torch.arange(5),
    }
    save_file(tensors, path, metadata={"format": "pt", "step": "7"})
    return path


def sqnr(x: Any, y: Any) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return 10 * math.log10((x**2).sum() / ((x - y) ** 2).sum())


def test_a_checkpoint(suite_command, checkpoint: Path) -> None:
    casts = ["mxfp8", "nvfp4", "e4m3:row", "int4:group64"]
    said = suite_command(
        "quantize", str(checkpoint), "--format", "mxfp8,nvfp4", "--format", "e4m3:row,int4:group64,nvfp4",
        "--out", "out", "--json",
    )  # fmt: skip
    assert said.code == 0, said.stderr
    data = said.data
    assert [total["cast"] for total in data["totals"]] == casts, "each cast once"
    assert [(skip["tensor"], skip["reason"]) for skip in data["skipped"]] == [("ids", "I64 is not a float")]
    rows = {(row["tensor"], row["cast"]): row for row in data["rows"]}
    assert len(rows) == 6 * len(casts)
    original = load_file(checkpoint)
    for entry in data["written"]:
        written = load_file(entry["path"])
        assert written.keys() == original.keys()
        assert torch.equal(written["ids"], original["ids"])
        for name in ("layer.weight", "embedding", "conv"):
            row, x, y = rows[name, entry["cast"]], original[name], written[name]
            assert y.dtype == (torch.float32 if name in entry["as_fp32"] else x.dtype)
            assert row["sqnr_db"] == pytest.approx(sqnr(x.double(), y.double()), abs=1e-6)
            flushed = int(((x != 0) & (y == 0)).sum()) / x.numel()
            assert row["flushed_fraction"] == pytest.approx(flushed)
    assert {e["cast"]: sorted(e["as_fp32"]) for e in data["written"]}["mxfp8"] == [], "16 bits hold these"
    assert "embedding" in {e["cast"]: e["as_fp32"] for e in data["written"]}["e4m3:row"]


def test_bits_and_worst_blocks(suite_command, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, 128)).astype(np.float32)
    x[2, 1, 64], x[2, 1, 65:96] = 5.0, 0.249  # E2M1 rounds these to 4 and to 0
    np.save("x.npy", x)
    said = suite_command(
        "quantize", "x.npy", "--json",
        "--format", "mxfp8,mxfp4,nvfp4,e4m3,int4:group128,int4-asym:group32,nf4,e4m3:row,e4m3:block128:pow2,bf16",
    )  # fmt: skip
    rows = {row["cast"]: row for row in said.data["rows"]}
    bits = {cast: row["bits_per_element"] for cast, row in rows.items()}
    n = x.size
    assert bits == pytest.approx(
        {
            "mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5 + 32 / n, "e4m3": 8 + 32 / n, "int4:group128": 4.25,
            "int4-asym:group32": 4 + 36 / 32, "nf4": 4.5, "e4m3:row": 8.25, "e4m3:block128:pow2": 8 + 8 / 128,
            "bf16": 16,
        }
    )  # fmt: skip
    worst = rows["mxfp4"]["worst_block"]
    assert worst["place"] == "[2, 1, 64:96]"
    assert rows["e4m3"]["worst_block"] is None, "one scale, one block"


def test_the_table(suite_command) -> None:
    """Rows, a total over the tensors, the written file; NaN and infinity are left out and told of."""
    x = np.random.default_rng(0).standard_normal((2, 3, 128)).astype(np.float32)
    x[1, 1, 64], x[1, 1, 65:96] = 5.0, 0.249
    bad = x[0].copy()
    bad[1, 3], bad[2, 40] = np.nan, np.inf
    np.savez("three.npz", first=x[0], second=x[1], bad=bad)
    said = suite_command("quantize", "three.npz", "--format", "mxfp4", "--out", "four.npz")
    assert said.code == 0, said.stderr
    header, first, second, third, total = said.stdout.splitlines()
    assert header.split()[:4] == ["tensor", "shape", "dtype", "format"]
    assert first.split()[:4] == ["first", "3x128", "fp32", "mxfp4"]
    assert "[1, 64:96]" in second and third.startswith("bad") and "nan" not in said.stdout
    assert total.split()[:3] == ["total", "1,152", "mxfp4"] and "second[1, 64:96]" in total
    assert said.stderr.splitlines() == [
        "bad: 2 elements are NaN or infinite; mxfp4 makes 62 others so; all of them are left out of the SQNR",
        "four.npz written",
    ]
    with np.load("four.npz") as written:
        assert [*written] == ["first", "second", "bad"]
        assert float(first.split()[4]) == pytest.approx(sqnr(x[0], written["first"]), abs=0.005)


@pytest.mark.slow
def test_contraction_dimension_and_names(suite_command, tmp_path: Path) -> None:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    save_file(
        {"a.w": x, "a.t": x.t().contiguous(), "b": torch.ones(3), "c.w": torch.ones(3)}, "x.safetensors"
    )
    rows = {}
    for name, along in (("a.w", "0"), ("a.t", "-1")):
        said = suite_command(
            "quantize", "x.safetensors", "--format", "nvfp4", "--tensors", name, "--along", along, "--json"
        )
        (rows[name],) = said.data["rows"]
        assert said.data["totals"][0]["num_elements"] == x.numel(), "the other tensors do not count"
    assert rows["a.w"]["noise"] == pytest.approx(rows["a.t"]["noise"], rel=1e-12)
    first, second = (row["worst_block"]["place"].strip("[]").split(", ") for row in rows.values())
    assert first == second[::-1]


def test_bf16_arrays_of_numpy_and_the_seed(suite_command) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal((8, 32)).astype(ml_dtypes.bfloat16)
    np.save("x.npy", x)
    casts = ("mxfp4", "mxfp4:sr")
    said = suite_command(
        "quantize", "x.npy", "--format", ",".join(casts), "--seed", "3", "--out", "y", "--json"
    )
    row, stochastic = said.data["rows"]
    assert row["dtype"] == "bf16"
    assert row["noise"] < stochastic["noise"]
    for entry, text in zip(said.data["written"], casts, strict=True):
        written = torch.from_numpy(np.load(entry["path"]).view(np.int16)).view(torch.bfloat16)
        wanted = cast(torch.from_numpy(x.astype(np.float32)), parse_cast(text), seed=3)
        assert torch.equal(written.float(), dequantize(wanted))


@pytest.mark.slow
def test_shards_are_one_checkpoint(suite_command, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"a": torch.ones(2, 32), "shared": torch.ones(4)}, folder / "m-1.safetensors")
    save_file({"b": torch.full((2, 32), 1.1), "shared": torch.zeros(4)}, folder / "m-2.safetensors")
    index = folder / "m.safetensors.index.json"
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors", "shared": "m-2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    said = suite_command("quantize", str(index), "--format", "mxfp8", "--json", "--out", "out")
    assert sorted(row["tensor"] for row in said.data["rows"]) == ["a", "b", "shared"]
    (written,) = said.data["written"]
    assert Path(written["path"]) == Path("out/m.mxfp8.safetensors")
    assert load_file(written["path"]).keys() == {"a", "b", "shared"}


def test_names_that_a_terminal_would_obey(suite_command) -> None:
    x = torch.ones(2, 32)
    names = ("\x1b[2Jred", "two\nlines", "", "../up")
    save_file({name: x.clone() for name in names}, "x.safetensors")
    said = suite_command("quantize", "x.safetensors", "--format", "mxfp8", "--out", "out")
    assert said.code == 0, said.stderr
    assert "\x1b" not in said.stdout and len(said.stdout.splitlines()) == 6
    assert "\\x1b[2Jred" in said.stdout and "two\\nlines" in said.stdout
    assert [path.name for path in Path("out").iterdir()] == ["x.mxfp8.safetensors"]
    assert len(load_file("out/x.mxfp8.safetensors")) == 4


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_the_input_is_never_overwritten(suite_command, link: Any) -> None:
    """Neither a shard of a folder nor the file under another name."""
    Path("c").mkdir()
    save_file({"a": torch.full((2, 32), 1.1)}, "c/a.safetensors")
    before = Path("c/a.safetensors").read_bytes()
    link(Path("c/a.safetensors").resolve(), "b.safetensors")
    for file, out in (("c", "c/a.safetensors"), ("c/a.safetensors", "b.safetensors"), ("c", "b.safetensors")):
        said = suite_command("quantize", file, "--format", "mxfp4", "--out", out)
        assert said.code == 2 and "input" in said.stderr, said.stderr
    assert Path("c/a.safetensors").read_bytes() == before


def test_a_pipe_is_refused_at_once(suite_command) -> None:
    os.mkfifo("x.npy")
    said = suite_command("quantize", "x.npy")
    assert said.code == 2 and "x.npy: is a pipe" in said.stderr


REFUSED = [
    (["nowhere.npy"], "nowhere.npy does not exist"),
    (["x.txt"], "x.txt: .txt is not read; allowed are .npy, .npz, .safetensors"),
    (["x.npy", "--format", "e9m3"], "unknown format 'e9m3'; did you mean e4m3?"),
    (["x.npy", "--format", "e4m3:blok128"], "unknown scaling 'blok128'; did you mean block"),
    (["x.npy", "--format", ","], "names no cast"),
    (["x.npy", "--format", "mxfp4", "--out", "x.txt"], "x.txt: is no folder"),
    (["x.npy", "--format", "int4:block8:top8"], "less than the block's 8 elements"),
    (["x.npy", "--format", "e4m3:up"], "'up' is a rule of MX scales"),
    (["x.npy", "--format", "mxfp8:up:even"], "'even' contradicts or repeats"),
    (["x.npy", "--format", "e4m3:static=inf"], "from 2^-120 to 2^120, got inf"),
    (["x.npy", "--format", "e4m3:margin=99999"], "margin"),
    (["x.npy", "--format", "int4:group0"], "from 1 to 4096"),
    (["x.npy", "--format", "e5m2:delayed"], "take e5m2:current"),
    (["x.npy", "--out", "y.npz"], "what came from x.npy is written as .npy"),
    (["x.npy", "--format", "mxfp4,mxfp8", "--out", "y.npy"], "2 casts; name a folder"),
    (["x.npy", "--format", "mxfp4", "--out", "x.npy"], "is the input"),
    (["x.npy", "--seed", "-1"], "--seed"),
    (["x.npy", "--along", "last"], "--along"),
    (["x.npy", "--tensors", "y*"], "no tensor matches --tensors 'y*'; it has x"),
]


@pytest.mark.parametrize(
    ("arguments", "hint"), REFUSED, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_what_is_refused(suite_command, arguments: list[str], hint: str) -> None:
    np.save("x.npy", np.ones((2, 2), np.float32))
    Path("x.txt").write_text("1")
    said = suite_command("quantize", *arguments)
    assert said.code == 2, said.stderr
    assert hint in said.stderr
    assert "Traceback" not in said.stderr
    assert not said.stdout


def test_output_that_cannot_be_written(suite_command) -> None:
    np.save("x.npy", np.ones((2, 2), np.float32))
    Path("taken").write_text("")
    said = suite_command("quantize", "x.npy", "--format", "mxfp4", "--out", "taken/folder")
    assert said.code == 4
    assert "taken/folder" in said.stderr


def test_names_of_output_files() -> None:
    casts = parse_casts(["e4m3:static=2.5,e4m3:block8x8:pow2", "mxfp8"])
    paths = output_paths(Path("a/m.safetensors"), casts, Path("o"))
    assert paths is not None
    assert [str(path) for path in paths.values()] == [
        "o/m.e4m3-static-2.5.safetensors", "o/m.e4m3-block8x8-pow2.safetensors", "o/m.mxfp8.safetensors",
    ]  # fmt: skip
    with pytest.raises(QuantizeError, match="name a folder"):
        output_paths(Path("x.npy"), casts, Path("y.npy"))


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C reaches the command alone here, so the worker's end is the command's doing."""
    np.save(
        tmp_path / "x.npy", np.random.default_rng(0).standard_normal((1 << 11, 1 << 11)).astype(np.float32)
    )
    formats = ",".join(f"e4m3:block{n}x{n}:sr" for n in range(1, 200))
    command = subprocess.Popen(
        [sys.executable, "-m", "suite", "quantize", "x.npy", "--format", formats, "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert command.stdout is not None
    assert command.stdout.readline().startswith("tensor")
    assert command.stdout.readline().startswith("x ")
    workers = _children(command.pid)
    assert len(workers) == 1
    command.send_signal(signal.SIGINT)
    assert command.wait(30) == 130
    assert not Path(f"/proc/{workers[0]}").exists()
    assert [*(tmp_path / "out").iterdir()] == []


@pytest.mark.slow
def test_a_killed_command_takes_its_worker_along(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1 << 11, 1 << 11), np.float32))
    formats = ",".join(f"e4m3:block{n}x{n}:sr" for n in range(1, 200))
    command = subprocess.Popen(
        # A background job of a shell, which ignores SIGINT.
        [
            "sh", "-c", 'trap "" INT; exec "$@"', "sh",
            sys.executable, "-m", "suite", "quantize", "x.npy", "--format", formats, "--out", "out",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert command.stdout is not None
    assert command.stdout.readline().startswith("tensor")
    (worker,) = _children(command.pid)
    command.kill()
    command.wait(10)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
    assert [*(tmp_path / "out").iterdir()] == []


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.exists():
        pytest.skip("needs Linux's list of children")
    return [int(word) for word in listed.read_text().split()]
