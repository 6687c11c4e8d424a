"""The same comparisons from outside: what `suite quantize --out` writes, against the oracle and ml_dtypes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from . import oracle
from .oracle import F32, Array
from .test_oracle import CASTS, PEERS, assert_same_bits, awkward_inputs, expected

ROOT = Path(__file__).resolve().parents[3]
ELEMENTS = [f"{name}:none:special" for name in [*PEERS, "e8m0", "e1m2", "e3m0"]]
WORDS = [*CASTS, *ELEMENTS, "e2m1:none:sr"]


def sixteen_bits() -> dict[str, torch.Tensor]:
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(256, 256)
    return {"bf16": codes.view(torch.bfloat16), "fp16": codes.clone().view(torch.float16)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Array]]:
    """Cast -> tensor -> FP32 values, from one command over one file."""
    folder = tmp_path_factory.mktemp("quantize")
    save_file(
        sixteen_bits() | {k: torch.from_numpy(x) for k, x in awkward_inputs().items()},
        folder / "x.safetensors",
    )
    command = [sys.executable, "-m", "suite", "quantize", "x.safetensors", "--out", "out", "--seed", "5"]
    done = subprocess.run(
        [*command, "--format", ",".join(WORDS)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files = [line.split(" written")[0] for line in done.stderr.splitlines() if " written" in line]
    assert len(files) == len(WORDS)
    return {
        word: {name: tensor.float().numpy() for name, tensor in load_file(folder / file).items()}
        for word, file in zip(WORDS, files, strict=True)
    }


@pytest.mark.parametrize("text", ELEMENTS)
def test_elements(text: str, written: dict[str, dict[str, Array]]) -> None:
    """All 2^16 BF16 and all 2^16 FP16 inputs."""
    name = text.partition(":")[0]
    for dtype, codes in sixteen_bits().items():
        x = codes.float().numpy()
        with np.errstate(all="ignore"):
            if name == "e8m0":
                wanted = x.astype(ml_dtypes.float8_e8m0fnu).astype(F32)
            elif name in PEERS:
                wanted = x.astype(PEERS[name]).astype(F32)
            else:
                wanted = oracle.nearest(x, name, overflow="special").astype(F32)
        if name in ("e3m2", "e2m3", "e2m1"):
            wanted[np.isnan(x)] = np.nan  # ml_dtypes has no NaN there
        assert_same_bits(written[text][dtype], wanted, x)


@pytest.mark.parametrize("text", CASTS)
def test_scaled(text: str, written: dict[str, dict[str, Array]]) -> None:
    for which, x in awkward_inputs().items():
        assert_same_bits(written[text][which], expected(text, which), x)


def test_stochastic(written: dict[str, dict[str, Array]]) -> None:
    x = awkward_inputs()["normal"]
    assert_same_bits(written["e2m1:none:sr"]["normal"], oracle.stochastic(x, "e2m1", 5).astype(F32), x)
