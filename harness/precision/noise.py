"""The random bits of stochastic rounding: a hash of a seed and of the element's place, so every implementation draws
the same ones in any order and a resumed run draws what the first would have.

    bits(seed, i) = hash of i, the linear index of the element in row-major order (modulo 2^32), under two 32-bit keys

With all arithmetic modulo 2^32 and >> shifting in zeros:

    z = i ^ key0;  z ^= z >> 16;  z *= 0x7feb352d;  z ^= z >> 15;  z ^= key1;  z *= 0x846ca68b;  z ^= z >> 16

The multipliers and shifts are Wellons's lowbias32 (https://github.com/skeeto/hash-prospector); the second key, which
it lacks, keeps two seeds apart whose first keys cover the same indices. The keys are the halves of SplitMix64 (Steele,
Lea, Flood 2014) of the seed, so that neighbouring seeds have nothing in common.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
SHIFTS = (16, 15, 16)
_MASK64 = 2**64 - 1


def noise_seed(seed: int, step: int, name: str, rank: int | None = None) -> int:
    """64-bit seed for the cast of tensor `name` in a training step. `rank` None gives the same bits on all ranks."""
    text = f"{seed}/{step}/{name}/{'shared' if rank is None else rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def noise_keys(seed: int) -> tuple[int, int]:
    """(key0, key1) of the hash, each from 0 to 2^32 - 1: low and high half of SplitMix64's first output."""
    z = (seed + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def noise_bits(seed: int, shape: tuple[int, ...], device: torch.device | str | None = None) -> Tensor:
    """32 random bits for each element of a tensor of `shape`, as int32."""
    count = 1
    for size in shape:
        count *= size
    # beyond 2^31 elements the index wraps, which int64 must do on the way
    wide = torch.int64 if count > 2**31 - 1 else torch.int32
    z = torch.arange(count, dtype=wide, device=device).to(torch.int32)
    key0, key1 = noise_keys(seed)
    z = z ^ _signed(key0)
    z = (z ^ _shift(z, SHIFTS[0])) * MULTIPLIERS[0]
    z = z ^ _shift(z, SHIFTS[1]) ^ _signed(key1)
    z = z * _signed(MULTIPLIERS[1])
    bits: Tensor = z ^ _shift(z, SHIFTS[2])
    return bits.view(shape)


def uniform(bits: Tensor) -> Tensor:
    """The upper 24 of the 32 bits as FP32 in [0, 1), a multiple of 2^-24."""
    return _shift(bits, 8).float() * 2.0**-24


def upper(bits: Tensor, count: int) -> Tensor:
    """The upper `count` (1 to 31) of the 32 bits as a non-negative int32."""
    return _shift(bits, 32 - count)


def _shift(z: Tensor, count: int) -> Tensor:
    """z >> count with zeros shifted in; torch's own shift of int32 copies the sign."""
    shifted: Tensor = (z >> count) & (2 ** (32 - count) - 1)
    return shifted


def _signed(u32: int) -> int:
    return u32 - 2**32 if u32 >= 2**31 else u32
