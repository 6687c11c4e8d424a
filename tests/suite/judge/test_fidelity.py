"""Backend auto: a plan cannot know what a GPU will run itself, a stored run can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from suite.judge.judging import blocker, judge


def on(plan: Any, device: str, backend: str = "auto", format: str = "e4m3") -> Any:
    """The plan with its FP8 runs moved to a device, backend and format."""
    for i, run in enumerate(plan.runs):
        if run.labels["precision"] == "fp8":
            precision = run.spec.precision
            cast = precision.recipe.activations.model_copy(update={"format": format})
            roles = dict.fromkeys(("activations", "weights", "gradients"), cast)
            recipe = precision.recipe.model_copy(update=roles)
            changes = {"compute": "bf16", "backend": backend, "recipe": recipe}
            spec = run.spec.model_copy(
                update={"device": device, "precision": precision.model_copy(update=changes)}
            )
            plan.runs[i] = replace(run, spec=spec)
    return plan


@pytest.fixture
def native_claim(world: Any) -> Any:
    return world.claim("final_loss_gap", {"above": 0.05}, needs="native")


@pytest.mark.parametrize(
    ("device", "backend", "format", "blocked"),
    [
        ("cuda", "auto", "e4m3", False),
        ("cuda", "torch", "e4m3", False),
        ("cuda", "emulated", "e4m3", True),
        ("cuda", "auto", "e3m2", True),
        ("cpu", "auto", "e4m3", True),
    ],
)
def test_what_can_still_be_native_blocks_nothing(
    world: Any, native_claim: Any, device: str, backend: str, format: str, blocked: bool
) -> None:
    plan, _ = world.two_arms([0.2] * 3, native_claim)
    reason = blocker(native_claim, on(plan, device, backend, format))
    assert (reason is not None) is blocked


@pytest.mark.parametrize(("stored", "verdict"), [("native", "reproduced"), ("emulated", "not run")])
def test_the_stored_fidelity_decides(world: Any, native_claim: Any, stored: str, verdict: str) -> None:
    plan, store = world.two_arms([0.2, 0.2001, 0.1999], native_claim)
    for run in on(plan, "cuda").runs:
        store.rows[run.key].fidelity = stored if run.labels["precision"] == "fp8" else "native"
    (found,) = judge(plan, store)
    assert (found.verdict, found.fidelity) == (verdict, stored)
    if stored == "emulated":
        assert "at least one run here was emulated" in found.reason
