"""What each task reads of a run's spec.

A training task needs a model, a precision and tokens. A *study* measures a format, a cast, a kernel without training.
A case may hold runs of several tasks: each run takes the fields that its task reads, and the rest are no part of it.
"""

from __future__ import annotations

from harness.spec.base import Fidelity

TRAINING_TASKS = ("pretrain",)
"""Tasks whose runs need a model, a precision and a number of tokens."""

NEEDED_FOR_TRAINING = ("model", "precision", "tokens")

ANY_TASK = frozenset(
    {
        *("task", "seed", "threads", "device", "limits"),
        *("keep_checkpoint", "checkpoint_every_s"),
    }
)
"""Fields that every task reads."""

ONE_STEP = frozenset(
    {
        *("model", "precision", "parallelism", "optimizer", "attention", "reference"),
        *("batch_size", "seq_len", "accumulation", "recompute", "data"),
    }
)
"""What the memory and the communication of one training step depend on."""

STUDY_FIELDS: dict[str, frozenset[str]] = {
    "formats": frozenset({"format"}),
    "tensors": frozenset({"cast", "tensor"}),
    "attention": frozenset({"attention"}),
    "gemm": frozenset({"gemm"}),
    "accumulation": frozenset({"gemm", "precision"}),
    "step": ONE_STEP,
    "trace": ONE_STEP,
    "ledger": ONE_STEP,
    "pipeline": frozenset({"parallelism", "pipeline"}),
}
"""Study -> the fields it reads beside those of any task."""

EMULATED_STUDIES = ("formats", "tensors", "accumulation")
"""Studies whose numbers come from the suite's own casts."""

EXACT_STUDIES = ("step", "trace", "ledger")
"""Studies that count and do not sample: what they record is the same for every seed, so one run decides."""

FIDELITY_OF_STUDY: dict[str, Fidelity] = {
    "trace": "simulated",
    "ledger": "predicted",
    "pipeline": "simulated",
}
"""Studies whose fidelity does not depend on the precision. `step` measures: its bytes are what they are."""

MANY_RANKS = (*TRAINING_TASKS, "step", "pipeline")
"""Tasks that run as many processes as the mesh has ranks."""

STUDY_ONLY = frozenset({"format", "cast", "tensor", "gemm", "pipeline", "reference"})
"""Fields that training does not read."""


def reads(task: str, field: str) -> bool:
    """Whether a run of `task` reads `field`; a task that is not listed here reads everything."""
    if field in ANY_TASK:
        return True
    if task in STUDY_FIELDS:
        return field in STUDY_FIELDS[task]
    return field not in STUDY_ONLY if task in TRAINING_TASKS else True
