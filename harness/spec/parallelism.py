"""How a model is cut over ranks: the mesh, what is sharded, the pipeline's schedule.

P = P_dp · P_pp · P_ep · P_cp · P_tp. Ranks are numbered with tp innermost, then cp, ep, pp and dp outermost, so
that those which talk most are neighbours. Ranks of one ep group see different sequences, those of one cp group
different parts of the same; so a dense parameter is shared over dp · ep · cp ranks, one of an expert over dp · cp.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from harness.spec.base import Frozen

Axis = Literal["dp", "pp", "ep", "cp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "ep", "cp", "tp")
"""Mesh axes, outermost first."""
DENSE: tuple[Axis, ...] = ("dp", "ep", "cp")
"""Axes whose ranks hold the same dense parameters and different tokens."""
EXPERT: tuple[Axis, ...] = ("dp", "cp")
"""Those for the parameters of an expert."""

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules whose ranks hold stages r and 2 pp - 1 - r: exactly two each."""
MANY_STAGES: tuple[Schedule, ...] = ("interleaved", *V_SHAPED)


class ParallelismSpec(Frozen):
    """Ranks on each mesh axis, the ZeRO stage of the data-parallel one, and how the others are carried out."""

    name: str = "custom"
    dp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    zero: int = Field(default=0, ge=0, le=3)
    """0: DDP; 1: ZeroRedundancyOptimizer; 2: FSDP2 that keeps gathered weights until the backward pass; 3: FSDP2 that
    gathers them twice. Shards lie over dp, and over cp with it."""
    replicas: int = Field(default=1, ge=1)
    """HSDP: dp is so many replicas, each sharded over dp / replicas ranks (zero 2 or 3)."""
    sequence_parallel: bool = False
    """Between the matrices that tp cuts, activations are cut along the sequence (Korthikanti et al. 2022)."""
    schedule: Schedule = "1f1b"
    microbatches: int = Field(default=0, ge=0)
    """Microbatches a pipeline cuts each micro-step into; 0: twice pp."""
    stages_per_rank: int = Field(default=0, ge=0)
    """Pipeline stages on a rank; 0: two where the schedule needs more than one, else one."""
    context: Literal["ring", "all-gather", "native"] = "ring"
    """How cp ranks see each other's keys and values: passed round, collected first, or by PyTorch's own context
    parallelism, which has kernels on CUDA alone."""
    ranks: int = Field(default=0, ge=0)
    """Ranks that the mesh is meant to fill, refused where the axes make another number; 0: whatever they make. No part
    of a run's key."""

    @model_validator(mode="after")
    def _check(self) -> ParallelismSpec:
        if self.replicas > 1 and (self.zero < 2 or self.dp % self.replicas):
            raise ValueError(
                f"replicas {self.replicas} (HSDP) needs zero 2 or 3 and a dp that it divides, got zero {self.zero}, "
                f"dp {self.dp}"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel shares out what tp leaves whole; it needs tp of at least 2")
        if self.schedule in V_SHAPED and self.stages_per_rank not in (0, 2):
            raise ValueError(
                f"{self.schedule} is laid in a V, two stages a rank; got stages_per_rank {self.stages_per_rank}"
            )
        return self

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp * self.ep

    @property
    def data_shards(self) -> int:
        """Parts that a batch's sequences are dealt out in."""
        return self.dp * self.ep

    @property
    def num_microbatches(self) -> int:
        """Microbatches a pipeline passes on one after the other; 1 without a pipeline."""
        return 1 if self.pp == 1 else self.microbatches or 2 * self.pp

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.local_stages

    @property
    def local_stages(self) -> int:
        """Pipeline stages on each rank."""
        if self.pp == 1:
            return 1
        return self.stages_per_rank or (2 if self.schedule in MANY_STAGES else 1)

    def size(self, axis: Axis) -> int:
        """Ranks on an axis."""
        size: int = getattr(self, axis)
        return size

    def place(self, rank: int) -> dict[Axis, int]:
        """Axis -> coordinate of a rank."""
        found: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return {axis: found[axis] for axis in AXES}

    def rank(self, place: dict[Axis, int]) -> int:
        """The rank at a place; axes left out are 0."""
        number = 0
        for axis in AXES:
            number = number * self.size(axis) + place.get(axis, 0)
        return number

    def group(self, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axes` alone, itself included, in order."""
        here = self.place(rank)
        return tuple(
            other
            for other in range(self.num_ranks)
            if all(axis in axes or at == here[axis] for axis, at in self.place(other).items())
        )

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Stages on a pipeline rank: r and 2 pp - 1 - r in a V, else r, r + pp, r + 2 pp ..."""
        if self.schedule in V_SHAPED and self.pp > 1:
            return (pp_rank, 2 * self.pp - 1 - pp_rank)
        return tuple(pp_rank + each * self.pp for each in range(self.local_stages))
