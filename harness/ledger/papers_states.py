"""What papers and manuals say that model states take: bytes a parameter, and how sharding divides them.

Each function is one published formula in its source's letters; tests/harness/ledger/test_papers_memory.py holds each
against the numbers printed beside it. Where sources seem to differ they count different things: ZeRO's 16 bytes have
2-byte gradients, Megatron's 18 have FP32 ones, Megatron's 20 both. What this suite's own optimizers keep, to the
byte, is harness.ledger.states.
"""

from __future__ import annotations

from typing import Literal


def adamw_bytes(
    n: float, b_w: float = 2, b_g: float = 2, b_m: float = 4, b_v: float = 4, b_master: float = 0
) -> float:
    """N (b_w + b_g + b_m + b_v + b_master): 12 bytes a parameter for BF16 weights and gradients with FP32 moments,
    16 with an FP32 copy of the weights; 84 and 112 GB for N = 7e9, of which the weights are 14. Activations and
    buffers come on top.

    Source: the suite's source page, section 1 (read).
    """
    return n * (b_w + b_g + b_m + b_v + b_master)


def zero_bytes(psi: float, n_d: int, stage: Literal[0, 1, 2, 3], k: float = 12) -> float:
    """Bytes of a rank under ZeRO, mixed-precision Adam (K = 12: FP32 copy and two moments), 2-byte weights and
    gradients.

    DP (2 + 2 + K) Psi; P_os 4 Psi + K Psi / N_d; P_os+g 2 Psi + (2 + K) Psi / N_d; P_os+g+p (4 + K) Psi / N_d. Psi =
    7.5e9, N_d = 64: 120, 31.4, 16.6, 1.9 GB (decimal). Rajbhandari et al. 2020, figure 1 (secondary, recomputed).
    """
    weights, gradients = 2 * psi, 2 * psi
    return (
        weights / (n_d if stage >= 3 else 1)
        + gradients / (n_d if stage >= 2 else 1)
        + k * psi / (n_d if stage >= 1 else 1)
    )


Megatron = Literal["fp16, fp16 gradients", "bf16, fp32 gradients", "fp32"]
_MEGATRON: dict[str, tuple[float, float]] = {
    "fp16, fp16 gradients": (4, 16),
    "bf16, fp32 gradients": (6, 12),
    "fp32": (8, 8),
}


def megatron_bytes_per_parameter(kind: Megatron, d: int = 1, distributed: bool = False) -> float:
    """20, 18 and 16 bytes a parameter; with Megatron's distributed optimizer over d ranks 4 + 16/d, 6 + 12/d and 8 +
    8/d.

    Source: Megatron-LM, docs of the distributed optimizer (read).
    """
    kept, shared = _MEGATRON[kind]
    return kept + shared / (d if distributed else 1)


def megatron_weight_and_optimizer_bytes(d: int, distributed: bool = True) -> float:
    """18 bytes a parameter, or 6 + 12 / d: theoretical_memory_usage.py of Megatron-LM (read)."""
    return 6 + 12 / d if distributed else 18.0


def fsdp_resident_bytes(psi: float, n: int) -> float:
    """16 Psi / N: FP32 sharded weights, gradients and AdamW's moments (derived; padding and step counters apart)."""
    return 16 * psi / n


def galore_numel(m: int, n: int, r: int) -> int:
    """Elements of projector and moments, m r + 2 n r, for W [m, n], m <= n, of rank r. AdamW keeps 2 m n.

    Zhao et al. 2024 (recalled). Over Llama 7B's blocks at r = 1024, embedding and head by AdamW, this is 65.1 % less
    than AdamW; the abstract's "up to 65.5 %" does not say which tensors it counts.
    """
    m, n = sorted((m, n))
    return m * r + 2 * n * r


def apollo_numel(m: int, n: int, r: int) -> int:
    """Elements of moments in the random projection's space and two scalars (norm and seed), 2 n r + 2: no projector
    is kept.

    Zhu et al. 2024 (recalled). r = 1 is APOLLO-Mini.
    """
    _, n = sorted((m, n))
    return 2 * n * r + 2


def lomo_gradient_numel(sizes: list[int], alive: int = 2) -> int:
    """Most elements of gradients alive when the update is fused into the backward pass: the largest `alive`
    neighbours (one or two), in place of their sum. Lv et al. 2023 (recalled). Clipping by the global norm needs a
    second pass."""
    windows = range(max(1, len(sizes) - alive + 1))
    return max(sum(sizes[first : first + alive]) for first in windows)


def fsdp_transient_bytes(group: float, b_p: float, b_g: float, prefetched: int = 1) -> float:
    """Bytes that FSDP2 holds for the moment at a block of `group` parameters: itself and `prefetched` more gathered
    in b_p bytes, and the input of one reduce-scatter in b_g bytes (derived). The exact sum is
    harness.ledger.gathered's."""
    return (1 + prefetched) * group * b_p + group * b_g
