"""Which linears a quantising recipe covers, what their quantisers remember, and which operands are kept for the
backward pass. The arithmetic is harness.precision's; this is the part of it that decides bytes, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from harness.spec import ModelSpec, QuantizerSpec, RecipeSpec, RunSpec
from harness.spec.roles import FIRST, SECOND, Role, is_shared, spec_of


@dataclass(frozen=True)
class Operand:
    """What a quantised linear keeps of one operand for its second GEMM."""

    shared: bool
    """The first GEMM's cast serves the second too and is kept; else the tensor itself is."""
    e: int
    """Bytes an element of the kept cast."""
    scale: Literal["none", "tensor", "row"]
    """FP32 inverse scales kept beside it: none, one, or one a row."""


def linears(model: ModelSpec) -> tuple[str, ...]:
    """Names of a block's linears."""
    if model.moe is not None:
        return ("attention.qkv", "attention.output")
    up = "ffn.up" if model.ffn == "gelu" else "ffn.gate_up"
    return ("attention.qkv", "attention.output", up, "ffn.down")


def is_quantized(spec: RunSpec, layer: int | None, name: str) -> bool:
    """Whether the recipe covers the linear `name` of block `layer` (None: the head)."""
    recipe = spec.precision.recipe
    if recipe is None:
        return False
    full = name if layer is None else f"layers.{layer}.{name}"
    if layer is not None:
        from_end = spec.model.num_layers - layer
        if layer < recipe.high_precision_first or from_end <= recipe.high_precision_last:
            return False
    return not any(
        full == pattern or full.endswith(f".{pattern}") or full.startswith(f"{pattern}.")
        for pattern in recipe.high_precision
    )


def quantizer_bytes(spec: RunSpec, layer: int | None) -> int:
    """Buffers of the quantisers of one block's linears (None: of the head): amax history and the running amax,
    FP32."""
    names = ("head",) if layer is None else linears(spec.model)
    covered = sum(is_quantized(spec, layer, name) for name in names)
    recipe = spec.precision.recipe
    if recipe is None or not covered:
        return 0
    each = sum(4 * (q.history + 1) for q in _quantizers(recipe) if q.scaling == "delayed")
    return covered * each


def num_delayed(spec: RunSpec) -> int:
    """Quantisers of the whole model whose scale follows the maxima of earlier steps."""
    recipe = spec.precision.recipe
    if recipe is None:
        return 0
    covered = sum(
        is_quantized(spec, layer, name)
        for layer in range(spec.model.num_layers)
        for name in linears(spec.model)
    )
    covered += is_quantized(spec, None, "head")
    return covered * sum(q.scaling == "delayed" for q in _quantizers(recipe))


def kept_operand(spec: RunSpec, role: Role) -> Operand:
    """What is kept of `activations` or `weights` between the forward GEMM and the second one that reads them."""
    recipe = spec.precision.recipe
    assert recipe is not None
    quantizer = spec_of(recipe, FIRST[role], role)
    compute = 4 if spec.precision.compute == "fp32" else 2
    if quantizer is None:
        return Operand(is_shared(recipe, role), compute, "none")
    exact = quantizer.exact_in_bf16
    scale: Literal["none", "tensor", "row"] = "none"
    if quantizer.scaling in ("static", "delayed", "current", "nvfp4"):
        scale = "tensor"
    elif quantizer.scaling == "row":
        scale = "row"
    return Operand(is_shared(recipe, role), compute if exact else 4, scale)


def _quantizers(recipe: RecipeSpec) -> Iterator[QuantizerSpec]:
    """Those of one linear: one for each role's first cast, and one for a second cast of its own."""
    for role in FIRST:
        shared = is_shared(recipe, role)
        for gemm in (FIRST[role],) if shared else (FIRST[role], SECOND[role]):
            quantizer = spec_of(recipe, gemm, role)
            if quantizer is not None:
                yield quantizer
