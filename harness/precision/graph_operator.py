"""The cast as one operator of a compiled graph: torch.compile calls the fused kernel instead of tracing the twin.

    values, inverse, amax = quantize(x, text(spec), along, bf16, scale, amax, seed, dequantized)

`inverse` has no elements where a cast has none. The operator runs `cast`, eagerly.
"""

from __future__ import annotations

import json
from functools import cache

import torch
from torch import Tensor

from harness.spec import QuantizerSpec


def text(spec: QuantizerSpec) -> str:
    """The spec as an operator's argument; put together from plain fields, which torch.compile can follow."""
    block = "null" if spec.block is None else f"[{spec.block[0]},{spec.block[1]}]"
    return (
        f'{{"format":"{spec.format}","scaling":"{spec.scaling}","scale":{spec.scale!r},"margin":{spec.margin},'
        f'"power_of_two":{"true" if spec.power_of_two else "false"},"block":{block},'
        f'"scale_rounding":"{spec.scale_rounding}","rounding":"{spec.rounding}","overflow":"{spec.overflow}",'
        f'"keep_top":{spec.keep_top}}}'
    )


@cache
def spec_of(words: str) -> QuantizerSpec:
    return QuantizerSpec.model_validate(json.loads(words))


def has_inverse(spec: QuantizerSpec, dequantized: bool) -> bool:
    return not dequantized and spec.scaling not in ("none", "block", "mx")


@torch.library.custom_op("harness::quantize", mutates_args=())
def quantize(
    x: Tensor,
    spec: str,
    along: int,
    bf16: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    seed: int | None,
    dequantized: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from harness.precision.cast import cast

    result = cast(
        x, spec_of(spec), along=along, carrier=torch.bfloat16 if bf16 else torch.float32, scale=scale, amax=amax,
        seed=seed, dequantized=dequantized,
    )  # fmt: skip
    none = x.new_empty(0, dtype=torch.float32)
    return (
        result.values,
        none if result.inverse is None else result.inverse,
        x.new_full((), torch.nan, dtype=torch.float32) if result.amax is None else result.amax,
    )


@quantize.register_fake
def _(
    x: Tensor,
    spec: str,
    along: int,
    bf16: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    seed: int | None,
    dequantized: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    known = spec_of(spec)
    values = x.new_empty(x.shape, dtype=torch.bfloat16 if bf16 else torch.float32)
    if not has_inverse(known, dequantized):
        inverse = x.new_empty(0, dtype=torch.float32)
    elif known.scaling == "row":
        inverse = x.new_empty(x.shape[1 - along], dtype=torch.float32)
    else:
        inverse = x.new_empty((), dtype=torch.float32)
    return values, inverse, x.new_empty((), dtype=torch.float32)
