"""What a run holds while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.data.loader import Batch, TokenBatches
from harness.models.transformer import Transformer
from harness.spec import RunSpec
from results.journal import JournalWriter

COMPUTE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Diverged(Exception):  # noqa: N818 - an outcome, not an error
    """The loss is not finite, or stayed above the limit: an outcome of the run, not a fault of the program."""


class Skipped(Exception):  # noqa: N818 - an outcome, not an error
    """The device lacks what the run is about; the message says what would do."""


@dataclass
class Run:
    """One run in training."""

    spec: RunSpec
    journal: JournalWriter
    checkpoints: Path
    device: torch.device
    model: Transformer
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batches: TokenBatches
    validation: Sequence[Batch]
    step: int = 0
    loss: float = float("nan")
    learning_rate: float = 0.0
    gradient_norm: float = float("nan")
    """Global norm before clipping, loss scale taken out."""
    num_skipped_steps: int = 0
    """Updates that loss scaling left out because a gradient was not finite."""

    def autocast(self) -> AbstractContextManager[None]:
        """The compute dtype of the run's matrix products."""
        dtype = COMPUTE_DTYPES[self.spec.precision.compute]
        weights = COMPUTE_DTYPES[self.spec.precision.weights]
        if dtype == weights:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def batch(self, step: int) -> Batch:
        inputs, targets = self.batches.batch(step)
        return inputs.to(self.device), targets.to(self.device)
