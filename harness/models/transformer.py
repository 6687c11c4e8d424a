"""A decoder-only transformer: Llama's blocks by default, GPT-2's by the same fields.

Pre-norm blocks of grouped-query attention and a feed-forward, RoPE or learned positions, RMSNorm or LayerNorm.
The fused projections (qkv, gate_up) are one weight each, as in Megatron and Transformer Engine, so a per-tensor
scale covers what it covers there. Initialisation: normal with standard deviation 0.02, residual outputs divided by
sqrt(2 * num_layers) (GPT-2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.models import moe
from harness.models.ffn import FeedForward
from harness.models.functions import RMSNorm as RMSNormFunction
from harness.models.functions import Rotary
from harness.models.moe import MoE
from harness.precision.linear import Linear
from harness.spec import ModelSpec


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm in `x`'s dtype; the output is already what the next linear computes in."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        out: Tensor = RMSNormFunction.apply(x, self.weight, self.eps, dtype)
        return out


def make_norm(spec: ModelSpec, width: int | None = None) -> nn.Module:
    width = width or spec.d_model
    if spec.norm == "rmsnorm":
        return RMSNorm(width, spec.norm_eps)
    return nn.LayerNorm(width, eps=spec.norm_eps, bias=spec.bias)


class Attention(nn.Module):
    """Causal grouped-query attention. On a CPU the softmax product runs in FP32 whatever the compute dtype: PyTorch's
    CPU flash kernel takes 2.5 times as long in BF16 without matrix units, and gains little with them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.d_head = spec.num_heads, spec.num_kv_heads, spec.head_width
        self.qkv = Linear(
            spec.d_model, (self.num_heads + 2 * self.num_kv_heads) * self.d_head, bias=spec.bias
        )
        self.output = Linear(self.num_heads * self.d_head, spec.d_model, bias=spec.bias)
        self.query_norm = make_norm(spec, self.d_head) if spec.qk_norm else None
        self.key_norm = make_norm(spec, self.d_head) if spec.qk_norm else None
        self.emulation: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
        """Takes the place of the softmax product (harness.attention.emulation)."""
        self.product: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """Another way to compute it: scores kept in memory, or keys of other ranks. q [batch, heads, tokens, d_head], k
        and v the same with their own heads -> like q, causal."""
        self.recompute_product = False
        self.narrow_product = False
        """The softmax product in the compute dtype on a CPU too, as other devices have it."""

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv: Tensor = self.qkv(x).unflatten(-1, (heads + 2 * kv_heads, self.d_head))
        batch, tokens = qkv.shape[:2]  # x may be a part of the tokens (sequence parallelism)
        if self.query_norm is not None and self.key_norm is not None:
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
            qkv = torch.cat((self.query_norm(q), self.key_norm(k), v), dim=2)
        if rotation is not None:
            q, k, v = Rotary.apply(qkv, rotation, heads, kv_heads)
        else:
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
        wide = x.device.type == "cpu" and not self.narrow_product
        dtype = torch.promote_types(torch.float32, v.dtype) if wide else v.dtype
        q, k, v = (part.to(dtype).transpose(1, 2) for part in (q, k, v))
        with torch.autocast(x.device.type, enabled=False):
            if self.emulation is not None:
                out = self.emulation(x, q.float(), k.float(), v.float())
            elif self.recompute_product and torch.is_grad_enabled():
                out = checkpoint(self._product, q, k, v, use_reentrant=False)
            else:
                out = self._product(q, k, v)
        out = out.transpose(1, 2).reshape(batch, tokens, heads * self.d_head).to(qkv.dtype)
        result: Tensor = self.output(out)
        return result

    def _product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.product is not None:
            return self.product(q, k, v)
        grouped = self.num_heads != self.num_kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _make_ffn(spec: ModelSpec) -> nn.Module:
    return FeedForward(spec) if spec.moe is None else MoE(spec)


class Block(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec)
        self.ffn_norm = make_norm(spec)
        self.ffn = _make_ffn(spec)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """tokens [batch, tokens] (int64) -> logits [batch, tokens, vocab]."""

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(vocab_size, spec.d_model)
        self.positions = nn.Embedding(spec.max_seq_len, spec.d_model) if spec.positions == "learned" else None
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = make_norm(spec)
        self.head = Linear(spec.d_model, vocab_size, bias=False)
        if spec.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.recompute = False
        """Keep each block's input alone and compute the block again in the backward pass."""
        self._rotation: Tensor | None = None
        self._initialise()

    def _initialise(self) -> None:
        residual_std = 0.02 / (2 * self.spec.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith(("attention.output.weight", "ffn.down.weight", "ffn.experts.down"))
                nn.init.normal_(parameter, std=residual_std if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def rotation(self, tokens: int, device: torch.device) -> Tensor | None:
        """[tokens, 1, d_head / 2] complex, as precise as the weights; None with learned positions."""
        if self.spec.positions != "rope":
            return None
        dtype = torch.complex128 if next(self.parameters()).dtype == torch.float64 else torch.complex64
        known = self._rotation
        if known is None or len(known) < tokens or known.device != device or known.dtype != dtype:
            width = self.spec.head_width
            frequency = self.spec.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            angle = torch.outer(torch.arange(tokens, dtype=torch.float64), frequency)
            known = torch.polar(torch.ones_like(angle), angle).to(dtype).unsqueeze(1).to(device)
            self._rotation = known
        return known[:tokens]

    def forward(self, tokens: Tensor, at: Tensor | None = None) -> Tensor:
        """`at` [tokens]: the positions in the sequence that these tokens stand at, where they are not 0, 1, 2 ...;
        `rotation` must then reach beyond the largest."""
        x, rotation = self.embed(tokens, at)
        for block in self.layers:
            x = self.run_block(block, x, rotation)
        return self.logits(x)

    def embed(self, tokens: Tensor, at: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The stream [batch, tokens, d_model] before the first block, and the rotation for all blocks."""
        x: Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]] if at is None else x + self.positions.weight[at]
        return x, self.rotation_at(tokens.shape[1], tokens.device, at)

    def rotation_at(self, tokens: int, device: torch.device, at: Tensor | None = None) -> Tensor | None:
        """The rotation of the first `tokens` positions, or of the positions `at`."""
        if at is None:
            return self.rotation(tokens, device)
        whole = self.rotation(self.spec.max_seq_len, device)
        return None if whole is None else whole[at]

    def run_block(self, block: nn.Module, x: Tensor, rotation: Tensor | None) -> Tensor:
        """One block, with or without keeping what its backward pass needs."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(block, x, rotation, use_reentrant=False)  # type: ignore[no-any-return]
        return block(x, rotation)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """What the last norm and the head make of the stream."""
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor, at: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats per token, computed in FP32 or wider."""
        return cross_entropy(self(tokens, at), targets)

    def feed_forwards(self) -> list[FeedForward]:
        """Those of dense blocks; of a mixture of experts, none."""
        return [block.ffn for block in self.layers if isinstance(block.ffn, FeedForward)]

    def mixtures(self) -> list[MoE]:
        return [block.ffn for block in self.layers if isinstance(block.ffn, MoE)]

    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.layers]  # type: ignore[misc]

    def end_step(self) -> None:
        for ffn in self.feed_forwards():
            ffn.end_step()
        moe.end_step(self.mixtures())


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens, in nats; logits [batch, tokens, vocab] of any width, computed in FP32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def set_recompute(model: Transformer, what: Literal["none", "selective", "full"]) -> None:
    """Choose what the backward pass computes anew (RunSpec.recompute)."""
    model.recompute = what == "full"
    for attention in model.attentions():
        attention.recompute_product = what == "selective"


def build(spec: ModelSpec, vocab_size: int, seed: int) -> Transformer:
    """A freshly initialised model; the same seed gives the same bits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(spec, spec.vocab_size or vocab_size)
