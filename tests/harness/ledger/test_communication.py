"""Collectives by formula against those that real ranks of gloo made: calls and bytes, as integers."""

from __future__ import annotations

import traceback
from functools import cache
from typing import Any

import pytest

from harness.data.vocabulary import vocab_size
from harness.ledger.communication import collectives, explained
from harness.ledger.step import CONTROL, Collective
from harness.ledger.traffic.base import summed
from harness.ledger.traffic.data import BUCKET, FIRST_BUCKET, buckets
from harness.ledger.traffic.experts import Routing, uniform
from harness.ledger.volumes import tensor_parallel_layer
from harness.spec import ModelSpec, OptimizerSpec, ParallelismSpec, PrecisionSpec, RunSpec

VOCAB = vocab_size("bytes")
LLAMA: dict[str, Any] = {
    "name": "t",
    "num_layers": 4,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ffn": 56,
}
GPT: dict[str, Any] = {
    **LLAMA,
    "num_kv_heads": 4,
    "norm": "layernorm",
    "positions": "learned",
    "bias": True,
    "ffn": "gelu",
    "qk_norm": True,
}
MOE: dict[str, Any] = {**LLAMA, "num_layers": 2, "moe": {"experts": 4, "top_k": 2, "aux_loss": 0.01}}
AUTOCAST = {"compute": "bf16"}
MASTER = {"compute": "bf16", "weights": "bf16", "master": True}


def make(
    mesh: dict[str, Any],
    model: dict[str, Any] = LLAMA,
    precision: dict[str, Any] | None = None,
    optimizer: str = "adamw",
    **fields: Any,
) -> RunSpec:
    return RunSpec(
        task="step",
        model=ModelSpec.model_validate(model),
        precision=PrecisionSpec(name="p", **(precision or {})),
        parallelism=ParallelismSpec(**mesh),
        optimizer=OptimizerSpec(name=optimizer),  # type: ignore[arg-type]
        **{"batch_size": 16, "seq_len": 16, **fields},
    )


SP = {"sequence_parallel": True}
TWO: dict[str, RunSpec] = {
    "ddp": make({"dp": 2}),
    "ddp, several buckets": make({"dp": 2}, {**LLAMA, "d_model": 256, "d_ffn": 700}),
    "ddp, accumulation": make({"dp": 2}, GPT, AUTOCAST, accumulation=2),
    "ddp, bf16 weights": make({"dp": 2}, precision={**AUTOCAST, "weights": "bf16"}),
    "ddp, loss scaling": make({"dp": 2}, precision={"compute": "fp16", "loss_scaling": "dynamic"}),
    "ddp, main gradients": make({"dp": 2}, precision={**MASTER, "main_gradients": True}, accumulation=2),
    "zero 1": make({"dp": 2, "zero": 1}),
    "zero 1, accumulation": make({"dp": 2, "zero": 1}, GPT, AUTOCAST, accumulation=2),
    "zero 2": make({"dp": 2, "zero": 2}),
    "zero 2, padded": make(
        {"dp": 2, "zero": 2}, {**LLAMA, "num_layers": 2, "d_model": 24, "d_ffn": 51}, AUTOCAST
    ),
    "zero 3": make({"dp": 2, "zero": 3}, GPT),
    "zero 3, accumulation": make({"dp": 2, "zero": 3}, precision=AUTOCAST, accumulation=2, recompute="full"),
    "tp": make({"tp": 2}),
    "tp, gpt": make({"tp": 2}, GPT, AUTOCAST),
    "tp, recomputed": make({"tp": 2}, precision=AUTOCAST, accumulation=2, recompute="full"),
    "tp, nothing to shard": make({"tp": 2, "zero": 3}, precision=AUTOCAST),
    "tp, sp": make({"tp": 2, **SP}),
    "tp, sp, gpt": make({"tp": 2, **SP}, GPT, AUTOCAST),
    "tp, sp, recomputed": make({"tp": 2, **SP}, precision=AUTOCAST, accumulation=2, recompute="full"),
    "pp": make({"pp": 2}),
    "pp, gpipe": make({"pp": 2, "schedule": "gpipe"}, precision=AUTOCAST, accumulation=2),
    "pp, interleaved": make({"pp": 2, "schedule": "interleaved"}),
    "pp, zero-bubble": make({"pp": 2, "schedule": "zero-bubble"}, accumulation=2),
    "pp, zbv": make({"pp": 2, "schedule": "zbv"}),
    "pp, dualpipev": make({"pp": 2, "schedule": "dualpipev"}),
    "cp, ring": make({"cp": 2}),
    "cp, ring, zero 3": make({"cp": 2, "zero": 3}, precision=AUTOCAST, accumulation=2, recompute="full"),
    "cp, all-gather": make({"cp": 2, "context": "all-gather"}, recompute="selective"),
    "ep": make({"ep": 2}, MOE),
    "ep, zero 3": make({"ep": 2, "zero": 3}, MOE, AUTOCAST, accumulation=2, recompute="full"),
    "experts on one rank": make({"dp": 2}, MOE),
}
"""Meshes of 2 ranks."""
FOUR: dict[str, RunSpec] = {
    "ddp": make({"dp": 4}),
    "zero 1": make({"dp": 4, "zero": 1}),
    "zero 2": make({"dp": 4, "zero": 2}, {**LLAMA, "d_model": 40, "d_ffn": 50}),
    "zero 3": make({"dp": 4, "zero": 3}, {**LLAMA, "d_model": 40, "d_ffn": 50}, AUTOCAST, accumulation=2),
    "hsdp": make({"dp": 4, "zero": 3, "replicas": 2}, {**LLAMA, "d_model": 40, "d_ffn": 51}, AUTOCAST),
    "tp": make({"tp": 4}, GPT),
    "tp, sp": make({"tp": 4, **SP}, GPT),
    "pp": make({"pp": 4}),
    "cp, ring": make({"cp": 4}),
    "cp, all-gather": make({"cp": 4, "context": "all-gather"}),
    "ep": make({"ep": 4}, MOE),
    "dp, tp": make({"dp": 2, "tp": 2}),
    "zero 3, tp, sp": make({"dp": 2, "zero": 3, "tp": 2, **SP}, precision=AUTOCAST, accumulation=2),
    "zero 3, pp": make({"dp": 2, "zero": 3, "pp": 2}),
    "zero 2, pp, zbv": make({"dp": 2, "zero": 2, "pp": 2, "schedule": "zbv"}, accumulation=2),
    "dp, pp": make({"dp": 2, "pp": 2}),
    "zero 3, cp": make({"dp": 2, "zero": 3, "cp": 2}),
    "dp, ep": make({"dp": 2, "ep": 2}, MOE),
    "zero 3, ep": make({"dp": 2, "zero": 3, "ep": 2}, MOE, AUTOCAST),
    "dp, pp of experts": make({"dp": 2, "pp": 2, "schedule": "interleaved"}, {**MOE, "num_layers": 4}),
}
"""Meshes of 4."""

Measured = tuple[tuple[Collective, ...], list[int]]
"""Collectives of one rank's step, and by expert the pairs that the rank's own tokens made with it in all layers."""


def measure(specs: list[RunSpec]) -> list[Measured | str]:
    """On each rank: the second step of every spec, one after the other in the same process; where one fails, why."""
    found: list[Measured | str] = []
    for spec in specs:
        try:
            found.append(_step(spec))
        except Exception:  # told by the spec's own test
            found.append(traceback.format_exc())
    return found


def _step(spec: RunSpec) -> Measured:
    import torch
    import torch.distributed as dist

    from harness.models import transformer
    from harness.optim import build
    from harness.parallel import layout, mesh, recorder
    from harness.precision.loss_scaling import loss_scaler
    from harness.run import COMPUTE_DTYPES

    with recorder.paused():
        laid_on = mesh.build(spec.parallelism, dist.get_rank())
        model = transformer.build(spec.model, VOCAB, 0).to(COMPUTE_DTYPES[spec.precision.weights])
        transformer.set_recompute(model, spec.recompute)
        laid_out = layout.lay_out(model, spec, laid_on)
        optimizer = build.build(laid_out)
    scaler = loss_scaler(spec.precision, torch.device("cpu"))
    shape = (spec.batch_size, spec.seq_len + 1)
    batch = torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # in the first DDP orders its buckets, and a pipeline's stages greet each other
        with recorder.recording() as calls:
            loss = laid_out.forward_backward(batch[:, :-1], batch[:, 1:], scaler.get_scale())
            scaler.unscale_(optimizer)
            laid_out.agree(loss)
            scaler.step(optimizer)
            scaler.update()
            taken = [
                each.tally[1] for part in laid_out.parts for each in part.mixtures() if each.tally is not None
            ]
            laid_out.end_step()
            for part in laid_out.parts:
                part.end_step()
    pairs = torch.stack(taken).sum(0).int().tolist() if taken else []
    return recorder.collectives(calls, spec.parallelism), pairs


@cache
def measured(num_ranks: int) -> dict[str, list[Measured | str]]:
    """Name of a spec -> what each rank did, all specs measured by one group of ranks."""
    pytest.importorskip("torch")
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor  # noqa: F401 - once, before the ranks are forked

    from tests.harness.parallel.conftest import run_ranks

    specs = TWO if num_ranks == 2 else FOUR
    ranks = run_ranks(num_ranks, measure, list(specs.values()), limit_s=240)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(specs)}


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [(2, name) for name in TWO] + [pytest.param(4, name, marks=pytest.mark.slow) for name in FOUR],
)
def test_formula_equals_what_ranks_do(num_ranks: int, name: str) -> None:
    spec = (TWO if num_ranks == 2 else FOUR)[name]
    answers = measured(num_ranks)[name]
    assert not any(isinstance(answer, str) for answer in answers), answers
    pairs = [taken for _, taken in answers]
    for rank, (found, _) in enumerate(answers):
        assert found == collectives(spec, VOCAB, rank, _routing(spec, rank, pairs))
        assert len(found) > 1  # the control ones are always there


def _routing(spec: RunSpec, rank: int, pairs: list[list[int]]) -> Routing | None:
    """What came to the rank's experts from the ranks of its ep group."""
    mesh = spec.parallelism
    if spec.model.moe is None:
        return None
    here = spec.model.moe.experts // mesh.ep
    first = here * mesh.place(rank)["ep"]
    received = sum(sum(pairs[other][first : first + here]) for other in mesh.group(rank, ("ep",)))
    return Routing(sum(pairs[rank]), received)


def test_uniform_routing_is_what_is_sent_on_average() -> None:
    """Whatever a router does, the pairs that come to all ranks are those that all ranks send."""
    spec = TWO["ep"]
    pairs = [answer[1] for answer in measured(2)["ep"]]
    found = [_routing(spec, rank, pairs) for rank in (0, 1)]
    assert found[0].received != found[1].received
    assert (
        sum(each.received for each in found) == 2 * uniform(spec, VOCAB, 0).received == sum(map(sum, pairs))
    )


EIGHT_LAYERS = {**LLAMA, "num_layers": 8}
MANY: dict[str, RunSpec] = {
    "three axes": make({"dp": 2, "pp": 2, "tp": 2}, EIGHT_LAYERS),
    "three axes, sharded": make({"dp": 2, "zero": 3, "pp": 2, "tp": 2, **SP}, EIGHT_LAYERS),
    "64 ranks": make({"dp": 16, "zero": 3, "cp": 2, "tp": 2}, EIGHT_LAYERS, AUTOCAST, batch_size=64),
    "hsdp and ring": make({"dp": 8, "zero": 3, "replicas": 2, "cp": 2}, EIGHT_LAYERS),
}
"""Meshes of more ranks than this machine would start."""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MANY))
def test_formula_equals_what_a_trace_finds(name: str) -> None:
    pytest.importorskip("torch")
    from harness.trace.ranks import trace_ranks

    spec = MANY[name].model_copy(update={"task": "trace"})
    found = trace_ranks(spec, VOCAB)
    assert found
    for each in found:
        assert each.collectives == collectives(spec, VOCAB, each.rank)
        assert len(each.collectives) > 2


# What needs no ranks


def total(spec: RunSpec, axis: str, op: str, rank: int = 0) -> tuple[int, int]:
    """(calls, bytes) of one kind."""
    found = [c for c in collectives(spec, VOCAB, rank) if (c.axis, c.op) == (axis, op)]
    return (found[0].count, found[0].num_bytes) if found else (0, 0)


def test_one_rank_exchanges_nothing() -> None:
    assert collectives(make({}), VOCAB) == ()
    assert explained(make({}), VOCAB) == ()


def test_zero_3_gathers_half_as_much_again_as_data_parallelism_sends() -> None:
    """Rajbhandari et al. 2020: 2 Psi, 2 Psi, 3 Psi elements; stage 3's exactly but for the root, which is gathered
    once."""
    model = {**LLAMA, "num_layers": 64, "d_model": 256, "num_heads": 8, "d_ffn": 704, "vocab_size": 256}
    sent = {}
    for zero in (0, 2, 3):
        spec = make({"dp": 64, "zero": zero}, model, batch_size=64)
        kinds = [c for c in collectives(spec, VOCAB) if c.axis == "dp"]
        sent[zero] = sum(c.sent_bytes for c in kinds)
    assert sent[2] == sent[0]
    assert sent[3] / sent[0] == pytest.approx(1.5, rel=0.002)


def test_tensor_parallel_layer_is_narayanan_s() -> None:
    """8 b s h (t - 1) / t elements a layer and microbatch, as much with sequence parallelism."""
    for sequence_parallel in (False, True):
        layers = {}
        for count in (2, 3):
            spec = make(
                {"tp": 4, "sequence_parallel": sequence_parallel},
                {**GPT, "num_layers": count, "qk_norm": False},
            )
            activations = [
                t for t in explained(spec, VOCAB) if t.axis == "tp" and "seen in parts" not in t.name
            ]
            layers[count] = sum(c.sent_bytes for c in summed(activations))
        assert layers[3] - layers[2] == 4 * tensor_parallel_layer(16, 16, 32, 4)


def test_accumulation_multiplies_all_but_ddp_s_gradients() -> None:
    for mesh, op, factor in (({"dp": 2}, "all_reduce", 1), ({"dp": 2, "zero": 3}, "all_gather", 4)):
        once, four = (total(make(mesh, accumulation=count), "dp", op) for count in (1, 4))
        assert four == (once[0] * factor, once[1] * factor)


def test_explained_adds_up_to_collectives() -> None:
    for spec in (*TWO.values(), *FOUR.values()):
        for rank in (0, spec.parallelism.num_ranks - 1):
            parts = explained(spec, VOCAB, rank)
            assert sum(each.num_bytes for each in parts) == sum(
                c.num_bytes for c in collectives(spec, VOCAB, rank)
            )
            assert all(each.formula and each.numbers and each.axis for each in parts)


def test_control_is_apart_from_the_scheme() -> None:
    assert total(make({"dp": 2}), CONTROL, "all_reduce") == (1, 16)
    assert total(make({"dp": 2}, MOE), CONTROL, "all_reduce") == (2, 16 + 3 * 8 * 4 * 2)


def test_buckets_close_at_ddp_s_limits() -> None:
    torch = pytest.importorskip("torch")
    assert torch.distributed._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET
    big = {**LLAMA, "num_layers": 20, "d_model": 512, "num_heads": 8, "d_ffn": 1376}
    from harness.ledger.inventory import inventory

    found = buckets(inventory(ModelSpec.model_validate(big), VOCAB), 4)
    assert all(size >= limit for size, limit in zip(found[:-1], [FIRST_BUCKET, *[BUCKET] * 99], strict=False))
    assert sum(found) == 4 * sum(p.numel for p in inventory(ModelSpec.model_validate(big), VOCAB))
    assert len(found) > 3
