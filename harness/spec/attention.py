"""How attention is computed, and the ties put into it on purpose.

The arithmetic (`kernel` and what follows it) is used by every task; the problem below it by the task `attention`
alone; `inject_*` by training tasks alone.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from harness.spec.base import Frozen

Kernel = Literal[
    "default",
    "fp32",
    "paper",
    "code",
    "fp32-accumulate",
    "eager",
    "flash",
    "math",
    "efficient",
    "cudnn",
    "fa2",
    "fa3",
]
Delta = Literal["do-o", "do-o-fp64", "do-o32", "dp-p", "dp-p-fp64"]
EMULATED = ("fp32", "paper", "code", "fp32-accumulate")
"""Kernels of our own tiled emulation (harness.attention.tiled); the rest are other people's."""


class AttentionSpec(Frozen):
    """Arithmetic of the softmax product, and the problem it is tried on."""

    kernel: Kernel = "default"
    """default: what the model does by itself. Emulated: fp32 (no rounding), paper (running maximum in FP32, O and l
    rounded to BF16 after each tile), code (all buffers and tile updates BF16), fp32-accumulate (FP32 over all tiles,
    one final rounding). Native: eager (BF16 softmax times V), PyTorch's flash, math, efficient and cudnn, and the
    packages fa2 and fa3."""
    tile: int = Field(default=0, ge=0)
    """Keys in a tile of the emulation; 0: the variant's own, 512 for code and the whole row for the others."""
    beta: float = Field(default=0.0, ge=0)
    """The repair for tied maxima: m = beta * r_m where r_m > 0, m = 0 where r_m < 0; 0: no repair."""
    tie_tolerance: float | None = Field(default=None, ge=0)
    """Scores within this of the maximum count as tied; the variant's own where not given, 1e-3 for code, else 0."""
    delta: Delta = "do-o"
    """Where the backward pass takes delta from: dO * O (as saved), the same summed in FP64, dO * O of an O that was
    not rounded, dP * P in FP32 or in FP64."""
    exp_zero_error: float = Field(default=0.0, gt=-0.5, lt=0.5)
    """Relative error of exp(0) in the row sum alone, as of a fast exponential (the product has P exactly 1)."""
    flush_subnormals: bool = True
    """exp gives zero below 2^-126, as the GPU instruction ex2.approx.ftz does."""

    num_ties: int = Field(default=2, ge=1)
    """Keys with the row's largest score."""
    gap: float = Field(default=16.0, ge=0, le=48, multiple_of=0.25)
    """Nats from the largest score down to the next."""
    spread: float = Field(default=3.0, ge=0, le=15, multiple_of=0.25)
    """The other scores lie evenly in so many nats below the next."""
    num_keys: int = Field(default=1024, ge=2)
    num_heads: int = Field(default=20, ge=1)
    num_queries: int = Field(default=32, ge=1, le=252)
    """Rows of a head; each has tied keys of its own."""
    d_head: int = Field(default=64, ge=4)
    logit_low: float = Field(default=0.0, ge=-15, le=60, multiple_of=0.25)
    logit_high: float = Field(default=15.0, ge=-15, le=60, multiple_of=0.25)
    """A row's largest score is drawn evenly from this range."""
    values: Literal["uniform", "normal"] = "uniform"
    """|V|: uniform between 0.5 and 2, or |N(0, 1)|."""
    negative_share: float = Field(default=1.0, ge=0, le=1)
    """Share of negative values in V."""
    tied_value_ratio: float = Field(default=1.0, gt=0)
    """|V| of the tied keys over that of the others."""
    gradient_negative_share: float = Field(default=1.0, ge=0, le=1)
    """Share of negative values in dO."""
    token_similarity: float = Field(default=0.5, ge=0, le=1)
    """Share of one common direction in the inputs X (variance), for the coherence of the error of W_Q's gradient."""

    inject_ties: int = Field(default=0, ge=0)
    """In a training run: the first so many keys of one head are made equal, all others' scores are lowered by
    `gap` nats, and the head's values are made negative; 0: nothing is put in."""
    inject_layer: int = Field(default=1, ge=0)
    inject_head: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> AttentionSpec:
        if self.num_ties * self.num_queries > self.num_keys:
            raise ValueError(
                f"num_ties {self.num_ties} times num_queries {self.num_queries} must not exceed num_keys "
                f"{self.num_keys}: each row has tied keys of its own"
            )
        if self.num_queries > self.d_head - 4:
            raise ValueError(f"num_queries {self.num_queries} must be at most d_head - 4 = {self.d_head - 4}")
        if self.logit_low > self.logit_high:
            raise ValueError(f"logit_low {self.logit_low} is above logit_high {self.logit_high}")
        if self.beta and self.kernel not in ("paper", "code", "fp32-accumulate"):
            raise ValueError(f"beta is a repair of the emulated BF16 variants; kernel {self.kernel} has none")
        if self.inject_ties and not self.is_emulated:
            raise ValueError(
                f"ties are put in through an emulated kernel ({', '.join(EMULATED)}), not {self.kernel}"
            )
        return self

    @property
    def is_emulated(self) -> bool:
        return self.kernel in EMULATED
