"""The cast on CUDA by Triton: one kernel under scales per tensor or row, one under scales per block.

Each reads x once, from any strides, and writes the values once; the tensor's largest magnitude and the statistics come
out of the same pass. Bits are the twin's. Integers with a zero point, tables, kept values and E8M0 elements are left
to it. TRITON_INTERPRET=1, set before triton is imported, runs the kernels on a CPU, for tests.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from harness.precision import triton_math as device
from harness.precision import triton_passes as passes
from harness.precision.formats import FloatFormat, IntFormat, find_format
from harness.precision.noise import noise_keys
from harness.precision.result import CastResult, CastStatistics
from harness.precision.rounding import clip_threshold, largest
from harness.precision.scales import MXINT8_UNIT, absolute_maximum, encode_scale, nvfp4_outer, step_scales
from harness.spec import QuantizerSpec

TILE = 4096
"""Elements a program works on, unless one block is larger."""
MAX_PROGRAMS = 65_535
"""CUDA's limit on a grid's second dimension."""
INTERPRETED = bool(triton.knobs.runtime.interpret)


def available() -> bool:
    return INTERPRETED or torch.cuda.is_available()


def reason() -> str:
    if INTERPRETED:
        return f"triton {triton.__version__}, interpreted"
    return f"triton {triton.__version__}" if torch.cuda.is_available() else "no CUDA device"


@dataclass(frozen=True)
class _Grid:
    """A format and rounding as the kernels take them."""

    kind: int
    mantissa: int
    maximum: float
    top: int
    limit: int
    min_normal: int
    emax: int
    rounding: int
    overflow: int

    @property
    def runtime(self) -> tuple[int, int, int, float]:
        return self.top, self.limit, self.min_normal, clip_threshold(self.maximum)

    @property
    def constants(self) -> dict[str, int]:
        return {
            "KIND": self.kind, "MANTISSA": self.mantissa, "ROUNDING": self.rounding, "OVERFLOW": self.overflow,
        }  # fmt: skip


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _grid(spec: QuantizerSpec) -> _Grid | None:
    fmt = find_format(spec.format)
    rounding = {
        "nearest": device.NEAREST, "stochastic": device.STOCHASTIC, "half_away": device.HALF_AWAY,
    }[spec.rounding]  # fmt: skip
    if isinstance(fmt, IntFormat) and fmt.symmetric and not spec.margin:
        kind, unit = (device.MXINT8, MXINT8_UNIT) if spec.scaling == "mx" else (device.WHOLE, 1.0)
        top = _bits(float(fmt.max))
        return _Grid(kind, 6, fmt.max * unit, top, 0, 0, 0, rounding, device.SATURATE)
    if not isinstance(fmt, FloatFormat) or not fmt.signed:
        return None
    special = spec.overflow == "special" and fmt.specials != "none"
    overflow = device.SATURATE
    if special:
        overflow = device.INFINITY if fmt.has_infinity else device.NOT_A_NUMBER
    maximum, emax = largest(fmt), fmt.max_exponent
    if fmt.exponent_bits == 8:
        return _Grid(device.BITS, fmt.mantissa_bits, maximum, _bits(maximum), 0, 0, emax, rounding, overflow)
    limit = 2.0 ** (emax + 1) if special else maximum
    return _Grid(
        device.NARROW, fmt.mantissa_bits, maximum, _bits(maximum), _bits(limit), _bits(fmt.min_normal),
        fmt.max_exponent, rounding, overflow,
    )  # fmt: skip


def cast_tensor(
    x: Tensor,
    spec: QuantizerSpec,
    *,
    along: int,
    carrier: torch.dtype,
    scale: Tensor | None,
    amax: Tensor | None,
    seed: int | None,
    collect: bool,
    dequantized: bool,
) -> CastResult | None:
    """See `harness.precision.cast.cast`; None where the twin must do it."""
    grid = _grid(spec)
    if grid is None or spec.keep_top or not x.numel() or x.numel() >= 2**31:
        return None
    if spec.block_shape is not None and math.prod(map(_next_power, spec.block_shape)) > 4 * TILE:
        return None
    x = x.detach()
    if x.dtype not in (torch.float32, torch.bfloat16):
        x = x.float()
    keys = noise_keys(seed) if spec.rounding == "stochastic" and seed is not None else (0, 0)
    if spec.block_shape is not None:
        return _by_block(x, spec, grid, along, carrier, amax, keys, collect, dequantized)
    return _by_tensor_or_row(x, spec, grid, along, carrier, scale, amax, keys, collect, dequantized)


def _by_tensor_or_row(
    x: Tensor, spec: QuantizerSpec, grid: _Grid, along: int, carrier: torch.dtype, scale: Tensor | None,
    amax: Tensor | None, keys: tuple[int, int], collect: bool, dequantized: bool,
) -> CastResult | None:  # fmt: skip
    own = (
        absolute_maximum(x)
        if spec.scaling == "current" or (spec.scaling == "delayed" and scale is None)
        else None
    )
    encode, inverse = _outer_scales(x, spec, along, scale, amax, own)
    by_row = encode.dim() == 1
    rows, cols = x.shape
    out = torch.empty(x.shape, dtype=carrier, device=x.device)
    found = torch.zeros((), dtype=torch.int32, device=x.device)
    tile_cols = min(_next_power(cols), 512)
    tile_rows = max(TILE // tile_cols, 1)
    programs = (triton.cdiv(rows, tile_rows), triton.cdiv(cols, tile_cols))
    if programs[1] > MAX_PROGRAMS:
        return None
    sums = torch.zeros(programs[0] * programs[1] if collect else 1, 5, dtype=torch.float64, device=x.device)
    passes.scaled_kernel[programs](
        x, _destination(out), encode, inverse, found, sums, rows, cols, *x.stride(), int(by_row and along == 1),
        int(by_row and along == 0), *keys, *grid.runtime, **grid.constants, FACTOR=dequantized, AMAX=own is None,
        COLLECT=collect, **_carrier(spec, carrier, dequantized), ROWS=tile_rows, COLS=tile_cols,
        enable_fp_fusion=False,
    )  # fmt: skip
    own = found.view(torch.float32) if own is None else own
    factor = None if dequantized or spec.scaling == "none" else inverse
    statistics = _statistics(sums, own, math.nan if by_row else float(encode)) if collect else None
    return CastResult(out, factor, own, statistics, along)


def _outer_scales(
    x: Tensor, spec: QuantizerSpec, along: int, scale: Tensor | None, amax: Tensor | None, own: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(encode, inverse) as the twin has them: FP32, scalar or per row of the operand."""
    stepped = isinstance(find_format(spec.format), IntFormat)
    if spec.scaling == "none":
        one = torch.ones((), device=x.device)
        return one, one
    if spec.scaling == "static" or scale is not None:
        encode = torch.full((), spec.scale, device=x.device) if scale is None else scale.float().view(())
        return encode, encode.reciprocal()
    if spec.scaling == "row":
        reference = x.abs().amax(along).float()
    else:
        given = own if amax is None else amax
        assert given is not None
        reference = given.float().view(())
    if stepped and spec.scaling != "delayed":
        scales = step_scales(-reference, reference, spec, per_block=False)
        assert scales.encode is not None
        assert scales.inverse is not None
        return scales.encode, scales.inverse
    encode = encode_scale(reference, spec)
    return encode, encode.reciprocal()


def _by_block(
    x: Tensor, spec: QuantizerSpec, grid: _Grid, along: int, carrier: torch.dtype, amax: Tensor | None,
    keys: tuple[int, int], collect: bool, dequantized: bool,
) -> CastResult | None:  # fmt: skip
    assert spec.block_shape is not None
    nvfp4 = spec.scaling == "nvfp4"
    own = absolute_maximum(x) if nvfp4 else None
    outer = inverse = torch.ones((), device=x.device)
    if nvfp4:
        reference = own if amax is None else amax.float().view(())
        assert reference is not None
        outer = nvfp4_outer(reference)
        inverse = outer.reciprocal()
    n, k = x.shape if along == 1 else (x.shape[1], x.shape[0])
    strides, places = x.stride(), (x.shape[1], 1)
    if along == 0:
        strides, places = strides[::-1], places[::-1]
    across, length = spec.block_shape
    b, d = _next_power(across), _next_power(length)
    count = max(TILE // (b * d), 1)
    # blocks of a tile lie side by side in memory: along the contraction, or across it where that is contiguous
    c = min(count, _next_power(triton.cdiv(k, length))) if along == 1 else 1
    a = min(count // c, _next_power(triton.cdiv(n, across)))
    programs = (triton.cdiv(n, across * a), triton.cdiv(k, length * c))
    if programs[1] > MAX_PROGRAMS:
        return None
    out = torch.empty(x.shape, dtype=carrier, device=x.device)
    found = torch.zeros((), dtype=torch.int32, device=x.device)
    sums = torch.zeros(programs[0] * programs[1] if collect else 1, 5, dtype=torch.float64, device=x.device)
    maximum = grid.maximum / 2.0**spec.margin
    passes.block_kernel[programs](
        x, _destination(out), outer, inverse, found, sums, n, k, *strides, *places, *keys, *grid.runtime, maximum,
        **grid.constants, SCALING={"block": device.BLOCK, "mx": device.MX, "nvfp4": device.NVFP4}[spec.scaling],
        RULE={"floor": device.FLOOR, "up": device.UP, "even": device.EVEN}[spec.scale_rounding],
        POWER_OF_TWO=spec.power_of_two, EMAX=grid.emax,
        TOP_MANTISSA=_bits(grid.maximum) & 0x7FFFFF, ACROSS=across, ALONG=length, FACTOR=dequantized and nvfp4,
        AMAX=not nvfp4, COLLECT=collect, **_carrier(spec, carrier, dequantized), A=a, B=b, C=c, D=d,
        enable_fp_fusion=False,
    )  # fmt: skip
    own = found.view(torch.float32) if own is None else own
    statistics = _statistics(sums, own, math.nan) if collect else None
    return CastResult(out, inverse if nvfp4 and not dequantized else None, own, statistics, along)


def _destination(out: Tensor) -> Tensor:
    """BF16 numbers are stored by their bits."""
    return out.view(torch.int16) if out.dtype == torch.bfloat16 else out


def _carrier(spec: QuantizerSpec, carrier: torch.dtype, dequantized: bool) -> dict[str, bool]:
    """Whether the values are BF16, and whether they surely are on its grid: a block's scale can take them below it."""
    scaled = dequantized or spec.scaling in ("block", "mx")
    return {"BF16": carrier == torch.bfloat16, "EXACT": spec.exact_in_bf16 and not scaled}


def _statistics(sums: Tensor, amax: Tensor, scale: float) -> CastStatistics:
    nonzero, clipped, flushed, signal, noise = sums.sum(0).tolist()
    return CastStatistics(float(amax), scale, int(nonzero), int(clipped), int(flushed), signal, noise)


def _next_power(value: int) -> int:
    return 1 << (value - 1).bit_length()
