"""What lies in a rank's memory between two steps: weights, gradients, optimizer states, to the byte.

    weights      N b_w       parameters that pp, tp and ep leave on the rank (harness.ledger.placement), and buffers
    gradients    N b_g       in the weights' dtype, or FP32 with `main_gradients`; as they are just before the update
    optimizer    N (2 b_m)   AdamW: two moments, and a 4-byte step counter for each parameter that the kernel reads
                 N b_m       SGD with momentum and Muon (whose matrices alone; the rest is AdamW's)
                 N 4         the FP32 copy of `master`

DDP keeps all three whole. ZeRO-1 (ZeroRedundancyOptimizer) hands out whole parameters: group by group, largest
first, each to the rank with the least so far; so a rank's share is not N / d but what that gives it
(`greedy_share`). FSDP2 (ZeRO-2 and 3) cuts each parameter along its first dimension in d chunks of ceil(rows / d)
rows, as torch.chunk does; weights and gradients lie in storage padded to a whole chunk on every rank, moments have
the rows that are really there (`_fsdp_param.py`: `_sharded_param_data`; the flat output of the reduce-scatter, of
which gradients are views).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.ledger.inventory import Parameter
from harness.ledger.placement import local_parameters, stages
from harness.ledger.recipes import quantizer_bytes
from harness.ledger.terms import BYTES, Term
from harness.spec import RunSpec

STEP_BYTES = 4
"""Fused AdamW's count of steps, an FP32 scalar for each parameter."""


@dataclass(frozen=True)
class States:
    """Bytes of one rank between steps."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int
    buffers: int
    """Of `weights`: histories of quantisers, scales, routing biases."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def as_dict(self) -> dict[str, int]:
        return {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}


@dataclass(frozen=True)
class Shards:
    """How a rank's parameters are divided over data-parallel ranks."""

    dense: int
    """Ranks that a dense parameter is cut over; 1 under DDP and ZeRO-1."""
    expert: int
    dense_index: int
    expert_index: int

    def of(self, parameter: Parameter) -> tuple[int, int]:
        """(ranks, which of them this is) of a parameter."""
        if parameter.kind == "expert":
            return self.expert, self.expert_index
        return self.dense, self.dense_index


def shards(spec: RunSpec, rank: int = 0) -> Shards:
    """FSDP2's shard groups: dense parameters over dp (within a replica), ep and cp, experts over dp and cp."""
    mesh = spec.parallelism
    if mesh.zero < 2:
        return Shards(1, 1, 0, 0)
    at = mesh.place(rank)
    per_replica = mesh.dp // mesh.replicas
    dp = at["dp"] % per_replica
    return Shards(
        dense=per_replica * mesh.ep * mesh.cp,
        expert=per_replica * mesh.cp,
        dense_index=(dp * mesh.ep + at["ep"]) * mesh.cp + at["cp"],
        expert_index=dp * mesh.cp + at["cp"],
    )


def chunk_rows(rows: int, parts: int, index: int) -> tuple[int, int]:
    """(rows in storage, rows really there) of chunk `index`: torch.chunk's sizes, storage padded to the first's."""
    padded = -(-rows // parts)
    return padded, max(0, min(padded, rows - index * padded))


def greedy_share(groups: Iterable[Sequence[int]], num_ranks: int) -> list[list[tuple[int, int]]]:
    """ZeroRedundancyOptimizer's partition: rank -> (group, index in the group) of the parameters it keeps states of.

    `groups` are the optimizer's parameter groups as element counts. Group by group the largest goes first, to the
    rank with the fewest elements so far (the lowest of equals); ties keep the group's order.
    """
    shares: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for number, group in enumerate(groups):
        for index in sorted(range(len(group)), key=lambda each: -group[each]):
            rank = sizes.index(min(sizes))
            shares[rank].append((number, index))
            sizes[rank] += group[index]
    return shares


def optimizer_groups(spec: RunSpec, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The optimizer's parameter groups in order: Muon's matrices, other matrices (decayed), vectors."""
    theirs = [p for p in parameters if spec.optimizer.name == "muon" and is_muon(p)]
    rest = [p for p in parameters if not (spec.optimizer.name == "muon" and is_muon(p))]
    groups = [theirs, [p for p in rest if p.is_matrix], [p for p in rest if not p.is_matrix]]
    return [group for group in groups if group]


def shard_numel(parameter: Parameter, parts: int, index: int) -> tuple[int, int]:
    """(elements in storage, elements really there) of one rank's FSDP2 shard."""
    rest = math.prod(parameter.shape[1:])
    padded, real = chunk_rows(parameter.shape[0], parts, index)
    return padded * rest, real * rest


def states(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> States:
    """Bytes of one rank between steps, exact."""
    buffers = buffer_bytes(spec, rank)
    parameters = local_parameters(spec, vocab_size, rank)
    cut = shards(spec, rank)
    stored = sum(shard_numel(p, *cut.of(p))[0] for p in parameters)
    weight = BYTES[spec.precision.weights]
    gradient = 4 if spec.precision.main_gradients else weight
    return States(
        weights=stored * weight + buffers,
        gradients=stored * gradient,
        optimizer=_optimizer(spec, parameters, cut, rank),
        buffers=buffers,
    )


def bucketed_gradients(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> int:
    """Bytes of the gradients in DDP's buckets: all but those of experts that ep shares out."""
    apart = spec.parallelism.ep > 1
    theirs = (p for p in local_parameters(spec, vocab_size, rank) if not (apart and p.kind == "expert"))
    return sum(p.numel for p in theirs) * BYTES[spec.precision.weights]


def moment_bytes(spec: RunSpec) -> int:
    """Bytes an element of the optimizer's states."""
    precision = spec.precision
    return 4 if precision.master or precision.moments == "fp32" else BYTES[precision.weights]


def _optimizer(spec: RunSpec, parameters: Sequence[Parameter], cut: Shards, rank: int) -> int:
    mine = parameters if spec.parallelism.zero != 1 else _dealt(spec, parameters, rank)
    return sum(_state_bytes(spec, p, shard_numel(p, *cut.of(p))[1]) for p in mine)


def updated_parameters(spec: RunSpec, vocab_size: int | None, rank: int) -> Iterable[Parameter]:
    """Those that the rank's optimizer steps, whole or in part."""
    parameters = local_parameters(spec, vocab_size, rank)
    return parameters if spec.parallelism.zero != 1 else _dealt(spec, parameters, rank)


def _dealt(spec: RunSpec, parameters: Sequence[Parameter], rank: int) -> Iterator[Parameter]:
    """The parameters that ZeRO-1 gives this rank: of the dense ones over dp, ep and cp, of experts that ep shares
    out over dp and cp."""
    mesh = spec.parallelism
    at = mesh.place(rank)
    apart = [p for p in parameters if p.kind == "expert" and mesh.ep > 1]
    dense = [p for p in parameters if not (p.kind == "expert" and mesh.ep > 1)]
    for part, num_ranks, index in (
        (dense, mesh.dp * mesh.ep * mesh.cp, (at["dp"] * mesh.ep + at["ep"]) * mesh.cp + at["cp"]),
        (apart, mesh.dp * mesh.cp, at["dp"] * mesh.cp + at["cp"]),
    ):
        groups = optimizer_groups(spec, part)
        shares = greedy_share([[p.numel for p in group] for group in groups], num_ranks)
        yield from (groups[group][each] for group, each in shares[index])


def _state_bytes(spec: RunSpec, parameter: Parameter, numel: int) -> int:
    """States of one parameter of which `numel` elements are here."""
    moment = moment_bytes(spec)
    master = 4 * numel if spec.precision.master else 0
    if spec.optimizer.name == "sgd":
        return master + (numel * moment if spec.optimizer.beta1 else 0)
    if spec.optimizer.name == "muon" and is_muon(parameter):
        return master + numel * moment
    return master + 2 * numel * moment + STEP_BYTES


def is_muon(parameter: Parameter) -> bool:
    """Muon takes the blocks' matrices; embedding, head, norms and biases stay with AdamW."""
    return parameter.layer is not None and len(parameter.shape) == 2


def buffer_bytes(spec: RunSpec, rank: int = 0) -> int:
    """Buffers of the modules on a rank: quantisers' amax histories, Smooth-SwiGLU's scales, routers' biases."""
    model = spec.model
    each = 2 * model.d_ffn * BYTES[spec.precision.weights] if model.ffn == "smooth-swiglu" else 0
    if model.moe is not None and model.moe.bias_update:
        each = 8 * model.moe.experts
    held = stages(spec, spec.parallelism.place(rank)["pp"])
    total = 0
    for stage in held:
        total += stage.num_layers * each
        total += sum(quantizer_bytes(spec, layer) for layer in range(stage.first, stage.last))
        total += quantizer_bytes(spec, None) if stage.has_head else 0
    return total


def explain_states(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> list[Term]:
    """The states as terms, largest unit first."""
    found = states(spec, vocab_size, rank)
    parameters = local_parameters(spec, vocab_size, rank)
    cut = shards(spec, rank)
    weight = BYTES[spec.precision.weights]
    gradient = 4 if spec.precision.main_gradients else weight
    experts = [p for p in parameters if p.kind == "expert"]
    if experts and cut.expert != cut.dense:
        dense = [p for p in parameters if p.kind != "expert"]
        parts = [(" of dense layers", "N_dense", dense), (" of experts", "N_experts", experts)]
    else:
        parts = [("", "N", list(parameters))]
    weights, gradients = [], []
    for whose, symbol, part in parts:
        over, _ = cut.of(part[0])
        stored = sum(shard_numel(p, *cut.of(p))[0] for p in part)
        shared = f"{symbol} / {over}, padded" if over > 1 else symbol
        counted = f"{stored:,}" if over == 1 else f"{stored:,} (of {sum(p.numel for p in part):,})"
        weights.append(
            Term("weights", f"parameters{whose}", f"{shared} · b_w", f"{counted} · {weight}", stored * weight)
        )
        gradients.append(
            Term(
                "gradients",
                f"gradients{whose}",
                f"{shared} · b_g",
                f"{counted} · {gradient}",
                stored * gradient,
            )
        )
    if found.buffers:
        weights.append(Term("weights", "buffers", "scales, histories", f"{found.buffers:,}", found.buffers))
    terms = [*weights, *gradients]
    terms.append(Term("optimizer", *_optimizer_words(spec), found.optimizer))
    return terms


def _optimizer_words(spec: RunSpec) -> tuple[str, str, str]:
    moment, share = moment_bytes(spec), "N_mine" if spec.parallelism.zero else "N"
    master = " + 4 N" if spec.precision.master else ""
    number = " + 4 a parameter" if spec.precision.master else ""
    if spec.optimizer.name == "sgd":
        return "momentum", f"{share} · b_m{master}", f"{moment} a parameter{number}"
    if spec.optimizer.name == "muon":
        return (
            "momentum and AdamW moments",
            f"N_matrices · b_m + N_rest · 2 b_m{master}",
            f"{moment} or {2 * moment} a parameter{number}",
        )
    return (
        "moments and step counters",
        f"{share} · 2 b_m + {STEP_BYTES} T{master}",
        f"{2 * moment} a parameter, {STEP_BYTES} a tensor{number}",
    )
