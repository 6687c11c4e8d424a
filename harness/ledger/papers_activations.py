"""What papers say that activations take, and what recomputing them costs.

Letters of Korthikanti et al. 2022 (arXiv 2205.05198): s sequence, b microbatch, h width, a heads, L layers, v
vocabulary, t tensor and p pipeline parallel size, m chunks on a device. Bytes with 16-bit activations and 1-byte
dropout masks, for GPT with dropout and stored scores. tests/harness/ledger/test_papers_memory.py holds each against
what is printed. What this suite's own modules keep is harness.ledger.activations; the paper's layer itself is
harness.models.reference.
"""

from __future__ import annotations

import math
from typing import Literal

Recompute = Literal["none", "selective", "full"]


def attention_bytes(s: int, b: int, h: int, a: int) -> float:
    """11 s b h + 5 a s^2 b: qkv input 2, q and k 4, v 2, output projection's input 2, its mask 1 (times s b h);
    softmax's output 2, dropout's mask 1 and output 2 (times a s^2 b). Equation 1's first part (read)."""
    return 11 * s * b * h + 5 * a * s * s * b


def mlp_bytes(s: int, b: int, h: int) -> float:
    """19 s b h: inputs of the two linears 2 + 8, GELU's 8, dropout's mask 1 (read)."""
    return 19 * s * b * h


def layernorm_bytes(s: int, b: int, h: int) -> float:
    """4 s b h: the inputs of two layer norms (read)."""
    return 4 * s * b * h


def score_term(s: int, h: int, a: int) -> float:
    """5 a s / h: 80 for GPT-3 (a 96, s 2048, h 12288), 64 for MT-NLG (a 128, h 20480) (read)."""
    return 5 * a * s / h


def layer_bytes(
    s: int,
    b: int,
    h: int,
    a: int,
    *,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Activation bytes of one layer, table 2 (read).

    none s b h (34 + 5 a s / h); tp s b h (10 + 24 / t + 5 a s / (h t)); tp and sp s b h / t (34 + 5 a s / h);
    selective leaves the last term of each away; full 2 s b h.
    """
    if recompute == "full":
        return 2 * s * b * h
    scores = 0.0 if recompute == "selective" else score_term(s, h, a) / t
    return s * b * h * ((34 / t if sequence_parallel else 10 + 24 / t) + scores)


def saved_by_selective(s: int, h: int, a: int) -> float:
    """Share of a layer's activations that selective recomputation leaves away: 0.70 for GPT-3, 0.65 for MT-NLG
    (read)."""
    term = score_term(s, h, a)
    return term / (34 + term)


def interleaving_factor(p: int, m: int) -> float:
    """1 + (p - 1) / (p m): activations of the first stage under the interleaved schedule, over L layers' (read)."""
    return 1 + (p - 1) / (p * m)


def first_stage_bytes(layer: float, num_layers: int, p: int, m: int = 1) -> float:
    """What the first stage keeps under 1F1B: L layers' worth whatever p is, p microbatches of L / p layers each;
    more where m > 1 chunks a device are interleaved (read)."""
    return num_layers * layer * (interleaving_factor(p, m) if m > 1 else 1)


def extra_bytes(s: int, b: int, h: int, v: int, num_layers: int, *, t: int = 1, p: int = 1) -> float:
    """Embedding's dropout, head and loss: (s b h L / t) (p / L + [p = 1] (4 / L) (1 + v / h)) (read)."""
    head = 4 * (1 + v / h) / num_layers if p == 1 else 0
    return s * b * h * num_layers / t * (p / num_layers + head)


def model_flops(batch: int, s: int, h: int, num_layers: int, v: int) -> float:
    """72 B L s h^2 (1 + s / (6 h) + v / (12 h L)): one iteration, no recomputation. Equation 7 (read)."""
    return 72 * batch * num_layers * s * h * h * (1 + s / (6 * h) + v / (12 * h * num_layers))


def hardware_flops(batch: int, s: int, h: int, num_layers: int, v: int) -> float:
    """72 B L s h^2 (1 + s / (3 h) + v / (12 h L)): with selective recomputation. Equation 8 (read).

    Its ratio to the model's is about 1 + s / (6 h): 2.7 % more for GPT-3, 1.6 % for MT-NLG, as printed. That charges
    the recomputed products all of attention's 12 s^2 h a layer; recomputed is the forward pass alone, a third of it
    (harness.ledger.flops.step_flops), so the printed overhead is an upper bound.
    """
    return 72 * batch * num_layers * s * h * h * (1 + s / (3 * h) + v / (12 * h * num_layers))


def flops_overhead(s: int, h: int) -> float:
    """Extra FLOPs of selective recomputation over a layer's own: (s / 6h) / (1 + s / 6h) (derived from equations 7,
    8)."""
    each = s / (6 * h)
    return each / (1 + each)


# Megatron-LM's theoretical_memory_usage.py (read)


def megatron_layer_bytes(
    s: int, b: int, h: int, ffn: int, t: int, *, sequence_parallel: bool = True
) -> float:
    """s b h (18 + 4 ffn / h) / t with sequence parallelism and selective recomputation: 34 s b h / t where ffn = 4
    h. Without it, s b h (10 + 24 / t), which the script multiplies by 1.05 for a margin."""
    if sequence_parallel:
        return s * b * h * (18 + 4 * ffn / h) / t
    return 1.05 * s * b * h * (10 + 24 / t)


def megatron_total_bytes(
    s: int,
    b: int,
    h: int,
    ffn: int,
    num_layers: int,
    v: int,
    *,
    t: int = 1,
    p: int = 1,
    vp: int = 1,
    num_microbatches: int,
) -> float:
    """Most loaded stage: L / p layers of min(m, p) microbatches, or with vp interleaved chunks of all p (1 + (p - 1)
    / (p vp)); embedding 8 s b p and its dropout s b h p; the head's 4 s b h (1 + v / h) where p = 1."""
    layers = megatron_layer_bytes(s, b, h, ffn, 1) * num_layers
    if p == 1:
        return (layers + 8 * s * b + s * b * h + 4 * s * b * h * (1 + v / h)) / t
    ends = 8 * s * b * p + s * b * h * p
    if vp > 1:
        return (layers * (1 + (p - 1) / (p * vp)) + ends) / t
    return (layers * min(1.0, num_microbatches / p) + ends) / t


# Checkpoints


def chen_layers_alive(n: int, segments: int) -> float:
    """Layers' worth of activations alive when a chain of n layers keeps `segments` inputs: segments + n / segments,
    least at sqrt(n), for one more forward pass. Chen et al. 2016 (secondary)."""
    return segments + n / segments


def chen_best_segments(n: int) -> int:
    """sqrt(n), rounded. For the paper's chain of 1,000 layers 32 inputs and 63 layers' worth: a sixteenth, where its
    measured 48 to 7 GB (recalled) is a seventh, since a segment there is several operators of unequal size."""
    return round(math.sqrt(n))


def narayanan_checkpoint_bytes(c: float, num_layers: float, a_input: float, a_intermediate: float) -> float:
    """c A_input + (l / c) A_intermediate for c checkpoints on a stage of l layers: Narayanan et al. 2021, section
    3.5 (read)."""
    return c * a_input + num_layers / c * a_intermediate


def narayanan_best_checkpoints(num_layers: float, a_input: float, a_intermediate: float) -> float:
    """c = sqrt(l A_intermediate / A_input) (read). For GPT's layer (2 against 34 + 5as/h) it is more than l: one a
    layer."""
    return math.sqrt(num_layers * a_intermediate / a_input)


# A layer as it is written today


def modern_layer_bytes(n: int, h: int, a: int, f: int, k: float = 1.0) -> float:
    """2 n (h (6 + 2 k) + 4 f) + 4 n a: RMSNorm, SwiGLU of width f, flash attention with k h wide keys, no dropout,
    16-bit throughout (derived).

    Inputs of two norms 2 h, of qkv h, q, k and v h (1 + 2k), product h (it is the output projection's input), input
    of gate and up h; gate, up, silu(gate) and their product 4 f; log-sum-exp 4 bytes a head. The note this was taken
    from sums its own parts to 5 + 2k: one h is missing there. Ours keeps more: rotated q and k in FP32, and on a CPU
    attention in FP32 (harness.ledger.activations).
    """
    return 2 * n * (h * (6 + 2 * k) + 4 * f) + 4 * n * a
