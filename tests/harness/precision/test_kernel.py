"""The C++ kernel against the PyTorch twin, bit for bit; its cache, its threads, and life without a compiler."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.precision import twin
from harness.precision.kernel import build, cpu
from harness.precision.result import CastResult
from harness.spec.notation import parse_cast

COMPILER_MISSING = not cpu.available()
needs_kernel = pytest.mark.skipif(COMPILER_MISSING, reason=f"no kernel: {cpu.reason()}")

FLOATS = (
    "e4m3",
    "e5m2",
    "e4m3-ieee",
    "e3m2",
    "e2m3",
    "e2m1",
    "e1m2",
    "e3m0",
    "fp16",
    "bf16",
    "tf32",
    "m0",
    "m23",
    "e6m15",
    "e7m22",
)
SCALINGS = (
    "none",
    "static=3.7",
    "delayed",
    "current",
    "row",
    "block128",
    "block32",
    "block7",
    "block5x9",
    "block128x128",
)
OPTIONS = ("", ":pow2", ":sr", ":away", ":special", ":margin=1", ":margin=-2")
FIXED, OF_DATA = ("none", "static=3.7"), (":pow2", ":margin=1", ":margin=-2")
"""Scalings whose scale does not come from the data, and options that say how it would."""
WIDE = ("bf16", "tf32", "m0", "m23")
"""Their maximum is FP32's, which a negative margin would exceed."""
INTEGERS = ("int8", "int4", "int8-asym", "int4-asym")
CASTS = (
    *(
        f"{fmt}:{scaling}{option}"
        for fmt in FLOATS
        for scaling in SCALINGS
        for option in OPTIONS
        if option != ":margin=-2" or fmt not in WIDE
        if scaling not in FIXED or option not in OF_DATA
    ),
    *(
        f"{fmt}:{scaling}{option}"
        for fmt in INTEGERS
        for scaling in SCALINGS[3:]
        for option in OPTIONS
        if option != ":special"
    ),
    *(f"nf4:{scaling}" for scaling in SCALINGS[3:]),
    *(
        f"{fmt}:mx{rule}{square}{rounding}"
        for fmt in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8")
        for rule in ("", ":up", ":even")
        for square in ("", ":2d")
        for rounding in ("", ":sr", ":away")
    ),
    *(f"nvfp4{square}{rounding}" for square in ("", ":2d") for rounding in ("", ":sr", ":away")),
)  # fmt: skip
SPECIAL_BITS = (
    0, -0x80000000, 0x7F800000, -0x00800000, 0x7FC00000, 0x7FFFFFFF, -1, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF,
)  # fmt: skip


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN payloads aside."""
    a, b = a.float(), b.float()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def close(a: float, b: float, relative: float = 1e-6, absolute: float = 0.0) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= relative * abs(b) + absolute


def compare(ours: CastResult | None, theirs: CastResult) -> None:
    assert ours is not None
    assert ours.values.dtype == theirs.values.dtype and ours.values.shape == theirs.values.shape
    assert same(ours.values, theirs.values)
    assert (ours.inverse is None) == (theirs.inverse is None)
    if ours.inverse is not None and theirs.inverse is not None:
        assert ours.inverse.shape == theirs.inverse.shape and same(ours.inverse, theirs.inverse)
    assert ours.amax is not None and theirs.amax is not None and same(ours.amax, theirs.amax)
    assert (ours.statistics is None) == (theirs.statistics is None)
    if ours.statistics is not None and theirs.statistics is not None:
        a, b = ours.statistics, theirs.statistics
        assert (a.nonzero, a.clipped, a.flushed) == (b.nonzero, b.clipped, b.flushed)
        assert close(a.signal, b.signal) and close(a.scale, b.scale) and close(a.amax, b.amax)
        # what FP32 sums leave of a nearly exact cast's noise is far below anything a ratio in dB shows
        assert close(a.noise, b.noise, absolute=1e-13 * b.signal if math.isfinite(b.signal) else 0.0)


def made(rows: int, cols: int, kind: str, seed: int) -> torch.Tensor:
    """A tensor of hard values; `kind` says which."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x = x * torch.exp2(torch.randint(-14, 14, (rows, 1), generator=generator).float())
    if kind == "bits":
        return (
            torch.randint(-(2**31), 2**31 - 1, (rows, cols), generator=generator)
            .to(torch.int32)
            .view(torch.float32)
        )
    if kind == "tiny":
        return x * 2.0**-135
    if kind == "huge":
        return x * 2.0**112
    if kind == "grid":  # many ties, for rounding on and between grid points
        return (x * 8).round() / 16
    if kind == "zeros":
        x[torch.rand(rows, cols, generator=generator) < 0.9] = 0.0
    if kind == "specials" and x.numel():
        special = torch.tensor(SPECIAL_BITS, dtype=torch.int32).view(torch.float32)
        where = torch.randint(0, x.numel(), (3,), generator=generator)
        x.view(-1)[where] = special[torch.randint(0, len(special), (3,), generator=generator)]
    return x


KINDS = ("normal", "bits", "tiny", "huge", "grid", "zeros", "specials")


def arranged(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    rows, cols = x.shape
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "padded":
        wide = torch.full((rows, cols + 5), 7.0, dtype=x.dtype)
        wide[:, 2 : 2 + cols] = x
        return wide[:, 2 : 2 + cols]
    if layout == "stepped":
        wide = torch.full((2 * rows, 3 * cols), 7.0, dtype=x.dtype)
        wide[::2, ::3] = x
        return wide[::2, ::3]
    return x


@needs_kernel
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(CASTS),
    rows=st.one_of(st.integers(1, 40), st.sampled_from((64, 130, 257))),
    cols=st.one_of(st.integers(1, 70), st.sampled_from((128, 129, 256, 300))),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(("plain", "transposed", "padded", "stepped")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    carrier=st.sampled_from((torch.float32, torch.bfloat16)),
    along=st.integers(0, 1),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 2**31),
)
def test_every_cast_has_the_twins_bits(
    name: str,
    rows: int,
    cols: int,
    kind: str,
    layout: str,
    dtype: torch.dtype,
    carrier: torch.dtype,
    along: int,
    flags: tuple[bool, bool, bool],
    seed: int,
) -> None:
    spec = parse_cast(name)
    x = arranged(made(rows, cols, kind, seed).to(dtype), layout)
    collect, dequantized, given_scale = flags
    scale = torch.tensor(37.3) if given_scale and spec.scaling == "delayed" else None
    amax = torch.tensor(2.75) if given_scale and spec.scaling in ("current", "nvfp4") else None
    arguments = {
        "along": along, "carrier": carrier, "scale": scale, "amax": amax, "collect": collect,
        "dequantized": dequantized, "seed": seed if spec.rounding == "stochastic" else None,
    }  # fmt: skip
    ours = cpu.cast_tensor(x, spec, **arguments)
    if ours is None:  # delayed scaling of integers without a scale has no meaning of its own
        assert spec.scaling == "delayed"
        return
    compare(ours, twin.cast_tensor(x, spec, **arguments))


@needs_kernel
@pytest.mark.parametrize(
    "name",
    [
        "e4m3:delayed",
        "e5m2:current",
        "mxfp8",
        "mxfp4:up",
        "nvfp4",
        "int4:group128",
        "bf16:none:sr",
        "e4m3:row",
    ],
)
@pytest.mark.parametrize("along", [0, 1])
def test_large_tensors_and_their_statistics(name: str, along: int) -> None:
    """Large enough for the FP32 sums, several tiles, and outliers in one of them."""
    x = made(300, 512, "normal", 11)
    x[17, 33], x[200, 500] = 3e5, float("inf")
    for tensor in (x.nan_to_num(0, 1, -1), x):
        spec = parse_cast(name)
        arguments = {
            "along": along, "carrier": torch.float32, "amax": None, "collect": True, "dequantized": False,
            "scale": torch.tensor(0.9) if spec.scaling == "delayed" else None, "seed": 3,
        }  # fmt: skip
        compare(cpu.cast_tensor(tensor, spec, **arguments), twin.cast_tensor(tensor, spec, **arguments))


@needs_kernel
@pytest.mark.parametrize(
    "name", ["bf16:mx", "mxfp8", "mxfp8:2d", "mxfp4:up", "nvfp4", "e4m3:block128", "mxint8"]
)
@pytest.mark.parametrize("side", [64, 256])
@pytest.mark.parametrize("along", [0, 1])
def test_zeros_beside_nan_are_not_flushed(name: str, side: int, along: int) -> None:
    """A block that becomes NaN leaves no zero, so its zeros are neither nonzero nor flushed; and a clipped element is
    counted in the general way there and in the fast way elsewhere."""
    x = made(side, side, "normal", 4)
    x[torch.rand(side, side, generator=torch.Generator().manual_seed(1)) < 0.3] = 0.0
    x[3, 5], x[side // 2, 40] = float("nan"), float("inf")
    spec = parse_cast(name)
    ours = cpu.cast_tensor(x, spec, along=along, collect=True)
    theirs = twin.cast_tensor(
        x, spec, along=along, carrier=torch.float32, scale=None, amax=None, seed=None, collect=True, dequantized=False,
    )  # fmt: skip
    compare(ours, theirs)
    assert theirs.statistics is not None and theirs.statistics.nonzero < side * side


@needs_kernel
@pytest.mark.parametrize(
    "name", ["e4m3:delayed", "e4m3:current", "mxfp8", "nvfp4", "e2m1:nvfp4:sr", "int8-asym:row"]
)
@pytest.mark.parametrize("along", [0, 1])
def test_two_threads_give_what_one_gives(name: str, along: int) -> None:
    x = made(512, 384, "normal", 5)
    spec = parse_cast(name)
    scale = torch.tensor(11.0) if spec.scaling == "delayed" else None
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(cpu.cast_tensor(x, spec, along=along, scale=scale, seed=9, collect=True))
    finally:
        torch.set_num_threads(before)
    one, two = results
    assert one is not None and two is not None and x.numel() >= cpu.PARALLEL_ELEMENTS
    assert torch.equal(one.values, two.values)
    assert (one.inverse is None) or torch.equal(one.inverse, two.inverse)
    for field in dataclasses.fields(one.statistics):
        assert close(getattr(one.statistics, field.name), getattr(two.statistics, field.name), relative=0.0)


@needs_kernel
def test_streaming_stores_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(96, 160, "normal", 2)
    for name in ("e4m3:current", "mxfp8", "nvfp4", "e4m3:block32"):
        for carrier in (torch.float32, torch.bfloat16):
            for along in (0, 1):
                spec = parse_cast(name)
                monkeypatch.setattr(cpu, "STREAM_BYTES", 2**40)
                plain = cpu.cast_tensor(x, spec, along=along, carrier=carrier)
                monkeypatch.setattr(cpu, "STREAM_BYTES", 0)
                streamed = cpu.cast_tensor(x, spec, along=along, carrier=carrier)
                assert plain is not None and streamed is not None
                assert same(plain.values, streamed.values)


@needs_kernel
def test_out_is_filled_in_place() -> None:
    x = made(40, 96, "normal", 1)
    spec = parse_cast("mxfp8")
    wide = torch.full((40, 128), 5.0)
    result = cpu.cast_tensor(x, spec, out=wide[:, :96])
    alone = cpu.cast_tensor(x, spec)
    assert result is not None and alone is not None
    assert result.values.data_ptr() == wide.data_ptr() and same(wide[:, :96], alone.values)
    assert bool((wide[:, 96:] == 5).all())
    with pytest.raises(ValueError, match="out must be"):
        cpu.cast_tensor(x, spec, out=torch.empty(96, 40))
    with pytest.raises(ValueError, match="contiguous columns"):
        cpu.cast_tensor(x, spec, out=torch.empty(96, 40).t())


@needs_kernel
def test_what_the_twin_must_do() -> None:
    x = made(8, 64, "normal", 1)
    assert cpu.cast_tensor(x, parse_cast("int4:block32:top2")) is None
    assert cpu.cast_tensor(x, parse_cast("e8m0:none")) is None
    assert cpu.cast_tensor(torch.empty(0, 64), parse_cast("mxfp8")) is None


def interpreter(code: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )


CAST_AND_SAY = """
import torch, zlib
from harness.precision.cast import cast
from harness.precision.kernel import cpu
from harness.spec.notation import parse_cast
x = torch.arange(-96, 96).view(3, 64) * 0.37
result = cast(x, parse_cast("mxfp8"))
print(cpu.available(), zlib.crc32(result.values.numpy().tobytes()), cpu.reason())
"""


def expected_checksum() -> int:
    x = torch.arange(-96, 96).view(3, 64) * 0.37
    values = twin.cast_tensor(
        x, parse_cast("mxfp8"), along=1, carrier=torch.float32, scale=None, amax=None, seed=None, collect=False,
        dequantized=False,
    ).values  # fmt: skip
    return zlib.crc32(values.numpy().tobytes())


def test_without_a_compiler_the_twin_runs(tmp_path: Path) -> None:
    done = interpreter(CAST_AND_SAY, tmp_path, CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    available, checksum, reason = done.stdout.strip().split(" ", 2)
    assert available == "False" and "no-such-compiler" in reason
    assert int(checksum) == expected_checksum()
    assert not list(tmp_path.rglob("*.so"))


@pytest.fixture
def small_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for the sources that compiles at once."""
    (tmp_path / "quantize.cpp").write_text('extern "C" int answer() { return 42; }\n')
    (tmp_path / "vectors.h").write_text("")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@needs_kernel
def test_the_library_is_built_once(small_kernel: Path) -> None:
    library, path = build.load_library()
    assert library.answer() == 42 and path.parent == small_kernel / "cache" / "lowprec-suite"
    made_at = path.stat().st_mtime_ns
    assert build.load_library()[1] == path and path.stat().st_mtime_ns == made_at
    (small_kernel / "vectors.h").write_text("// another\n")
    assert build.load_library()[1] != path  # other sources, another library
    assert {p.suffix for p in path.parent.iterdir()} == {".so"} and len(list(path.parent.iterdir())) == 2


@needs_kernel
def test_a_damaged_library_is_built_again(small_kernel: Path) -> None:
    path = build.cache_folder() / f"quantize-{build._fingerprint(build.find_compiler())}.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x7fELF cut off")
    library, built = build.load_library()
    assert built == path and library.answer() == 42


@needs_kernel
def test_a_cache_that_cannot_be_written(small_kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = small_kernel / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    library, path = build.load_library()
    assert library.answer() == 42 and not path.exists()


@needs_kernel
def test_another_users_library_is_not_run(small_kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.load_library()[1]
    made_at = path.stat().st_mtime_ns
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    trusted = path.stat().st_uid == 0
    assert (build.load_library()[1].stat().st_mtime_ns == made_at) == trusted


def test_the_cache_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative XDG_CACHE_HOME is to be ignored by its specification; without a home the folder names the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert build.cache_folder().is_absolute()

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    assert build.cache_folder().name == f"lowprec-suite-{os.getuid()}"


def test_a_compiler_with_an_open_quote_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(build.BuildError, match="is not a command"):
        build.find_compiler()


@needs_kernel
def test_two_processes_build_at_once(small_kernel: Path) -> None:
    code = (
        "from pathlib import Path; from harness.precision.kernel import build;"
        f"build.SOURCES = Path({str(small_kernel)!r}); print(build.load_library()[0].answer())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in processes] == ["42", "42"]
    assert [p.suffix for p in build.cache_folder().iterdir()] == [".so"]


@needs_kernel
def test_a_source_that_does_not_compile_is_a_reason(small_kernel: Path) -> None:
    (small_kernel / "quantize.cpp").write_text("this is not C++\n")
    with pytest.raises(build.BuildError, match=r"does not compile the kernel: .*error"):
        build.load_library()
    assert not list(build.cache_folder().iterdir())


def test_the_sources_are_package_files() -> None:
    """hatch puts every file of a package into the wheel; nothing may be left beside it."""
    assert {path.name for path in build.SOURCES.iterdir() if path.suffix in (".cpp", ".h")} == {
        "quantize.cpp", "groups.h", "tiles.h", "scales.h", "rounding.h", "vectors.h",
    }  # fmt: skip


@pytest.mark.slow
@needs_kernel
def test_the_portable_path_has_the_same_bits(tmp_path: Path) -> None:
    """The code without AVX-512, compiled for the plainest processor and run in a process of its own."""
    code = CAST_AND_SAY.replace("import torch, zlib", "import torch, zlib\nfrom harness.precision.kernel import build\n"
        "build.FLAGS = (*build.FLAGS, '-DQUANTIZE_PORTABLE')\nbuild.ATTEMPTS = ((),)")  # fmt: skip
    done = interpreter(code, tmp_path)
    assert done.returncode == 0, done.stderr
    available, checksum, _ = done.stdout.strip().split(" ", 2)
    assert available == "True" and int(checksum) == expected_checksum()
