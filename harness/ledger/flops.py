"""Floating-point operations of training, by the formula of PaLM (Chowdhery et al. 2022, appendix B).

    FLOPs a token = 6 N + 12 L H Q T

N: weights in matrix products; each is used by one multiply-add forward and two backward, 2 FLOPs each. L
layers, H heads of width Q, T the sequence length: queries times keys and probabilities times values are 4 H
Q T FLOPs forward, three times that with the backward pass. The formula counts the full square of attention;
a causal kernel needs half of that term (`causal=True`). Norms, activations, the optimizer, recomputation
and the casts of an emulated format are not counted: these are the model's FLOPs, not the hardware's.
"""

from __future__ import annotations

from harness.ledger.parameters import num_parameters
from harness.spec import ModelSpec, RunSpec


def train_flops_per_token(
    model: ModelSpec, seq_len: int, vocab_size: int | None = None, *, causal: bool = False
) -> int:
    """FLOPs of one token's forward and backward pass. MFU by convention takes `causal=False`."""
    attention = 12 * model.num_layers * model.num_heads * model.head_width * seq_len
    return 6 * num_parameters(model, vocab_size).matmul + (attention // 2 if causal else attention)


def forward_flops_per_token(
    model: ModelSpec, seq_len: int, vocab_size: int | None = None, *, causal: bool = False
) -> int:
    """A third of training's: one multiply-add a weight instead of three."""
    return train_flops_per_token(model, seq_len, vocab_size, causal=causal) // 3


def run_flops(spec: RunSpec, vocab_size: int | None = None) -> int:
    """FLOPs of a whole run: all training steps, the last batch full, and two passes over held-out text."""
    tokens = spec.num_steps * spec.batch_size * spec.seq_len
    train = tokens * train_flops_per_token(spec.model, spec.seq_len, vocab_size)
    return train + 2 * spec.val_tokens * forward_flops_per_token(spec.model, spec.seq_len, vocab_size)
