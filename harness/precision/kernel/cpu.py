"""Calling the C++ kernel: from a spec to the fields of its job, and back to a `CastResult`.

    available()                    # False without a compiler; reason() says why
    cast_tensor(x, spec, along=1, carrier=torch.float32, ...)       # None: the twin must do it

Not covered, so None: tensors elsewhere than on the CPU, empty ones, E8M0 as an element format, and kept outliers.
"""

from __future__ import annotations

import ctypes
import math
import struct
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from harness.precision.formats import FloatFormat, IntFormat, find_format
from harness.precision.kernel import build
from harness.precision.noise import noise_keys
from harness.precision.result import CastResult, CastStatistics
from harness.precision.rounding import clip_threshold, largest, level_edges
from harness.precision.scales import MXINT8_UNIT
from harness.spec import QuantizerSpec

STREAM_BYTES = 32 * 2**20
"""Outputs from this size on are written past the caches, which could not hold them; it saves reading them first."""
PARALLEL_ELEMENTS = 2**16
"""Below this a second thread costs more than it does."""
FP32_MAX = (2 - 2.0**-23) * 2.0**127

_NARROW, _WIDE, _WHOLE, _TABLE = range(4)
_GIVEN, _ENCODE, _STEP, _MX, _NVFP4 = range(5)
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "half_away": 2}
_SCALE_ROUNDINGS = {"floor": 0, "up": 1, "even": 2}


class _Grid(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "rounding", "special", "mantissa_bits")),
        *((name, ctypes.c_float) for name in ("max", "min_normal", "beyond", "before", "after")),
        *((name, ctypes.c_int32) for name in ("asymmetric", "num_levels")),
        *((name, ctypes.c_void_p) for name in ("levels", "edges")),
        *((name, ctypes.c_uint32) for name in ("key0", "key1")),
    ]


class _ScaleRule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rule", "scale_rounding", "power_of_two")),
        *((name, ctypes.c_int32) for name in ("emax", "mantissa_bits", "top_fraction")),
        *((name, ctypes.c_float) for name in ("dividend", "margin_factor", "max")),
        ("asymmetric", ctypes.c_int32),
        ("outer", ctypes.c_float),
    ]


class _Job(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out", "given", "inverse", "amax", "statistics")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "row_stride", "out_stride")),
        *((name, ctypes.c_int64) for name in ("block_rows", "block_cols")),
        *((name, ctypes.c_int32) for name in ("in_bf16", "out_bf16", "threads", "multiply", "stream")),
        *((name, ctypes.c_float) for name in ("clip_threshold", "safe")),
        ("grid", _Grid),
        ("rule", _ScaleRule),
    ]


@cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    try:
        library, path = build.load_library()
    except build.BuildError as error:
        return None, str(error)
    if not hasattr(library, "quantize_job_bytes"):
        return None, f"{path} is another library; remove it"
    library.quantize_job_bytes.restype = ctypes.c_int64
    if library.quantize_job_bytes() != ctypes.sizeof(_Job):
        return None, f"{path} and cpu.py disagree about the layout of a job"
    library.quantize.argtypes = [ctypes.c_void_p]
    library.quantize.restype = None
    return library, f"fused C++ kernel {path.name}"


def available() -> bool:
    """Whether the kernel can be had; the first call may compile it (some CPU-seconds)."""
    return _library()[0] is not None


def reason() -> str:
    """Which library runs, or why none does."""
    return _library()[1]


def cast_tensor(
    x: Tensor,
    spec: QuantizerSpec,
    *,
    along: int = 1,
    carrier: torch.dtype = torch.float32,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    seed: int | None = None,
    collect: bool = False,
    dequantized: bool = False,
    out: Tensor | None = None,
) -> CastResult | None:
    """See `harness.precision.cast.cast`. None where the kernel cannot do it.

    out   [rows, cols] in the carrier dtype, contiguous columns, apart from x: where the values go. Memory that is
          mapped already saves its first touch, which costs more than the cast.
    """
    library = _library()[0]
    if library is None or not x.is_cpu or not x.numel():
        return None
    plan = _plan(spec, along, dequantized)
    if plan is None:
        return None
    if dequantized and spec.scaling == "nvfp4":
        return _nvfp4_dequantized(x, spec, along, carrier, amax, seed, collect, out)
    if x.dtype not in (torch.float32, torch.bfloat16):
        x = x.float()
    rows, cols = x.shape
    row_stride, col_stride = x.stride()
    if col_stride != 1 and cols > 1:
        x = x.contiguous()
        row_stride = cols
    values = torch.empty((rows, cols), dtype=carrier) if out is None else _checked(out, rows, cols, carrier)

    job = _Job.from_buffer_copy(plan.job)
    own_amax = torch.empty(())
    fake = isinstance(x, FakeTensor) or isinstance(
        values, FakeTensor
    )  # as harness.trace casts: nothing to compute
    job.x, job.out, job.amax = (0, 0, 0) if fake else (x.data_ptr(), values.data_ptr(), own_amax.data_ptr())
    job.in_bf16, job.out_bf16 = x.dtype is torch.bfloat16, carrier is torch.bfloat16
    if (reference := scale if scale is not None else amax) is not None:
        if reference.dtype is not torch.float32 or not reference.is_cpu:
            reference = reference.detach().to("cpu", torch.float32)
        job.given = 0 if fake else reference.data_ptr()
        if scale is not None:
            job.rule.rule = _GIVEN
    elif spec.scaling == "delayed" and job.rule.rule == _GIVEN:
        return None
    inverse = None
    if plan.inverse is not None:
        inverse = torch.empty(()) if plan.inverse == "tensor" else torch.empty(rows if along == 1 else cols)
        job.inverse = 0 if fake else inverse.data_ptr()
    if spec.scaling == "row":
        job.block_rows, job.block_cols = (1, max(cols, 2)) if along == 1 else (rows, 1)
    if seed is not None:
        job.grid.key0, job.grid.key1 = noise_keys(seed)
    out_stride = values.stride(0)
    itemsize = values.itemsize
    if rows * cols * itemsize >= STREAM_BYTES:
        job.stream = plan.streams(itemsize) and (job.out | out_stride * itemsize) % 64 == 0
    one_row = job.block_cols == 0 or (
        spec.scaling != "row" and job.block_rows == 1 and cols % job.block_cols == 0
    )
    if one_row and row_stride == cols == out_stride:
        rows, cols = 1, rows * cols
    job.rows, job.cols, job.row_stride, job.out_stride = rows, cols, row_stride, out_stride
    threads = torch.get_num_threads()
    job.threads = threads if threads > 1 and rows * cols >= PARALLEL_ELEMENTS else 1
    if collect:
        sums = (ctypes.c_double * 6)()
        job.statistics = ctypes.addressof(sums)
    if not fake:
        library.quantize(ctypes.addressof(job))
    one_scale = spec.scaling in ("none", "static", "delayed", "current") or (
        spec.scaling == "row" and x.shape[1 - along] == 1
    )
    statistics = _statistics(sums, float(own_amax), one_scale) if collect else None
    return CastResult(values, inverse, own_amax, statistics, along)


def _statistics(sums: ctypes.Array[ctypes.c_double], amax: float, one_scale: bool) -> CastStatistics:
    """What the kernel left in `sums`; `scale` is NaN where there is more than one."""
    nonzero, clipped, flushed, signal, noise, scale = sums
    return CastStatistics(
        amax=amax,
        scale=scale if one_scale else math.nan,
        nonzero=int(nonzero),
        clipped=int(clipped),
        flushed=int(flushed),
        signal=signal,
        noise=noise,
    )


def _nvfp4_dequantized(
    x: Tensor,
    spec: QuantizerSpec,
    along: int,
    carrier: torch.dtype,
    amax: Tensor | None,
    seed: int | None,
    collect: bool,
    out: Tensor | None,
) -> CastResult | None:
    """The factor of the tensor is a second multiplication with a rounding of its own."""
    made = cast_tensor(x, spec, along=along, amax=amax, seed=seed, collect=collect)
    if made is None or made.inverse is None:
        return None
    values = made.values.mul_(made.inverse).to(carrier)
    if out is not None:
        values = out.copy_(values)
    return CastResult(values, None, made.amax, made.statistics, along)


def _checked(out: Tensor, rows: int, cols: int, carrier: torch.dtype) -> Tensor:
    if out.dtype is not carrier or out.shape != (rows, cols) or not out.is_cpu:
        raise ValueError(
            f"out must be {carrier} [{rows}, {cols}] on the CPU, got {out.dtype} {list(out.shape)}"
        )
    if not out.is_contiguous() and (out.stride(1) != 1 or out.stride(0) < cols):
        raise ValueError(f"out must have contiguous columns and rows apart, got strides {out.stride()}")
    return out


class _Plan:
    """The fields of a job that depend on the spec alone, and what they point to."""

    def __init__(self, job: _Job, inverse: str | None, keep: tuple[object, ...]) -> None:
        self.job = job
        self.inverse = inverse
        self._keep = keep

    def streams(self, itemsize: int) -> bool:
        """Whether blocks begin where the kernel's stores must: 64 bytes apart, 32 for a lone half register of BF16."""
        return self.job.block_cols in (0, 1, 16) or self.job.block_cols * itemsize % 64 == 0


_plans: dict[tuple[int, int, bool], tuple[QuantizerSpec, _Plan | None]] = {}


def _plan(spec: QuantizerSpec, along: int, dequantized: bool) -> _Plan | None:
    """By identity: hashing and comparing a spec takes longer than the rest of a call."""
    key = (id(spec), along, dequantized)
    known = _plans.get(key)
    if known is None:  # holding the spec keeps its id from being given to another
        if len(_plans) >= 4096:
            _plans.clear()
        known = _plans[key] = (spec, _make_plan(spec, along, dequantized))
    return known[1]


def _below(value: float) -> float:
    """The FP32 number before a positive one; of what FP32 cannot hold, its largest."""
    if value > FP32_MAX:
        return FP32_MAX
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    (below,) = struct.unpack("<f", struct.pack("<i", bits - 1))
    return float(below)


@lru_cache(maxsize=1024)
def _make_plan(spec: QuantizerSpec, along: int, dequantized: bool) -> _Plan | None:
    fmt = find_format(spec.format)
    if spec.keep_top or (isinstance(fmt, FloatFormat) and not fmt.signed):
        return None
    job = _Job()
    keep: list[object] = []
    grid, rule = job.grid, job.rule
    grid.rounding = _ROUNDINGS[spec.rounding]
    grid.before = grid.after = 1.0
    stepped = not isinstance(fmt, FloatFormat)
    if isinstance(fmt, FloatFormat):
        maximum, emax, mantissa_bits = largest(fmt), fmt.max_exponent, fmt.mantissa_bits
        grid.kind = _WIDE if fmt.exponent_bits == 8 else _NARROW
        grid.mantissa_bits, grid.min_normal = mantissa_bits, fmt.min_normal
        grid.special = spec.overflow == "special" and fmt.specials != "none"
        grid.beyond = math.inf if fmt.has_infinity else math.nan
        half_step = 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)
        job.safe = _below(maximum + half_step)
    elif isinstance(fmt, IntFormat):
        maximum, emax, mantissa_bits = float(fmt.max), 0, 6
        grid.kind, grid.asymmetric = _WHOLE, not fmt.symmetric
        job.safe = maximum + 0.25 if fmt.symmetric else 2.0 * maximum
        if spec.scaling == "mx":
            grid.before, grid.after = 1 / MXINT8_UNIT, MXINT8_UNIT
    else:
        maximum, emax, mantissa_bits = fmt.max, 0, 0
        grid.kind = _TABLE
        levels = (ctypes.c_float * len(fmt.levels))(*fmt.levels)
        edges = (ctypes.c_float * (len(fmt.levels) - 1))(*level_edges(fmt))
        grid.levels, grid.edges, grid.num_levels = (
            ctypes.addressof(levels),
            ctypes.addressof(edges),
            len(levels),
        )
        keep += [levels, edges]
    grid.max = maximum
    unit = MXINT8_UNIT if spec.scaling == "mx" and isinstance(fmt, IntFormat) else 1.0
    job.clip_threshold = clip_threshold(maximum * unit)

    rule.max, rule.asymmetric = maximum, grid.asymmetric
    rule.power_of_two = spec.power_of_two
    rule.scale_rounding = _SCALE_ROUNDINGS[spec.scale_rounding]
    rule.dividend, rule.margin_factor = maximum / 2.0**spec.margin, 2.0**spec.margin
    rule.emax, rule.mantissa_bits = emax, mantissa_bits
    if spec.scaling == "mx":
        (top,) = struct.unpack("<i", struct.pack("<f", maximum * unit / 2.0**emax))
        rule.top_fraction = top & 0x7FFFFF
    if spec.scaling in ("none", "static"):
        factor = ctypes.c_float(spec.scale if spec.scaling == "static" else 1.0)
        job.given, rule.rule = ctypes.addressof(factor), _GIVEN
        keep.append(factor)
    elif spec.scaling in ("mx", "nvfp4"):
        rule.rule = _MX if spec.scaling == "mx" else _NVFP4
    else:
        rule.rule = _STEP if stepped and spec.scaling != "delayed" else _ENCODE
    if spec.block_shape is not None:
        across, length = spec.block_shape
        job.block_rows, job.block_cols = (across, length) if along == 1 else (length, across)
    job.multiply = dequantized or spec.scaling in ("block", "mx", "nvfp4")
    inverse = None
    if not dequantized:
        places = {
            "static": "tensor",
            "delayed": "tensor",
            "current": "tensor",
            "nvfp4": "tensor",
            "row": "row",
        }
        inverse = places.get(spec.scaling)
    return _Plan(job, inverse, tuple(keep))
