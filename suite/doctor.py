"""What this machine can do for the suite, and what is missing. It looks and leaves nothing; torch stays unloaded.

suite doctor
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from suite.capabilities import cast_kernel, families, read_capability
from suite.execute.folder import OutFolder
from suite.execute.resources import usable_cores

DISTRIBUTION = "lowprec-suite"
MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 2 * 2**30
"""A laptop case writes some hundred MB of checkpoints and journals."""

EXTRAS = {
    "te": ("transformer-engine", "native FP8, MXFP8 and NVFP4 modules (backend transformer_engine)"),
    "torchao": ("torchao", "MX and NVFP4 casts of a peer, to compare with in tests and benchmarks"),
    "slurm": ("submitit", "a Slurm cluster; no run is sent there yet"),
    "rl": ("reasoning-gym", "tasks with verifiable answers; no case has one yet"),
    "hf": ("datasets", "corpora from the Hugging Face hub"),
    "bench": ("transformers", "speed comparison with the Hugging Face Trainer"),
    "dev": ("pytest", "the test suite"),
}
"""Extra -> (a distribution that it brings, what it is for)."""

NATIVE_FORMATS = (
    (10.0, "FP16, BF16, FP8, MXFP8, NVFP4"),
    (8.9, "FP16, BF16, FP8"),
    (8.0, "FP16, BF16"),
    (7.0, "FP16"),
)
"""CUDA compute capability from which the tensor cores multiply these formats."""

State = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `missing` makes the machine unfit; `note` is worth knowing."""

    name: str
    state: State
    found: str
    advice: str = ""


def examine(out: Path) -> list[Check]:
    """All checks, for results that would go to `out`."""
    return [check for look in LOOKS for check in look(out)]


def _python(out: Path) -> Iterator[Check]:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info >= MIN_PYTHON:
        yield Check("Python", "ok", found)
    else:
        yield Check("Python", "missing", found, f"Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed")


def _packages(out: Path) -> Iterator[Check]:
    for name in ("torch", "duckdb", "safetensors", "tokenizers", "pydantic", "scipy", "jinja2"):
        version = _version(name)
        if version is None:
            yield Check(name, "missing", "not installed", f"pip install {DISTRIBUTION}")
        else:
            yield Check(name, "ok", version)


def _machine(out: Path) -> Iterator[Check]:
    import psutil

    cores = usable_cores()
    yield Check("cores", "ok", f"{cores} usable of {os.cpu_count()}")
    load = os.getloadavg()[0]
    busy = load > 0.5 * cores
    yield Check(
        "load",
        "note" if busy else "ok",
        f"{load:.1f} over the last minute",
        "other work is running: speeds measured now are not this machine's" if busy else "",
    )
    memory = psutil.virtual_memory()
    yield Check("memory", "ok", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free")


def _out_folder(out: Path) -> Iterator[Check]:
    existing = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    advice = (
        ""
        if free >= MIN_FREE_BYTES
        else "a case may not fit; free some space or choose another folder with --out"
    )
    yield Check("disk", "note" if advice else "ok", f"{free / 2**30:.1f} GiB free at {existing}", advice)
    try:
        # Only trying tells: permissions say nothing of a file system that is full, read-only or not a real one.
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as folder:
            (Path(folder) / "written").write_bytes(b"x")
    except OSError as error:
        found = f"{existing} cannot be written: {error.strerror}"
        yield Check("out folder", "missing", found, "choose another with --out DIR")
    else:
        yield Check("out folder", "ok", f"{out} can be written")
    yield _database(OutFolder(out))


def _database(folder: OutFolder) -> Check:
    from results.database import StoreError
    from results.store import Store

    if not folder.database.exists():
        return Check("database", "ok", f"{folder.database} does not exist yet")
    try:
        with Store(folder.database, wait_s=2.0) as store:
            number = len(store.runs())
    except StoreError as error:
        return Check("database", "missing", str(folder.database), str(error))
    return Check("database", "ok", f"{folder.database} can be locked and read; {number} runs")


def _gpu(out: Path) -> Iterator[Check]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Check("GPU", "note", "none seen (no nvidia-smi)", "cases run at size laptop; FP8 is emulated")
        yield from _native(None)
        return
    command = [
        tool,
        "--query-gpu=name,compute_cap,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Check(
            "GPU", "note", f"nvidia-smi failed: {error}", "the driver and the device files do not agree"
        )
        yield from _native(None)
        return
    capabilities = []
    for line in answer.stdout.strip().splitlines():
        name, capability, memory, driver = (part.strip() for part in line.split(",", 3))
        yield Check("GPU", "ok", f"{name}, {memory} MiB, driver {driver}, {native_formats(capability)}")
        capabilities.append(capability)
    yield from _native(capabilities[0] if capabilities else None)


def _native(capability: str | None) -> Iterator[Check]:
    """Which families of recipes the first GPU runs itself, and what the others need."""
    version = None if capability is None else read_capability(capability)
    for family in families(version):
        found = f"native: {', '.join(family.backends)}" if family.backends else "emulated only"
        yield Check(f"recipes {family.name}", "ok" if family.backends else "note", found, family.missing)


def native_formats(capability: str) -> str:
    """What the tensor cores of a compute capability, such as `9.0`, multiply themselves."""
    try:
        number = float(capability)
    except ValueError:
        return f"compute capability {capability} unknown"
    formats = next((text for least, text in NATIVE_FORMATS if number >= least), "none below FP32")
    return f"compute capability {capability}, native: {formats}"


def _kernel(out: Path) -> Iterator[Check]:
    works, found = cast_kernel()
    advice = "" if works else "casts run in PyTorch, to the same bits and several times slower; install g++"
    yield Check("cast kernel", "ok" if works else "note", found, advice)


def _extras(out: Path) -> Iterator[Check]:
    for extra, (name, purpose) in EXTRAS.items():
        version = _version(name)
        if version is not None:
            yield Check(f"extra {extra}", "ok", f"{name} {version}: {purpose}")
        else:
            yield Check(
                f"extra {extra}", "note", f"absent: {purpose}", f"pip install '{DISTRIBUTION}[{extra}]'"
            )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(re.sub(r"[-_.]+", "-", name))
    except importlib.metadata.PackageNotFoundError:
        return None


LOOKS: tuple[Callable[[Path], Iterator[Check]], ...] = (
    _python,
    _packages,
    _machine,
    _out_folder,
    _gpu,
    _kernel,
    _extras,
)
