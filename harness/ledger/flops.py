"""Floating-point operations of training, by the formula of PaLM (Chowdhery et al. 2022, appendix B).

    FLOPs a token = 6 N + 12 L H Q T

N: weights in matrix products; each is used by one multiply-add forward and two backward, 2 FLOPs each. L
layers, H heads of width Q, T the sequence length: queries times keys and probabilities times values are 4 H
Q T FLOPs forward, three times that with the backward pass. The formula counts the full square of attention;
a causal kernel needs half of that term (`causal=True`). Norms, activations, the optimizer, recomputation
and the casts of an emulated format are not counted: these are the model's FLOPs, not the hardware's. What one rank
carries out in a step, recomputation included, is `step_flops`.
"""

from __future__ import annotations

from harness.ledger.parameters import num_parameters
from harness.ledger.placement import stages
from harness.ledger.states import is_muon, updated_parameters
from harness.ledger.widths import widths
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


def step_flops(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> int:
    """Operations of one rank in one step, recomputation included, as kernels carry them out and the trace counts
    them.

    A linear of i inputs and o outputs: 2 i o a token forward and twice that backward. Attention in full squares: two
    products of 2 s^2 q forward, five backward for a flash kernel (which computes the scores anew), four where the
    scores are stored. `full` recomputes a layer's forward but for its last product, of which nothing is kept (of the
    reference layer's the mask of its dropout is); `selective` the two products of attention, of stored scores the
    first alone, since nothing keeps the second's result.
    """
    mesh, model = spec.parallelism, spec.model
    w = widths(spec, vocab_size)
    passes = spec.accumulation * mesh.num_microbatches
    held = stages(spec, mesh.place(rank)["pp"])
    layers = sum(stage.num_layers for stage in held)
    up = w.f if model.ffn == "gelu" else 2 * w.f
    down = 2 * w.n * w.f * w.h
    linear = 2 * w.n * (w.h * (w.q + 2 * w.k) + w.q * w.h + w.h * up) + down
    if model.moe is not None:
        pairs = w.n * model.moe.top_k
        linear += (2 * pairs * 3 * w.h * w.f) - 2 * w.n * w.h * up - down + 2 * w.n * w.h * model.moe.experts
        down = 0
    # q k^T and p v; with cp all local keys, and half a square of each other rank's (harness.parallel.context).
    products = 2 * 2 * w.b * w.q * (w.s * w.s * (mesh.cp + 1) // 2)
    stored = spec.attention.kernel == "eager" or spec.reference != "none"
    backward = 2 * products if stored else 5 * products // 2
    last = down if spec.reference == "none" else 0
    selective = products // 2 if stored else products
    again = {"none": 0, "selective": selective, "full": linear - last + products}[spec.recompute]
    head = 3 * 2 * w.n * w.h * w.v if any(stage.has_head for stage in held) else 0
    return passes * (layers * (3 * linear + products + backward + again) + head) + _muon_flops(
        spec, vocab_size, rank
    )


NEWTON_SCHULZ_STEPS = 5


def _muon_flops(spec: RunSpec, vocab_size: int | None, rank: int) -> int:
    """Products of Newton-Schulz over the matrices that this rank orthogonalises: X X^T, its square, and their
    product with X, for X [m, n], m <= n, 2 m^2 n + 2 m^3 + 2 m^2 n each of five times (Jordan et al. 2024)."""
    total = 0
    for parameter in updated_parameters(spec, vocab_size, rank) if spec.optimizer.name == "muon" else ():
        if is_muon(parameter):
            m, n = sorted(parameter.shape)
            total += NEWTON_SCHULZ_STEPS * (4 * m * m * n + 2 * m**3)
    return total
