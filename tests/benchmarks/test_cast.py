"""What a cast costs, as a ratio to `copy_` of the same tensor measured in alternation in the same run.

    OMP_NUM_THREADS=1 pytest tests/benchmarks/test_cast.py --benchmark-json=kernels.json
    suite ingest kernels.json
    python tests/benchmarks/test_cast.py kernels.json      # the ratios as a table

Times are CPU time of the process, medians; the ratios are what counts (a busy machine slows both sides). Outputs lie in
memory that is mapped already, as a training step's do. Peers are measured where they can be imported, microxcaling from
a folder named by MICROXCALING (it is on no package index). The compiled twin takes a minute to compile.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.precision import twin
from harness.precision.kernel import cpu
from harness.spec.notation import parse_cast

Action = Callable[[], object]

CASTS = (
    "e4m3:delayed", "e5m2:delayed", "e4m3:current", "e4m3:row", "e4m3:block128",
    "e4m3:block128:pow2", "e4m3:block128x128",
    "mxfp8", "mxfp8:up", "mxfp6", "mxfp4", "nvfp4", "int8:group128", "int4:group128", "bf16:none", "bf16:none:sr",
    "e5m2:delayed:sr", "nvfp4:sr", "nf4:block64",
)  # fmt: skip
SIDES = (1024, 4096)
ROUNDS = {1024: (9, 5), 4096: (5, 1)}
"""Side -> rounds and calls in each."""

needs_kernel = pytest.mark.skipif(not cpu.available(), reason=f"no kernel: {cpu.reason()}")
pytestmark = pytest.mark.slow


def in_alternation(actions: list[Action], rounds: int, calls: int) -> list[float]:
    """Median CPU seconds of one call of each; every round runs all of them, each after one call that warms up."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, taken in zip(actions, times, strict=True):
            action()
            start = time.process_time()
            for _ in range(calls):
                action()
            taken.append((time.process_time() - start) / calls)
    return [statistics.median(taken) for taken in times]


def matrix(side: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.set_num_threads(1)
    x = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x, x.clone()


def arguments(name: str) -> dict[str, Any]:
    spec = parse_cast(name)
    return {
        "along": 1, "carrier": torch.float32, "scale": torch.tensor(90.0) if spec.scaling == "delayed" else None,
        "amax": None, "seed": 1 if spec.rounding == "stochastic" else None, "collect": False, "dequantized": False,
    }  # fmt: skip


def describe(
    benchmark: Any, cast: str, implementation: str, side: int, dtype: torch.dtype = torch.float32
) -> None:
    """What the report's page of kernels calls this benchmark."""
    benchmark.extra_info["format"] = cast
    benchmark.extra_info["implementation"] = implementation
    benchmark.extra_info["dtype"] = "bf16" if dtype == torch.bfloat16 else "fp32"
    benchmark.extra_info["elements"] = side * side


def report(benchmark: Any, action: Action, copy: Action, side: int, **also: Action) -> None:
    """Let pytest-benchmark time `action` and store its ratio to `copy`, and of each of `also` the ratio too; `alone` is
    the ratio where nothing but the two runs."""
    rounds, calls = ROUNDS[side]
    own, base, *others = in_alternation([action, copy, *also.values()], rounds, calls)
    benchmark.extra_info["ratio_to_copy"] = round(own / base, 3)
    benchmark.extra_info["copy_s"] = base
    if side == min(SIDES):  # in the caches it matters what else has run
        alone, base_alone = in_alternation([action, copy], 100, 1)
        benchmark.extra_info["alone"] = round(alone / base_alone, 3)
    for name, taken in zip(also, others, strict=True):
        benchmark.extra_info[name] = round(taken / base, 3)
    benchmark.pedantic(action, rounds=rounds, iterations=calls)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CASTS)
def test_cast(benchmark: Any, name: str, side: int, dtype: torch.dtype) -> None:
    benchmark.group = name
    describe(benchmark, name, "cpp", side, dtype)
    spec = parse_cast(name)
    x, out = matrix(side, dtype)
    given = arguments(name) | {"carrier": dtype, "out": out}
    report(
        benchmark,
        lambda: cpu.cast_tensor(x, spec, **given),
        lambda: out.copy_(x),
        side,
        with_statistics=lambda: cpu.cast_tensor(x, spec, **(given | {"collect": True})),
        along_columns=lambda: cpu.cast_tensor(x, spec, **(given | {"along": 0})),
    )


@needs_kernel
@pytest.mark.parametrize("name", ["e4m3:delayed", "mxfp8", "e4m3:block128"])
def test_subnormal_inputs(benchmark: Any, name: str) -> None:
    """Every element an FP32 subnormal: `normal_numbers` is the same cast of ordinary ones."""
    benchmark.group = f"{name}, subnormal"
    describe(benchmark, f"{name} of subnormals", "cpp", 1024)
    spec = parse_cast(name)
    x, out = matrix(1024)
    tiny = x * 2.0**-130
    given = arguments(name) | {"out": out}
    report(
        benchmark,
        lambda: cpu.cast_tensor(tiny, spec, **given),
        lambda: out.copy_(tiny),
        1024,
        normal_numbers=lambda: cpu.cast_tensor(x, spec, **given),
    )


@pytest.mark.parametrize("name", ["e4m3:delayed", "e4m3:current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_twin(benchmark: Any, name: str, way: str) -> None:
    benchmark.group = name
    describe(benchmark, name, f"torch, {way}", 1024)
    spec = parse_cast(name)
    x, out = matrix(1024)
    function: Callable[..., Any] = twin.cast_tensor
    if way == "compiled":
        function = torch.compile(twin.cast_tensor, dynamic=False)
    given = arguments(name)
    report(benchmark, lambda: function(x, spec, **given), lambda: out.copy_(x), 1024)


def eager_chain(x: Tensor, scale: Tensor) -> Tensor:
    """What a user writes: scale, clamp, torch's own dtype, and back."""
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)


def peers() -> dict[str, tuple[str, Callable[[Tensor], object]]]:
    """name -> (what it does, how); those that can be imported here."""
    found: dict[str, tuple[str, Callable[[Tensor], object]]] = {}
    scale = torch.tensor(90.0)
    found["torch eager cast"] = ("e4m3:delayed", lambda x: eager_chain(x, scale))
    if importlib.util.find_spec("ml_dtypes"):
        import ml_dtypes

        found["ml_dtypes"] = (
            "e4m3:delayed",
            lambda x: (x.numpy() * 90.0).astype(ml_dtypes.float8_e4m3fn).astype("float32"),
        )
    if importlib.util.find_spec("torchao"):
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        for name, dtype in (("mxfp8", torch.float8_e4m3fn), ("mxfp4", torch.float4_e2m1fn_x2)):

            def to_mx(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
                made: Tensor = MXTensor.to_mx(x, dtype, 32).dequantize(torch.float32)
                return made

            found[f"torchao {name}"] = (name, to_mx)
    if folder := os.environ.get("MICROXCALING"):
        sys.path.insert(0, folder)
        from mx.mx_ops import _quantize_mx  # type: ignore[import-not-found]

        for name, element in (("mxfp8", "fp8_e4m3"), ("mxfp4", "fp4_e2m1")):
            found[f"microxcaling {name}"] = (
                name,
                lambda x, element=element: _quantize_mx(
                    x, 8, element, axes=[-1], block_size=32, round="even"
                ),
            )
    return found


PEERS = (
    "torch eager cast",
    "ml_dtypes",
    "torchao mxfp8",
    "torchao mxfp4",
    "microxcaling mxfp8",
    "microxcaling mxfp4",
)


@needs_kernel
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("peer", PEERS)
def test_peer(benchmark: Any, peer: str, side: int) -> None:
    """`times_ours`: how many of our casts one of theirs takes."""
    known = peers()
    if peer not in known:
        pytest.skip(f"{peer.split()[0]} cannot be imported here")
    name, function = known[peer]
    benchmark.group = name
    describe(benchmark, name, peer, side)
    spec = parse_cast(name)
    x, out = matrix(side)
    given = arguments(name) | {"out": out}
    theirs, ours, base = in_alternation(
        [lambda: function(x), lambda: cpu.cast_tensor(x, spec, **given), lambda: out.copy_(x)], 3, 1
    )
    benchmark.extra_info["ratio_to_copy"] = round(theirs / base, 2)
    benchmark.extra_info["times_ours"] = round(theirs / ours, 1)
    benchmark.pedantic(function, args=(x,), rounds=1)


def main(path: str) -> None:
    for entry in sorted(json.loads(Path(path).read_text())["benchmarks"], key=lambda e: str(e["group"])):
        info = {name: value for name, value in entry["extra_info"].items() if name != "copy_s"}
        print(f"{entry['name']:60s} " + "  ".join(f"{name} {value}" for name, value in info.items()))


if __name__ == "__main__":
    main(sys.argv[1])
