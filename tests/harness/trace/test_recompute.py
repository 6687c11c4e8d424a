"""What recomputation saves, and that it changes no number: casts included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.models import transformer
from harness.optim import adamw
from harness.precision.linear import apply_recipe, begin_step, end_step, quantizers
from harness.spec import ModelSpec, OptimizerSpec, PrecisionSpec, QuantizerSpec, RecipeSpec

from .steps import GPT, PRECISIONS, SHAPE, delayed, make_spec, traced

STOCHASTIC = PrecisionSpec(
    name="stochastic",
    compute="bf16",
    recipe=RecipeSpec(
        activations=delayed("e4m3", rounding="stochastic"),
        weights=QuantizerSpec(format="e4m3", rounding="stochastic"),
        gradients=delayed("e5m2", rounding="stochastic"),
    ),
)


def train(precision: PrecisionSpec, recompute: Any, micro_steps: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Weights after three steps, and what each quantiser then remembers."""
    model = transformer.build(ModelSpec(**SHAPE), 64, 0)
    transformer.set_recompute(model, recompute)
    apply_recipe(model, precision, seed=5)
    optimizer = adamw.build(model, OptimizerSpec(lr=1e-2))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 4):
        begin_step(model, step)
        for _ in range(micro_steps):
            inputs, targets = torch.randint(64, (2, 2, 16), generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model.loss(inputs, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end_step(model)
    memory = {name: quantizer.state_dict() for name, quantizer in quantizers(model)}
    return [parameter.detach() for parameter in model.parameters()], memory


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("precision", [PRECISIONS["fp8"], STOCHASTIC], ids=lambda each: str(each.name))
def test_a_forward_pass_that_runs_twice_casts_alike(precision: PrecisionSpec, micro_steps: int) -> None:
    weights, memory = train(precision, "none", micro_steps)
    again, same_memory = train(precision, "full", micro_steps)
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    assert memory.keys() == same_memory.keys() and memory
    for name, state in memory.items():
        assert all(torch.equal(state[key], same_memory[name][key]) for key in state), name


def test_the_noise_does_matter_here() -> None:
    """Else the test above would pass with any noise."""
    nearest = PrecisionSpec(
        name="nearest",
        compute="bf16",
        recipe=RecipeSpec(activations=delayed("e4m3"), gradients=delayed("e5m2")),
    )
    weights, _ = train(STOCHASTIC, "none", 1)
    other, _ = train(nearest, "none", 1)
    assert not all(torch.equal(a, b) for a, b in zip(weights, other, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_kept(precision: str) -> None:
    """Full: the stream between two layers and nothing else. Selective: flash attention keeps no scores, so only the
    log-sum-exp of each query is saved, and where the rest is in BF16 the kernel's FP32 output."""
    spec = {"precision": precision, "batch_size": 2}
    none, selective, full = (
        traced(make_spec(recompute=what, **spec)).layers["layers.0"] for what in ("none", "selective", "full")
    )
    tokens, width, heads = 2 * 32, 32, 4
    assert none - selective == tokens * heads * 4 + (tokens * width * 4 if precision == "bf16" else 0)
    assert full == tokens * width * 4


def test_selective_saves_stored_scores() -> None:
    """b a s^2 probabilities in FP32, and a layer's own causal mask."""
    spec: dict[str, Any] = {"attention": {"kernel": "eager"}, "batch_size": 2, "model": GPT}
    none, selective = (
        traced(make_spec(recompute=what, **spec)).layers["layers.1"] for what in ("none", "selective")
    )
    assert none - selective == 2 * 4 * 32 * 32 * 4 + 32 * 32
