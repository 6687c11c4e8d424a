"""What ranks that hold the same parameters exchange: gradients summed up, and with ZeRO parameters gathered.

    P     parameters of the rank as pp, tp and ep leave them
    P_n   the same with first dimensions padded to a multiple of n
    A     micro-steps
    e_w, e_g, e_p   bytes of a stored, a reduced, a gathered one

    DDP      all_reduce P e_g, once a step: DDP's buckets, or one buffer where DDP cannot go
    ZeRO-1   the same, and broadcasts of P e_w: every rank sends what it updated
    ZeRO-2   A times: all_gather P_n e_p, reduce_scatter P_n e_g
    ZeRO-3   A times: all_gather P_n e_p forward and the blocks' once more backward, reduce_scatter P_n e_g
    HSDP     the same over the shards, and all_reduce of the shard P_n e_g / n over the replicas

Follows harness.parallel.replicate and harness.parallel.zero. A group of FSDP2 is a block, its experts where ep
shares them out, or the root.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.ledger.inventory import Parameter
from harness.ledger.placement import local_parameters
from harness.ledger.recipes import num_delayed
from harness.ledger.states import greedy_share, is_muon, optimizer_groups
from harness.ledger.terms import BYTES
from harness.ledger.traffic.base import Traffic, axis_name, calls, group_size
from harness.ledger.transfers import weight_gathers
from harness.spec import AXES, Axis, ParallelismSpec, RunSpec
from harness.spec.parallelism import DENSE, EXPERT

FIRST_BUCKET = 1024 * 1024
"""Bytes of gradients at which DDP closes its first bucket (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""
BUCKET = 25 * 1024 * 1024
"""And the others (bucket_cap_mb)."""


def data(spec: RunSpec, vocab_size: int | None, rank: int) -> Iterator[Traffic]:
    """Gradients and gathered parameters in one rank's step."""
    parameters = local_parameters(spec, vocab_size, rank)
    yield from _maxima(spec)
    if spec.parallelism.zero >= 2:
        yield from _sharded(spec, parameters)
        yield from _orthogonalised(spec, parameters)
        return
    yield from _replicated(spec, parameters)
    if spec.parallelism.zero == 1:
        yield from _updated(spec, parameters)


def gradient_bytes(spec: RunSpec) -> int:
    """e_g of whole gradients."""
    return 4 if spec.precision.main_gradients else BYTES[spec.precision.weights]


def gathered_bytes(spec: RunSpec) -> int:
    """e_p: the compute dtype where FSDP2's mixed precision takes autocast's place, else the weights'."""
    return BYTES[spec.precision.weights if spec.precision.recipe is not None else spec.precision.compute]


def _maxima(spec: RunSpec) -> Iterator[Traffic]:
    """Delayed scales: the largest elements that any rank saw, of all quantisers together, once a step."""
    mesh, count = spec.parallelism, num_delayed(spec)
    if count and mesh.num_ranks > 1:
        yield calls(
            "largest elements", axis_name(mesh, AXES), "all_reduce", mesh.num_ranks, calls=1, n=count, e=4
        )


# Whole parameters


def _replicated(spec: RunSpec, parameters: Sequence[Parameter]) -> Iterator[Traffic]:
    mesh, each = spec.parallelism, gradient_bytes(spec)
    experts = [p for p in parameters if p.kind == "expert"] if mesh.ep > 1 else []
    dense = [p for p in parameters if p not in experts]
    flat = mesh.pp > 1 or spec.precision.main_gradients
    for name, axes, part, count in (
        ("gradients", DENSE, dense, 1 if flat else len(buckets(dense, each))),
        ("gradients of experts", EXPERT, experts, 1),
    ):
        if part:
            yield _whole(spec, name, axes, "all_reduce", part, count, each)


def _updated(spec: RunSpec, parameters: Sequence[Parameter]) -> Iterator[Traffic]:
    """ZeroRedundancyOptimizer's broadcasts: one from each rank, of all that it owns, or of one FP32 element."""
    mesh, weight = spec.parallelism, BYTES[spec.precision.weights]
    experts = [p for p in parameters if p.kind == "expert"] if mesh.ep > 1 else []
    dense = [p for p in parameters if p not in experts]
    for name, axes, part in (
        ("updated parameters", DENSE, dense),
        ("updated parameters of experts", EXPERT, experts),
    ):
        size = group_size(mesh, axes)
        if not part or size == 1:
            continue
        found = [[p.numel for p in group] for group in optimizer_groups(spec, part)]
        idle = sum(not share for share in greedy_share(found, size))
        sent = _whole(spec, name, axes, "broadcast", part, size, weight)
        if idle:
            sent = replace(
                sent,
                num_bytes=sent.num_bytes + 4 * idle,
                formula=f"{sent.formula} + 4 idle",
                numbers=f"{sent.numbers} + 4 · {idle}",
            )
        yield sent


def _whole(
    spec: RunSpec, name: str, axes: Sequence[Axis], op: str, part: Sequence[Parameter], calls: int, each: int
) -> Traffic:
    mesh, numel = spec.parallelism, sum(p.numel for p in part)
    symbol = "P e_w" if op == "broadcast" else "P e_g"
    return Traffic(
        name=name,
        axis=axis_name(mesh, axes),
        op=op,  # type: ignore[arg-type]
        group_size=group_size(mesh, axes),
        count=calls,
        num_bytes=numel * each,
        formula=symbol,
        numbers=f"{numel:,} · {each}",
    )


def buckets(parameters: Sequence[Parameter], each: int) -> list[int]:
    """Bytes of DDP's buckets, in the order in which a backward pass finishes gradients (DDP orders them so after its
    first step): a bucket is closed once it holds its limit or more."""
    found: list[int] = []
    held = 0
    for parameter in backward_order(parameters):
        held += parameter.numel * each
        if held >= (BUCKET if found else FIRST_BUCKET):
            found.append(held)
            held = 0
    return [*found, held] if held else found


_OF_BLOCK = (
    "ffn.down",
    "ffn.up",
    "ffn.gate_up",
    "ffn_norm",
    "attention.output",
    "key_norm",
    "query_norm",
    "qkv",
    "attention_norm",
)


def backward_order(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Last layer first, within a layer from its output to its input; embedding and positions last."""

    def place(parameter: Parameter) -> tuple[int, int, bool]:
        if parameter.layer is None:
            first = ("head", "norm").index(parameter.kind) if parameter.kind in ("head", "norm") else 2
            return (-1 if first < 2 else 1_000_000, first, parameter.name.endswith("weight"))
        within = next((i for i, name in enumerate(_OF_BLOCK) if f".{name}." in parameter.name), 0)
        return (1_000_000 - 1 - parameter.layer, within, parameter.name.endswith("weight"))

    return sorted(parameters, key=place)


# Sharded parameters


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers together."""

    kind: str
    """block, experts or root."""
    axes: tuple[Axis, ...]
    padded: int
    """Elements, first dimensions padded to a multiple of the shards."""


def _sharded(spec: RunSpec, parameters: Sequence[Parameter]) -> Iterator[Traffic]:
    mesh, passes = spec.parallelism, spec.accumulation
    gathered, reduced = gathered_bytes(spec), BYTES[spec.precision.weights]
    found = groups(spec, parameters)
    for kind, axes in dict.fromkeys((group.kind, group.axes) for group in found):
        same = [group for group in found if (group.kind, group.axes) == (kind, axes)]
        size = group_size(mesh, axes) // mesh.replicas
        shard_axis = _shard_axis(mesh, axes)
        padded = sum(group.padded for group in same)
        times = passes * _gathers(spec, kind)
        what = {"block": "blocks", "experts": "experts", "root": "embedding, norm, head"}[kind]
        if size > 1:
            yield _all(
                f"parameters of {what}", shard_axis, "all_gather", size, len(same), times, padded, gathered
            )
            yield _all(
                f"gradients of {what}", shard_axis, "reduce_scatter", size, len(same), passes, padded, reduced
            )
        if mesh.replicas > 1:
            shard = padded // size
            name = f"gradients of {what}, over replicas"
            yield _all(name, "dp", "all_reduce", mesh.replicas, len(same), passes, shard, reduced)


def _shard_axis(mesh: ParallelismSpec, axes: Sequence[Axis]) -> str:
    """Axes along which shards lie: dp is none of them where each of its ranks is a replica."""
    return axis_name(mesh, [axis for axis in axes if axis != "dp" or mesh.dp > mesh.replicas])


def _orthogonalised(spec: RunSpec, parameters: Sequence[Parameter]) -> Iterator[Traffic]:
    """Muon: the momentum of each of its matrices, gathered whole (harness.optim.muon)."""
    mesh, precision = spec.parallelism, spec.precision
    size = group_size(mesh, DENSE) // mesh.replicas
    matrices = [p for p in parameters if is_muon(p)]
    if spec.optimizer.name != "muon" or size == 1 or not matrices:
        return
    wide = precision.master or precision.moments == "fp32"
    padded = sum(padded_numel(p, size) for p in matrices)
    each = 4 if wide else BYTES[precision.weights]
    name, axis = "momenta of Muon's matrices", _shard_axis(mesh, DENSE)
    yield _all(name, axis, "all_gather", size, len(matrices), 1, padded, each)


def _gathers(spec: RunSpec, kind: str) -> int:
    """How often a group is gathered in one micro-step."""
    mesh = spec.parallelism
    if mesh.pp > 1:
        return 1 if kind == "root" else weight_gathers(mesh)
    return 2 if mesh.zero == 3 and kind != "root" else 1


def _all(
    name: str, axis: str, op: str, size: int, num_groups: int, times: int, padded: int, each: int
) -> Traffic:
    return Traffic(
        name=name,
        axis=axis,
        op=op,  # type: ignore[arg-type]
        group_size=size,
        count=num_groups * times,
        num_bytes=times * padded * each,
        formula={"all_gather": "times · P_n e_p", "reduce_scatter": "times · P_n e_g"}.get(
            op, "times · P_n / n · e_g"
        ),
        numbers=f"{times:,} · {padded:,} · {each}",
    )


def groups(spec: RunSpec, parameters: Sequence[Parameter]) -> list[Group]:
    """FSDP2's groups of a rank: of each block, of its experts where ep shares them out, and of each stage's rest."""
    mesh = spec.parallelism
    found: dict[tuple[str, object, tuple[Axis, ...]], int] = {}
    for parameter in parameters:
        apart = parameter.kind == "expert" and mesh.ep > 1
        axes = EXPERT if apart else DENSE
        kind = "experts" if apart else "root" if parameter.layer is None else "block"
        size = group_size(mesh, axes) // mesh.replicas
        which = parameter.layer if parameter.layer is not None else _stage_of(spec, parameter)
        key = (kind, which, axes)
        found[key] = found.get(key, 0) + padded_numel(parameter, size)
    return [Group(kind, axes, padded) for (kind, _, axes), padded in found.items()]


def _stage_of(spec: RunSpec, parameter: Parameter) -> str:
    """First or last stage, whose roots are groups of their own where there is a pipeline."""
    if spec.parallelism.pp == 1 or spec.parallelism.num_stages == 1:
        return "all"
    return "first" if parameter.kind in ("embedding", "positions") else "last"


def padded_numel(parameter: Parameter, parts: int) -> int:
    """Elements of all shards together: each has ceil(rows / n) rows."""
    return -(-parameter.shape[0] // parts) * parts * math.prod(parameter.shape[1:])
