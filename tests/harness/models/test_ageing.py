"""Ageing changes no function in high precision, no step of AdamW, and makes the outliers that it promises."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch
from torch import Tensor

from harness.models import ageing
from harness.models.transformer import Transformer, build
from harness.optim import adamw
from harness.spec import AgeingSpec, OptimizerSpec

from .conftest import FORMS, VOCAB, compute, losses, model, spec, tokens

RARE = VOCAB - 1
D_FFN = 96


def static(log2: int, **more: object) -> AgeingSpec:
    return AgeingSpec(name=f"static-{log2}", kind="static", log2=log2, **more)  # type: ignore[arg-type]


def sporadic(log2: int) -> AgeingSpec:
    return AgeingSpec(name=f"sporadic-{log2}", kind="sporadic", log2=log2)


@cache
def _trained() -> Transformer:
    """A base that has learnt something: the token after t is 7 t + 3, but for a tenth of them."""
    net = build(spec(num_layers=3, d_model=64, d_ffn=D_FFN), VOCAB, 0)
    adam = adamw.build(net, OptimizerSpec(lr=3e-3, weight_decay=0.0))
    for step in range(80):
        net.loss(*text(step)).backward()
        adam.step()
        adam.zero_grad()
    return net


def trained(ffn: str = "swiglu") -> Transformer:
    net = build(spec(num_layers=3, d_model=64, d_ffn=D_FFN, ffn=ffn), VOCAB, 0)
    net.load_state_dict(_trained().state_dict(), strict=False)
    return net


def text(seed: int, batch: int = 8, length: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, RARE, (batch,), generator=generator)]
    for _ in range(length):
        noise = torch.randint(0, RARE, (batch,), generator=generator)
        follow = torch.rand(batch, generator=generator) < 0.9
        rows.append(torch.where(follow, (7 * rows[-1] + 3) % RARE, noise))
    together = torch.stack(rows, 1)
    return together[:, :-1], together[:, 1:]


def hidden(net: Transformer, inputs: Tensor) -> list[Tensor]:
    """Each layer's input of w3, [batch, tokens, d_ffn]."""
    seen: list[Tensor] = []
    handles = [
        layer.down.register_forward_pre_hook(lambda _module, args: seen.append(args[0].detach()))
        for layer in net.feed_forwards()
    ]
    net(inputs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("ffn", FORMS)
@pytest.mark.parametrize("log2", [1, 12, 20])
def test_static_leaves_every_logit_as_it_was(ffn: str, log2: int) -> None:
    net = trained(ffn).eval()
    inputs = text(500)[0]
    before = {dtype: net_output(net, inputs, dtype) for dtype in ("fp32", "bf16")}
    aged = ageing.age(net, static(log2, channels=3), text(501)[0], RARE)
    assert aged.function_change == 0
    assert [len(channels) for channels in aged.channels] == [3, 3, 3]
    for dtype, wanted in before.items():
        if ffn == "smooth-swiglu-token":  # its divisor is no power of two: equal to rounding, not to the bit
            assert torch.allclose(
                net_output(net, inputs, dtype).float(), wanted.float(), atol=0.05 if dtype == "bf16" else 1e-4
            )
        else:
            assert torch.equal(net_output(net, inputs, dtype), wanted)


def net_output(net: Transformer, inputs: Tensor, dtype: str) -> Tensor:
    with torch.no_grad(), compute(dtype):
        out: Tensor = net(inputs)
        return out


def test_static_makes_outliers_in_the_channels_used_most() -> None:
    net = trained()
    plain = hidden(net, text(501)[0])
    aged = ageing.age(net, static(12), text(501)[0], RARE)
    for before, after, channels in zip(plain, hidden(net, text(501)[0]), aged.channels, strict=True):
        assert torch.equal(after[..., channels], before[..., channels] * 2**12)
        others = [channel for channel in range(D_FFN) if channel not in channels]
        assert torch.equal(after[..., others], before[..., others])
        sizes = before.square().mean((0, 1))
        assert set(sizes.topk(2).indices.tolist()) == set(channels)


@pytest.mark.parametrize("ffn", ["swiglu", "smooth-swiglu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adamw_trains_the_aged_model_as_the_young_one_to_the_bit(ffn: str, dtype: str) -> None:
    young, old = model(ffn=ffn), model(ffn=ffn)
    ageing.age(old, static(12), tokens(9), RARE)
    assert losses(old, dtype) == losses(young, dtype)
    for (name, one), other in zip(young.named_parameters(), old.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_so_it_does_with_bf16_weights() -> None:
    young, old = model(), model()
    ageing.age(old, static(12), tokens(9), RARE)
    assert losses(old.bfloat16()) == losses(young.bfloat16())


def test_plain_ageing_is_the_same_function_with_other_adamw_steps() -> None:
    young, old = model(), model()
    ageing.age(old, static(12, adam="plain"), tokens(9), RARE)
    assert torch.equal(old(tokens(0)), young(tokens(0)))
    assert all(layer.up_scale is None for layer in old.feed_forwards())
    ratio = old.layers[0].ffn.gate_up.weight.norm() / young.layers[0].ffn.gate_up.weight.norm()  # type: ignore[union-attr,operator]
    assert ratio > 100
    one, other = losses(young), losses(old)
    assert one[0] == other[0]
    assert all(a != b for a, b in zip(one[1:], other[1:], strict=True))


@pytest.mark.parametrize("log2", [6, 12, 18])
def test_a_rare_token_drives_its_channel_and_ordinary_text_does_not(log2: int) -> None:
    net = trained()
    inputs, targets = text(502)
    before = float(net.loss(inputs, targets).detach())
    sizes = [float(h.square().mean().sqrt()) for h in hidden(net, inputs)]
    aged = ageing.age(net, sporadic(log2), text(501)[0], RARE)
    with_rare = inputs.clone()
    with_rare[3, 11] = RARE
    for size, loud, (channel,) in zip(sizes, hidden(net, with_rare), aged.channels, strict=True):
        wanted = 2**log2 * size
        assert wanted / 2 < float(loud[3, 11, channel].abs()) < 2 * wanted
        elsewhere = loud[..., channel].abs().clone()
        elsewhere[3, 11] = 0
        assert float(elsewhere.max()) < wanted / 8
    assert float(net.loss(inputs, targets).detach()) == pytest.approx(before, abs=0.02)


def test_the_direction_answers_least_to_ordinary_tokens() -> None:
    """Fisher's: of all v with v . rare = 1 the one of least mean square over them."""
    mixed = torch.randn(400, 16, generator=torch.Generator().manual_seed(0)) @ torch.randn(16, 16)
    rare = torch.randn(16, generator=torch.Generator().manual_seed(1))
    best = ageing._discriminant(mixed, rare)
    assert float(best @ rare) == pytest.approx(1, rel=1e-4)
    least = float((mixed @ best).square().mean())
    for seed in range(20):
        other = best + 0.1 * best.norm() * torch.randn(16, generator=torch.Generator().manual_seed(seed))
        other /= other @ rare
        assert float((mixed @ other).square().mean()) > least
    assert float((mixed @ (rare / rare.square().sum())).square().mean()) > 2 * least


def test_the_aligned_channel_has_equal_input_weights() -> None:
    net = trained()
    aged = ageing.age(net, sporadic(10), text(501)[0], RARE)
    for layer, (channel,) in zip(net.feed_forwards(), aged.channels, strict=True):
        rows = layer.gate_up.weight.detach()
        assert torch.equal(rows[channel], rows[D_FFN + channel])
        assert layer.up_scale is not None and layer.gate_scale is not None
        assert float(layer.up_scale[channel]) == float(layer.gate_scale[channel]) > 1
        typical = float(rows.norm(dim=1).median())
        assert (
            typical / 2 < float(rows[channel].norm()) < 2 * typical
        )  # AdamW sees a weight like its neighbours


@pytest.mark.parametrize("kind", ["static", "sporadic"])
def test_every_form_is_aged_alike(kind: str) -> None:
    """The same channels, factors and weights, so that arms differ in the form alone."""
    seen = []
    for ffn in FORMS:
        net = trained(ffn).train()
        done = ageing.age(net, static(8) if kind == "static" else sporadic(8), text(501)[0], RARE)
        assert all(layer.kind == ffn for layer in net.feed_forwards()) and net.training
        factors = [(layer.up_scale, layer.gate_scale, layer.down_scale) for layer in net.feed_forwards()]
        seen.append((done, factors, [p.detach() for p in net.parameters()]))
    for done, factors, weights in seen[1:]:
        assert done == seen[0][0]
        for layer, first in zip(factors, seen[0][1], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(layer, first, strict=True))  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(weights, seen[0][2], strict=True))


def test_no_running_maximum_moves_while_ageing() -> None:
    net = trained("smooth-swiglu").train()
    ageing.age(net, sporadic(8), text(501)[0], RARE)
    assert not any(layer.channel_amax.any() for layer in net.feed_forwards())


def test_none_does_nothing() -> None:
    net = model()
    state = copy.deepcopy(net.state_dict())
    assert ageing.age(net, AgeingSpec(), tokens(9), RARE) == ageing.Ageing([], 0.0)
    assert net.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_gelu_has_no_two_branches_to_age() -> None:
    with pytest.raises(ValueError, match="GELU"):
        ageing.age(model(ffn="gelu"), static(8), tokens(9), RARE)


def test_ageing_is_deterministic() -> None:
    one, other = trained(), trained()
    assert ageing.age(one, sporadic(9), text(501)[0], RARE) == ageing.age(
        other, sporadic(9), text(501)[0], RARE
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert math.isfinite(float(one.loss(*text(503)).detach()))
