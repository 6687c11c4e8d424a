"""Layers out of papers, in place of a model's own, to hold a paper's count of activations against.

gpt-dropout: the layer that Korthikanti et al. (2022, arXiv 2205.05198, section 4) count: LayerNorm, biases, GELU,
dropout behind the softmax, the attention and the feed-forward, all in 16 bits, scores kept. For s tokens of b
sequences, h wide, a heads, it keeps for its backward pass, in bytes:

    attention   qkv's input 2, q and k 4, v 2, the projection's input 2, mask 1     11 s b h
                softmax 2, its dropout's mask 1, its dropout's output 2               5 a s^2 b
    feed-forward   inputs of both linears 2 + 8, GELU's input 8, mask 1             19 s b h
    norms       inputs 2 + 2                                                         4 s b h
    in all                                                                          34 s b h + 5 a s^2 b

PyTorch keeps the same and, for each LayerNorm, mean and 1 / standard deviation of every token, which the paper leaves
out as small: 2 norms x 2 numbers x s b, of two bytes each on a CPU and of four on CUDA. The causal mask is one for all
layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.models.transformer import Block, Transformer
from harness.spec import RunSpec

DROPOUT = 0.1


def dropout(x: Tensor) -> Tensor:
    """With a mask of one byte, on every device: PyTorch's own call takes one of the tensor's dtype on a CPU."""
    out: Tensor = torch.native_dropout(x, DROPOUT, True)[0]
    return out


class StoredSoftmax:
    """Causal attention with dropout whose scores lie in memory; one for all layers, with their mask."""

    def __init__(self) -> None:
        self._later: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [batch, heads, tokens, d_head] -> the same shape."""
        tokens = q.shape[2]
        if self._later is None or len(self._later) != tokens:
            self._later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu_(1)
        scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5).masked_fill_(self._later, float("-inf"))
        return dropout(torch.softmax(scores, dim=-1)) @ v


class DropoutBlock(Block):
    """A block with dropout on what is added to the stream."""

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + dropout(self.attention(self.attention_norm(x), rotation))
        return x + dropout(self.ffn(self.ffn_norm(x)))


def refer(model: Transformer, spec: RunSpec) -> None:
    """Turn the model's blocks into those of `spec.reference`, in place. Raises ValueError where shape or precision are
    not what the paper counts."""
    if spec.reference == "none":
        return
    shape, precision = spec.model, spec.precision
    wanted = {"ffn": "gelu", "norm": "layernorm", "positions": "learned", "num_kv_heads": shape.num_heads}
    wrong = [
        f"{name} {getattr(shape, name)}" for name, value in wanted.items() if getattr(shape, name) != value
    ]
    if wrong:
        raise ValueError(
            "reference gpt-dropout is a layer of GPT with ffn gelu, norm layernorm, positions learned and a key/value "
            f"head for each query head; {shape.name} has {', '.join(wrong)}"
        )
    if (
        precision.compute not in ("bf16", "fp16")
        or precision.weights != precision.compute
        or precision.recipe
    ):
        raise ValueError(
            f"reference gpt-dropout is in 16 bits throughout; precision {precision.name} computes in "
            f"{precision.compute} with weights in {precision.weights}"
        )
    product = StoredSoftmax()
    for block, attention in zip(model.layers, model.attentions(), strict=True):
        block.__class__ = DropoutBlock
        attention.product = product
        attention.narrow_product = True
