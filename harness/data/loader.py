"""Batches of tokens by random access: batch `step` is a function of the seed and the step alone.

The text is cut into windows of `seq_len` tokens that do not overlap. Each epoch visits every window once,
in an order drawn from (seed, epoch); sample i of the run is window i of that order, whatever the batch
size. So a resumed run needs no state. The rare token is drawn from (seed, step) and leaves all other tokens
as they were.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harness.data.corpora import DataError

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Batch = tuple[torch.Tensor, torch.Tensor]
"""(inputs, targets), int64 [batch, seq]; targets are the inputs moved on by one token."""

ORDER_STREAM, RARE_STREAM = 0, 1


class TokenBatches:
    """Training batches of one run. Steps count from 1; step 1 takes the first `batch_size` samples."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        rare_token_every: int = 0,
        rare_id: int = 0,
    ) -> None:
        self.num_windows = _num_windows(tokens, seq_len)
        self._tokens = tokens
        self._batch_size = batch_size
        self._seq_len = seq_len
        self._seed = seed
        self._rare_token_every = rare_token_every
        self._rare_id = rare_id
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def batch(self, step: int) -> Batch:
        """The batch of training step `step` >= 1."""
        samples = (step - 1) * self._batch_size + np.arange(self._batch_size)
        epochs, places = np.divmod(samples, self.num_windows)
        windows = np.empty_like(samples)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            mine = epochs == epoch
            windows[mine] = self._order(epoch)[places[mine]]
        inputs, targets = _gather(self._tokens, windows * self._seq_len, self._seq_len)
        if (place := self._rare_place(step)) is not None:
            inputs[place] = self._rare_id
        return inputs, targets

    def rare_count(self, step: int) -> int:
        """Rare tokens in the inputs of this step: 0 or 1."""
        return int(self._rare_place(step) is not None)

    def _rare_place(self, step: int) -> tuple[int, int] | None:
        """(sequence, position) of the rare token, which a step has with probability 1/rare_token_every."""
        if not self._rare_token_every:
            return None
        draw = np.random.default_rng((self._seed, RARE_STREAM, step))
        if draw.random() * self._rare_token_every >= 1:
            return None
        return int(draw.integers(self._batch_size)), int(draw.integers(self._seq_len))

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._orders:
            # A batch touches two neighbouring epochs at most, unless the text is shorter than a batch.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = np.random.default_rng((self._seed, ORDER_STREAM, epoch)).permutation(
                self.num_windows
            )
        return self._orders[epoch]


def validation_batches(
    tokens: Tokens, *, batch_size: int, seq_len: int, num_tokens: int, rare_id: int | None = None
) -> list[Batch]:
    """The same batches for every run: windows spread evenly over the held-out text, at least `num_tokens`.

    All batches are of equal size, so that the mean of their losses is the loss. A text too short for
    `num_tokens` gives the whole batches it has (one smaller batch where it has not even one). With
    `rare_id` that token stands in the middle of each batch's first sequence.
    """
    if num_tokens <= 0:
        return []
    available = _num_windows(tokens, seq_len)
    batch_size = min(batch_size, available)
    num_batches = min(-(-num_tokens // (batch_size * seq_len)), available // batch_size)
    chosen = np.arange(num_batches * batch_size) * available // (num_batches * batch_size)
    batches = []
    for windows in chosen.reshape(num_batches, batch_size):
        inputs, targets = _gather(tokens, windows * seq_len, seq_len)
        if rare_id is not None:
            inputs[0, seq_len // 2] = rare_id
        batches.append((inputs, targets))
    return batches


def _num_windows(tokens: Tokens, seq_len: int) -> int:
    """Whole windows with one further token as the last target."""
    num_windows = (len(tokens) - 1) // seq_len
    if num_windows < 1:
        raise DataError(f"the text has {len(tokens)} tokens, too few for one sequence of {seq_len} (seq_len)")
    return num_windows


def _gather(tokens: Tokens, starts: npt.NDArray[np.int64], seq_len: int) -> Batch:
    window = tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return torch.from_numpy(window[:, :-1].copy()), torch.from_numpy(window[:, 1:].copy())
