"""What the study of tensors records, against sums made apart and against arithmetic."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.precision.cast import cast, dequantize
from harness.spec import RunSpec, TensorSpec
from harness.spec.notation import parse_cast
from harness.tasks.tensors import delayed_scale, make_tensor, outlier_places, tensors

SMALL = {"rows": 128, "cols": 256}


class Journal:
    """Keeps what a task records: (step, scope) -> metric -> value."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], dict[str, float]] = {}

    def measure(self, step: int, values: dict[str, float], scope: str = "") -> None:
        self.values.setdefault((step, scope), {}).update(values)

    def note(self, name: str, value: Any, reason: str) -> None: ...

    def beat(self) -> None: ...


def run(cast_name: str, seed: int = 0, **tensor: Any) -> dict[tuple[int, str], dict[str, float]]:
    journal = Journal()
    spec = RunSpec(task="tensors", cast=cast_name, seed=seed, tensor=TensorSpec(**{**SMALL, **tensor}))
    assert tensors(spec, {}, journal, Path()) == []  # type: ignore[arg-type]
    return journal.values


def tensor_of(spec: TensorSpec, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outliers = outlier_places(spec, generator)
    return make_tensor(spec, generator, outliers, with_outliers=True), outliers


@pytest.mark.parametrize("distribution", ["normal", "student_t", "log_uniform"])
def test_the_bulk_has_unit_deviation(distribution: str) -> None:
    x, _ = tensor_of(TensorSpec(distribution=distribution, rows=512, cols=512))  # type: ignore[arg-type]
    assert float(x.std()) == pytest.approx(1, abs=0.05)
    assert abs(float(x.mean())) < 0.02


@pytest.mark.parametrize(("kind", "share"), [("isolated", 0.01), ("channels", 0.125), ("tokens", 0.0625)])
def test_outliers_stand_where_they_are_put(kind: str, share: float) -> None:
    spec = TensorSpec(**SMALL, outliers=kind, outlier_share=share, outlier_sigmas=1000)  # type: ignore[arg-type]
    x, outliers = tensor_of(spec)
    assert float(outliers.float().mean()) == pytest.approx(share, rel=0.01)
    assert torch.equal(outliers, x.abs() == 1000)
    if kind == "channels":
        assert torch.equal(outliers.any(dim=0), outliers.all(dim=0))
    if kind == "tokens":
        assert torch.equal(outliers.any(dim=1), outliers.all(dim=1))


def test_outliers_may_be_spread() -> None:
    x, outliers = tensor_of(TensorSpec(**SMALL, outlier_sigmas=1024, outlier_spread=2, outlier_share=0.1))
    sizes = x[outliers].abs()
    assert 256 <= float(sizes.min()) < 300 and 900 < float(sizes.max()) <= 1024


def test_the_same_seed_gives_the_same_bulk_with_outliers_and_without() -> None:
    plain = make_tensor(
        TensorSpec(**SMALL),
        torch.Generator().manual_seed(3),
        torch.zeros(128, 256, dtype=torch.bool),
        with_outliers=True,
    )
    spec = TensorSpec(**SMALL, steps=2, outlier_sigmas=50)
    generator = torch.Generator().manual_seed(3)
    none = torch.zeros(128, 256, dtype=torch.bool)
    none[0, 0] = True
    with_one = make_tensor(spec, generator, none, with_outliers=True)
    assert torch.equal(plain[~none], with_one[~none])
    assert abs(float(with_one[0, 0])) == 50


@pytest.mark.parametrize("name", ["e4m3:current", "e4m3:row", "e4m3:block128", "mxfp8", "nvfp4", "int8:row"])
def test_noise_by_scope_adds_up(name: str) -> None:
    found = run(name, outlier_sigmas=300, outlier_share=0.01, outlier_spread=1)
    x, outliers = tensor_of(TensorSpec(**SMALL, outlier_sigmas=300, outlier_share=0.01, outlier_spread=1))
    back = dequantize(cast(x, parse_cast(name)))
    for scope, mask in (("all", torch.ones_like(outliers)), ("bulk", ~outliers), ("outliers", outliers)):
        signal = x[mask].double().square().sum()
        noise = (back[mask].double() - x[mask].double()).square().sum()
        assert found[1, scope]["quant_sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)
        flushed = float((back[mask] == 0).float().mean())
        assert found[1, scope]["quant_flushed_fraction"] == pytest.approx(flushed, abs=1e-6)


def test_clipping_is_told_apart_in_mx_blocks() -> None:
    """Floor clips the largest of a block between 448 and 512; the C of a hand-made tensor is counted by hand."""
    found = run("mxfp8", outlier_sigmas=1000, outlier_share=0.01)
    x, outliers = tensor_of(TensorSpec(**SMALL, outlier_sigmas=1000, outlier_share=0.01))
    blocks = x.reshape(-1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(dim=1, keepdim=True))) - 8
    clipped = (blocks.abs() / torch.exp2(exponent) > 448).reshape(x.shape)
    assert found[1, "all"]["quant_clipped_fraction"] == pytest.approx(float(clipped.float().mean()))
    assert found[1, "outliers"]["quant_clipped_fraction"] == 1  # 1000 is 1.95 * 2^9
    assert found[1, "bulk"]["quant_clipped_fraction"] == pytest.approx(
        float(clipped[~outliers].float().mean())
    )
    saturated = (blocks.abs().amax(dim=1) / torch.exp2(exponent[:, 0]) > 448).float().mean()
    assert found[1, "all"]["quant_saturated_blocks"] == pytest.approx(float(saturated))
    assert run("mxfp8:up")[1, "all"]["quant_saturated_blocks"] == 0


def test_a_stale_scale_clips_and_leaves_a_shadow() -> None:
    history = 3
    found = run(f"e4m3:delayed={history}", steps=9, outlier_from=4, outlier_until=4, outlier_sigmas=1e5)
    flushed = [found[step, "bulk"]["quant_flushed_fraction"] for step in range(1, 10)]
    assert found[4, "outliers"]["quant_clipped_fraction"] == 1
    assert found[4, "outliers"]["quant_sqnr_db"] < 1
    assert [step for step, share in enumerate(flushed, 1) if share > 0.1] == [5, 6, 7]
    assert all((step, "outliers") not in found for step in (1, 3, 5, 9))
    current = run("e4m3:current", steps=9, outlier_from=4, outlier_until=4, outlier_sigmas=1e5)
    assert current[4, "outliers"]["quant_clipped_fraction"] == 0
    assert current[4, "bulk"]["quant_flushed_fraction"] > 0.1 > current[5, "bulk"]["quant_flushed_fraction"]


def test_the_history_gives_the_largest_or_the_latest() -> None:
    history = deque([2.0, 8.0, 4.0])
    x = torch.ones(2, 2)
    assert float(delayed_scale(parse_cast("e4m3:delayed=3"), history, x)) == 56
    latest = parse_cast("e4m3:delayed=3").model_copy(update={"amax": "most_recent"})
    assert float(delayed_scale(latest, history, x)) == 112
    assert float(delayed_scale(latest, deque(), x)) == 448


def test_a_run_needs_a_cast() -> None:
    with pytest.raises(ValueError, match="needs a cast"):
        tensors(RunSpec(task="tensors"), {}, Journal(), Path())  # type: ignore[arg-type]


def test_outliers_must_come_within_the_sequence() -> None:
    with pytest.raises(ValueError, match="within the 2 steps"):
        TensorSpec(steps=2, outlier_from=3)
