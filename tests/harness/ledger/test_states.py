"""Bytes between steps, against PyTorch's own partitions and a real optimizer's states."""

import pytest
import torch

from harness.ledger.inventory import inventory
from harness.ledger.states import chunk_rows, greedy_share, optimizer_groups, states
from harness.models import transformer
from harness.optim import adamw
from harness.precision.linear import apply_recipe
from harness.run import COMPUTE_DTYPES
from harness.spec import ModelSpec, OptimizerSpec, ParallelismSpec, RunSpec
from suite.declare import presets

SMALL = ModelSpec(name="small", num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ffn=160)


def spec_of(precision="bf16", optimizer="adamw", model=SMALL, **mesh) -> RunSpec:
    return RunSpec(
        task="ledger",
        model=model,
        precision=presets("precisions")[precision],
        optimizer=OptimizerSpec(name=optimizer),
        parallelism=ParallelismSpec(**mesh),
        batch_size=8,
        seq_len=16,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp64", "fp8-delayed", "nvfp4"])
def test_a_real_step(precision):
    """Weights with buffers, gradients and AdamW's states after one step of one process."""
    spec = spec_of(precision)
    model = transformer.build(SMALL, 272, 0).to(COMPUTE_DTYPES[spec.precision.weights])
    apply_recipe(model, spec.precision)
    optimizer = adamw.build(model, spec.optimizer)
    narrow = spec.precision.compute != spec.precision.weights
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        loss = model.loss(torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    loss.backward()
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values()]
    assert states(spec, 272).as_dict() == {
        "weights": num_bytes([*model.parameters(), *model.buffers()]),
        "gradients": num_bytes([p.grad for p in model.parameters()]),
        "optimizer": num_bytes(held),
    }


def num_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("precision", "each"),
    [
        ("bf16-pure", 8),
        ("bf16-fp32-moments", 12),
        ("bf16-master", 16),
        ("bf16-main-gradients", 18),
        ("bf16", 16),
    ],
)
def test_bytes_a_parameter(precision, each):
    """12, 16 and 18 of the papers; a step counter of 4 bytes is kept for each tensor beside."""
    spec = spec_of(precision)
    parameters = inventory(SMALL, 272)
    counters = 4 * len(parameters)
    assert states(spec, 272).total - counters == each * sum(p.numel for p in parameters)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_greedy_share_is_torchs(ranks, monkeypatch):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = inventory(SMALL, 272)
    groups = optimizer_groups(spec_of(), parameters)
    tensors = [[torch.empty(p.shape, device="meta") for p in group] for group in groups]
    torchs = object.__new__(ZeroRedundancyOptimizer)
    torchs.world_size = ranks
    torchs._partition_parameters_cache = []
    torchs.param_groups = [{"params": group} for group in tensors]
    theirs = [
        [t.numel() for group in of_rank for t in group["params"]]
        for of_rank in torchs._partition_parameters()
    ]
    shares = greedy_share([[p.numel for p in group] for group in groups], ranks)
    assert [[groups[g][i].numel for g, i in share] for share in shares] == theirs


@pytest.mark.parametrize(("rows", "parts"), [(10, 3), (10, 4), (7, 8), (16, 4), (1, 3)])
def test_chunks_are_torchs(rows, parts):
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    sizes = [len(chunk) for chunk in _chunk_with_empty(torch.empty(rows, 2), parts, dim=0)]
    assert [chunk_rows(rows, parts, index)[1] for index in range(parts)] == sizes
    assert {chunk_rows(rows, parts, index)[0] for index in range(parts)} == {sizes[0]}


def test_shards_add_up():
    whole = states(spec_of(), 272)
    for stage in (1, 2, 3):
        of_ranks = [states(spec_of(dp=3, zero=stage), 272, rank) for rank in range(3)]
        extra = (
            4 * len(inventory(SMALL, 272)) * (0 if stage == 1 else 2)
        )  # each rank counts its shards' steps
        assert sum(each.optimizer for each in of_ranks) == whole.optimizer + extra
        padded = {each.weights for each in of_ranks}
        assert len(padded) == 1
        assert padded == {whole.weights} if stage == 1 else padded.pop() >= whole.weights / 3
    replicas = [states(spec_of(dp=4, zero=3, replicas=2), 272, rank) for rank in range(4)]
    assert replicas[0] == replicas[2] and replicas[1] == replicas[3]


def test_optimizers_of_fewer_states():
    count = sum(p.numel for p in inventory(SMALL, 272))
    assert states(spec_of("fp32", "sgd"), 272).optimizer == 4 * count
    matrices = sum(p.numel for p in inventory(SMALL, 272) if p.layer is not None and p.is_matrix)
    rest = [p for p in inventory(SMALL, 272) if p.layer is None or not p.is_matrix]
    muon = states(spec_of("fp32", "muon"), 272).optimizer
    assert muon == 4 * matrices + sum(8 * p.numel + 4 for p in rest)
