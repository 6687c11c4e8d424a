"""Published formulas of communication: elements and bytes that a rank sends in a step, and the time it takes.

Each function keeps its paper's symbols and normalisation, so that its printed numbers can be held against it. What the
suite's own runs send, to the byte, is harness.ledger.communication.

Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054); Narayanan et al. 2021 (arXiv 2104.04473); Korthikanti et al. 2022
(arXiv 2205.05198); Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv 2309.14509); Liu et al. 2023 (Ring Attention, arXiv
2310.01889); Thakur et al. 2005 (collectives by rings). Fidelity of everything here: `predicted`.
"""

from __future__ import annotations

from fractions import Fraction


def all_reduce_sent(num_bytes: float, n: int) -> float:
    """2 S (n - 1) / n: what each of n ranks sends in a ring all-reduce of S bytes, a reduce-scatter and an all-gather
    (Thakur et al. 2005)."""
    return 2 * num_bytes * (n - 1) / n


def all_gather_sent(num_bytes: float, n: int) -> float:
    """S (n - 1) / n, S the gathered size; the same for a reduce-scatter of S and for an all-to-all of a buffer of S."""
    return num_bytes * (n - 1) / n


def data_parallel_sent(parameters: float, bytes_each: float, n: int) -> float:
    """2 Psi e (n - 1) / n: DDP's gradients."""
    return all_reduce_sent(parameters * bytes_each, n)


def zero_volume(parameters: float, stage: int) -> float:
    """Elements that a rank sends a step, for many ranks: 2 Psi for data parallelism and stages 1 and 2, 3 Psi for
    stage 3, 1.5 times as much (Rajbhandari et al. 2020, section 7). Accumulation is not in it: FSDP gathers in each
    micro-step."""
    return parameters * (3 if stage == 3 else 2)


def tensor_parallel_layer(b: int, s: int, h: int, t: int) -> Fraction:
    """8 b s h (t - 1) / t elements a layer and microbatch, forward and backward: two all-reduces each way (Narayanan
    et al. 2021, section 3.2). With sequence parallelism each is a reduce-scatter and an all-gather: the same
    (Korthikanti et al. 2022, section 4.2.2)."""
    return Fraction(8 * b * s * h * (t - 1), t)


def vocabulary_parallel_loss(b: int, s: int, t: int, bytes_each: int = 4) -> Fraction:
    """3 · 2 b s e (t - 1) / t bytes: all-reduces of each token's largest logit, of its sum of exponentials and of its
    target's logit (Shoeybi et al. 2019: the logits themselves are never gathered)."""
    return Fraction(3 * 2 * b * s * bytes_each * (t - 1), t)


def ulysses(n: int, h: int, p: int) -> Fraction:
    """4 N h / P elements a link: all-to-alls of q, k, v and of the output, sequence N, P ranks (Jacobs et al. 2023)."""
    return Fraction(4 * n * h, p)


def megatron_sequence_parallel(n: int, h: int) -> int:
    """4 N h: two all-gathers and two reduce-scatters, whatever P (Jacobs et al. 2023's account of Megatron's)."""
    return 4 * n * h


def context_ring(b: int, s: int, kv_width: int, bytes_each: int, cp: int) -> Fraction:
    """(cp - 1) · 2 b (s / cp) h_kv e bytes: keys and values of a rank's tokens, passed on cp - 1 times in a forward
    pass (Liu et al. 2023). An all-gather of both sends as much."""
    return Fraction((cp - 1) * 2 * b * s * kv_width * bytes_each, cp)


def ring_attention_block(flops_per_s: float, bytes_per_s: float) -> float:
    """c >= F / B: tokens of a block below which passing keys and values on takes longer than their products: 4 d c^2
    FLOPs against 4 d c bytes (Liu et al. 2023, section 3). The sequence on a device must be 6 c."""
    return flops_per_s / bytes_per_s


def expert_parallel(tokens: int, k: int, h: int, bytes_each: int, ep: int) -> Fraction:
    """4 T k h e (ep - 1) / ep bytes a layer: dispatch and combine, forward and backward, of T tokens on a rank that
    each go to k experts. Uniform routing is assumed: with real routers the largest share decides."""
    return Fraction(4 * tokens * k * h * bytes_each * (ep - 1), ep)


def ring_seconds(num_bytes: float, n: int, alpha: float, beta: float) -> float:
    """2 (n - 1) alpha + 2 S (n - 1) / (n beta): an all-reduce of S bytes, alpha seconds a message and beta bytes a
    second on each link (Thakur et al. 2005)."""
    return 2 * (n - 1) * alpha + all_reduce_sent(num_bytes, n) / beta


def exposed_seconds(communication: float, overlapped: float) -> float:
    """max(0, T_comm - T_overlap): what computation does not hide."""
    return max(0.0, communication - overlapped)
