"""Batches are a pure function of seed and step; each window is seen once an epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.data.corpora import DataError
from harness.data.loader import TokenBatches, validation_batches

TOKENS = np.arange(1001, dtype=np.uint16)
RARE = 60000


def batches(seed: int = 0, every: int = 0, batch_size: int = 4, tokens: np.ndarray = TOKENS) -> TokenBatches:
    return TokenBatches(
        tokens, batch_size=batch_size, seq_len=10, seed=seed, rare_token_every=every, rare_id=RARE
    )


def test_shapes_and_targets() -> None:
    inputs, targets = batches().batch(1)
    assert inputs.shape == targets.shape == (4, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)


def test_random_access_gives_what_order_gives() -> None:
    straight = batches(seed=3)
    ahead = [straight.batch(step) for step in range(1, 80)]
    for step in (79, 1, 26, 25, 50):
        for one, other in zip(batches(seed=3).batch(step), ahead[step - 1], strict=True):
            assert torch.equal(one, other)


def test_an_epoch_sees_each_window_once_and_the_next_in_another_order() -> None:
    starts = torch.cat([batches().batch(step)[0][:, 0] for step in range(1, 51)]).tolist()
    assert sorted(starts[:100]) == sorted(starts[100:]) == list(range(0, 1000, 10))
    assert starts[:100] != starts[100:]


def test_samples_do_not_depend_on_the_batch_size() -> None:
    small = torch.cat([batches(batch_size=2).batch(step)[0] for step in range(1, 7)])
    large = torch.cat([batches(batch_size=6).batch(step)[0] for step in range(1, 3)])
    assert torch.equal(small, large)


def test_a_batch_larger_than_the_text() -> None:
    inputs, _ = batches(batch_size=7, tokens=TOKENS[:31]).batch(2)
    assert sorted(inputs[2:5, 0].tolist()) == [0, 10, 20]


def test_seeds_differ() -> None:
    assert not torch.equal(batches(seed=0).batch(1)[0], batches(seed=1).batch(1)[0])


def test_rare_token_changes_one_input_and_nothing_else() -> None:
    plain, rare = batches(), batches(every=4)
    counts = []
    for step in range(1, 401):
        (x, y), (rare_x, rare_y) = plain.batch(step), rare.batch(step)
        changed = x != rare_x
        assert torch.equal(y, rare_y)
        assert int(changed.sum()) == rare.rare_count(step)
        assert (rare_x[changed] == RARE).all()
        counts.append(rare.rare_count(step))
    assert 70 <= sum(counts) <= 130  # binomial(400, 1/4): mean 100, s.d. 8.7
    assert sum(batches(every=1).rare_count(step) for step in range(1, 11)) == 10


def test_validation_is_fixed_spread_and_equal_in_size() -> None:
    found = validation_batches(TOKENS, batch_size=4, seq_len=10, num_tokens=100)
    assert [x.shape for x, _ in found] == [(4, 10)] * 3
    starts = torch.cat([x[:, 0] for x, _ in found])
    assert starts[0] == 0
    assert starts[-1] >= 900
    assert len(set(starts.tolist())) == 12
    assert validation_batches(TOKENS, batch_size=4, seq_len=10, num_tokens=0) == []


def test_validation_of_a_short_text() -> None:
    (only,) = validation_batches(TOKENS[:31], batch_size=8, seq_len=10, num_tokens=10_000)
    assert only[0].shape == (3, 10)


def test_validation_with_the_rare_token() -> None:
    plain = validation_batches(TOKENS, batch_size=4, seq_len=10, num_tokens=80)
    rare = validation_batches(TOKENS, batch_size=4, seq_len=10, num_tokens=80, rare_id=RARE)
    for (x, y), (rare_x, rare_y) in zip(plain, rare, strict=True):
        assert torch.equal(y, rare_y)
        assert (x != rare_x).nonzero().tolist() == [[0, 5]]


def test_too_few_tokens_is_an_error() -> None:
    with pytest.raises(DataError, match="5 tokens, too few for one sequence of 10"):
        batches(tokens=TOKENS[:5])
