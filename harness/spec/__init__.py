"""A run, fully resolved: the one value that every stage agrees on. No module here imports torch."""

from harness.spec.attention import AttentionSpec
from harness.spec.base import Device, Fidelity, Frozen
from harness.spec.gemm import GemmSpec
from harness.spec.model import FFN, NO_MODEL, ModelSpec, MoESpec
from harness.spec.parallelism import AXES, Axis, ParallelismSpec, Schedule
from harness.spec.pipeline import PipelineSpec
from harness.spec.precision import (
    NO_PRECISION,
    AccumulationSpec,
    Backend,
    GemmOverride,
    PrecisionSpec,
    QuantizerSpec,
    RecipeSpec,
    Scaling,
)
from harness.spec.run import (
    AgeingSpec,
    DataSpec,
    FaultSpec,
    LimitsSpec,
    OptimizerSpec,
    RunSpec,
)
from harness.spec.tasks import TRAINING_TASKS, reads
from harness.spec.tensor import TensorSpec

__all__ = [
    "AXES",
    "FFN",
    "NO_MODEL",
    "NO_PRECISION",
    "TRAINING_TASKS",
    "AccumulationSpec",
    "AgeingSpec",
    "AttentionSpec",
    "Axis",
    "Backend",
    "DataSpec",
    "Device",
    "FaultSpec",
    "Fidelity",
    "Frozen",
    "GemmOverride",
    "GemmSpec",
    "LimitsSpec",
    "MoESpec",
    "ModelSpec",
    "OptimizerSpec",
    "ParallelismSpec",
    "PipelineSpec",
    "PrecisionSpec",
    "QuantizerSpec",
    "RecipeSpec",
    "RunSpec",
    "Scaling",
    "Schedule",
    "TensorSpec",
    "reads",
]
