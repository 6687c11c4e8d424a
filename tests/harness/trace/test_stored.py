"""Traces as JSON, their cache, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.ledger.step import CATEGORIES, Collective, RankStep
from harness.spec import DataSpec
from harness.trace import __main__ as command
from harness.trace import stored

from .steps import make_spec

STEP = RankStep(
    rank=3,
    peak=dict.fromkeys(CATEGORIES, 5),
    moment="backward",
    state={"weights": 1, "gradients": 2, "optimizer": 3},
    saved=9,
    collectives=(Collective("dp", "all_gather", 2, 64, 4),),
    flops=77,
    layers={"layers.0": 9},
)


def test_json_and_back() -> None:
    values = json.loads(json.dumps(stored.to_json([STEP])))
    assert values[0]["total"] == 30
    assert stored.from_json(values) == [STEP]


@pytest.mark.parametrize(
    "changes",
    [{"seed": 7}, {"task": "trace"}, {"threads": 2}, {"val_tokens": 5}, {"optimizer": {"lr": 0.5}}],
    ids=str,
)
def test_what_memory_does_not_depend_on_is_no_part_of_the_key(changes: dict[str, Any]) -> None:
    task = changes.pop("task", "step")
    assert stored.key(make_spec()) == stored.key(make_spec(**changes).model_copy(update={"task": task}))


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 16},
        {"recompute": "full"},
        {"optimizer": {"name": "sgd"}},
        {"optimizer": {"clip_norm": 0}},
        {"precision": "bf16"},
        {"model": {"d_ffn": 128}},
        {"data": DataSpec(tokenizer="bpe-512")},
        {"device": "cuda"},
    ],
    ids=str,
)
def test_what_memory_depends_on_is(changes: dict[str, Any]) -> None:
    assert stored.key(make_spec()) != stored.key(make_spec(**changes))


def test_the_mesh_is_part_of_the_key_and_its_name_is_not() -> None:
    assert stored.key(make_spec({"dp": 2})) == stored.key(make_spec({"dp": 2, "name": "two"}))
    assert stored.key(make_spec({"dp": 2})) != stored.key(make_spec({"dp": 2, "zero": 3}))


def test_an_answer_that_cannot_be_kept_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "no folder"
    folder.write_text("")
    assert stored.known_or_made(make_spec(), folder, lambda: [STEP]) == [STEP]
    assert "could not be kept" in capsys.readouterr().err


def test_an_answer_is_given_again_and_a_broken_file_is_not(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> list[RankStep]:
        calls.append(1)
        return [STEP]

    spec = make_spec()
    assert stored.known_or_made(spec, tmp_path, make) == stored.known_or_made(spec, tmp_path, make) == [STEP]
    assert len(calls) == 1
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:40])
    assert stored.known_or_made(spec, tmp_path, make) == [STEP]
    assert len(calls) == 2


def test_the_command_prints_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spec.json"
    file.write_text(make_spec({"pp": 2}).model_dump_json())
    assert command.main([str(file), "--cache", str(tmp_path / "traces")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in printed] == [0, 1]
    assert command.main([str(file), "--cache", str(tmp_path / "traces")]) == 0
    assert json.loads(capsys.readouterr().out) == printed
    file.write_text('{"task": "trace", "batch_size": -1}')
    assert command.main([str(file)]) == 2


def test_no_torch_is_loaded_for_an_answer_that_is_there(tmp_path: Path) -> None:
    code = (
        "import sys, harness.trace.stored, harness.trace.__main__\n"
        "assert not any(name == 'torch' or name.startswith('torch.') for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
