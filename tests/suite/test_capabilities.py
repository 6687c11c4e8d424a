"""What a machine runs natively, asked without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import suite.doctor
from harness.precision.kernel import build
from suite.capabilities import FAMILIES, cast_kernel, families, read_capability

PACKAGES = {"torch": "2.13.0", "cuda": "13.0", "transformer-engine": "2.9.0"}


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        (None, set()),
        ((8, 0), set()),
        ((8, 9), {"FP8 per tensor", "FP8 per row"}),
        ((9, 0), {"FP8 per tensor", "FP8 per row", "FP8 1x128 blocks"}),
        ((10, 0), {*FAMILIES}),
    ],
)
def test_families(capability: tuple[int, int] | None, native: set[str]) -> None:
    found = {family.name: family for family in families(capability, PACKAGES)}
    assert found.keys() == FAMILIES.keys()
    assert {name for name, family in found.items() if family.backends} == native
    assert all(family.backends or "compute capability" in family.missing for family in found.values())


def test_what_is_missing_is_named() -> None:
    found = {family.name: family for family in families((9, 0), {"torch": "2.13.0", "cuda": "12.8"})}
    assert found["FP8 per tensor"].backends == ("torch",)
    assert "lowprec-suite[te]" in found["FP8 per tensor"].missing
    assert "cuda 12.9" in found["FP8 1x128 blocks"].missing
    assert "the device has 9.0" in found["MXFP8"].missing


def test_capabilities_as_nvidia_smi_prints_them() -> None:
    assert (read_capability("9.0"), read_capability("12.1"), read_capability("[N/A]")) == (
        (9, 0),
        (12, 1),
        None,
    )


def test_doctor_asks_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.doctor.shutil, "which", lambda name: f"/bin/{name}")
    answer = "NVIDIA H200, 9.0, 143771, 570.1\nNVIDIA H200, 9.0, 143771, 570.1\n"
    monkeypatch.setattr(
        suite.doctor.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, answer, "")
    )
    monkeypatch.setattr(suite.doctor, "families", lambda version: families(version, PACKAGES))
    checks = {check.name: check for check in suite.doctor._gpu(Path())}
    assert checks["recipes FP8 per tensor"].found == "native: torch, transformer_engine"
    assert checks["recipes MXFP8"].state == "note"
    assert checks["recipes MXFP8"].found == "emulated only"


def test_cast_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    works, found = cast_kernel()
    assert not works and "no-such-compiler" in found
    compiler = Path(sys.executable)  # any program that says its version
    monkeypatch.setenv("CXX", str(compiler))
    works, found = cast_kernel()
    assert works and f"compiles it into {tmp_path / 'lowprec-suite'}" in found
    assert not any(tmp_path.iterdir()), "nothing is made"
    library = build.library_path([str(compiler)])
    library.parent.mkdir()
    library.touch()
    assert cast_kernel() == (True, f"compiled: {library}")


def test_torch_stays_unloaded() -> None:
    code = (
        "import sys; from pathlib import Path; from suite.doctor import examine; examine(Path('out')); "
        "import suite.cli.list as l; [l.KINDS[k]() for k in ('precisions', 'formats', 'casts')]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
