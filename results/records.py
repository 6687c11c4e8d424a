"""The words of the results: statuses, the row of a run, and what each metric means.

A new metric is a new entry in `METRICS`, never a new column. Units stand in the metric's name where they can;
`direction` says which way is better, `none` where neither is.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

OK, OOM, DIVERGED, HUNG, TIMEOUT, CRASHED, INTERRUPTED, SKIPPED = STATUSES = (
    "ok",
    "oom",
    "diverged",
    "hung",
    "timeout",
    "crashed",
    "interrupted",
    "skipped",
)
"""How a run can end. Outcomes, never holes."""

COMMUNICATION = "communication failed: "
"""How a rank's reason begins that a collective of its own was refused or never came back: seldom its own fault."""

ON_THIS_RANK = ", on this rank"
"""How a rank's reason ends that the loss was not finite in its own share of the batch."""

TABLES = ("environments", "runs", "measurements", "verdicts", "alarms")


@dataclass(frozen=True)
class RunRow:
    """One attempt of a run: the columns of table `runs`. Times are UTC without a zone."""

    run_id: str
    key: str
    attempt: int
    case_name: str
    size: str
    role: str
    labels: dict[str, Any]
    spec: dict[str, Any]
    environment_id: str | None
    status: str
    reason: str
    fidelity: str
    device: str | None
    num_parameters: int | None
    started_at: datetime | None
    ended_at: datetime | None
    start_checkpoint: str | None
    final_checkpoint: str | None
    resume_checkpoint: str | None
    """SHA-256 of the newest resume point this attempt wrote, taken after step `resume_step`."""
    resume_step: int | None
    notes: dict[str, dict[str, Any]]
    """name -> {"value", "reason"}: chosen values, and missing ones with the reason they are missing."""
    command: str | None
    suite_version: str | None
    journal_bytes: dict[str, int]
    """rank -> bytes of its journal that are in the database."""


Direction = Literal["lower", "higher", "none"]


@dataclass(frozen=True)
class MetricInfo:
    name: str
    unit: str
    direction: Direction
    meaning: str
    kind: str
    """loss, speed, memory, communication, optimization, quantization, attention, format, activations, weights, kernels,
    run."""


_REGISTRY: tuple[tuple[str, str, Direction, str, str], ...] = (
    ("loss", "nats/token", "lower", "training loss of the step's batch, before its update", "loss"),
    ("val_loss", "nats/token", "lower", "loss on held-out text", "loss"),
    ("val_loss_without_ffn", "nats/token", "lower", "held-out loss with every feed-forward removed", "loss"),
    ("ffn_removal_cost", "nats/token", "none", "val_loss_without_ffn minus val_loss", "loss"),
    ("function_change", "logits", "lower", "largest logit difference made by ageing, in fp32", "loss"),
    ("step_ms", "ms", "lower", "wall time of a training step, probes left out", "speed"),
    ("tokens_per_s", "tokens/s", "higher", "training tokens over step time", "speed"),
    ("mfu", "ratio", "higher", "model FLOP/s over the device's peak", "speed"),
    ("model_flops_per_s", "FLOP/s", "higher", "FLOPs that the model needs, over step time", "speed"),
    ("train_seconds", "s", "lower", "wall time of all training steps", "speed"),
    ("setup_seconds", "s", "lower", "wall time before the first step", "speed"),
    ("probe_ms", "ms", "lower", "a probe's own cost, mean of its recordings; scope: probe", "speed"),
    ("peak_bytes", "bytes", "lower", "peak memory; scope: category", "memory"),
    ("live_bytes", "bytes", "lower", "memory in use at the end of a step; scope: category", "memory"),
    (
        "state_bytes",
        "bytes",
        "lower",
        "bytes between steps, gradients as before the update; scope: category",
        "memory",
    ),
    ("saved_bytes", "bytes", "lower", "kept for the backward pass at the end of the forward one", "memory"),
    ("bytes_per_parameter", "bytes", "lower", "state_bytes over parameters; scope: category", "memory"),
    ("step_flops", "FLOP", "lower", "operations of one rank in one step, recomputation included", "memory"),
    ("comm_bytes", "bytes", "lower", "payload of a step's collectives; scope: axis.op", "communication"),
    ("comm_count", "count", "none", "collectives of a step; scope: axis.op", "communication"),
    (
        "comm_sent_bytes",
        "bytes",
        "lower",
        "bytes a rank sends by ring algorithms; scope: axis.op",
        "communication",
    ),
    (
        "comm_ms",
        "ms",
        "lower",
        "time from call to end of a step's collectives; scope: axis.op",
        "communication",
    ),
    ("comm_exposed_share", "ratio", "lower", "part of a step in which only collectives ran", "communication"),
    ("pipeline_idle_share", "ratio", "lower", "1 - busy time over makespan, over all ranks", "communication"),
    ("pipeline_overhead", "ratio", "lower", "idle over busy time, over all ranks", "communication"),
    ("pipeline_makespan_ms", "ms", "lower", "one pass of all microbatches", "communication"),
    (
        "pipeline_in_flight",
        "count",
        "lower",
        "microbatches held for the backward pass at most, each stage's counted; scope: rank",
        "communication",
    ),
    (
        "expert_load_max_over_mean",
        "ratio",
        "lower",
        "busiest expert over the mean; scope: layer",
        "communication",
    ),
    (
        "expert_load_cv",
        "ratio",
        "lower",
        "standard deviation over mean of experts' tokens; scope: layer",
        "communication",
    ),
    (
        "expert_load_gini",
        "ratio",
        "lower",
        "Gini coefficient of experts' tokens; scope: layer",
        "communication",
    ),
    (
        "expert_load_entropy",
        "ratio",
        "higher",
        "entropy of experts' tokens over log E; scope: layer",
        "communication",
    ),
    (
        "expert_dropped_share",
        "ratio",
        "lower",
        "token-expert pairs beyond capacity; scope: layer",
        "communication",
    ),
    (
        "expert_balance_loss",
        "ratio",
        "lower",
        "Switch's load-balancing loss before its coefficient, 1 when balanced; scope: layer",
        "communication",
    ),
    ("num_parameters", "count", "none", "trainable parameters", "run"),
    ("rare_tokens_in_batch", "count", "none", "rare tokens put into the step's batch", "run"),
    ("learning_rate", "1", "none", "learning rate of the step", "optimization"),
    ("gradient_norm", "1", "none", "global gradient norm before clipping", "optimization"),
    (
        "num_nonfinite_gradients",
        "count",
        "lower",
        "gradient elements that are NaN or infinite",
        "optimization",
    ),
    ("num_nonfinite_loss", "count", "lower", "losses so far that are NaN or infinite", "optimization"),
    ("loss_scale", "1", "none", "factor on the loss for fp16 gradients", "optimization"),
    (
        "num_skipped_steps",
        "count",
        "lower",
        "updates skipped so far for non-finite gradients",
        "optimization",
    ),
    ("weight_spectral_norm", "1", "none", "largest singular value; scope: parameter", "weights"),
    ("alignment_cosine_mean", "1", "none", "mean over channels of |cos(w1, w2)|; scope: layer", "weights"),
    ("alignment_cosine_max", "1", "none", "largest over channels of |cos(w1, w2)|; scope: layer", "weights"),
    ("alignment_norm_product_max", "1", "none", "largest |w1||w2| over channels; scope: layer", "weights"),
    ("activation_peak", "1", "none", "largest magnitude of an activation; scope: tensor", "activations"),
    ("activation_rms", "1", "none", "root mean square of an activation; scope: tensor", "activations"),
    ("activation_peak_over_rms", "1", "lower", "activation_peak over activation_rms", "activations"),
    ("quant_clipped_fraction", "ratio", "lower", "elements above the format's largest", "quantization"),
    ("quant_flushed_fraction", "ratio", "lower", "non-zero elements that became zero", "quantization"),
    ("quant_amax", "1", "none", "largest magnitude before the cast", "quantization"),
    ("quant_scale", "1", "none", "factor applied before the cast", "quantization"),
    ("quant_sqnr_db", "dB", "higher", "signal over quantisation noise of one cast", "quantization"),
    ("quant_saturated_blocks", "ratio", "lower", "blocks whose largest element was clipped", "quantization"),
    ("format_max", "1", "none", "largest finite value; scope: who casts", "format"),
    ("format_min_normal", "1", "none", "smallest value with full precision", "format"),
    ("format_min_positive", "1", "none", "smallest positive value", "format"),
    ("format_epsilon", "1", "none", "distance from 1 to the next larger value", "format"),
    ("format_mantissa_bits", "bits", "none", "bits below the leading one, at best", "format"),
    ("format_binades", "bits", "none", "log2 of the largest over the smallest positive value", "format"),
    ("format_num_magnitudes", "count", "none", "finite values that are not negative", "format"),
    ("format_num_levels", "count", "none", "distinct values of a block or row", "format"),
    ("format_overflow_start", "1", "none", "smallest number that is cast to no finite value", "format"),
    ("format_overflows_to_infinity", "1", "none", "1 where infinity stays infinity", "format"),
    ("format_overflows_to_nan", "1", "none", "1 where infinity becomes NaN", "format"),
    ("format_mismatches", "count", "lower", "probes that PyTorch's own cast rounds otherwise", "format"),
    (
        "ffn_output_sqnr_db",
        "dB",
        "higher",
        "feed-forward output against unquantised; scope: layer",
        "quantization",
    ),
    (
        "attention_bias_ulp",
        "BF16 ulp",
        "none",
        "mean error of O, in spacings at the exact value",
        "attention",
    ),
    ("attention_bias_se_ulp", "BF16 ulp", "none", "standard error of that mean, over rows", "attention"),
    ("attention_sd_ulp", "BF16 ulp", "lower", "standard deviation of an element of O's error", "attention"),
    ("nan_share", "ratio", "lower", "rows whose O is not finite", "attention"),
    (
        "tied_one_share",
        "ratio",
        "none",
        "rows with more than one weight of exactly 1; scope: head",
        "attention",
    ),
    ("lse_error", "nats", "none", "mean error of the saved log-sum-exp", "attention"),
    (
        "exp_sum_error",
        "1",
        "none",
        "sum of exp(0) over equal scores, over their number, minus 1",
        "attention",
    ),
    ("delta_bias", "1", "none", "mean over rows of delta minus its exact value", "attention"),
    ("delta_bias_relative", "1", "none", "sum of delta's errors over the sum of |delta|", "attention"),
    ("delta_sign_p", "1", "none", "two-sided sign test of delta's errors over rows", "attention"),
    ("coherence", "1", "none", "|sum| over sum of |W_Q gradient errors|; scope: head", "attention"),
    ("dq_relative_error", "1", "lower", "error of dQ over dQ, Frobenius norms", "attention"),
    ("delta_error_sum", "1", "none", "delta's errors summed over tokens and steps; scope: head", "attention"),
    ("gemm_tflops", "TFLOP/s", "higher", "2mkn over a product's time, operands cast before", "speed"),
    ("gemm_with_cast_tflops", "TFLOP/s", "higher", "2mkn over the time of product and casts", "speed"),
    ("gemm_us", "µs", "lower", "time of a product, operands cast before", "speed"),
    ("gemm_error", "1", "lower", "largest error against the emulation over the largest element", "kernels"),
    ("gemm_operand_mismatches", "count", "lower", "operand elements unlike the emulation's", "kernels"),
    ("accumulation_max_error", "ratio", "lower", "largest error of a product over its RMS", "quantization"),
    ("accumulation_rms_error", "ratio", "lower", "RMS of a product's error over its RMS", "quantization"),
    ("benchmark_min_s", "s", "lower", "fastest round; scope: benchmark", "kernels"),
    ("benchmark_median_s", "s", "lower", "median round; scope: benchmark", "kernels"),
    ("benchmark_mean_s", "s", "lower", "mean of the rounds; scope: benchmark", "kernels"),
    ("benchmark_max_s", "s", "lower", "slowest round; scope: benchmark", "kernels"),
    ("benchmark_stddev_s", "s", "lower", "standard deviation of the rounds; scope: benchmark", "kernels"),
    ("benchmark_rounds", "count", "none", "rounds timed; scope: benchmark", "kernels"),
    ("benchmark_round_s", "s", "lower", "one round, its number the step; scope: benchmark", "kernels"),
    ("ratio_to_copy", "ratio", "lower", "time over a copy's of the same tensor; scope: benchmark", "kernels"),
)
METRICS: dict[str, MetricInfo] = {entry[0]: MetricInfo(*entry) for entry in _REGISTRY}


def metric(name: str) -> MetricInfo:
    """What a metric means. Raises KeyError with the nearest names for one that is not registered."""
    try:
        return METRICS[name]
    except KeyError:
        near = difflib.get_close_matches(name, METRICS, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else f"; known: {', '.join(METRICS)}"
        raise KeyError(f"unknown metric {name!r}{hint}") from None


def digits_between(low: float | None, high: float | None) -> int:
    """Significant digits, three to six, with which the two ends of an interval can be told apart."""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)) or low == high:
        return 3
    return min(6, max(3, math.ceil(math.log10(max(abs(low), abs(high)) / abs(high - low))) + 1))
