"""Published volumes of communication against the numbers that their papers print."""

from __future__ import annotations

import pytest

from harness.ledger.bubble import p2p_bytes
from harness.ledger.overlap import exposed, exposed_share, length, union
from harness.ledger.volumes import (
    all_gather_sent,
    all_reduce_sent,
    context_ring,
    data_parallel_sent,
    expert_parallel,
    exposed_seconds,
    megatron_sequence_parallel,
    ring_attention_block,
    ring_seconds,
    tensor_parallel_layer,
    ulysses,
    vocabulary_parallel_loss,
    zero_volume,
)


def test_zero_prints_2_2_2_and_3_psi() -> None:
    assert [zero_volume(7.5e9, stage) / 7.5e9 for stage in range(4)] == [2, 2, 2, 3]
    assert zero_volume(1, 3) / zero_volume(1, 0) == 1.5


def test_data_parallelism_is_an_all_reduce_of_the_gradients() -> None:
    assert data_parallel_sent(7.5e9, 2, 64) == 2 * 7.5e9 * 2 * 63 / 64
    assert data_parallel_sent(1, 1, 2**20) == pytest.approx(zero_volume(1, 0))
    assert all_reduce_sent(8, 4) == 2 * all_gather_sent(8, 4) == 12


def test_narayanan_s_layer_and_boundary() -> None:
    """b s h = 1 · 2048 · 12288 (GPT-3), t = 8: 8 b s h 7 / 8; a boundary b s h, and b s h / t with scatter and
    gather."""
    assert tensor_parallel_layer(1, 2048, 12288, 8) == 7 * 2048 * 12288
    assert tensor_parallel_layer(4, 16, 8, 1) == 0
    assert p2p_bytes(1, 2048, 12288, 2) == 8 * p2p_bytes(1, 2048, 12288, 2, 8) == 2 * 2048 * 12288


def test_ulysses_shrinks_with_the_ranks_and_megatron_s_does_not() -> None:
    n, h = 65536, 4096
    assert megatron_sequence_parallel(n, h) == 4 * n * h
    assert ulysses(n, h, 64) * 64 == megatron_sequence_parallel(n, h)
    assert ulysses(2 * n, h, 128) == ulysses(n, h, 64)  # as the paper says: constant where both grow


def test_a_ring_and_an_all_gather_of_keys_send_alike() -> None:
    b, s, kv, e, cp = 2, 8192, 1024, 2, 4
    assert context_ring(b, s, kv, e, cp) == all_gather_sent(2 * b * s * kv * e, cp)


@pytest.mark.parametrize(
    ("flops", "link", "block", "sequence"),
    [(312e12, 300e9, 1.0e3, 6.2e3), (312e12, 12.5e9, 24.5e3, 149.5e3)],
    ids=["A100, NVLink", "A100, InfiniBand"],
)
def test_ring_attention_s_least_block(flops: float, link: float, block: float, sequence: float) -> None:
    """Its table prints c and 6 c for F and B; with InfiniBand it prints 24.5 thousand where F / B makes 24.96, and
    149.5 where 6 F / B makes 149.8."""
    found = ring_attention_block(flops, link)
    assert found == pytest.approx(block, rel=0.045)
    assert 6 * found == pytest.approx(sequence, rel=0.01)


def test_experts_and_loss() -> None:
    assert expert_parallel(4096, 8, 7168, 1, 1) == 0
    assert expert_parallel(100, 2, 8, 2, 4) == 4 * 100 * 2 * 8 * 2 * 3 // 4
    assert vocabulary_parallel_loss(1, 1024, 2) == 3 * 1024 * 4


def test_alpha_and_beta() -> None:
    """4 ranks, 1 GB, 10 µs a message, 100 GB/s: 6 messages, and 1.5 GB on each link."""
    assert ring_seconds(1e9, 4, 1e-5, 1e11) == pytest.approx(6e-5 + 1.5e-2)
    assert ring_seconds(0, 1, 1e-5, 1e11) == 0
    assert (exposed_seconds(3.0, 2.0), exposed_seconds(2.0, 3.0)) == (1.0, 0.0)


def test_intervals() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert length([(0, 2), (1, 3), (7, 8)]) == 4
    assert exposed([(0, 2), (3, 5)], [(1, 4)]) == 2
    assert exposed([(0, 1)], []) == 1
    assert exposed([(0, 1)], [(0, 1)]) == 0
    assert exposed_share([(0, 2), (9, 12)], [(1, 4)], (0, 10)) == 0.2
    with pytest.raises(ValueError, match="empty span"):
        exposed_share([(0, 1)], [], (1, 1))


def test_exposure_of_a_model_is_that_of_its_intervals() -> None:
    """T_comm - T_overlap where communication begins with the computation that it hides behind."""
    assert exposed([(0, 3)], [(0, 2)]) == exposed_seconds(3, 2)
    assert exposed([(0, 2)], [(0, 3)]) == exposed_seconds(2, 3)
