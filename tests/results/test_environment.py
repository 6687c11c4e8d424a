"""The machine's description: complete, the same each time, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from results import environment
from results.environment import describe_environment, machine_name
from results.rows import save_environment
from results.store import Store


def test_it_fills_the_columns(store: Store) -> None:
    found = describe_environment()
    assert found["num_cores"] >= 1 and found["memory_bytes"] > 1 << 28
    assert found["cpu"] and found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["duckdb"] and found["torch"] == found["packages"].get("torch")
    json.dumps(found)
    with store._transaction() as connection:
        one = save_environment(connection, found)
        found["details"] = {"load_average": [99.0]}
        assert save_environment(connection, found) == one, "the load does not make another environment"
        found["packages"] = {**found["packages"], "torch": "0.1"}
        assert save_environment(connection, found) != one
    assert store.environment(one)["packages"] == describe_environment()["packages"]  # type: ignore[index]


def test_it_runs_alone_without_torch() -> None:
    code = "import sys, results.environment as e; e.describe_environment(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("cpu", "num_cores", "gpus", "name"),
    [
        ("AMD EPYC", 2, [], "AMD EPYC 2 cores"),
        ("Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", 1, [], "Intel Xeon Platinum 8480+ 1 core"),
        ("AMD EPYC 9654 96-Core Processor", 96, [], "AMD EPYC 9654 96 cores"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics", 8, [], "AMD Ryzen 7 7840U 8 cores"),
        ("AMD EPYC", 16, ["NVIDIA H200"], "NVIDIA H200"),
        ("AMD EPYC", 16, ["NVIDIA H200"] * 8, "8x NVIDIA H200"),
    ],
)
def test_machine_names(cpu: str, num_cores: int, gpus: list[str], name: str) -> None:
    assert machine_name(cpu, num_cores, gpus) == name


def test_gpus_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(
        environment, "_output", lambda command: "NVIDIA H200, 570.86.15\nNVIDIA H200, 570.86.15"
    )
    assert environment._gpus() == (["NVIDIA H200", "NVIDIA H200"], "570.86.15")
    monkeypatch.setattr(environment, "_output", lambda command: "")
    assert environment._gpus() == ([], None)
