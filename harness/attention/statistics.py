"""How far an error leans one way: its mean against its spread, its signs, and whether its parts add up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.attention.backward import Gradients

BF16_MANTISSA_BITS = 7


def ulp(x: Tensor) -> Tensor:
    """BF16's spacing at `x` (FP64, not zero): 2^(exponent - 7), 2^-133 below the normal numbers."""
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), (exponent - 1).clamp_min(-126) - BF16_MANTISSA_BITS)


def bias_of(out: Tensor, ideal: Tensor) -> dict[str, float]:
    """Mean and standard deviation of (out - ideal) in BF16 ulp of `ideal`, the mean's standard error from the means of
    rows (an error of P or l is common to a row), and the share of rows that have an element that is not finite."""
    finite = out.isfinite().all(-1)
    kept, wanted = out[finite].double(), ideal[finite].double()
    error = (kept - wanted) / ulp(wanted)
    lost = 1 - float(finite.double().mean())
    if len(error) < 2:
        return {"nan_share": lost}
    return {
        "attention_bias_ulp": float(error.mean()),
        "attention_bias_se_ulp": float(error.mean(-1).std()) / len(error) ** 0.5,
        "attention_sd_ulp": float(error.std()),
        "nan_share": lost,
    }


def delta_statistics(found: Gradients, wanted: Gradients, x: Tensor) -> dict[str, float]:
    """How delta's error leans: its mean, its sum over that of |delta|, a two-sided sign test over rows; how coherent
    the rank-1 errors of W_Q's gradient are; and the error of dQ. Rows that are not finite are left out."""
    finite = found.delta.isfinite().squeeze(-1) & found.dq.isfinite().all(-1)
    error = (found.delta.double() - wanted.delta)[finite].flatten()
    if not len(error):
        return {}
    dq_error = (found.dq.double() - wanted.dq)[finite]
    return {
        "delta_bias": float(error.mean()),
        "delta_bias_relative": float(error.sum() / wanted.delta[finite].abs().sum()),
        "delta_sign_p": sign_test(int((error > 0).sum()), int((error < 0).sum())),
        "coherence": coherence(error, wanted.pk[finite], x[finite]),
        "dq_relative_error": float(dq_error.norm() / wanted.dq[finite].norm()),
    }


def sign_test(num_positive: int, num_negative: int) -> float:
    """Two-sided p of so uneven a split under equal chances: exact up to 1000 signs, else normal with continuity."""
    n, more = num_positive + num_negative, max(num_positive, num_negative)
    if n == 0:
        return 1.0
    if n <= 1000:
        tail = sum(math.comb(n, i) for i in range(more, n + 1))
        return min(1.0, float(2 * tail / 2**n))
    return min(1.0, math.erfc((more - n / 2 - 0.5) / (n / 4) ** 0.5 / 2**0.5))


def coherence(error: Tensor, pk: Tensor, x: Tensor) -> float:
    """|sum_T e_T (PK)_T^T X_T| over sum_T |e_T (PK)_T^T X_T| (Frobenius): 1 where all point one way, about 1/sqrt(T)
    where they are random. error [T], pk [T, d], x [T, d_model]; 0 where there is no error at all."""
    pk, x = pk.double(), x.double()
    whole = ((error[:, None] * pk).mT @ x).norm()
    parts = (error.abs() * pk.norm(dim=1) * x.norm(dim=1)).sum()
    return float(whole / parts) if parts > 0 else 0.0
