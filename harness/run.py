"""What a run holds while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.data.loader import Batch, TokenBatches
from harness.models.transformer import Transformer
from harness.spec import RunSpec
from results.journal import JournalWriter

if TYPE_CHECKING:
    from harness.parallel.strategy import Strategy

COMPUTE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Diverged(Exception):  # noqa: N818 - an outcome, not an error
    """The loss is not finite, or stayed above the limit: an outcome of the run, not a fault of the program."""

    def __init__(self, reason: str, *, on_this_rank: bool = False) -> None:
        super().__init__(reason)
        self.on_this_rank = on_this_rank
        """This rank's own share of the loss was not finite."""


class Skipped(Exception):  # noqa: N818 - an outcome, not an error
    """The device lacks what the run is about; the message says what would do."""


class Quiet:
    """The journal of a rank that has nothing to say of its own: of several, the first one records."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal

    def measure(self, step: int, values: Any, scope: str = "") -> None:
        self._journal.beat()

    def note(self, name: str, value: Any, reason: str) -> None:
        self._journal.beat()

    def checkpoint(self, step: int, sha256: str, final: bool = False) -> None:
        self._journal.beat()

    def beat(self) -> None:
        self._journal.beat()


@dataclass
class Run:
    """One run in training, as one of its ranks sees it."""

    spec: RunSpec
    journal: JournalWriter | Quiet
    checkpoints: Path
    device: torch.device
    model: Transformer
    """The model as it is called without a wrapper; with a pipeline this rank's first stage."""
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batches: TokenBatches
    validation: Sequence[Batch]
    step: int = 0
    loss: float = float("nan")
    own_loss: torch.Tensor | float = float("nan")
    """Of this rank's share of the batch, not averaged."""
    learning_rate: float = 0.0
    gradient_norm: float = float("nan")
    """Global norm before clipping, loss scale taken out."""
    num_skipped_steps: int = 0
    """Updates that loss scaling left out because a gradient was not finite."""

    def batch(self, step: int) -> Batch:
        inputs, targets = self.batches.batch(step)
        return inputs.to(self.device), targets.to(self.device)
