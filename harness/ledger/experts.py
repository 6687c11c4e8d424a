"""Uneven experts: how uneven a load is, and what that costs a step whose experts lie on several ranks.

    load    token-choice pairs of each expert, all of a layer's
    pairs   pairs[i][j]: those that rank i sends to rank j's experts

A layer waits for its busiest rank, whose experts multiply all that was sent to them, and for the link that carries
most:

    T = max_j sum_i pairs[i][j] · t_tok + 4 · max over ranks of (sent, received) · h e / beta

with dispatch and combine, forward and backward, each as long as the fullest link of that rank, full duplex. Under
uniform routing of T tokens a rank to k experts over E_p ranks the four send 4 T k h e (E_p - 1) / E_p
(harness.ledger.volumes). Derived here; no source prints it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Pairs = Sequence[Sequence[float]]


def max_over_mean(load: Sequence[float]) -> float:
    """Busiest expert over the mean: 1 when balanced, the number of experts when one has all."""
    return max(load) / _mean(load)


def cv(load: Sequence[float]) -> float:
    """Standard deviation over mean: 0 when balanced, sqrt(n - 1) when one of n has all."""
    mean = _mean(load)
    return math.sqrt(sum((each - mean) ** 2 for each in load) / len(load)) / mean


def gini(load: Sequence[float]) -> float:
    """Half the mean difference between two experts over the mean: 0 when balanced, 1 - 1 / n when one of n has
    all."""
    ordered, n = sorted(load), len(load)
    weighted = sum(place * each for place, each in enumerate(ordered, start=1))
    return 2 * weighted / (n * n * _mean(load)) - (n + 1) / n


def entropy(load: Sequence[float]) -> float:
    """Entropy of the shares over log n: 1 when balanced, 0 when one has all."""
    total = _mean(load) * len(load)
    shares = [each / total for each in load if each]
    return -sum(share * math.log(share) for share in shares) / math.log(len(load))


def _mean(load: Sequence[float]) -> float:
    if len(load) < 2 or min(load) < 0 or not sum(load):
        raise ValueError(f"a load is of at least two experts, none below 0 and not all 0; got {list(load)}")
    return sum(load) / len(load)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one MoE layer, forward and backward."""

    compute: float
    """Of the busiest rank."""
    exchange: float
    """Of the four all-to-alls."""

    @property
    def total(self) -> float:
        return self.compute + self.exchange


def layer_time(pairs: Pairs, t_tok: float, row_bytes: int, beta: float) -> LayerTime:
    """The model above. `t_tok`: seconds that an expert computes for one pair, forward and backward; `row_bytes`: h e
    of one token; `beta`: bytes a second each way on a rank's link. What a rank keeps for its own experts crosses no
    link."""
    ranks = range(len(pairs))
    received = [sum(pairs[i][j] for i in ranks) for j in ranks]
    sent = [sum(pairs[i]) for i in ranks]
    fullest = max(max(sent[rank], received[rank]) - pairs[rank][rank] for rank in ranks)
    return LayerTime(max(received) * t_tok, 4 * fullest * row_bytes / beta)
