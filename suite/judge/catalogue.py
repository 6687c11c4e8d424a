"""The statistics that claims may measure: how the measurements of one run become a number. `suite list measures`

A new one is one entry of STATISTICS; its unit and direction are those of its metric in results/records.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from results.records import METRICS, metric

Direction = Literal["lower", "higher", "none"]
Point = tuple[str, int, float]
"""Scope, step and value of one measurement."""
Reducer = Callable[[Sequence[Point], int], float | None]
"""Points of one metric of one run and its number of steps -> the statistic; None if nothing was recorded."""


def _mean(points: Sequence[Point], num_steps: int) -> float | None:
    return statistics.fmean(value for _, _, value in points) if points else None


def _mean_of_last_half(points: Sequence[Point], num_steps: int) -> float | None:
    return _mean([point for point in points if point[1] > num_steps / 2], num_steps)


def _median(points: Sequence[Point], num_steps: int) -> float | None:
    return statistics.median(value for _, _, value in points) if points else None


def largest(points: Sequence[Point], num_steps: int) -> float | None:
    return max((value for _, _, value in points), default=None)


def _min(points: Sequence[Point], num_steps: int) -> float | None:
    return min((value for _, _, value in points), default=None)


def _first(points: Sequence[Point], num_steps: int) -> float | None:
    """Mean over scopes at the first recorded step."""
    step = min((step for _, step, _ in points), default=0)
    return _mean([point for point in points if point[1] == step], num_steps)


def _last(points: Sequence[Point], num_steps: int) -> float | None:
    """Mean over scopes at the last recorded step."""
    step = max((step for _, step, _ in points), default=0)
    return _mean([point for point in points if point[1] == step], num_steps)


def _growth(points: Sequence[Point], num_steps: int) -> float | None:
    """Last minus first; None where only one step was recorded, since nothing could grow."""
    first, last = _first(points, num_steps), _last(points, num_steps)
    if first is None or last is None or len({step for _, step, _ in points}) < 2:
        return None
    return last - first


def _size_of_last(points: Sequence[Point], num_steps: int) -> float | None:
    """Mean over scopes of the magnitude at the last recorded step."""
    return _last([(scope, step, abs(value)) for scope, step, value in points], num_steps)


def _sum(points: Sequence[Point], num_steps: int) -> float | None:
    """Sum over scopes at the last recorded step."""
    step = max((step for _, step, _ in points), default=0)
    return math.fsum(value for _, at, value in points if at == step) if points else None


_SPEEDS = (
    *("tokens_per_s", "step_ms", "mfu", "model_flops_per_s", "train_seconds"),
    *("gemm_tflops", "gemm_with_cast_tflops"),
)


@dataclass(frozen=True)
class Statistic:
    """One number a run. Unit and direction are those of its metric in results/records.py."""

    name: str
    metric: str
    reduce: Reducer
    meaning: str
    scope: str = ""
    """Which scopes count: a pattern for `fnmatch`; "" means the run as a whole."""
    scoped: bool = False
    """Whether a claim may give its own scope pattern in brackets."""
    signed: bool = False
    """Whether its sign alone says something (a growth, a cost); a share or a loss is never below zero."""
    exact: bool = False
    """A fact that no seed changes (a format's maximum), not a sample: one run decides, and there is no interval."""

    @property
    def unit(self) -> str:
        return metric(self.metric).unit

    @property
    def direction(self) -> Direction:
        return metric(self.metric).direction

    @property
    def is_speed(self) -> bool:
        """Speeds are judged on native runs alone: an emulated run's time is the emulation's."""
        return self.metric in _SPEEDS

    @property
    def infinite_when_diverged(self) -> bool:
        """A diverged run has an infinite loss; its other statistics are missing."""
        return self.metric in ("loss", "val_loss")


STATISTICS: dict[str, Statistic] = {
    statistic.name: statistic
    for statistic in (
        Statistic(
            "final_loss",
            "loss",
            _mean_of_last_half,
            "mean training loss over the last half of the steps: both runs of a pair see the same batches, "
            "so the noise of single batches cancels in the difference",
        ),
        Statistic("mean_loss", "loss", _mean, "mean training loss over all steps"),
        Statistic("max_loss", "loss", largest, "largest training loss of any step"),
        Statistic("first_loss", "loss", _first, "training loss of the first step"),
        Statistic("last_loss", "loss", _last, "training loss of the last step"),
        Statistic("final_val_loss", "val_loss", _last, "validation loss after the last step"),
        Statistic("first_val_loss", "val_loss", _first, "validation loss before training"),
        Statistic(
            "ffn_removal_cost",
            "ffn_removal_cost",
            _last,
            "rise of the validation loss without the feed-forward",
            signed=True,
        ),
        Statistic("throughput", "tokens_per_s", _median, "median tokens per second over the recorded steps"),
        Statistic("step_ms", "step_ms", _median, "median time of a step"),
        Statistic("mfu", "mfu", _median, "median model FLOPs utilisation"),
        Statistic("train_seconds", "train_seconds", _last, "wall time of the training loop"),
        *(
            Statistic(name, name, _last, metric(name).meaning)
            for name in ("accumulation_max_error", "accumulation_rms_error")
        ),
        Statistic("gemm_tflops", "gemm_tflops", _median, "median speed of a product, operands cast before"),
        Statistic(
            "gemm_with_cast_tflops",
            "gemm_with_cast_tflops",
            _median,
            "median speed of a product together with the casts of its operands",
        ),
        Statistic("gemm_error", "gemm_error", largest, "largest error of a product against the emulation's"),
        Statistic(
            "gemm_operand_mismatches",
            "gemm_operand_mismatches",
            largest,
            "elements of both operands that differ from the emulation's",
        ),
        Statistic("peak_bytes", "peak_bytes", largest, "peak memory", scope="total", scoped=True),
        *(
            Statistic(
                name, name, _sum, f"{metric(name).meaning}; {summed}", scope="*", scoped=True, exact=True
            )
            for name, summed in (
                ("state_bytes", "sum over categories, each of the rank that has most of it"),
                ("comm_bytes", "sum over axes and operations, each of the rank that has most of it"),
                ("comm_count", "sum over axes and operations"),
                ("comm_sent_bytes", "sum over axes and operations"),
            )
        ),
        *(
            Statistic(name, name, largest, metric(name).meaning, scope=scope, scoped=True, exact=True)
            for name, scope in (("bytes_per_parameter", "total"), ("saved_bytes", ""), ("step_flops", ""))
        ),
        Statistic(
            "pipeline_in_flight",
            "pipeline_in_flight",
            largest,
            "microbatches that a rank holds for the backward pass at most, each stage's counted, largest of the ranks",
            scoped=True,
            exact=True,
        ),
        *(
            Statistic(
                name,
                name,
                _last,
                f"{metric(name).meaning}, of the pass that idled least",
                scoped=True,
            )
            for name in ("pipeline_idle_share", "pipeline_overhead", "pipeline_makespan_ms")
        ),
        *(
            Statistic(
                name,
                name,
                _mean_of_last_half,
                f"{metric(name).meaning}; mean over layers and the last half of the steps",
                scope="*",
                scoped=True,
            )
            for name in METRICS
            if name.startswith("expert_")
        ),
        Statistic(
            "comm_exposed_share",
            "comm_exposed_share",
            _median,
            "part of a step in which only collectives ran, median over the recorded steps",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "max_gradient_norm", "gradient_norm", largest, "largest global gradient norm before clipping"
        ),
        Statistic("mean_gradient_norm", "gradient_norm", _mean, "mean global gradient norm before clipping"),
        Statistic(
            "num_skipped_steps", "num_skipped_steps", largest, "optimizer steps skipped by loss scaling"
        ),
        Statistic(
            "alignment_cosine_max",
            "alignment_cosine_max",
            _last,
            "largest |cos(w1, w2)| of a layer's channels, mean over layers, last recorded step",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "alignment_cosine_mean",
            "alignment_cosine_mean",
            _last,
            "mean |cos(w1, w2)| of a layer's channels, mean over layers, last recorded step",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "alignment_growth",
            "alignment_cosine_max",
            _growth,
            "largest |cos(w1, w2)|, mean over layers: last recorded step minus first",
            scope="*",
            scoped=True,
            signed=True,
        ),
        Statistic(
            "alignment_mean_growth",
            "alignment_cosine_mean",
            _growth,
            "mean |cos(w1, w2)|, mean over layers: last recorded step minus first",
            scope="*",
            scoped=True,
            signed=True,
        ),
        Statistic(
            "activation_peak_over_rms",
            "activation_peak_over_rms",
            largest,
            "largest peak over RMS of any recorded step and scope",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "weight_spectral_norm",
            "weight_spectral_norm",
            _last,
            "largest singular value, mean over the chosen weights, last recorded step",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "quant_flushed_fraction",
            "quant_flushed_fraction",
            _mean,
            "share of non-zero values that became zero, mean over recorded steps and chosen tensors",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "quant_clipped_fraction",
            "quant_clipped_fraction",
            _mean,
            "share of values beyond the format's maximum, mean over recorded steps and chosen tensors",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "max_quant_clipped_fraction",
            "quant_clipped_fraction",
            largest,
            "share of values beyond the format's maximum, largest of the recorded steps and chosen tensors",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "quant_sqnr_db",
            "quant_sqnr_db",
            _mean,
            "signal to quantisation noise, mean over recorded steps and chosen tensors",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "quant_saturated_blocks",
            "quant_saturated_blocks",
            _mean,
            "share of scale blocks whose largest value was clipped, mean over recorded steps",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "max_quant_flushed_fraction",
            "quant_flushed_fraction",
            largest,
            "share of non-zero values that became zero, largest of the recorded steps and chosen tensors",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "min_quant_sqnr_db",
            "quant_sqnr_db",
            _min,
            "signal to quantisation noise, worst recorded step and chosen tensor",
            scope="*",
            scoped=True,
        ),
        *(
            Statistic(name, name, _last, metric(name).meaning, scoped=True, exact=True)
            for name in METRICS
            if metric(name).kind == "format"
        ),
        *(
            Statistic(name, name, _last, metric(name).meaning, scoped=True, signed=True)
            for name in METRICS
            if metric(name).kind == "attention"
        ),
        Statistic(
            "mean_coherence",
            "coherence",
            _mean,
            "|sum| over sum of |W_Q gradient errors| in one step, mean over the recorded steps and chosen heads",
            scoped=True,
        ),
        Statistic(
            "delta_error_drift",
            "delta_error_sum",
            _size_of_last,
            "size of delta's errors summed over all tokens and recorded steps, whatever its sign",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "weight_norm_growth",
            "weight_spectral_norm",
            _growth,
            "largest singular value, mean over the chosen weights: last recorded step minus first",
            scope="*",
            scoped=True,
            signed=True,
        ),
        Statistic(
            "ffn_output_sqnr_db",
            "ffn_output_sqnr_db",
            _mean,
            "feed-forward output against the same one unquantised, mean over recorded steps and layers",
            scope="*",
            scoped=True,
        ),
        Statistic(
            "min_ffn_output_sqnr_db",
            "ffn_output_sqnr_db",
            _min,
            "feed-forward output against the same one unquantised, worst recorded step and layer",
            scope="*",
            scoped=True,
        ),
    )
}
