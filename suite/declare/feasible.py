"""Runs that cannot be: meshes that do not divide what they share out, weights that fit no other model."""

from __future__ import annotations

from harness.precision.backends.requirements import native_requirements
from harness.spec import RunSpec
from harness.spec.gemm import unfit

_SHAPE = (
    *("num_layers", "d_model", "num_heads", "num_kv_heads", "head_width", "d_ffn", "vocab_size"),
    *("norm", "positions", "qk_norm", "bias", "tie_embeddings"),
)
"""Fields of a model that its weights depend on."""


def mesh_problems(spec: RunSpec) -> list[str]:
    """Why `spec` cannot be laid over its mesh; empty when it can.

    Tensor parallelism splits heads and the feed-forward width, pipeline parallelism layers, data parallelism
    the batch, context parallelism the sequence (in 2 cp pieces, so that a causal mask loads all ranks alike).
    Key/value heads are split too, or copied when there are fewer of them than ranks.
    """
    model, mesh = spec.model, spec.parallelism
    found = []
    if model.num_heads % mesh.tp:
        found.append(f"tp {mesh.tp} does not divide num_heads {model.num_heads} of {model.name}")
    elif model.num_kv_heads % mesh.tp and mesh.tp % model.num_kv_heads:
        found.append(
            f"tp {mesh.tp} and num_kv_heads {model.num_kv_heads} of {model.name}: neither divides the other"
        )
    if model.d_ffn % mesh.tp:
        found.append(f"tp {mesh.tp} does not divide d_ffn {model.d_ffn} of {model.name}")
    if model.num_layers % mesh.pp:
        found.append(f"pp {mesh.pp} does not divide num_layers {model.num_layers} of {model.name}")
    if spec.batch_size % mesh.dp:
        found.append(f"dp {mesh.dp} does not divide batch_size {spec.batch_size}")
    if mesh.cp > 1 and spec.seq_len % (2 * mesh.cp):
        found.append(f"cp {mesh.cp}: seq_len {spec.seq_len} is no multiple of {2 * mesh.cp} (twice cp)")
    if mesh.ep > 1:
        found.append(f"ep {mesh.ep}: {model.name} has no experts to share out")
    return found


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
