"""Korthikanti et al. 2022, table 2, on the real layer cut over ranks that are not there."""

from __future__ import annotations

from typing import Any

import pytest

from .steps import GPT, make_spec, traced

S, B, H, A = 32, 2, 32, 4
STATISTICS = 8 * S * B
"""Mean and 1 / standard deviation of two norms, in BF16; the paper leaves them out."""


def kept(parallelism: dict[str, Any], recompute: str) -> int:
    """Bytes that the second layer keeps."""
    spec = make_spec(
        parallelism,
        precision="bf16-pure",
        model={**GPT, "d_ffn": 4 * H},
        batch_size=B,
        seq_len=S,
        recompute=recompute,
        reference="gpt-dropout",
    )
    return traced(spec).layers["layers.1"]


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallel(t: int, recompute: str) -> None:
    """s b h (10 + 24/t) + 5 a s^2 b / t; selective without the last term."""
    scores = 5 * A * S * S * B // t if recompute == "none" else 0
    assert kept({"tp": t}, recompute) == S * B * H * 10 + S * B * H * 24 // t + scores + STATISTICS


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("t", [2, 4])
def test_sequence_parallel(t: int, recompute: str) -> None:
    """(34 s b h + 5 a s^2 b) / t, and what PyTorch does otherwise: the inputs of qkv and of the first feed-forward
    matrix are kept gathered, where the paper gathers them again: 2 s b h (1 - 1/t) more of each."""
    scores = 5 * A * S * S * B // t if recompute == "none" else 0
    gathered = 2 * 2 * (S * B * H - S * B * H // t)
    expected = 34 * S * B * H // t + scores + gathered + STATISTICS // t
    assert kept({"tp": t, "sequence_parallel": True}, recompute) == expected
