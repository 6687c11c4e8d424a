"""The cast in plain PyTorch: every format, scaling and rounding, on any device, eager or compiled.

It defines what the kernels compute, bit for bit. Where a kernel does not cover a cast, it is what runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.precision.formats import FloatFormat, IntFormat, TableFormat, find_format
from harness.precision.noise import noise_bits
from harness.precision.result import CastResult, CastStatistics
from harness.precision.rounding import clip_threshold, largest, round_level, round_to, round_whole
from harness.precision.scales import (
    MXINT8_UNIT,
    Scales,
    absolute_maximum,
    encode_scale,
    from_blocks,
    largest_in_blocks,
    mx_scales,
    nvfp4_scales,
    step_scales,
    to_blocks,
)
from harness.spec import QuantizerSpec


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
) -> CastResult:
    """See `harness.precision.cast.cast`, which checks the arguments."""
    x = x.detach().float()
    if not x.numel():
        return _empty(x, spec, along, carrier, collect, dequantized)
    operand = x if along == 1 else x.t()
    noise = None
    if spec.rounding == "stochastic" and seed is not None:
        noise = noise_bits(seed, tuple(x.shape), x.device)
        noise = noise if along == 1 else noise.t()
    shape = (operand.shape[0], operand.shape[1])
    block, kept = spec.block_shape, None
    if block is not None:
        # A vector is not padded to many times its size.
        block = (min(block[0], shape[0]), min(block[1], shape[1]))
        operand = to_blocks(operand, block)
        noise = to_blocks(noise, block) if noise is not None else None
        kept = largest_in_blocks(operand, spec.keep_top) if spec.keep_top else None
        counted = operand if kept is None else operand.masked_fill(kept, 0.0)
        maxima = counted.abs().amax((1, 3), keepdim=True)
        own_amax = maxima.amax() if kept is None else absolute_maximum(x)
        scales = _block_scales(counted, maxima, spec, own_amax if amax is None else amax.float().view(()))
    else:
        own_amax = absolute_maximum(x)
        scales = _outer_scales(operand, spec, own_amax, scale, amax)
    scaled = operand if scales.encode is None else operand * scales.encode
    rounded = _round(scaled, spec, scales.zero_point, noise)
    values = rounded if scales.decode is None else rounded * scales.decode
    if kept is not None:
        values = torch.where(kept, operand, values)
    statistics = None
    if collect:
        statistics = _measure(operand, scaled, rounded, values, kept, scales, spec, own_amax)
    if dequantized and scales.inverse is not None:
        values = values * scales.inverse
    if block is not None:
        values = from_blocks(values, shape)
    values = (values if along == 1 else values.t()).to(carrier).contiguous()
    inverse = None if scales.inverse is None or dequantized else scales.inverse.flatten()
    if inverse is not None and spec.scaling != "row":
        inverse = inverse.view(())
    return CastResult(values, inverse, own_amax, statistics, along)


def _outer_scales(
    operand: Tensor, spec: QuantizerSpec, own_amax: Tensor, scale: Tensor | None, amax: Tensor | None
) -> Scales:
    """One scale per tensor, or per row of `operand` [n, k]."""
    stepped = not isinstance(find_format(spec.format), FloatFormat)
    if spec.scaling == "none":
        return Scales(None)
    if spec.scaling == "static":
        return _per_tensor(torch.full((), spec.scale, device=operand.device))
    if scale is not None:
        return _per_tensor(scale.detach().float().view(()))
    if spec.scaling == "row":
        if stepped:
            low, high = operand.amin(1, keepdim=True), operand.amax(1, keepdim=True)
            return step_scales(low, high, spec, per_block=False)
        return _per_tensor(encode_scale(operand.abs().amax(1, keepdim=True), spec))
    reference = own_amax if amax is None else amax.detach().float().view(())
    if stepped and spec.scaling == "current":
        low, high = operand.aminmax() if amax is None else (-reference, reference)
        return step_scales(low, high, spec, per_block=False)
    return _per_tensor(
        encode_scale(reference, spec)
    )  # delayed by its own maximum where there is no history yet


def _block_scales(counted: Tensor, maxima: Tensor, spec: QuantizerSpec, tensor_amax: Tensor) -> Scales:
    """One scale per block of `counted` [a, across, c, along], whose largest magnitudes are `maxima` [a, 1, c, 1]."""
    fmt = find_format(spec.format)
    if spec.scaling == "mx":
        return mx_scales(maxima, spec)
    if spec.scaling == "nvfp4":
        return nvfp4_scales(maxima, tensor_amax)
    if isinstance(fmt, FloatFormat):
        encode = encode_scale(maxima, spec)
        return Scales(encode, decode=encode.reciprocal())
    if isinstance(fmt, IntFormat) and not fmt.symmetric:
        low, high = counted.amin((1, 3), keepdim=True), counted.amax((1, 3), keepdim=True)
        return step_scales(low, high, spec, per_block=True)
    return step_scales(-maxima, maxima, spec, per_block=True)


def _per_tensor(scale: Tensor) -> Scales:
    return Scales(scale, inverse=scale.reciprocal())


def _round(scaled: Tensor, spec: QuantizerSpec, zero_point: Tensor | None, noise: Tensor | None) -> Tensor:
    fmt = find_format(spec.format)
    if isinstance(fmt, FloatFormat):
        return round_to(scaled, fmt, spec.rounding, spec.overflow, noise)
    if isinstance(fmt, TableFormat):
        return round_level(scaled, fmt)
    if spec.scaling == "mx":
        return round_whole((scaled / MXINT8_UNIT).clamp(fmt.min, fmt.max), spec.rounding, noise) * MXINT8_UNIT
    if zero_point is None:
        return round_whole(scaled.clamp(fmt.min, fmt.max), spec.rounding, noise)
    return _around(scaled, fmt, zero_point, spec, noise) - zero_point


def _around(
    scaled: Tensor, fmt: IntFormat, zero_point: Tensor, spec: QuantizerSpec, noise: Tensor | None
) -> Tensor:
    bounded = scaled.clamp(-2.0 * fmt.max, 2.0 * fmt.max)  # an infinity has no whole part
    return (round_whole(bounded, spec.rounding, noise) + zero_point).clamp(fmt.min, fmt.max)


def _measure(
    x: Tensor,
    scaled: Tensor,
    rounded: Tensor,
    values: Tensor,
    kept: Tensor | None,
    scales: Scales,
    spec: QuantizerSpec,
    amax: Tensor,
) -> CastStatistics:
    fmt = find_format(spec.format)
    if scales.zero_point is not None and isinstance(fmt, IntFormat):
        code = round_whole(scaled.clamp(-2.0 * fmt.max, 2.0 * fmt.max)) + scales.zero_point
        clipped = (code < fmt.min) | (code > fmt.max)
    else:
        maximum = largest(fmt) if isinstance(fmt, FloatFormat) else float(fmt.max)
        clipped = scaled.abs() > clip_threshold(maximum * (MXINT8_UNIT if _is_mxint8(spec, fmt) else 1.0))
    flushed = (rounded == 0) & (x != 0)
    if kept is not None:
        clipped, flushed = clipped & ~kept, flushed & ~kept
    dequantized = values if scales.inverse is None else values * scales.inverse
    wide = x.double()
    one_scale = scales.decode is None and (scales.encode is None or scales.encode.numel() == 1)
    return CastStatistics(
        amax=float(amax),
        scale=math.nan if not one_scale else 1.0 if scales.encode is None else float(scales.encode),
        nonzero=int(torch.count_nonzero(x)),
        clipped=int(clipped.sum()),
        flushed=int(flushed.sum()),
        signal=float(wide.square().sum()),
        noise=float((wide - dequantized.double()).square().sum()),
    )


def _is_mxint8(spec: QuantizerSpec, fmt: object) -> bool:
    return spec.scaling == "mx" and isinstance(fmt, IntFormat)


def _empty(
    x: Tensor,
    spec: QuantizerSpec,
    along: int,
    carrier: torch.dtype,
    collect: bool,
    dequantized: bool,
) -> CastResult:
    inverse = None
    if not dequantized and spec.scaling == "row":
        inverse = torch.ones(x.shape[1 - along], device=x.device)
    elif not dequantized and spec.scaling in ("static", "delayed", "current", "nvfp4"):
        inverse = torch.ones((), device=x.device)
    statistics = CastStatistics(0.0, 1.0, 0, 0, 0, 0.0, 0.0) if collect else None
    return CastResult(x.to(carrier).contiguous(), inverse, absolute_maximum(x), statistics, along)
