"""Imbalance of known distributions, and the time model's corner cases."""

import math

import pytest

from harness.ledger.experts import cv, entropy, gini, layer_time, max_over_mean
from harness.ledger.volumes import expert_parallel

N = 8
UNIFORM = [3.0] * N
ONE_HOT = [0.0] * (N - 1) + [5.0]
ZIPF = [1 / place for place in range(1, N + 1)]
HARMONIC = sum(ZIPF)


@pytest.mark.parametrize(
    ("metric", "uniform", "one_hot", "zipf"),
    [
        (max_over_mean, 1.0, N, N / HARMONIC),
        (cv, 0.0, math.sqrt(N - 1), math.sqrt(N * sum(1 / k**2 for k in range(1, N + 1)) / HARMONIC**2 - 1)),
        # With F(i) = i: sum over i of (2 i - n - 1) x_(i) / (n sum x), ascending; the i-th largest is 1 / i.
        (gini, 0.0, 1 - 1 / N, sum((N + 1 - 2 * k) / k for k in range(1, N + 1)) / (N * HARMONIC)),
        (
            entropy,
            1.0,
            0.0,
            (math.log(HARMONIC) + sum(math.log(k) / k for k in range(1, N + 1)) / HARMONIC) / math.log(N),
        ),
    ],
)
def test_known_distributions(metric, uniform, one_hot, zipf):
    assert metric(UNIFORM) == pytest.approx(uniform, abs=1e-12)
    assert metric(ONE_HOT) == pytest.approx(one_hot, abs=1e-12)
    assert metric(ZIPF) == pytest.approx(zipf)
    assert metric([10 * each for each in reversed(ZIPF)]) == pytest.approx(zipf), "neither order nor scale"


@pytest.mark.parametrize("load", [[], [1.0], [0.0, 0.0], [1.0, -1.0]])
def test_no_load_is_refused(load):
    with pytest.raises(ValueError, match="at least two experts"):
        gini(load)


def test_uniform_routing_sends_what_the_formula_says():
    tokens, k, h, element, ranks = 64, 2, 16, 2, 4
    pairs = [[tokens * k / ranks] * ranks] * ranks
    time = layer_time(pairs, t_tok=0.5, row_bytes=h * element, beta=1.0)
    assert time.exchange == expert_parallel(tokens, k, h, element, ranks)
    assert time.compute == tokens * k * 0.5
    assert time.total == time.exchange + time.compute


def test_the_busiest_rank_and_the_fullest_link_decide():
    pairs = [[1, 9, 0], [2, 5, 3], [4, 6, 0]]
    time = layer_time(pairs, t_tok=1.0, row_bytes=1, beta=2.0)
    assert time.compute == 20  # rank 1 gets 9 + 5 + 6
    assert time.exchange == 4 * 15 / 2  # of which 5 are its own


def test_one_rank_exchanges_nothing():
    assert layer_time([[7]], t_tok=1.0, row_bytes=4, beta=1.0).exchange == 0
