"""Runs that cannot be: meshes that do not divide what they share out, weights that fit no other model."""

from __future__ import annotations

from collections.abc import Sequence

from harness.precision.backends.requirements import native_requirements
from harness.spec import RunSpec
from harness.spec.gemm import unfit
from harness.spec.model import NO_MODEL
from harness.spec.precision import NO_PRECISION
from suite.declare.meshes import mesh_problems
from suite.declare.nearest import mesh_text, nearest_mesh

ONE_STEP_STUDIES = ("step", "trace", "ledger")
"""Studies of one training step, which need what it needs."""

_SHAPE = (
    *("num_layers", "d_model", "num_heads", "num_kv_heads", "head_width", "d_ffn", "vocab_size"),
    *("norm", "positions", "qk_norm", "bias", "tie_embeddings"),
)
"""Fields of a model that its weights depend on."""


def mesh_problem(spec: RunSpec) -> str | None:
    """Why `spec` cannot be laid over its mesh, and the possible mesh that is nearest; None when it can."""
    problems = mesh_problems(spec)
    return impossible(spec, problems) if problems else None


def impossible(spec: RunSpec, problems: Sequence[str]) -> str:
    """The message for a mesh with these problems."""
    ranks = spec.parallelism.ranks or spec.parallelism.num_ranks
    nearest = nearest_mesh(spec, ranks)
    of = ranks_text(ranks)
    way_out = f"no mesh of {of} is possible" if nearest is None else f"nearest of {of}: {mesh_text(nearest)}"
    return f"impossible mesh: {'; '.join(problems)}; {way_out}"


def ranks_text(ranks: int) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks"


def batch_problem(spec: RunSpec) -> str | None:
    """Why the batch cannot be cut into equal micro-steps, or None."""
    if spec.batch_size % spec.accumulation == 0:
        return None
    return f"accumulation {spec.accumulation} does not divide batch_size {spec.batch_size}"


def fault_problem(spec: RunSpec) -> str | None:
    """Why a fault put in on purpose would strike nobody, or None."""
    if spec.fault is None or spec.fault.rank < spec.num_ranks:
        return None
    return f"fault.rank is {spec.fault.rank}, and the run has {ranks_text(spec.num_ranks)}; the first is 0"


def mixture_problem(spec: RunSpec) -> str | None:
    """Why a mixture of experts cannot have what is asked for: of dense feed-forwards, or None."""
    name, precision = spec.model.name, spec.precision
    if spec.model.moe is None:
        return None
    if precision.recipe is not None:
        return f"{name} has experts, fused weights without the linears whose operands precision {precision.name} casts"
    if spec.ageing.kind != "none":
        return f"{name} has experts; ageing puts outliers into dense feed-forwards"
    return None


def start_problem(spec: RunSpec, base: RunSpec) -> str | None:
    """Why `spec` cannot start from the weights of `base`, or None. SwiGLU's forms share their weights."""
    for name in _SHAPE:
        own, other = getattr(spec.model, name), getattr(base.model, name)
        if own != other:
            return f"model.{name} is {own} here and {other} in the base"
    if (spec.model.ffn == "gelu") != (base.model.ffn == "gelu"):
        return f"model.ffn is {spec.model.ffn} here and {base.model.ffn} in the base"
    if spec.data.tokenizer != base.data.tokenizer:
        return f"data.tokenizer is {spec.data.tokenizer} here and {base.data.tokenizer} in the base"
    return None


def study_problem(spec: RunSpec) -> tuple[str, str] | None:
    """(field, why) where a study lacks what it measures, or None."""
    if spec.task == "formats" and not spec.format:
        return "format", "task formats needs a format, such as e4m3 (suite list formats)"
    if spec.task == "tensors" and not spec.cast:
        return "cast", "task tensors needs a cast, such as e4m3:current"
    if spec.task in ONE_STEP_STUDIES and spec.model == NO_MODEL:
        return "model", f"task {spec.task} needs a model"
    if spec.task in ONE_STEP_STUDIES and spec.precision == NO_PRECISION:
        return "precision", f"task {spec.task} needs a precision"
    if spec.task == "pipeline" and spec.parallelism.pp == 1:
        return "parallelism", "task pipeline needs a parallelism with pp of at least 2"
    if spec.task == "gemm" and (wrong := unfit(spec.gemm)):
        return "gemm", wrong
    if spec.task == "accumulation":
        sizes = (("m", spec.gemm.m), ("k", spec.gemm.k), ("n", spec.gemm.n))
        if empty := [f"gemm.{name}" for name, size in sizes if not size]:
            return "gemm", f"task accumulation needs {', '.join(empty)} of at least 1"
        if spec.precision.recipe is None or spec.precision.recipe.accumulation is None:
            return (
                "precision",
                "task accumulation needs a precision with recipe.accumulation, as fp8-deepseek-14bit",
            )
    return None


def sequence_problem(spec: RunSpec) -> str | None:
    """Why the model cannot take the run's sequences, or None."""
    if spec.seq_len <= spec.model.max_seq_len:
        return None
    return f"seq_len {spec.seq_len} is above max_seq_len {spec.model.max_seq_len} of {spec.model.name}"


def backend_problem(spec: RunSpec) -> str | None:
    """Why the precision's backend, asked for by name, cannot run on the run's device, or None where it may.

    Of a GPU only its worker knows the compute capability; a CPU has no native products.
    """
    precision = spec.precision
    if precision.recipe is None or precision.backend in ("auto", "emulated"):
        return None
    needs = native_requirements(precision)
    need = needs.torch if precision.backend == "torch" else needs.transformer_engine
    lacks = needs.reason if need is None else need.lacking("cpu", None, {}) if spec.device == "cpu" else None
    return lacks and f"precision {precision.name}: backend {precision.backend} cannot run it: {lacks}"
