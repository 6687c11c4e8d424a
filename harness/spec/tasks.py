"""What each task reads of a run's spec.

A training task needs a model, a precision and tokens. A *study* measures a format, a cast, a kernel without training.
A case may hold runs of several tasks: each run takes the fields that its task reads, and the rest are no part of it.
"""

from __future__ import annotations

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

STUDY_FIELDS: dict[str, frozenset[str]] = {
    "formats": frozenset({"format"}),
    "tensors": frozenset({"cast", "tensor"}),
    "attention": frozenset({"attention"}),
    "gemm": frozenset({"gemm"}),
    "accumulation": frozenset({"gemm", "precision"}),
}
"""Study -> the fields it reads beside those of any task."""

EMULATED_STUDIES = ("formats", "tensors", "accumulation")
"""Studies whose numbers come from the suite's own casts."""

STUDY_ONLY = frozenset({"format", "cast", "tensor", "gemm"})
"""Fields that training does not read."""


def reads(task: str, field: str) -> bool:
    """Whether a run of `task` reads `field`; a task that is not listed here reads everything."""
    if field in ANY_TASK:
        return True
    if task in STUDY_FIELDS:
        return field in STUDY_FIELDS[task]
    return field not in STUDY_ONLY if task in TRAINING_TASKS else True
