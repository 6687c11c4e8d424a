"""Putting a recipe into a whole model: which linears, and that without quantisers nothing changes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from harness.optim import adamw
from harness.precision.linear import QuantizedLinear, apply_recipe, end_step, quantizers
from harness.spec import OptimizerSpec, PrecisionSpec, QuantizerSpec, RecipeSpec

from .conftest import recipe, tiny_model, tokens

HIDDEN = ["attention.qkv", "attention.output", "ffn.gate_up", "ffn.down"]
ALL = [f"layers.{layer}.{name}" for layer in (0, 1) for name in HIDDEN]


def fp8(compute: str = "fp32", **more: object) -> PrecisionSpec:
    return PrecisionSpec(name="fp8", compute=compute, recipe=recipe(**more))  # type: ignore[arg-type]


def test_every_hidden_linear_is_covered_and_the_head_is_not() -> None:
    model = tiny_model()
    weights = {name: id(p) for name, p in model.named_parameters()}
    assert apply_recipe(model, fp8()) == ALL
    assert [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)] == ALL
    assert {name: id(p) for name, p in model.named_parameters()} == weights
    assert len(list(quantizers(model))) == 3 * len(ALL)
    assert "layers.0.ffn.down.activations" in dict(quantizers(model))


@pytest.mark.parametrize(
    ("exception", "left"),
    [
        ("ffn.down", ["layers.0.ffn.down", "layers.1.ffn.down"]),
        ("attention", []),  # a pattern is a whole path, or its first or last parts
        ("attention.output", ["layers.0.attention.output", "layers.1.attention.output"]),
        ("layers.0", [name for name in ALL if name.startswith("layers.0.")]),
        ("layers.1.ffn.gate_up", ["layers.1.ffn.gate_up"]),
        ("down", ["layers.0.ffn.down", "layers.1.ffn.down"]),
        ("own", []),
    ],
)
def test_exceptions(exception: str, left: list[str]) -> None:
    replaced = apply_recipe(tiny_model(), fp8(high_precision=("head", exception)))
    assert sorted(set(ALL) - set(replaced)) == sorted(left)


def test_the_tenth_layer_is_not_the_first() -> None:
    replaced = apply_recipe(tiny_model(num_layers=11), fp8(high_precision=("head", "layers.1")))
    assert "layers.10.ffn.down" in replaced and "layers.1.ffn.down" not in replaced


@pytest.mark.parametrize(
    ("first", "last", "left"),
    [(1, 0, {0}), (0, 1, {10}), (1, 2, {0, 9, 10}), (0, 0, set()), (0, 20, set(range(11)))],
)
def test_blocks_at_the_ends_may_stay_unquantised(first: int, last: int, left: set[int]) -> None:
    spec = fp8()
    assert spec.recipe is not None
    ends = {"high_precision_first": first, "high_precision_last": last}
    spec = spec.model_copy(update={"recipe": spec.recipe.model_copy(update=ends)})
    replaced = {int(name.split(".")[1]) for name in apply_recipe(tiny_model(num_layers=11), spec)}
    assert set(range(11)) - replaced == left


def test_a_head_may_be_quantised_and_stays_tied() -> None:
    model = tiny_model(tie_embeddings=True)
    assert apply_recipe(model, fp8(high_precision=())) == [*ALL, "head"]
    assert model.head.weight is model.embedding.weight


def test_no_recipe_changes_nothing() -> None:
    assert apply_recipe(tiny_model(), PrecisionSpec(name="fp32")) == []


def test_fp16_products_are_refused() -> None:
    with pytest.raises(ValueError, match="fp32 or bf16, not fp16"):
        apply_recipe(tiny_model(), fp8("fp16"))


def losses(compute: str, ffn: str, quantised: str | None, steps: int = 5) -> list[float]:
    """Losses of a short training; `quantised`: casts to the compute dtype, no casts, real ones, or None for plain
    linears."""
    model = tiny_model(ffn=ffn)
    same = QuantizerSpec(format=compute, scaling="none")
    recipes = {
        "identity": RecipeSpec(activations=same, weights=same, gradients=same),
        "roles left out": RecipeSpec(),
        "real": recipe(),
    }
    if quantised is not None:
        spec = PrecisionSpec(name="fp8", compute=compute, recipe=recipes[quantised])  # type: ignore[arg-type]
        assert apply_recipe(model, spec) == ALL
    optimizer = adamw.build(model, OptimizerSpec(lr=1e-2))
    out = []
    for step in range(steps):
        with nullcontext() if compute == "fp32" else torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(tokens(step), tokens(step + 100))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end_step(model)
        model.end_step()
        out.append(float(loss.detach()))
    return out


@pytest.mark.parametrize("ffn", ["swiglu", "smooth-swiglu", "smooth-swiglu-token"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_training_with_identity_quantisers_is_unquantised_training_to_the_bit(compute: str, ffn: str) -> None:
    plain = losses(compute, ffn, None)
    assert losses(compute, ffn, "identity") == plain
    assert losses(compute, ffn, "roles left out") == plain
    assert losses(compute, ffn, "real") != plain


def test_end_step_reaches_every_quantiser() -> None:
    model = tiny_model()
    apply_recipe(model, fp8(scaling="delayed", history=2))
    model.loss(tokens(), tokens(1)).backward()
    end_step(model)
    for name, quantizer in quantizers(model):
        assert float(quantizer.amax_history[0]) > 0, name
        assert float(quantizer.amax_now) == 0
