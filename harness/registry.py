"""What can be chosen by name: tasks and probes, as `module:attribute` strings.

Nothing is imported until `load` is called, so a list of names costs nothing and loads no torch. A new task
or probe is one file and one line here.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any


class Registry:
    """Names of one kind of thing, and where each is found."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def check(self, name: str) -> str:
        """`name` itself. Raises KeyError with the allowed names and the nearest one."""
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise KeyError(f"unknown {self.kind} {name!r}; allowed: {', '.join(self._entries)}{hint}")
        return name

    def load(self, name: str) -> Any:
        """Import the module and return the attribute that `name` stands for."""
        module, _, attribute = self._entries[self.check(name)].partition(":")
        return getattr(importlib.import_module(module), attribute)


TASKS = Registry(
    "task",
    {
        "pretrain": "harness.tasks.pretrain:pretrain",
        "formats": "harness.tasks.formats:formats",
        "tensors": "harness.tasks.tensors:tensors",
        "gemm": "harness.tasks.gemm:gemm",
        "accumulation": "harness.tasks.accumulation:accumulation",
        "attention": "harness.tasks.attention:attention",
        "step": "harness.tasks.step:step",
        "trace": "harness.tasks.trace:trace",
        "ledger": "harness.tasks.ledger:ledger",
        "pipeline": "harness.tasks.pipeline:pipeline",
    },
)

PROBES = Registry(
    "probe",
    {
        "loss": "harness.probes.loss:Loss",
        "throughput": "harness.probes.throughput:Throughput",
        "gradients": "harness.probes.gradients:Gradients",
        "weights": "harness.probes.weights:Weights",
        "alignment": "harness.probes.alignment:Alignment",
        "activations": "harness.probes.activations:Activations",
        "quantization": "harness.probes.quantization:Quantization",
        "attention": "harness.probes.attention:Attention",
        "ablation": "harness.probes.ablation:Ablation",
        "memory": "harness.probes.memory:Memory",
        "collectives": "harness.probes.collectives:Collectives",
        "experts": "harness.probes.experts:Experts",
    },
)

DEFAULT_PERIODS = {"loss": 1, "gradients": 1, "throughput": 10}
"""Probes that record without being asked, and every how many steps."""


def probe_periods(asked: Mapping[str, int]) -> dict[str, int]:
    """Probe -> period, in registry order: the defaults overridden by `asked`; 0 turns a probe off."""
    for name in asked:
        PROBES.check(name)
    periods = {**DEFAULT_PERIODS, **asked}
    return {name: periods[name] for name in PROBES if periods.get(name, 0) > 0}
