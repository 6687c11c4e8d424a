"""Every parameter of a model, by name and shape, as `Transformer.named_parameters()` gives them.

    from harness.ledger.inventory import inventory
    sum(p.numel for p in inventory(model, vocab_size))        # equals num_parameters(model).total

`cut` says which dimension tensor parallelism cuts: 0 for a column-parallel matrix (qkv, gate and up, the vocabulary
of embedding and head), 1 for a row-parallel one (output, down), None for what every rank keeps whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from harness.spec import ModelSpec

Kind = Literal["embedding", "positions", "norm", "attention", "ffn", "router", "expert", "head"]


@dataclass(frozen=True)
class Parameter:
    """One tensor that is trained."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int | None = None
    """Block it belongs to; None outside the blocks."""
    cut: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Weight decay and Muon look at matrices alone."""
        return len(self.shape) >= 2

    def divided(self, dim: int, parts: int) -> Parameter:
        """The first (largest) of `parts` pieces along `dim`."""
        shape = list(self.shape)
        shape[dim] = -(-shape[dim] // parts)
        return replace(self, shape=tuple(shape))


@lru_cache(maxsize=256)
def inventory(model: ModelSpec, vocab_size: int | None = None) -> tuple[Parameter, ...]:
    """All parameters in the model's own order; `vocab_size` is the tokenizer's, for models without one of their own.

    A tied head is the embedding and is not listed again. Raises ValueError where neither gives a vocabulary.
    """
    vocab = vocabulary(model, vocab_size)
    first = [Parameter("embedding.weight", (vocab, model.d_model), "embedding", cut=0)]
    if model.positions == "learned":
        first.append(Parameter("positions.weight", (model.max_seq_len, model.d_model), "positions"))
    block = tuple(_block(model))
    layers = [
        replace(each, name=f"layers.{layer}.{each.name}", layer=layer)
        for layer in range(model.num_layers)
        for each in block
    ]
    last = list(_norm(model, "norm", model.d_model))
    if not model.tie_embeddings:
        last.append(Parameter("head.weight", (vocab, model.d_model), "head", cut=0))
    return (*first, *layers, *last)


def vocabulary(model: ModelSpec, vocab_size: int | None) -> int:
    """The model's own vocabulary, else the tokenizer's."""
    vocab = model.vocab_size or vocab_size
    if vocab is None:
        raise ValueError(f"model {model.name} has no vocab_size of its own; give the tokenizer's")
    return vocab


def _block(model: ModelSpec) -> Iterator[Parameter]:
    d, width = model.d_model, model.head_width
    qkv = (model.num_heads + 2 * model.num_kv_heads) * width
    yield from _norm(model, "attention_norm", d)
    yield from _linear(model, "attention.qkv", qkv, d, "attention", cut=0)
    yield from _linear(model, "attention.output", d, model.num_heads * width, "attention", cut=1)
    if model.qk_norm:
        yield from _norm(model, "attention.query_norm", width)
        yield from _norm(model, "attention.key_norm", width)
    yield from _norm(model, "ffn_norm", d)
    if model.moe is not None:
        yield from _experts(model)
    elif model.ffn == "gelu":
        yield from _linear(model, "ffn.up", model.d_ffn, d, "ffn", cut=0)
        yield from _linear(model, "ffn.down", d, model.d_ffn, "ffn", cut=1)
    else:
        yield from _linear(model, "ffn.gate_up", 2 * model.d_ffn, d, "ffn", cut=0)
        yield from _linear(model, "ffn.down", d, model.d_ffn, "ffn", cut=1)


def _experts(model: ModelSpec) -> Iterator[Parameter]:
    """Router, and all experts' matrices in two tensors whose first dimension counts the experts."""
    assert model.moe is not None
    d, f, experts = model.d_model, model.d_ffn, model.moe.experts
    yield Parameter("ffn.router.weight", (experts, d), "router")
    yield Parameter("ffn.experts.gate_up", (experts, 2 * f, d), "expert")
    yield Parameter("ffn.experts.down", (experts, d, f), "expert")


def _norm(model: ModelSpec, name: str, width: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), "norm")
    if model.norm == "layernorm" and model.bias:
        yield Parameter(f"{name}.bias", (width,), "norm")


def _linear(model: ModelSpec, name: str, out: int, into: int, kind: Kind, cut: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (out, into), kind, cut=cut)
    if model.bias:
        yield Parameter(f"{name}.bias", (out,), kind, cut=0 if cut == 0 else None)
