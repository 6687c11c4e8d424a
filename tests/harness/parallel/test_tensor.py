"""Parameters cut for tensor parallelism: what lies where, what is refused, and the moves between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.ledger.traffic.tensor import is_partial
from harness.models import transformer
from harness.parallel import layout, mesh, tensor
from harness.spec import ModelSpec, MoESpec, ParallelismSpec
from tests.harness.parallel.conftest import run_ranks
from tests.harness.parallel.training import TINY, VOCAB, make_spec, prepare

GPT: dict[str, Any] = {**TINY, "bias": True, "norm": "layernorm", "positions": "learned", "ffn": "gelu"}


@pytest.mark.parametrize("model", [{**TINY, "num_kv_heads": 2, "qk_norm": True}, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_put_together_are_the_whole(model: dict[str, Any], ranks: int) -> None:
    spec = ModelSpec(**model)
    whole = transformer.build(spec, VOCAB, 0)
    cut = 0
    for name, parameter in whole.named_parameters():
        parts = [tensor.shard(name, parameter.detach(), spec, ranks, rank) for rank in range(ranks)]
        assert torch.equal(tensor.join(name, parts, spec), parameter)
        cut += parts[0].numel() < parameter.numel()
    assert cut == (0 if ranks == 1 else 2 + 2 * (4 if spec.ffn == "swiglu" else 6))


def test_a_part_of_the_fused_weights_is_the_rank_s_own_heads_and_channels() -> None:
    spec = ModelSpec(**{**TINY, "num_kv_heads": 2})
    rows = torch.arange((4 + 2 * 2) * 8)[
        :, None
    ]  # heads of 8 rows: four of queries, two of keys, two of values
    heads = tensor.shard("layers.0.attention.qkv.weight", rows, spec, 2, 1).flatten() // 8
    assert heads.view(-1, 8)[:, 0].tolist() == [2, 3, 5, 7]
    channels = tensor.shard("layers.0.ffn.gate_up.weight", torch.arange(128)[:, None], spec, 2, 1).flatten()
    assert channels.tolist() == [*range(32, 64), *range(96, 128)]


@pytest.mark.parametrize(
    ("changes", "vocab", "reason"),
    [
        ({"num_kv_heads": 1}, 64, "num_kv_heads, 1"),
        ({"d_ffn": 63}, 64, "d_ffn, 63"),
        ({}, 65, "the vocabulary, 65"),
        ({"moe": MoESpec(experts=2)}, 64, "experts"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, Any], vocab: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tensor.check(ModelSpec(**{**TINY, **changes}), 2, vocab)


def moves(sequence: bool) -> list[Tensor]:
    """Forward and gradient of entering and leaving, each rank with inputs of its own."""
    rank = dist.get_rank()
    devices = mesh.build(ParallelismSpec(tp=2), rank).over("tp")
    stream = torch.full((1, 2 if sequence else 4, 1), 1.0 + rank if sequence else 1.0, requires_grad=True)
    entered = tensor._enter(stream, devices, sequence)
    entered.backward(torch.full((1, 4, 1), 10.0**rank))
    partial = torch.arange(4.0).view(1, 4, 1).add(100.0 * rank).requires_grad_()
    left = tensor._leave(partial, devices, sequence)
    left.backward(torch.full_like(left, 3.0 + (rank if sequence else 0)))
    assert stream.grad is not None and partial.grad is not None
    found = [entered.detach(), stream.grad, left.detach(), partial.grad]
    return [each.flatten().clone() for each in found]


def test_whole_tokens_on_every_rank() -> None:
    for entered, from_ranks, left, back in run_ranks(2, moves, False):
        assert entered.tolist() == [1, 1, 1, 1]
        assert from_ranks.tolist() == [11, 11, 11, 11], "gradients of the ranks' parts are added up"
        assert left.tolist() == [100, 102, 104, 106]
        assert back.tolist() == [3, 3, 3, 3]


def test_each_rank_has_its_part_of_the_tokens() -> None:
    found = run_ranks(2, moves, True)
    for rank, (entered, from_ranks, left, back) in enumerate(found):
        assert entered.tolist() == [1, 1, 2, 2]
        assert from_ranks.tolist() == [11, 11]
        assert left.tolist() == [[100, 102], [104, 106]][rank]
        assert back.tolist() == [3, 3, 4, 4]


def held(sequence: bool, tied: bool) -> dict[str, Any]:
    spec = make_spec({"tp": 2, "sequence_parallel": sequence}, model={"tie_embeddings": tied})
    run = prepare(spec)
    return {
        "sizes": {name: tuple(parameter.shape) for name, parameter in run.model.named_parameters()},
        "tied": run.model.head.weight is run.model.embedding.weight,
    }


def test_what_lies_on_a_rank() -> None:
    for found in run_ranks(2, held, True, False):
        assert not found["tied"]
        sizes = found["sizes"]
        assert sizes["embedding.weight"] == sizes["head.weight"] == (32, 32)
        assert sizes["layers.1.attention.qkv.weight"] == (48, 32)
        assert sizes["layers.1.attention.output.weight"] == (32, 16)
        assert sizes["layers.1.ffn.gate_up.weight"] == (64, 32)
        assert sizes["layers.1.ffn.down.weight"] == (32, 32)
        assert sizes["layers.1.ffn_norm.weight"] == sizes["norm.weight"] == (32,)


def test_tied_embeddings_stay_tied() -> None:
    assert all(found["tied"] for found in run_ranks(2, held, False, True))


def test_partial_gradients() -> None:
    norms = ["norm.weight", "layers.0.ffn_norm.weight", "layers.0.attention.output.bias", "positions.weight"]
    heads = ["layers.0.attention.query_norm.weight", "layers.0.attention.key_norm.weight"]
    cut = ["layers.0.attention.qkv.bias", "layers.0.ffn.up.bias", "head.weight"]
    assert not any(is_partial(name, False) for name in (*norms, *cut))
    assert all(is_partial(name, True) for name in (*norms, *heads))
    assert all(is_partial(name, False) for name in heads)
    assert not any(is_partial(name, True) for name in cut)


def test_sequences_that_do_not_divide_are_refused() -> None:
    spec = make_spec({"tp": 2, "sequence_parallel": True}, seq_len=15)
    with pytest.raises(ValueError, match="15 tokens do not divide over tp 2"):
        layout.check(spec)
