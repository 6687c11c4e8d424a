"""Published formulas of pipelines: idle time, batch time, activations in flight, bytes between stages.

Two normalisations are in use and must not be mixed: the *overhead* x is idle time over ideal time (Narayanan et al.:
(p - 1) / m), the *idle share* is idle time over the whole, x / (1 + x) (GPipe: (p - 1) / (m + p - 1)). Zero-bubble
schedules are counted in each rank's own window, from its first to its last action (Qi et al., recalled).

p ranks, m microbatches, v stages a rank; t_F, t_B, t_W times of one microbatch in one stage: forward pass,
gradient of inputs, gradient of weights, in the notation of Qi et al. 2024, whose t_B is `input` here. DeepSeek's B is
the whole backward pass, t_I + t_W.

Huang et al. 2019 (GPipe, arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473); Korthikanti et al. 2022 (arXiv
2205.05198); Qi et al. 2024 (arXiv 2401.10241); DeepSeek, README of github.com/deepseek-ai/DualPipe.
Fidelity of everything here: `predicted`.
"""

from __future__ import annotations

from harness.ledger.schedules import Pipeline
from harness.ledger.simulate import Durations

NEGLIGIBLE_MICROBATCHES = 4
"""GPipe: the bubble is negligible when m >= 4 p."""


def idle_share(overhead: float) -> float:
    """x / (1 + x): share of the whole time, from overhead over the ideal one."""
    return overhead / (1 + overhead)


def overhead(idle_share: float) -> float:
    """s / (1 - s): overhead over the ideal time, from the share of the whole one."""
    return idle_share / (1 - idle_share)


def is_negligible(p: int, m: int) -> bool:
    """GPipe: m >= 4 p."""
    return m >= NEGLIGIBLE_MICROBATCHES * p


def one_f_one_b(p: int, m: int, v: int = 1) -> float:
    """Overhead (1 / v) (p - 1) / m: GPipe and 1F1B with v = 1, interleaved with more (Narayanan et al. 2021)."""
    return (p - 1) / (m * v)


def zero_bubble_1(p: int, m: int) -> float:
    """ZB1P's overhead (p - 1) / (3 m) at t_F = t_B = t_W, with the memory of 1F1B (Qi et al. 2024)."""
    return (p - 1) / (3 * m)


def zero_bubble_2() -> float:
    """ZB2P: none, with twice the activations (Qi et al. 2024)."""
    return 0.0


def zero_bubble_v() -> float:
    """ZBV: none in each rank's own window at t_F = t_B = t_W, with the activations of 1F1B and twice the traffic (Qi et
    al. 2024)."""
    return 0.0


def deepseek_1f1b(p: int, forward: float, backward: float) -> float:
    """Idle time of a rank, 1F1B: (PP - 1)(F + B)."""
    return (p - 1) * (forward + backward)


def deepseek_zb1p(p: int, forward: float, backward: float, weight: float) -> float:
    """Idle time of a rank, ZB1P: (PP - 1)(F + B - 2 W)."""
    return (p - 1) * (forward + backward - 2 * weight)


def deepseek_dualpipe(p: int, forward_and_backward: float, backward: float, weight: float) -> float:
    """Idle time of a rank, DualPipe: (PP / 2 - 1)(F&B + B - 3 W), F&B a forward and a backward pass overlapped. It
    holds 2 x the parameters and PP + 1 activations."""
    return (p / 2 - 1) * (forward_and_backward + backward - 3 * weight)


def batch_time(
    batch: int, microbatch: int, p: int, forward: float, backward: float, data_parallel: int = 1
) -> float:
    """(b' / b + p - 1)(t_f + t_b), b' = B / d sequences a pipeline and b a microbatch (Narayanan et al. 2021, with
    communication left out)."""
    return (batch / data_parallel / microbatch + p - 1) * (forward + backward)


def predicted_overhead(pipeline: Pipeline, times: Durations | None = None) -> float | None:
    """Idle over ideal time of a pass, from the first rank's start to the last one's end, by the formula for the
    schedule; None where the formula does not apply (then simulate).

    `times` are of one stage. gpipe, 1f1b and interleaved: Narayanan's. zero-bubble: DeepSeek's ZB1P row, Qi et al.'s
    (p - 1) / (3 m v) at equal times. zbv, at equal times: the ranks' windows are full, and each begins one forward of
    one stage after its neighbour's, (p - 1) / (6 m) (derived). dualpipev: DualPipe's row with PP = 2 p stages, a V's,
    and F&B = F + B, since torch runs the two one after the other.
    """
    times = times or Durations()
    p, m, v = pipeline.num_ranks, pipeline.num_microbatches, pipeline.stages_per_rank
    if times.p2p:
        return None
    equal = times.forward == times.input == times.weight
    whole = times.forward + times.input + times.weight
    match pipeline.schedule:
        case "gpipe" | "1f1b":
            return one_f_one_b(p, m)
        case "interleaved":
            return one_f_one_b(p, m, v) if m % p == 0 else None
        case "zero-bubble":
            if m < p or times.weight > min(times.forward, times.input):
                return None
            backward = times.input + times.weight
            return deepseek_zb1p(p, times.forward, backward, times.weight) / (m * v * whole)
        case "zbv":
            return (p - 1) / (6 * m) if equal and m >= 2 * p - 1 else None
        case "dualpipev":
            if times.forward != times.input or times.weight > times.forward:
                return None
            idle = deepseek_dualpipe(2 * p, whole, times.input + times.weight, times.weight)
            return idle / (m * v * whole)


def predicted_window_overhead(pipeline: Pipeline, times: Durations | None = None) -> float | None:
    """The same with each rank counted from its own start to its own end, as Qi et al. 2024 count: 0 for ZBV at equal
    times; where the first rank is busy from first to last, the same as `predicted_overhead`."""
    found = predicted_overhead(pipeline, times)
    return zero_bubble_v() if pipeline.schedule == "zbv" and found is not None else found


def predicted_in_flight(pipeline: Pipeline, rank: int) -> int | None:
    """Chunks (microbatches times stages) that a rank keeps activations for at most; None without a formula.

    GPipe m (Huang et al. 2019); 1F1B p - r (Narayanan et al. 2021); interleaved 2 (p - r - 1) + (v - 1) p + 1, which on
    rank 0 gives Korthikanti's L (1 + (p - 1) / (p v)); ZB1P p (Qi et al. 2024: as 1F1B's first rank); ZBV 2 p halves;
    DualPipeV PP + 1 halves, with PP = 2 p stages (DeepSeek). For m large enough to fill the pipeline.
    """
    p, m, v = pipeline.num_ranks, pipeline.num_microbatches, pipeline.stages_per_rank
    match pipeline.schedule:
        case "gpipe":
            return m
        case "1f1b":
            return p - rank
        case "interleaved":
            return min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v) if m % p == 0 else None
        case "zero-bubble":
            return p if v == 1 and m >= p else None
        case "zbv":
            return 2 * p if m >= 2 * p - 1 else None
        case "dualpipev":
            return 2 * p + 1


def layers_in_flight(layers: int, p: int, v: int = 1) -> float:
    """Layers' activations on the first rank, 1F1B: L, and L (1 + (p - 1) / (p v)) interleaved (Korthikanti et al. 2022,
    whose m is v here)."""
    return layers * (1.0 if v == 1 else 1 + (p - 1) / (p * v))


def p2p_bytes(batch: int, seq_len: int, width: int, bytes_each: int, tensor_parallel: int = 1) -> int:
    """b s h e: what a stage sends the next for one microbatch, and back for its gradient; divided by t where the stream
    is cut along the sequence (Narayanan et al. 2021)."""
    return batch * seq_len * width * bytes_each // tensor_parallel
