"""What one cast does to one tensor: SQNR, clipped and flushed fractions, bits an element, the worst block.

A tensor of any shape is cast as the matrix a GEMM would see: its contraction dimension last, the others flattened.
Sums are FP64 against the tensor's own values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.precision import hadamard
from harness.precision.cast import cast, dequantize
from harness.precision.formats import IntFormat, find_format
from harness.spec import QuantizerSpec

CHUNK = 1 << 20
"""Elements whose errors are summed at a time: they stay in the cache."""


FP32_MAX = torch.finfo(torch.float32).max
"""What is larger, in an FP64 tensor, is infinite to the cast."""


@dataclass
class Sums:
    """What adds up over tensors."""

    num_elements: int = 0
    num_nonzero: int = 0
    num_clipped: int = 0
    num_flushed: int = 0
    num_nonfinite: int = 0
    """NaN and infinite elements of the tensor as FP32."""
    num_lost: int = 0
    """Finite elements that the cast made NaN or infinite."""
    signal: float = 0.0
    noise: float = 0.0
    """Sums of x^2 and (x - dequantised)^2 over elements that are finite before and after."""
    stored_bits: float = 0.0

    def add(self, other: Sums) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def num_compared(self) -> int:
        """Elements whose errors are in the sums."""
        return self.num_elements - self.num_nonfinite - self.num_lost

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise); infinite where the cast was exact, None where there is nothing to compare."""
        return ratio_db(self.signal, self.noise) if self.num_compared else None

    @property
    def bits_per_element(self) -> float | None:
        return self.stored_bits / self.num_elements if self.num_elements else None


@dataclass
class Worst:
    """The block with the lowest SQNR of a cast with several scales a tensor."""

    sqnr_db: float
    place: str
    """Slices of the tensor: [3, 0:32]; for blocks of several rows of an N-D tensor, of the flattened matrix."""


def ratio_db(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise): infinite without noise, None where both are 0 and for what is no number."""
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


@dataclass
class Flattened:
    """A tensor as the cast takes it."""

    matrix: Tensor
    along: int
    """Contraction dimension of the matrix."""
    shape: tuple[int, ...]
    dim: int
    """Contraction dimension of the tensor."""

    def restore(self, matrix: Tensor) -> Tensor:
        """A matrix of this one's shape back in the tensor's."""
        if len(self.shape) <= 2:
            return matrix.reshape(self.shape)
        lead = [n for i, n in enumerate(self.shape) if i != self.dim]
        return matrix.reshape(*lead, self.shape[self.dim]).movedim(-1, self.dim)


def flatten(x: Tensor, along: int) -> Flattened:
    """`x` as [rows, cols]; `along` counts from either end and must name a dimension of tensors that have any."""
    if x.ndim == 0:
        return Flattened(x.reshape(1, 1), 1, (), 0)
    dim = along % x.ndim
    if x.ndim == 1:
        return Flattened(x.reshape(1, -1), 1, tuple(x.shape), dim)
    if x.ndim == 2:
        return Flattened(x, dim, tuple(x.shape), dim)
    moved = x.movedim(dim, -1)
    rows = math.prod(moved.shape[:-1])
    return Flattened(moved.reshape(rows, moved.shape[-1]), 1, tuple(x.shape), dim)


def measure(x: Tensor, spec: QuantizerSpec, along: int, seed: int) -> tuple[Sums, Worst | None, Tensor]:
    """(sums, worst block, dequantised FP32 in the shape of `x`) of a cast of a float tensor of any shape."""
    flat = flatten(x, along)
    wide = flat.matrix.float()
    if not wide.numel():
        return Sums(), None, flat.restore(wide)
    turned = hadamard.transform(wide, spec.hadamard, along=flat.along) if spec.hadamard else wide
    result = cast(turned, spec, along=flat.along, seed=seed, collect=True)
    values = dequantize(result)
    assert result.statistics is not None
    sums = Sums(
        num_elements=wide.numel(),
        num_nonzero=int(result.statistics.nonzero),
        num_clipped=int(result.statistics.clipped),
        num_flushed=int(result.statistics.flushed),
        num_nonfinite=0 if math.isfinite(result.statistics.amax) else int((~torch.isfinite(wide)).sum()),
        stored_bits=stored_bits(spec, wide.shape, flat.along),
    )
    reference = flat.matrix if x.dtype is torch.float64 and not spec.hadamard else turned
    worst = _compare(reference, values, spec, flat, sums)
    if spec.hadamard:
        values = _undo(values, spec.hadamard, flat.along)
    return sums, worst, flat.restore(values)


def _undo(x: Tensor, size: int, along: int) -> Tensor:
    """The transpose of `hadamard.transform`, which is its inverse."""
    whole = x.shape[along] // size * size
    if size < 2 or not whole:
        return x
    x = x.clone()
    head = x.narrow(along, 0, whole)
    basis = hadamard.matrix(size, x.device)
    parts = head.unflatten(along, (-1, size))
    head.copy_((parts @ basis.t() if along == 1 else basis @ parts).flatten(along, along + 1))
    return x


def stored_bits(spec: QuantizerSpec, shape: torch.Size, along: int) -> float:
    """Bits that hold a cast matrix: elements, and scales as wide as the cast computes them.

    A scale is FP32, but 8 bits where it is a power of two per block (E8M0) or NVFP4's per-block E4M3; asymmetric
    integers add a zero point as wide as an element; a kept value costs FP32 and its index in the block.
    """
    fmt = find_format(spec.format)
    bits = fmt.bits * float(shape.numel())
    depth, width = shape[along], shape[1 - along]
    scales, each = 1, 32
    if spec.scaling in ("none", "static"):
        scales = 0  # 1 or a constant of the recipe
    elif spec.scaling == "row":
        scales = width
    elif spec.block_shape is not None:
        across, length = spec.block_shape
        scales = math.ceil(width / across) * math.ceil(depth / length)
        if spec.scaling in ("mx", "nvfp4") or spec.power_of_two:
            each = 8
        index = max(1, math.ceil(math.log2(across * length)))
        bits += scales * spec.keep_top * (32 + index)
    if spec.scaling == "nvfp4":
        bits += 32
    if isinstance(fmt, IntFormat) and not fmt.symmetric:
        each += fmt.bits
    return bits + scales * each


def _compare(
    reference: Tensor, values: Tensor, spec: QuantizerSpec, flat: Flattened, sums: Sums
) -> Worst | None:
    """Add the errors to `sums`; the worst of the cast's blocks."""
    if flat.along == 0:
        reference, values = reference.t(), values.t()
    rows, cols = reference.shape
    block = (1, cols) if spec.scaling == "row" else spec.block_shape
    across, length = block or (1, cols)
    # A vector is not padded to many times its size.
    across, length = min(across, rows), min(length, cols)
    worst: tuple[float, int, int] | None = None
    for start, x, y in _chunks(reference, values, across):
        noise = _block_sums((x - y).square_(), across, length)
        if sums.num_nonfinite or not math.isfinite(float(noise.sum())):
            usable = x.abs() <= FP32_MAX
            kept = usable & (y.abs() <= FP32_MAX)
            sums.num_lost += int((usable & ~kept).sum())
            x, y = torch.where(kept, x, 0), torch.where(kept, y, 0)
            noise = _block_sums((x - y).square_(), across, length)
        signal = _block_sums(x.square_(), across, length)
        sums.signal += float(signal.sum())
        sums.noise += float(noise.sum())
        share = torch.where(noise > 0, noise / signal, 0.0)
        high, at = share.flatten().max(0)
        if block is not None and high > 0 and (worst is None or high > worst[0]):
            i, j = divmod(int(at), share.shape[1])
            worst = (float(high), start + i * across, j * length)
    if worst is None:
        return None
    share_, row, col = worst
    place = _place(flat, (row, min(row + across, rows)), (col, min(col + length, cols)))
    return Worst(0.0 - 10 * math.log10(share_), place)


def _chunks(x: Tensor, y: Tensor, multiple: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first row, FP64 rows of x, of y); the number of rows is a multiple of `multiple`, but at the end."""
    rows = max(1, CHUNK // x.shape[1] // multiple) * multiple
    for start in range(0, x.shape[0], rows):
        # .to() would hand on an FP64 tensor itself, and the sums below write into what they get.
        yield (
            start,
            x[start : start + rows].to(torch.float64, copy=True),
            y[start : start + rows].double(),
        )


def _block_sums(x: Tensor, across: int, length: int) -> Tensor:
    rows, cols = x.shape
    tail = (0, -cols % length, 0, -rows % across)
    if any(tail):
        x = torch.nn.functional.pad(x, tail)
    return x.view(x.shape[0] // across, across, x.shape[1] // length, length).sum((1, 3))


def _place(flat: Flattened, rows: tuple[int, int], cols: tuple[int, int]) -> str:
    """`rows` and `cols` with the contraction last, as slices of the tensor."""
    along = f"{cols[0]}:{cols[1]}"
    if not flat.shape:
        return "[]"
    if len(flat.shape) == 1:
        return f"[{along}]"
    one_row = rows[1] - rows[0] == 1
    across = f"{rows[0]}" if one_row else f"{rows[0]}:{rows[1]}"
    if len(flat.shape) == 2:
        return f"[{across}, {along}]" if flat.dim == 1 else f"[{along}, {across}]"
    if not one_row:
        return f"[{across}, {along}] of the flattened matrix"
    index = rows[0]
    parts: list[str] = []
    for i in reversed([i for i in range(len(flat.shape)) if i != flat.dim]):
        index, position = divmod(index, flat.shape[i])
        parts.insert(0, str(position))
    parts.insert(flat.dim, along)
    return f"[{', '.join(parts)}]"
