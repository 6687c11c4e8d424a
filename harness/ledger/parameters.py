"""How many parameters a model has, part by part.

For a width d, q query heads and k key/value heads of width w, feed-forward width f and vocabulary v:

    attention      L (d (q + 2k) w + q w d)         fused qkv, output
    feed-forward   L 3 d f   (GELU: L 2 d f)        gate, up, down; E experts: L (3 E d f + E d), the router's with them
    norms          (2 L + 1) d                      two a block and the last one; qk_norm adds L 2 w
    embedding      v d, and v d for the head unless it is tied; learned positions max_seq_len d

Smooth-SwiGLU adds none: its scales are buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.spec import ModelSpec


@dataclass(frozen=True)
class Parameters:
    """Trainable parameters by part. A tied head is counted in `embedding` alone."""

    embedding: int
    positions: int
    attention: int
    ffn: int
    norms: int
    head: int
    matmul: int
    """Weights that enter a matrix product for every token: all matrices but embedding and positions, and the
    head's whether tied or not; of experts, as many as a token goes to. The N of 6 N FLOPs a token."""
    idle: int = 0
    """Parameters of the experts that a token does not go to."""

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.attention + self.ffn + self.norms + self.head

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        return self.total - self.idle


def num_parameters(model: ModelSpec, vocab_size: int | None = None) -> Parameters:
    """Parameters of `model`; `vocab_size` is the tokenizer's, needed where the model has no published one.

    Raises ValueError where neither gives a vocabulary.
    """
    vocab = model.vocab_size or vocab_size
    if vocab is None:
        raise ValueError(f"model {model.name} has no vocab_size of its own; give the tokenizer's")
    d, width, layers = model.d_model, model.head_width, model.num_layers
    qkv = (model.num_heads + 2 * model.num_kv_heads) * width
    num_ffn_matrices = 2 if model.ffn == "gelu" else 3
    attention = layers * (d * qkv + model.num_heads * width * d)
    ffn = layers * num_ffn_matrices * d * model.d_ffn
    idle = 0
    if model.moe is not None:
        expert, experts = ffn, model.moe.experts
        ffn = experts * expert + layers * experts * d
        idle = (experts - model.moe.top_k) * expert
    matmul = attention + ffn - idle + vocab * d
    norms = (2 * layers + 1) * d
    if model.qk_norm:
        norms += layers * 2 * width
    if model.bias:
        attention += layers * (qkv + d)
        ffn += layers * ((num_ffn_matrices - 1) * model.d_ffn + d)
        if model.norm == "layernorm":
            norms *= 2
    return Parameters(
        embedding=vocab * d,
        positions=model.max_seq_len * d if model.positions == "learned" else 0,
        attention=attention,
        ffn=ffn,
        norms=norms,
        head=0 if model.tie_embeddings else vocab * d,
        matmul=matmul,
        idle=idle,
    )
