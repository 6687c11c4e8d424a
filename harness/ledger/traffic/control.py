"""Numbers exchanged for the record: the loss and the gradient norm, axis `control`."""

from __future__ import annotations

from collections.abc import Iterator

from harness.ledger.placement import stages
from harness.ledger.step import CONTROL
from harness.ledger.terms import BYTES
from harness.ledger.traffic.base import Traffic, calls, group_size
from harness.spec import RunSpec
from harness.spec.parallelism import DENSE

FP64, FP32 = 8, 4


def control(spec: RunSpec, vocab_size: int | None, rank: int) -> Iterator[Traffic]:
    """One all_reduce of loss and squared norm over all ranks; of a pipeline, each micro-step's loss from the last
    stage."""
    mesh = spec.parallelism
    if mesh.num_ranks == 1:
        return
    yield calls("loss and gradient norm", CONTROL, "all_reduce", mesh.num_ranks, calls=1, numbers=2, e=FP64)
    if spec.precision.loss_scaling == "dynamic":
        yield calls("whether gradients are finite", CONTROL, "all_reduce", mesh.num_ranks, calls=1, e=FP32)
    if mesh.pp > 1:
        wide = max(4, BYTES[spec.precision.weights])
        yield calls("loss of a micro-step", CONTROL, "broadcast", mesh.pp, calls=spec.accumulation, e=wide)
    dense = group_size(mesh, DENSE)
    if spec.model.moe is not None and dense > 1:
        for stage in stages(spec, mesh.place(rank)["pp"]):
            load = {"numbers": 3, "E": spec.model.moe.experts, "L": stage.num_layers, "e": FP64}
            yield calls("load of experts", CONTROL, "all_reduce", dense, calls=1, **load)
