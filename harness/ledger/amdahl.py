"""What faster matrix products do to a whole step: Amdahl's law over a model's linear layers.

    S = 1 / (1 - f + f / s)          speed-up of the step
    f = (1 - 1/S) / (1 - 1/s)        the share of the step that must get s times faster

f is the share of the unquantised step's time that is spent in the products which the recipe quantises, s how much
faster those become, casts included. Formulas give an upper limit of f, the share of the model's FLOPs that are in those
products (`flop_share`): it would be the time share if all FLOPs ran at one rate and nothing but FLOPs took time.

Fidelity of everything here: `predicted`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.ledger.flops import train_flops_per_token
from harness.spec import ModelSpec

Pass = Literal["forward", "dgrad", "wgrad"]
Shape = tuple[int, int, int]
"""m, k, n of a product [m, k] by [k, n]."""


@dataclass(frozen=True)
class LayerGemm:
    """One product of a layer's training step."""

    linear: str
    """attention.qkv, attention.output, ffn.up (the gate's rows among them) or ffn.down."""
    role: Pass
    m: int
    k: int
    n: int

    @property
    def shape(self) -> Shape:
        return self.m, self.k, self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


def layer_gemms(model: ModelSpec, num_tokens: int) -> tuple[LayerGemm, ...]:
    """The products of one layer's linears for `num_tokens` tokens: forward, input gradient, weight gradient.

    For a linear of i inputs and o outputs: [t, i] x [i, o], [t, o] x [o, i] and [o, t] x [t, i].
    """
    d, width = model.d_model, model.head_width
    up = model.d_ffn if model.ffn == "gelu" else 2 * model.d_ffn
    linears = {
        "attention.qkv": (d, (model.num_heads + 2 * model.num_kv_heads) * width),
        "attention.output": (model.num_heads * width, d),
        "ffn.up": (d, up),
        "ffn.down": (model.d_ffn, d),
    }
    gemms = []
    for name, (i, o) in linears.items():
        gemms += [
            LayerGemm(name, "forward", num_tokens, i, o),
            LayerGemm(name, "dgrad", num_tokens, o, i),
            LayerGemm(name, "wgrad", o, num_tokens, i),
        ]
    return tuple(gemms)


def flop_share(model: ModelSpec, seq_len: int, *, layers_kept: int = 0) -> float:
    """Share of the model's training FLOPs in its layers' linears: what FP8 recipes quantise.

    The head's product and attention's (half the square: causal) are in the whole but not in the part; so are
    `layers_kept` layers that a recipe leaves in high precision.
    """
    quantised = (model.num_layers - layers_kept) * sum(gemm.flops for gemm in layer_gemms(model, 1))
    return quantised / train_flops_per_token(model, seq_len, causal=True)


def step_speedup(share: float, gemm_speedup: float) -> float:
    """S from f and s."""
    if not 0 <= share <= 1 or gemm_speedup <= 0:
        raise ValueError(f"a share lies in [0, 1] and a speed-up above 0 (got {share:g}, {gemm_speedup:g})")
    return 1 / (1 - share + share / gemm_speedup)


def share_needed(speedup: float, gemm_speedup: float) -> float:
    """f from S and s; above 1 where no share would do, since the step cannot gain more than its products do."""
    if speedup < 1 or gemm_speedup <= 1:
        raise ValueError(f"speed-ups must be above 1 (got {speedup:g}, {gemm_speedup:g})")
    return (1 - 1 / speedup) / (1 - 1 / gemm_speedup)


def nearest_shape(shape: Shape, known: Iterable[Shape]) -> Shape | None:
    """Of `known` the shape closest to `shape` by the sum of its sizes' squared log ratios; None of none."""

    def distance(other: Shape) -> float:
        return sum(math.log(a / b) ** 2 for a, b in zip(shape, other, strict=True))

    return min(known, key=distance, default=None)


@dataclass(frozen=True)
class GemmSpeedup:
    """s of a model's layer, from products timed one by one."""

    value: float
    """Summed time in BF16 over summed time in the other kernel."""
    worst_distance: float
    """Largest factor in a size between a layer's product and the shape timed in its place; 1: all were timed."""


def gemm_speedup(
    gemms: Iterable[LayerGemm], base: Mapping[Shape, float], other: Mapping[Shape, float]
) -> GemmSpeedup | None:
    """s of a layer: times are summed and then divided, since products run one after the other.

    `base` and `other` map shapes to FLOP/s (any unit) of the two kernels; a product takes the rates of the nearest
    shape that both have. None where they share no shape.
    """
    known = base.keys() & other.keys()
    before = after = 0.0
    worst = 1.0
    for gemm in gemms:
        near = nearest_shape(gemm.shape, sorted(known))
        if near is None:
            return None
        before += gemm.flops / base[near]
        after += gemm.flops / other[near]
        worst = max(worst, *(max(a / b, b / a) for a, b in zip(gemm.shape, near, strict=True)))
    return GemmSpeedup(before / after, worst) if after else None
