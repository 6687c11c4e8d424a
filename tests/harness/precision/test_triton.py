"""The Triton kernels, run by Triton's interpreter on a CPU: the same bits and statistics as the twin.

TRITON_INTERPRET must be set before triton is imported, so the comparison is this file run as a script in a process of
its own.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_WORDS = (
    "e4m3:none e4m3:static=2 e5m2:delayed e4m3:current e5m2:current:pow2 e4m3:row e5m2:row:special e4m3:none:special "
    "bf16:none bf16:none:sr tf32:none fp16:none:special fp16:none:away e4m3:current:sr e5m23:none e3m0:current m0:none "
    "int8:row int8:current:sr int8:current:away e4m3:block128 e4m3:block32x32:pow2 e4m3:block24 e4m3:block16:margin=1 "
    "int4:group16 int4:group16:pow2 bf16:block32 mxfp8 mxfp8:up mxfp8:even mxfp8:2d mxfp6 mxfp4 mxint8:up mxint8:sr "
    "nvfp4 nvfp4:2d nvfp4:sr"
)
CASTS = _WORDS.split()
LEFT_TO_THE_TWIN = ("int4-asym:group16", "nf4", "int4:group16:top2", "e8m0:none")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow
def test_bits_are_the_twins() -> None:
    root = Path(__file__).parents[3]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"{len(CASTS)} casts agree"


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_the_reason_says_so() -> None:
    from harness.precision.cast import implementation_for

    assert implementation_for("cuda") == ("torch", "triton is not installed")


def inputs() -> list[torch.Tensor]:
    """Short blocks, infinities, NaN, zeros, FP32 subnormals; BF16; strides of both kinds."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(37, 83, generator=draw) * torch.exp2(
        torch.randint(-20, 10, (37, 83), generator=draw).float()
    )
    x[20, :40], x[21] = 0, 1e-42
    special = x.clone()
    special[3, 5], special[10, 60] = math.nan, math.inf
    return [special, x[1:20:2, ::3].bfloat16(), x.t()]


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    equal = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
    return a.shape == b.shape and a.dtype == b.dtype and bool(equal.all())


def close(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= 1e-6 * abs(b)


def compare(word: str) -> None:
    from harness.precision.cast import cast
    from harness.spec.notation import parse_cast

    spec = parse_cast(word)
    scale = torch.tensor(3.7) if spec.scaling == "delayed" else None
    for number, x in enumerate(inputs()):
        for along in (1, 0):
            more = {
                "along": along,
                "carrier": (torch.float32, torch.bfloat16)[(number + along) % 2],
                "dequantized": number == 2,
                "collect": number != 1,
                "seed": 5,
                "scale": scale,
            }
            got = cast(x, spec, implementation="triton", **more)
            wanted = cast(x, spec, implementation="torch", **more)
            assert same(got.values, wanted.values), (word, number, along)
            assert same(got.inverse, wanted.inverse), (word, number, along)
            assert same(got.amax, wanted.amax), (word, number, along)
            a, b = got.statistics, wanted.statistics
            assert (a is None) == (b is None) == (number == 1)
            if a is not None and b is not None:
                counts = (a.nonzero, a.clipped, a.flushed) == (b.nonzero, b.clipped, b.flushed)
                sums = all(close(getattr(a, n), getattr(b, n)) for n in ("signal", "noise", "amax", "scale"))
                assert counts and sums, (word, number, along, a, b)


def main() -> None:
    from harness.precision import triton_kernel
    from harness.spec.notation import parse_cast

    assert triton_kernel.INTERPRETED and triton_kernel.available()
    for words, covered in ((CASTS, True), (LEFT_TO_THE_TWIN, False)):
        for word in words:
            spec = parse_cast(word)
            result = triton_kernel.cast_tensor(
                torch.ones(2, 32), spec, along=1, carrier=torch.float32, scale=None, amax=None, seed=1,
                collect=False, dequantized=False,
            )  # fmt: skip
            assert (result is not None) == covered, word
            compare(word)
    print(f"{len(CASTS)} casts agree")


if __name__ == "__main__":
    main()
