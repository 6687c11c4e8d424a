"""The transformer's structure: what each token may see, heads, positions, initialisation, published sizes."""

from __future__ import annotations

import math

import pytest
import torch

from harness.ledger.parameters import num_parameters
from harness.models.functions import Rotary
from harness.models.transformer import Attention, Transformer, build
from harness.spec import ModelSpec

from .conftest import VOCAB, fill, losses, model, spec, tokens

GPT2 = {
    "ffn": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "bias": True,
    "tie_embeddings": True,
    "max_seq_len": 16,
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": True}, {"ffn": "smooth-swiglu-token"}, GPT2],
    ids=["llama", "qk", "token", "gpt2"],
)
def test_a_token_sees_no_later_one(changes: dict[str, object]) -> None:
    net = model(**changes)
    one, other = tokens(0), tokens(0).clone()
    other[:, 7:] = tokens(1)[:, 7:]
    a, b = net(one), net(other)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7:], b[:, 7:])
    earlier = tokens(0).clone()
    earlier[:, 0] = (earlier[:, 0] + 1) % VOCAB
    assert (net(earlier)[:, -1] != a[:, -1]).any()  # but every earlier one


def attention(num_heads: int, num_kv_heads: int, **changes: object) -> Attention:
    return Attention(spec(num_heads=num_heads, num_kv_heads=num_kv_heads, **changes))


def rotation(length: int, num_heads: int = 4) -> torch.Tensor:
    turned = model(num_heads=num_heads).rotation(length, torch.device("cpu"))
    assert turned is not None
    return turned


def test_grouped_queries_equal_repeated_heads() -> None:
    grouped, full = attention(4, 2), attention(4, 4)
    fill(grouped, lambda x: 0.2 * x)
    queries, keys, values = grouped.qkv.weight.detach().split((32, 16, 16))

    def repeated(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)

    with torch.no_grad():
        full.qkv.weight.copy_(torch.cat((queries, repeated(keys), repeated(values))))
        full.output.weight.copy_(grouped.output.weight)
    x = torch.randn(2, 9, 32)
    assert torch.allclose(grouped(x, rotation(9)), full(x, rotation(9)), atol=1e-6)


def test_attention_equals_the_formula() -> None:
    """softmax(q k^T / sqrt(d_head)) v over earlier tokens, pairs (2i, 2i + 1) turned by t theta^(-2i/d)."""
    layer = attention(2, 2)
    fill(layer, lambda x: 0.2 * x)
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    q, k, v = (x @ layer.qkv.weight.detach().double().t()).view(1, 6, 6, 16).transpose(1, 2).split(2, dim=1)
    angle = torch.arange(6.0).double()[:, None] * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)

    def turned(h: torch.Tensor) -> torch.Tensor:
        even, odd = h[..., 0::2], h[..., 1::2]
        out = torch.empty_like(h)
        out[..., 0::2] = even * angle.cos() - odd * angle.sin()
        out[..., 1::2] = even * angle.sin() + odd * angle.cos()
        return out

    scores = turned(q) @ turned(k).transpose(-1, -2) / 4
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(
        1, 6, 32
    ) @ layer.output.weight.detach().double().t()
    assert torch.allclose(layer(x.float(), rotation(6, num_heads=2)).double(), out, atol=1e-5)


def test_rope_depends_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float32)
    qkv = torch.stack((q, k, k)).expand(1, 40, 3, 8)
    queries, keys = (turned[0, :, 0] for turned in Rotary.apply(qkv, rotation(40), 1, 1)[:2])
    scores = queries @ keys.t()
    for distance in (0, 1, 7):
        along = torch.diagonal(scores, -distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-4)
    assert torch.allclose(queries.norm(dim=1), q.norm().expand(40), atol=1e-5)
    assert not torch.allclose(scores[0, 0], scores[9, 0], atol=1e-2)


def test_qk_norm_takes_the_length_out_of_queries_and_keys() -> None:
    layer = attention(4, 2, qk_norm=True)
    x = torch.randn(2, 9, 32)
    before = layer(x, rotation(9))
    with torch.no_grad():
        layer.qkv.weight[:48] *= 16  # queries and keys
    assert torch.allclose(layer(x, rotation(9)), before, atol=1e-3)
    with torch.no_grad():
        layer.qkv.weight[48:] *= 2  # values
    assert torch.allclose(layer(x, rotation(9)), 2 * before, atol=1e-3)


def test_initialisation_is_seeded_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, same, other = model(3), model(3), model(4)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == name.endswith("norm.weight")


def test_initial_sizes() -> None:
    """Standard deviation 0.02; residual outputs divided by sqrt(2 layers) (GPT-2)."""
    net = model(d_model=128, d_ffn=384, num_layers=8)
    for name, parameter in net.named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
            assert float(parameter.detach().std()) == pytest.approx(
                0.02 / (4 if residual else 1), rel=0.05
            ), name


def test_the_initial_loss_is_that_of_a_uniform_guess() -> None:
    assert float(model().loss(tokens(0), tokens(1)).detach()) == pytest.approx(math.log(VOCAB), abs=0.1)


def test_loss_is_the_mean_over_tokens() -> None:
    net = model()
    logits = net(tokens(0)).double().log_softmax(-1)
    wanted = -logits.gather(-1, tokens(1)[..., None]).mean()
    assert float(net.loss(tokens(0), tokens(1)).detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)


def test_tied_embeddings_are_one_parameter() -> None:
    net = model(tie_embeddings=True)
    assert net.head.weight is net.embedding.weight
    assert "head.weight" not in dict(net.named_parameters())
    assert losses(net)[-1] < math.log(VOCAB) + 0.5
    assert net.head.weight is net.embedding.weight


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [{"qk_norm": True}, GPT2, {**GPT2, "ffn": "swiglu"}])
def test_other_shapes_train(changes: dict[str, object], dtype: str) -> None:
    net = model(**changes)
    before = [p.detach().clone() for p in net.parameters()]
    assert all(math.isfinite(loss) for loss in losses(net, dtype, steps=2))
    for (name, now), then in zip(net.named_parameters(), before, strict=True):
        assert not torch.equal(now, then), name


def test_learned_positions_tell_places_apart() -> None:
    net = model(**GPT2)
    same = torch.zeros(1, 8, dtype=torch.int64)
    assert (net(same)[0, 0] != net(same)[0, 5]).any()


PUBLISHED = {
    124_439_808: ModelSpec(
        name="gpt2-124m",
        **{**GPT2, "max_seq_len": 1024},  # type: ignore[arg-type]
        num_layers=12,
        d_model=768,
        num_heads=12,
        num_kv_heads=12,
        d_ffn=3072,
        vocab_size=50257,
    ),
    6_738_415_616: ModelSpec(
        name="llama2-7b",
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=32,
        d_ffn=11008,
        vocab_size=32000,
    ),
    8_030_261_248: ModelSpec(
        name="llama3-8b",
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        d_ffn=14336,
        vocab_size=128256,
    ),
    8_190_735_360: ModelSpec(
        name="qwen3-8b",
        num_layers=36,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        d_head=128,
        d_ffn=12288,
        vocab_size=151936,
        qk_norm=True,
    ),
}


@pytest.mark.parametrize("count", PUBLISHED, ids=lambda count: PUBLISHED[count].name)
def test_published_sizes(count: int) -> None:
    """The built model, on no memory, has the published number of parameters; so says the formula."""
    with torch.device("meta"):
        net = build(PUBLISHED[count], 0, 0)
    assert sum(p.numel() for p in net.parameters()) == count == num_parameters(PUBLISHED[count]).total


@pytest.mark.parametrize("changes", [{}, GPT2, {"qk_norm": True, "tie_embeddings": True}, {"d_head": 12}])
def test_the_formula_counts_what_is_built(changes: dict[str, object]) -> None:
    built = sum(p.numel() for p in model(**changes).parameters())
    assert built == num_parameters(spec(**changes), VOCAB).total


def test_vocabulary_is_the_published_one_or_the_tokenizer_s() -> None:
    assert build(spec(vocab_size=100), 61, 0).head.out_features == 100
    net = build(spec(), 61, 0)
    assert isinstance(net, Transformer) and net.embedding.num_embeddings == 61
