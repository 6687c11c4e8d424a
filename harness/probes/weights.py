"""Largest singular value of every 2-D weight, by power iteration from a vector kept between records.

v <- W^T W v / |W^T W v|, sigma = |W v|: a lower bound that rises to the spectral norm. Weights move little
between records, so two iterations follow them (the first record takes 50). Matrices of one shape go through
as one batch.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from harness.probes.base import Probe, StepValues

FIRST_ITERATIONS, LATER_ITERATIONS = 50, 2
SEED = 0x5E


class Weights(Probe):
    name = "weights"

    def __init__(self) -> None:
        self._vectors: dict[tuple[int, int], Tensor] = {}

    def begin(self) -> None:
        if self.run.first_step == 1:
            self._record(0)

    def after_step(self, step: int, values: StepValues) -> None:
        self._record(step)

    @torch.no_grad()
    def _record(self, step: int) -> None:
        groups: dict[tuple[int, int], list[tuple[str, Tensor]]] = defaultdict(list)
        for name, parameter in self.run.model.named_parameters():
            if parameter.dim() == 2:
                groups[parameter.shape[0], parameter.shape[1]].append((name, parameter))
        for shape, group in groups.items():
            norms = self._spectral_norms(shape, torch.stack([weight.float() for _, weight in group]))
            for (name, _), norm in zip(group, norms.tolist(), strict=True):
                self.run.record.measure(step, {"weight_spectral_norm": norm}, scope=name)

    def _spectral_norms(self, shape: tuple[int, int], stacked: Tensor) -> Tensor:
        """[matrices, rows, columns] -> [matrices]."""
        vectors = self._vectors.get(shape)
        iterations = LATER_ITERATIONS
        if vectors is None:
            generator = torch.Generator().manual_seed(SEED)
            start = torch.randn(len(stacked), shape[1], 1, generator=generator)
            vectors = torch.nn.functional.normalize(start, dim=1).to(stacked.device)
            iterations = FIRST_ITERATIONS
        for _ in range(iterations):
            images = stacked @ vectors
            vectors = torch.nn.functional.normalize(stacked.mT @ images, dim=1)
        self._vectors[shape] = vectors
        norms: Tensor = torch.linalg.vector_norm(stacked @ vectors, dim=(1, 2))
        return norms
