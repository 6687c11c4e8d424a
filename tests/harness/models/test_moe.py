"""The mixture of experts against a token-by-token reference, its capacity, its two ways to balance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from harness.models.moe import MoE, end_step
from harness.models.transformer import Transformer, set_recompute
from harness.spec import MoESpec
from tests.harness.models.conftest import compute, model, spec, tokens

EXPERTS, WIDTH = 5, 32


def layer(seed: int = 0, **moe: float) -> MoE:
    made = MoE(spec(moe=MoESpec(experts=EXPERTS, **moe))).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 4
    return made


def inputs(seed: int = 1, batch: int = 3, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)


def reference(made: MoE, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Token by token, as the papers write it: the output, Switch's loss and how many pairs were dropped."""
    moe, d_ffn = made.moe, made.experts.down.shape[2]
    probabilities = (x @ made.router.weight.t()).softmax(-1)
    bias = 0 if made.bias_steps is None else moe.bias_update * made.bias_steps
    chosen = (probabilities + bias).topk(moe.top_k).indices
    limit = math.inf
    if moe.capacity_factor:
        limit = math.ceil(moe.capacity_factor * x.shape[1] * moe.top_k / moe.experts)
    out, dropped = torch.zeros_like(x), 0
    share = torch.zeros(moe.experts, dtype=torch.float64)
    for sequence in range(len(x)):
        room = dict.fromkeys(range(moe.experts), limit)
        for choice in range(moe.top_k):
            for token in range(x.shape[1]):
                expert = int(chosen[sequence, token, choice])
                share[expert] += 1 / chosen.numel()
                if not room[expert]:
                    dropped += 1
                    continue
                room[expert] -= 1
                logits = made.router.weight[chosen[sequence, token]] @ x[sequence, token]
                both = made.experts.gate_up[expert] @ x[sequence, token]
                hidden = F.silu(both[:d_ffn]) * both[d_ffn:]
                add = torch.zeros_like(out)
                one = probabilities[sequence, token, expert]  # of one, its own probability
                weight = logits.softmax(0)[choice] if moe.top_k > 1 else one
                add[sequence, token] = weight * (made.experts.down[expert] @ hidden)
                out = out + add
    loss = moe.experts * (share * probabilities.flatten(0, 1).mean(0)).sum()
    return out, loss, dropped


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 3, "aux_loss": 0.3},
        {"capacity_factor": 1.0, "aux_loss": 0.1},
        {"capacity_factor": 0.5, "top_k": 1, "bias_update": 0.1},
    ],
)
def test_output_and_gradients_are_the_reference_s(options: dict[str, float]) -> None:
    made, x = layer(**options), inputs()
    if made.bias_steps is not None:
        made.bias_steps += torch.arange(EXPERTS) - 2
    weight = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    leaves = [x, *made.parameters()]
    out, aux, dropped = reference(made, x)
    wanted = torch.autograd.grad((out * weight).sum() + made.moe.aux_loss * aux, leaves)
    got = made(x)
    torch.testing.assert_close(got, out, rtol=0, atol=1e-13)
    for mine, theirs in zip(torch.autograd.grad((got * weight).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    assert made.tally is not None
    assert int((made.tally[0] - made.tally[1]).sum()) == dropped
    assert bool(dropped) == bool(made.moe.capacity_factor), "the case must exercise what it is for"


def test_what_capacity_drops_does_not_depend_on_the_other_sequences() -> None:
    made, x = layer(capacity_factor=0.6), inputs()
    together = made(x)
    alone = torch.cat([made(part) for part in x.split(1)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-14)


def test_a_removed_mixture_gives_zero() -> None:
    made, x = layer(), inputs()
    made.removed = True
    assert not made(x).any()


def test_the_bias_moves_a_step_towards_balance_and_survives_bf16() -> None:
    made = layer(bias_update=0.01)
    made(inputs())
    made(inputs(2))
    assert made.tally is not None and int(made.tally[0].sum()) == 2 * 3 * 7 * 2
    load = made.tally[0].clone()
    end_step([made])
    assert made.tally is None and made.last is not None and torch.equal(made.last[0], load)
    wanted = torch.sign(load.mean() - load).long()
    assert made.bias_steps is not None and torch.equal(made.bias_steps, wanted) and wanted.any()
    assert made.to(torch.bfloat16).bias_steps.dtype == torch.int64  # type: ignore[union-attr]


def test_the_bias_evens_out_the_load() -> None:
    made, x = layer(bias_update=0.003), inputs(batch=8, length=16).detach() + 0.3  # all lean one way

    def imbalance() -> float:
        assert made.last is not None
        return float(made.last[0].max() / made.last[0].mean())

    with torch.no_grad():
        made(x)
        end_step([made])
        before = imbalance()
        for _ in range(100):
            made(x)
            end_step([made])
    assert before > 1.5 and imbalance() < 1.25


def test_evaluation_counts_nothing() -> None:
    made = layer(aux_loss=1.0).eval()
    made(inputs())
    end_step([made])
    assert made.tally is None and made.last is None


def mixture(seed: int = 0, **moe: float) -> Transformer:
    return model(seed, moe=MoESpec(experts=4, **moe))


def test_the_loss_is_the_cross_entropy_and_the_gradient_more() -> None:
    plain, pushed = mixture(), mixture(aux_loss=0.5)
    a, b = plain.loss(tokens(0), tokens(1)), pushed.loss(tokens(0), tokens(1))
    assert torch.equal(a, b)
    a.backward()
    b.backward()
    one, other = plain.mixtures()[0].router.weight.grad, pushed.mixtures()[0].router.weight.grad
    assert one is not None and other is not None and not torch.allclose(one, other)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_mixture_trains(dtype: str) -> None:
    net = mixture(aux_loss=0.01, capacity_factor=1.25)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    curve = []
    for _ in range(8):
        with compute(dtype):
            loss = net.loss(tokens(0), tokens(1))
        loss.backward()
        adam.step()
        adam.zero_grad()
        net.end_step()
        curve.append(float(loss.detach()))
    assert curve[-1] < curve[0] - 0.5


def test_recomputing_blocks_changes_no_gradient_and_counts_no_token_twice() -> None:
    found = []
    for what in ("none", "full"):
        net = mixture(aux_loss=0.1, bias_update=0.01, capacity_factor=1.0)
        set_recompute(net, what)  # type: ignore[arg-type]
        net.loss(tokens(0), tokens(1)).backward()
        assert [int(each.tally[0].sum()) for each in net.mixtures()] == [2 * 12 * 2] * 2  # type: ignore[index]
        found.append([parameter.grad for parameter in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_experts_scaled_as_the_dense_ones_are() -> None:
    one, other = mixture(3), mixture(3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    experts = one.mixtures()[0].experts
    assert float(experts.gate_up.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(experts.down.detach().std()) == pytest.approx(
        0.02 / 2, rel=0.05
    )  # two layers, two outputs each


def test_tensors_without_data_are_routed_evenly() -> None:
    with FakeTensorMode():
        net = mixture(aux_loss=0.1, capacity_factor=1.25)
        loss = net.loss(torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64))
        loss.backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
        net.end_step()
    assert mixture().mixtures()[0]._even_counts(2, 5) == [5, 5, 5, 5]
