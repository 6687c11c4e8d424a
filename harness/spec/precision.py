"""Number formats, scalings and recipes of a run, as data.

A recipe says how each role's tensor is cast before each of a linear's three GEMMs:

    forward   y  = Q(x) Q(w)^T      activations and weights, contraction over d_in
    dgrad     dx = Q(g) Q(w)        gradients and weights, contraction over d_out
    wgrad     dw = Q(g)^T Q(x)      gradients and activations, contraction over tokens

Scale blocks lie along the contraction dimension of the GEMM that reads them, as kernels need them.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from harness.precision.formats import FloatFormat, IntFormat, find_format
from harness.spec.base import Fidelity, Frozen

Scaling = Literal["none", "static", "delayed", "current", "row", "block", "mx", "nvfp4"]
Backend = Literal["auto", "emulated", "torch", "transformer_engine"]


_OF_ONE_SCALING = {"scale": "static", "history": "delayed", "amax": "delayed", "scale_rounding": "mx"}
"""Fields that one scaling alone reads: elsewhere they would look like a choice and change nothing but the key."""


class QuantizerSpec(Frozen):
    """How one role's tensor is cast before a GEMM: the number format and how its scale is found."""

    format: str
    """e4m3, e5m2, e4m3-ieee, e2m1, e3m2, int8, int4, int4-asym, nf4, bf16, m7, eXmY ... (`suite list formats`)."""
    scaling: Scaling = "current"
    """none: scale 1; static: `scale`; delayed: from the amax history of earlier steps; current: from this tensor's own
    amax; row: one per row of the operand; block: one per `block`; mx: power-of-two (E8M0) scales per 1x32; nvfp4: E4M3
    scales per 1x16 under one FP32 scale per tensor."""
    scale: float = Field(default=1.0, gt=0)
    """The factor of static scaling, applied before the cast."""
    history: int = Field(default=16, ge=1)
    """Steps of amax history kept for delayed scaling."""
    amax: Literal["max", "most_recent"] = "max"
    """What delayed scaling takes from the history."""
    margin: int = Field(default=0, ge=-64, le=64)
    """The scale is divided by 2^margin."""
    power_of_two: bool = False
    """Round the scale down to a power of two (Fishman et al.'s released code does)."""
    block: tuple[int, int] | None = None
    """[n, m]: one scale per m elements along the contraction and n across it. Default: block [1, 128], mx [1, 32],
    nvfp4 [1, 16]; [128, 128], [32, 32] and [16, 16] are the two-dimensional forms for weights."""
    scale_rounding: Literal["floor", "up", "even"] = "floor"
    """How an MX scale becomes a power of two. floor: the OCP text; up: the smallest without clipping; even: the block's
    amax is first rounded to the element's mantissa."""
    rounding: Literal["nearest", "stochastic", "half_away"] = "nearest"
    """nearest: ties to even; stochastic: up with the probability of the remainder; half_away: ties away from zero, as
    some peers do."""
    shared_noise: bool = False
    """Stochastic rounding draws the same bits on all data-parallel ranks."""
    overflow: Literal["saturate", "special"] = "saturate"
    """Beyond the maximum: the maximum, or what the format's own cast gives (infinity or NaN)."""
    hadamard: int = Field(default=0, ge=0)
    """Multiply both operands of the GEMM by a random Hadamard matrix of this size along the contraction; 0: no."""
    keep_top: int = Field(default=0, ge=0)
    """The largest magnitudes of each block that stay unquantised (Stable-SPAM's 4-bit set-up keeps two)."""

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        find_format(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> QuantizerSpec:
        fmt = find_format(self.format)
        for name, owner in _OF_ONE_SCALING.items():
            default = type(self).model_fields[name].default
            if self.scaling != owner and getattr(self, name) != default:
                raise ValueError(
                    f"{name} is of {owner} scaling, {self.scaling} has none; leave it at {default}, its default"
                )
        if self.block is not None and self.scaling not in ("block", "mx", "nvfp4"):
            raise ValueError(f"{self.scaling} scaling has no blocks; leave block away")
        if self.block is not None and (min(self.block) < 1 or max(self.block) > 4096):
            raise ValueError(f"block takes [n, m] from 1 to 4096, got {list(self.block)}")
        if self.scaling == "nvfp4" and self.format != "e2m1":
            raise ValueError(f"nvfp4 scaling is defined for e2m1, got {self.format}")
        if self.scaling == "mx" and not isinstance(fmt, FloatFormat) and self.format != "int8":
            raise ValueError(f"mx scaling takes float formats and int8, got {self.format}")
        if (
            isinstance(fmt, IntFormat)
            and not fmt.symmetric
            and self.scaling not in ("current", "row", "block")
        ):
            raise ValueError(f"{self.format} needs a zero point from the data: current, row or block scaling")
        if not 2.0**-120 <= self.scale <= 2.0**120:
            raise ValueError(f"a static scale lies from 2^-120 to 2^120, got {self.scale:g}")
        if self.format == "nf4" and self.rounding != "nearest":
            raise ValueError("nf4 rounds to its nearest level only")
        if self.hadamard & (self.hadamard - 1):
            raise ValueError(f"hadamard takes a power of two, got {self.hadamard}")
        if self.keep_top and self.scaling != "block":
            raise ValueError("keep_top works on blocks; use scaling: block")
        if self.keep_top and self.block_shape and self.keep_top >= math.prod(self.block_shape):
            raise ValueError(f"keep_top takes less than the block's {math.prod(self.block_shape)} elements")
        return self

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """(across, along) of one scale's block; None where scales are not per block."""
        default = {"block": (1, 128), "mx": (1, 32), "nvfp4": (1, 16)}.get(self.scaling)
        return self.block or default

    @property
    def exact_in_bf16(self) -> bool:
        """Whether every value the cast hands to the GEMM, scales that cannot be pulled out of it included, is a BF16
        number. If not, the product must run in FP32 to be what hardware computes."""
        fmt = find_format(self.format)
        narrow = fmt.significant_bits <= 8
        if self.scaling == "nvfp4":
            return True  # 2 significant bits of E2M1 times 4 of E4M3
        if self.scaling == "block":
            return narrow and self.power_of_two and not self.keep_top
        return narrow


class GemmOverride(Frozen):
    """What one GEMM does otherwise than the recipe's roles say."""

    quantized: bool = True
    """False: this GEMM sees unquantised operands."""
    activations: QuantizerSpec | None = None
    weights: QuantizerSpec | None = None
    gradients: QuantizerSpec | None = None


class AccumulationSpec(Frozen):
    """A tensor core's accumulator, imitated: sums keep few bits and are moved into FP32 now and then.

    Source: DeepSeek-V3 (arXiv 2412.19437) section 3.3.2, which found about 14 bits on H800.
    """

    mantissa_bits: int = Field(default=14, ge=4, le=23)
    """Bits of the accumulator below its leading one; what is beyond them is cut off."""
    instruction_k: int = Field(default=32, ge=1)
    """Products added exactly by one instruction before the sum is cut."""
    promote_every: int = Field(default=0, ge=0)
    """Move the partial sum into an FP32 accumulator every so many elements of the contraction; 0: never."""


class RecipeSpec(Frozen):
    """Which cast each role of a linear's three GEMMs gets; a role left out stays unquantised."""

    activations: QuantizerSpec | None = None
    weights: QuantizerSpec | None = None
    gradients: QuantizerSpec | None = None
    high_precision: tuple[str, ...] = ("embedding", "head")
    """Linears left unquantised, by name suffix: embedding, head, ffn.down, attention.output, layers.0 ..."""
    forward: GemmOverride = GemmOverride()
    dgrad: GemmOverride = GemmOverride()
    wgrad: GemmOverride = GemmOverride()
    high_precision_first: int = Field(default=0, ge=0)
    """Blocks left unquantised at the model's start."""
    high_precision_last: int = Field(default=0, ge=0)
    """Blocks left unquantised at its end."""
    accumulation: AccumulationSpec | None = None
    """The GEMMs' accumulator; FP32 where not given."""

    @model_validator(mode="after")
    def _check_hadamard(self) -> RecipeSpec:
        for name in ("forward", "dgrad", "wgrad"):
            left, right = self.operands(name)
            sizes = {q.hadamard if q is not None else 0 for q in (left, right)}
            if len(sizes) > 1:
                raise ValueError(
                    f"{name}: a Hadamard transform must be on both operands or on none, got {sorted(sizes)}"
                )
        return self

    def operands(self, gemm: str) -> tuple[QuantizerSpec | None, QuantizerSpec | None]:
        """Casts of the left and right operand of `forward` (x, w), `dgrad` (g, w) or `wgrad` (g, x)."""
        override: GemmOverride = getattr(self, gemm)
        if not override.quantized:
            return None, None
        names = {
            "forward": ("activations", "weights"),
            "dgrad": ("gradients", "weights"),
            "wgrad": ("gradients", "activations"),
        }[gemm]
        left, right = (getattr(override, name) or getattr(self, name) for name in names)
        return left, right


class PrecisionSpec(Frozen):
    """Number formats of a run: GEMM inputs, storage and loss scaling."""

    name: str
    compute: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    """dtype of the matrix products (autocast when it differs from `weights`)."""
    weights: Literal["fp64", "fp32", "bf16"] = "fp32"
    """dtype the parameters, gradients and optimizer states are kept in, unless the next three say otherwise."""
    master: bool = False
    """Keep an FP32 copy of BF16 weights, which the optimizer updates."""
    moments: Literal["weights", "fp32"] = "weights"
    """dtype of the optimizer's states; an FP32 copy of the weights always has FP32 states."""
    main_gradients: bool = False
    """Add gradients of BF16 weights up in FP32 buffers (Megatron)."""
    loss_scaling: Literal["none", "dynamic"] = "none"
    recipe: RecipeSpec | None = None
    backend: Backend = "auto"
    """What runs the recipe. emulated: quantise, dequantise, multiply in `compute`; torch: scaled matrix products of
    PyTorch and torchao; transformer_engine: its modules; auto: a native one that the device has, else emulated."""
    paper: str | None = None

    @model_validator(mode="after")
    def _check_storage(self) -> PrecisionSpec:
        if self.weights != "bf16" and (self.master or self.moments == "fp32" or self.main_gradients):
            raise ValueError(
                f"master, moments and main_gradients are of BF16 weights; weights are {self.weights}"
            )
        if self.main_gradients and not (self.master or self.moments == "fp32"):
            raise ValueError("main_gradients need an optimizer that reads FP32: master, or moments fp32")
        if self.main_gradients and self.loss_scaling != "none":
            raise ValueError(
                "loss scaling takes its factor out of the weights' gradients, not out of main_gradients"
            )
        if (self.weights == "fp64") != (self.compute == "fp64"):
            raise ValueError(f"fp64 is all or nothing: weights {self.weights}, compute {self.compute}")
        return self

    @property
    def fidelity(self) -> Fidelity:
        """native when the hardware's own arithmetic gave the numbers, emulated when casts were imitated. With backend
        auto the worker finds out, and what it finds is stored with the run."""
        if self.recipe is None or self.backend in ("torch", "transformer_engine"):
            return "native"
        return "emulated"


NO_PRECISION = PrecisionSpec(name="none")
"""Stands where a task has no precision of its own."""
