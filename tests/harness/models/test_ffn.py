"""The forms of SwiGLU: the same function without quantisers, and what each keeps of it in FP8."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.models.ffn import FeedForward, power_of_two_inverse
from harness.precision.linear import apply_recipe
from harness.spec import PrecisionSpec, QuantizerSpec, RecipeSpec

from .conftest import compute, fill, losses, model, spec, tokens

CURRENT = RecipeSpec(
    activations=QuantizerSpec(format="e4m3"),
    weights=QuantizerSpec(format="e4m3"),
    gradients=QuantizerSpec(format="e5m2"),
)
D_FFN, OUTLIER = 48, 5


def ffn(kind: str, **changes: Any) -> FeedForward:
    """Weights that give u, g and h of about unit size."""
    layer = FeedForward(spec(ffn=kind, **changes))
    fill(layer, lambda x: x / math.sqrt(x.shape[-1]))
    return layer


def x(seed: int = 1) -> Tensor:
    return torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(seed))


def hidden_of(layer: FeedForward, value: Tensor) -> Tensor:
    """What `down` is given."""
    seen: list[Tensor] = []
    handle = layer.down.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    layer(value)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_channel_form_is_swiglu_to_the_bit(dtype: str) -> None:
    """Before, while and after its scales move, gradients too: losses and weights of trainings are equal."""
    plain, smooth = model(), model(ffn="smooth-swiglu")
    assert losses(plain, dtype) == losses(smooth, dtype)
    for (name, one), other in zip(plain.named_parameters(), smooth.parameters(), strict=True):
        assert torch.equal(one, other), name
    scales = [layer.smooth_scale for layer in smooth.feed_forwards()]
    assert all((scale > 4).any() for scale in scales)  # it did something: |w1 x| starts well below 1
    with compute(dtype):
        assert torch.equal(plain(tokens(7)), smooth(tokens(7)))


def test_channel_form_with_outliers_is_swiglu_to_the_bit() -> None:
    plain, smooth = ffn("swiglu"), ffn("smooth-swiglu")
    for layer in (plain, smooth):
        with torch.no_grad():
            layer.gate_up.weight[D_FFN + OUTLIER] *= 3e4
    for _ in range(3):
        assert torch.equal(plain(x()), smooth(x()))
        smooth.end_step()
    assert float(smooth.smooth_scale[OUTLIER]) < 1e-4


def test_token_form_is_swiglu_to_rounding() -> None:
    plain, token = ffn("swiglu"), ffn("smooth-swiglu-token")
    assert torch.allclose(plain(x()), token(x()), rtol=1e-5, atol=1e-6)
    grads = []
    for layer in (plain, token):
        layer(x()).square().sum().backward()
        grads.append((layer.gate_up.weight.grad, layer.down.weight.grad))
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


def test_token_form_divides_each_token_by_its_linear_branch() -> None:
    """The released code's rule: max over channels of |w1 x|, no epsilon but for a token of zeros."""
    layer = ffn("smooth-swiglu-token")
    value = x()
    value[0, 0] = 0
    up = (value @ layer.gate_up.weight[D_FFN:].t()).abs().amax(-1, keepdim=True)
    wanted = hidden_of(ffn("swiglu"), value) / torch.where(up > 0, up, 1.0)
    assert torch.allclose(hidden_of(layer, value), wanted, rtol=1e-5)
    assert torch.equal(layer(value)[0, 0], torch.zeros(32))


def test_end_step_brings_each_channel_into_one_to_two() -> None:
    layer = ffn("smooth-swiglu")
    with torch.no_grad():
        layer.gate_up.weight[D_FFN:] *= torch.logspace(-3, 3, D_FFN)[:, None]
    layer(x())
    layer(2 * x())
    layer.end_step()
    up = (2 * x() @ layer.gate_up.weight[D_FFN:].t()).abs().flatten(0, 1).amax(0)
    scaled = up * layer.smooth_scale
    assert bool((scaled >= 1).all()) and bool((scaled < 2).all())
    assert torch.equal(torch.frexp(layer.smooth_scale)[0], torch.full((D_FFN,), 0.5))  # powers of two
    layer(x())  # folded now: the channel maxima must still be those of w1 x itself
    layer.end_step()
    scaled = up / 2 * layer.smooth_scale
    assert bool((scaled >= 1).all()) and bool((scaled < 2).all())


def test_a_channel_without_values_keeps_scale_one() -> None:
    layer = ffn("smooth-swiglu")
    with torch.no_grad():
        layer.gate_up.weight[D_FFN + 3] = 0
    out = layer(x())
    layer.end_step()
    assert float(layer.smooth_scale[3]) == 1
    assert torch.equal(layer(x()), out)


def test_evaluation_moves_no_scale_but_calibration_does() -> None:
    layer = ffn("smooth-swiglu").eval()
    layer(x())
    assert not layer.channel_amax.any()
    layer.calibrating = True
    layer(x())
    assert bool((layer.channel_amax > 0).all())


def test_power_of_two_inverse() -> None:
    amax = torch.tensor([1.0, 1.99, 2.0, 0.75, 3e4, 0.0, math.inf, math.nan])
    assert power_of_two_inverse(amax).tolist() == [1, 1, 0.5, 2, 2.0**-14, 1, 1, 1]
    extreme = power_of_two_inverse(torch.tensor([1e-45, 1e-38, 3e38]))
    assert bool(torch.isfinite(extreme.square()).all()) and bool((extreme.square() > 0).all())


def test_removed_gives_nothing() -> None:
    layer = ffn("swiglu")
    layer.removed = True
    assert not layer(x()).any()


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_bias_and_gelu_equal_the_formula(kind: str) -> None:
    layer = FeedForward(spec(ffn=kind, bias=True))
    fill(layer, lambda t: t / 4)
    first = layer.up if kind == "gelu" else layer.gate_up
    h = x() @ first.weight.t() + first.bias
    if kind == "gelu":
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
    else:
        h = h[..., :D_FFN] * torch.sigmoid(h[..., :D_FFN]) * h[..., D_FFN:]
    assert torch.allclose(layer(x()), h @ layer.down.weight.t() + layer.down.bias, rtol=1e-4, atol=1e-5)


def sqnr_in_fp8(kind: str, value: Tensor, channel_factor: float = 1.0, rows: slice = slice(None)) -> float:
    """dB of the FP8 output against FP32 SwiGLU's, per-tensor current scales, after one calibrating step.

    One channel's w1 is multiplied by `channel_factor` and its w3 divided by it; `rows`: tokens compared.
    """

    def made(kind: str) -> FeedForward:
        layer = ffn(kind)
        with torch.no_grad():
            layer.gate_up.weight[D_FFN + OUTLIER] *= channel_factor
            layer.down.weight[:, OUTLIER] /= channel_factor
        return layer

    layer = made(kind)
    layer(value)
    layer.end_step()
    apply_recipe(layer, PrecisionSpec(name="fp8", recipe=CURRENT))
    with torch.no_grad():
        exact = made("swiglu")(value).flatten(0, 1)[rows]
        noise = layer(value).flatten(0, 1)[rows] - exact
    return float(20 * torch.log10(exact.norm() / noise.norm()))


def test_an_outlier_channel_breaks_swiglu_in_fp8_and_not_the_channel_form() -> None:
    """E4M3 spans 17.8 binades: an outlier of 2^16 leaves the other channels next to nothing."""
    healthy = sqnr_in_fp8("swiglu", x())
    assert healthy > 23
    assert sqnr_in_fp8("swiglu", x(), 2.0**16) < 10
    assert sqnr_in_fp8("smooth-swiglu", x(), 2.0**16) > healthy - 3
    assert sqnr_in_fp8("smooth-swiglu-token", x(), 2.0**16) < 10  # every token has the outlier: no help


def test_an_outlier_token_breaks_swiglu_in_fp8_and_not_the_token_form() -> None:
    """A loud token's h grows as its square and flushes the others'; a channel's scale does not part them."""
    value = x()
    value[2, 9] *= 2.0**9
    others = slice(0, 64)
    assert sqnr_in_fp8("swiglu", value, rows=others) < 10
    assert sqnr_in_fp8("smooth-swiglu", value, rows=others) < 10
    assert sqnr_in_fp8("smooth-swiglu-token", value, rows=others) > 20
