"""Bytes of training for one rank at the peak of a step, by category, before anything runs.

Model states are exact: weights, gradients and AdamW's two moments are all kept in `precision.weights` (4 or
2 bytes), so 16 bytes a parameter in FP32 and 8 in BF16. They are divided by tp · pp, and by dp as ZeRO
(Rajbhandari et al. 2020) shards them: stage 1 the optimizer's, 2 also the gradients, 3 also the weights.

A step has two moments that can be its peak, and the larger one counts: the start of the backward pass, when
all that autograd keeps is alive and no gradient is yet, and the update, when all gradients are alive and no
activation is. Activations and temporary tensors are an estimate for this model in eager mode, to be held
against measured peaks (within 10 % of them on the shapes it was
checked on); allocators' overhead and
kernels' workspaces are not in it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from harness.ledger.parameters import num_parameters
from harness.spec import ModelSpec, RunSpec

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CAST_BYTES = 22
"""Bytes an element while an emulated cast runs: FP32 copies of its passes and its statistics (measured)."""


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of one rank at the peak, by category, in the words of `peak_bytes`."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    moment: Literal["backward", "update"]
    """When the peak is: at the start of the backward pass, or at the update."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary

    def as_dict(self) -> dict[str, int]:
        """Category -> bytes, `total` the last."""
        categories = asdict(self)
        del categories["moment"]
        return {**categories, "total": self.total}


def predict_memory(spec: RunSpec, vocab_size: int | None = None) -> Memory:
    """Peak bytes of one rank. `vocab_size` is the tokenizer's, for models without one of their own."""
    counts = num_parameters(spec.model, vocab_size)
    mesh, stored = spec.parallelism, BYTES[spec.precision.weights]
    state = -(-counts.total // (mesh.tp * mesh.pp)) * stored

    def sharded(num_bytes: int, from_stage: int) -> int:
        return -(-num_bytes // mesh.dp) if mesh.zero >= from_stage else num_bytes

    weights, gradients, optimizer = sharded(state, 3), sharded(state, 2), sharded(2 * state, 1)
    vocab = counts.embedding // spec.model.d_model
    activations = _kept(spec, vocab) + _weight_copies(spec, vocab)
    temporary = _passing(spec, vocab)
    if activations + temporary >= gradients:
        return Memory(weights, 0, optimizer, activations, temporary, "backward")
    return Memory(weights, gradients, optimizer, 0, 0, "update")


def _tokens(spec: RunSpec) -> int:
    """Tokens of one rank's share of a batch."""
    mesh = spec.parallelism
    return -(-spec.batch_size // mesh.dp) * -(-spec.seq_len // mesh.cp)


def _kept(spec: RunSpec, vocab: int) -> int:
    """Bytes that autograd keeps for the backward pass, weights' copies apart."""
    stream, product = BYTES[spec.precision.weights], BYTES[spec.precision.compute]
    layers = -(-spec.model.num_layers // spec.parallelism.pp)
    attention = 4 if spec.device == "cpu" else product
    layer = layers * _kept_by_layer(spec.model, stream, product, attention) / spec.parallelism.tp
    # The last norm's input, the head's input, and the logits' log-probabilities in FP32.
    head = spec.model.d_model * (stream + product) + 4 * vocab / spec.parallelism.tp
    return round(_tokens(spec) * (layer + head))


def _passing(spec: RunSpec, vocab: int) -> int:
    """Bytes of the largest tensors that come and go: the loss's gradients, or the last feed-forward's."""
    product = BYTES[spec.precision.compute]
    widest = (1 if spec.model.ffn == "gelu" else 2) * spec.model.d_ffn
    # The fused projection's gradient, and two tensors of half its width on the way to it.
    each = 2 * product if spec.precision.recipe is None else CAST_BYTES
    return round(_tokens(spec) * max(8 * vocab, each * widest) / spec.parallelism.tp)


def _kept_by_layer(model: ModelSpec, stream: int, product: int, attention: int) -> int:
    """Bytes that one layer keeps for one token's backward pass.

    Norms keep their normalised input in the stream's dtype and their output feeds a linear, which keeps it
    in the products' dtype. Attention runs in FP32 on a CPU (in the products' dtype elsewhere) and keeps q,
    k, v, the output and its log-sum-exp. SwiGLU keeps the fused projection and the activated gate; the
    product feeds `down`. The scales of Smooth-SwiGLU and of ageing are constants to autograd and keep
    nothing a token.
    """
    d, f = model.d_model, model.d_ffn
    query = model.num_heads * model.head_width
    key_value = 2 * model.num_kv_heads * model.head_width
    norms = 2 * d * stream
    inputs = (2 * d + query + f) * product
    core = (2 * query + key_value) * attention + 4 * model.num_heads
    gate = f * product if model.ffn == "gelu" else 3 * f * product
    return norms + inputs + core + gate


def _weight_copies(spec: RunSpec, vocab: int) -> int:
    """Bytes of weights' copies kept for the backward pass: autocast's, or an emulation's quantised ones.

    Smooth-SwiGLU and ageing scale the feed-forward's weights; where no cast follows, the scaled copy is kept.
    """
    model, precision = spec.model, spec.precision
    counts = num_parameters(model, vocab)
    stored, product = BYTES[precision.weights], BYTES[precision.compute]
    copied = 0
    if precision.recipe is not None:
        copied = counts.matmul - (0 if product != stored else vocab * model.d_model)
    elif product != stored:
        copied = counts.matmul
    elif model.ffn == "smooth-swiglu" or spec.ageing.kind != "none":
        copied = counts.ffn
    if spec.parallelism.zero == 3:
        # Gathered for one layer at a time, and for the next one ahead of it.
        copied = copied * min(2, model.num_layers) // model.num_layers
    return copied * product // (spec.parallelism.tp * spec.parallelism.pp)
