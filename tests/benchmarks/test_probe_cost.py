"""What recording each step costs: the default probes' own time over the step's, for the laptop model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.spec import RunSpec
from harness.tasks.pretrain import pretrain
from results.journal import JournalWriter, read_journal

from .step_process import PRECISIONS, SHAPES, model_spec

pytestmark = pytest.mark.slow

BATCH_SIZE, SEQ_LEN, _ = SHAPES["llama-0.8m"]


def test_default_probes_every_step(benchmark: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    spec = RunSpec(
        model=model_spec("llama-0.8m"),
        precision=PRECISIONS["fp32"],
        tokens=15 * BATCH_SIZE * SEQ_LEN,
        batch_size=BATCH_SIZE,
        seq_len=SEQ_LEN,
        val_tokens=0,
        probes={"throughput": 1},
    )
    journal = JournalWriter(tmp_path / "rank0.journal")
    benchmark.pedantic(pretrain, args=(spec, {}, journal, tmp_path), rounds=1)
    journal.end("ok")
    journal.close()
    records = [r for r in read_journal(tmp_path / "rank0.journal").records if r["k"] == "m"]
    step_ms = sorted(r["v"]["step_ms"] for r in records if "step_ms" in r["v"])
    probe_ms = {r["c"]: r["v"]["probe_ms"] for r in records if "probe_ms" in r["v"]}
    assert set(probe_ms) == {"loss", "gradients", "throughput"}
    assert len(step_ms) == 15
    benchmark.extra_info["probe_ms"] = {name: round(ms, 4) for name, ms in probe_ms.items()}
    benchmark.extra_info["cost_over_step"] = round(sum(probe_ms.values()) / step_ms[len(step_ms) // 2], 5)
