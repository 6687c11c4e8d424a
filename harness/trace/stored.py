"""Traces as JSON, and the folder where those made before lie. No torch is loaded.

A trace depends on the fields of a spec that say what one step does, on the code and on torch's version; all three are
in a file's name, so an old answer is never given to a new question.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from harness.data.vocabulary import vocab_size
from harness.ledger.step import Collective, RankStep
from harness.spec import RunSpec
from harness.spec.tasks import ONE_STEP

CODE = ("attention", "ledger", "models", "optim", "parallel", "precision", "spec", "tasks", "trace")


def to_json(ranks: Sequence[RankStep]) -> list[dict[str, Any]]:
    """The ranks' steps as plain values, `total` beside them."""
    return [asdict(each) | {"total": each.total} for each in ranks]


def from_json(values: Sequence[dict[str, Any]]) -> list[RankStep]:
    """The inverse of `to_json`."""
    found = []
    for value in values:
        fields = {name: each for name, each in value.items() if name != "total"}
        fields["collectives"] = tuple(Collective(**each) for each in fields["collectives"])
        found.append(RankStep(**fields))
    return found


def key(spec: RunSpec) -> str:
    """Hash of what a trace depends on."""
    fields = spec.model_dump(mode="json", include=set(ONE_STEP) - {"data", "optimizer"} | {"device"})
    fields["vocab_size"] = spec.model.vocab_size or vocab_size(spec.data.tokenizer)
    fields["optimizer"] = [spec.optimizer.name, spec.optimizer.clip_norm > 0, spec.optimizer.beta1 > 0]
    for name in ("model", "parallelism", "precision"):
        fields[name].pop("name")
    text = json.dumps([fields, _code(), importlib.metadata.version("torch")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known_or_made(spec: RunSpec, folder: Path, make: Callable[[], Sequence[RankStep]]) -> list[RankStep]:
    """The trace of `spec` from `folder`, else from `make`, and stored."""
    file = folder / f"{key(spec)}.json"
    try:
        return from_json(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError):  # none, or cut short
        pass
    ranks = list(make())
    making = file.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        making.write_text(json.dumps(to_json(ranks)), "utf-8")
        making.replace(file)
    except OSError as error:  # a full disk must not cost the answer
        print(f"the trace could not be kept in {folder}: {error}", file=sys.stderr)
    return ranks


@cache
def _code() -> str:
    """Hash of the source that a step runs through."""
    digest = hashlib.sha256()
    home = Path(__file__).parents[1]
    for name in CODE:
        for file in sorted((home / name).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
