"""Texts between ranks, and what `step` writes down of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.trace.exchange import gathered

from .steps import make_spec, measured


def send() -> list[Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    return gathered({"rank": rank, "text": "x" * (10 + 50 * rank)})


def test_each_rank_has_what_all_ranks_said(run_ranks: Callable[..., list[Any]]) -> None:
    heard = run_ranks(2, send)
    assert heard[0] == heard[1] == [{"rank": rank, "text": "x" * (10 + 50 * rank)} for rank in (0, 1)]
    assert gathered((1, 2)) == [[1, 2]]


def test_the_step_of_every_rank_is_recorded(run_ranks: Callable[..., list[Any]]) -> None:
    values = measured(make_spec({"pp": 2}), run_ranks)
    totals = [values["peak_bytes", f"rank{rank}.total"] for rank in (0, 1)]
    assert values["peak_bytes", "total"] == max(totals)
    assert values["step_ms", ""] > 0
    count = values["num_parameters", ""]
    weights = max(values["state_bytes", f"rank{rank}.weights"] for rank in (0, 1))
    assert values["bytes_per_parameter", "weights"] == weights / count
    assert values["comm_count", "rank0.pp.send"] == 4
