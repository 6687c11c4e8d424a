"""Seeds of stochastic rounding, and amax histories that all data-parallel ranks share (two processes over gloo)."""

from __future__ import annotations

import math
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from harness.precision.linear import apply_recipe, begin_step, end_step, quantizers
from harness.precision.scaling import Quantizer, end_steps
from harness.spec import PrecisionSpec, QuantizerSpec, RecipeSpec

from .conftest import tiny_model, tokens

STOCHASTIC = QuantizerSpec(format="e5m2", scaling="current", rounding="stochastic")
X = torch.linspace(-1, 1, 64 * 8).view(64, 8)


def drawn(name: str = "a", seed: int = 0, step: int = 1, spec: QuantizerSpec = STOCHASTIC) -> torch.Tensor:
    quantizer = Quantizer(spec, name, seed)
    quantizer.begin_step(step)
    return quantizer.cast(X).values


def test_the_same_place_draws_the_same_noise() -> None:
    assert torch.equal(drawn(), drawn())


@pytest.mark.parametrize("other", [{"name": "b"}, {"seed": 1}, {"step": 2}])
def test_name_seed_and_step_each_change_the_noise(other: dict[str, Any]) -> None:
    assert not torch.equal(drawn(), drawn(**other))


def test_casts_of_one_step_differ_and_the_step_can_be_repeated() -> None:
    quantizer = Quantizer(STOCHASTIC, "a")
    quantizer.begin_step(5)
    first, second = quantizer.cast(X).values, quantizer.cast(X).values
    assert not torch.equal(first, second)
    quantizer.begin_step(5)
    assert torch.equal(quantizer.cast(X).values, first)


def test_evaluation_draws_without_moving_anything() -> None:
    quantizer = Quantizer(STOCHASTIC, "a").eval()
    first = quantizer.cast(X).values
    assert torch.equal(quantizer.cast(X).values, first)
    assert torch.equal(quantizer.train().cast(X).values, first)


def test_ending_a_step_begins_the_next() -> None:
    quantizer = Quantizer(STOCHASTIC, "a")
    quantizer.end_step()
    assert torch.equal(quantizer.cast(X).values, drawn(step=1))


def losses(seed: int, first: int = 1) -> list[float]:
    model = tiny_model()
    precision = PrecisionSpec(name="sr", recipe=RecipeSpec(gradients=STOCHASTIC))
    assert apply_recipe(model, precision, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found = []
    for step in range(first, first + 3):
        begin_step(model, step)
        loss = model.loss(tokens(step), tokens(step + 100))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step(model)
        found.append(float(loss.detach()))
    return found


def test_the_run_s_seed_reaches_every_quantiser() -> None:
    assert losses(0) == losses(0)
    assert losses(0)[0] == losses(1)[0] and losses(0)[1:] != losses(1)[1:]
    model = tiny_model()
    apply_recipe(model, PrecisionSpec(name="sr", recipe=RecipeSpec(gradients=STOCHASTIC)), seed=7)
    identities = [quantizer.identity for _, quantizer in quantizers(model)]
    assert len(set(identities)) == len(identities) == 8
    assert {seed for _, seed in identities} == {7}


def one_rank(rank: int, rendezvous: str, pipe: Connection) -> None:
    """Three steps of three delayed quantisers and two stochastic ones, as one of two data-parallel ranks."""
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    with patch.object(distributed, "all_reduce", wraps=distributed.all_reduce) as collective:
        spec = QuantizerSpec(format="e4m3", scaling="delayed", history=3)
        delayed = [Quantizer(spec, str(index)) for index in range(3)]
        shared_noise = STOCHASTIC.model_copy(update={"shared_noise": True})
        stochastic = [Quantizer(STOCHASTIC, "noise"), Quantizer(shared_noise, "noise")]
        noise = [quantizer.cast(X).values.flatten().tolist() for quantizer in stochastic]
        for step in range(3):
            for index, quantizer in enumerate(delayed):
                amax = math.nan if (step, index, rank) == (1, 2, 0) else (1.0 + rank + index) * (step + 1)
                quantizer.cast(torch.tensor([[amax, 0.5]]))
            end_steps([*delayed, *stochastic])
        histories = [quantizer.amax_history.tolist() for quantizer in delayed]
    pipe.send({"histories": histories, "noise": noise, "calls": collective.call_count})
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="this PyTorch is built without gloo")
def test_two_ranks_agree_on_amax_in_one_collective(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=one_rank, args=(rank, str(tmp_path / "rendezvous"), pipe))
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    found = [pipe.recv() if pipe.poll(120) else None for pipe, _ in pipes]
    for process in ranks:
        process.join(timeout=60)
    assert [process.exitcode for process in ranks] == [0, 0]
    # rank 1 has the larger tensors; a NaN on rank 0 alone keeps that step out of both histories
    histories = [[6, 4, 2], [9, 6, 3], [12, 4, 0]]
    assert found[0]["histories"] == found[1]["histories"] == histories
    assert found[0]["calls"] == found[1]["calls"] == 3  # one a step, whatever the number of quantisers
    private, shared = ([rank["noise"][kind] for rank in found] for kind in (0, 1))
    assert private[0] != private[1]
    assert shared[0] == shared[1]
