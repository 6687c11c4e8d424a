"""A decoder-only transformer: Llama's blocks by default, GPT-2's by the same fields.

Pre-norm blocks of grouped-query attention and a feed-forward, RoPE or learned positions, RMSNorm or LayerNorm.
The fused projections (qkv, gate_up) are one weight each, as in Megatron and Transformer Engine, so a per-tensor
scale covers what it covers there. Initialisation: normal with standard deviation 0.02, residual outputs divided by
sqrt(2 * num_layers) (GPT-2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models.ffn import FeedForward
from harness.models.functions import RMSNorm as RMSNormFunction
from harness.models.functions import Rotary
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

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        batch, tokens, _ = x.shape
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv: Tensor = self.qkv(x).view(batch, tokens, heads + 2 * kv_heads, self.d_head)
        if self.query_norm is not None and self.key_norm is not None:
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
            qkv = torch.cat((self.query_norm(q), self.key_norm(k), v), dim=2)
        if rotation is not None:
            q, k, v = Rotary.apply(qkv, rotation, heads, kv_heads)
        else:
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
        dtype = torch.float32 if x.device.type == "cpu" else v.dtype
        q, k, v = (part.to(dtype).transpose(1, 2) for part in (q, k, v))
        with torch.autocast(x.device.type, enabled=False):
            if self.emulation is not None:
                out = self.emulation(x, q.float(), k.float(), v.float())
            else:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        out = out.transpose(1, 2).reshape(batch, tokens, heads * self.d_head).to(qkv.dtype)
        result: Tensor = self.output(out)
        return result


class Block(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec)
        self.ffn_norm = make_norm(spec)
        self.ffn = FeedForward(spec)

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
        self._rotation: Tensor | None = None
        self._initialise()

    def _initialise(self) -> None:
        residual_std = 0.02 / (2 * self.spec.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
                nn.init.normal_(parameter, std=residual_std if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def rotation(self, tokens: int, device: torch.device) -> Tensor | None:
        if self.spec.positions != "rope":
            return None
        if self._rotation is None or len(self._rotation) < tokens or self._rotation.device != device:
            width = self.spec.head_width
            frequency = self.spec.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            angle = torch.outer(torch.arange(tokens, dtype=torch.float64), frequency)
            self._rotation = (
                torch.polar(torch.ones_like(angle), angle).to(torch.complex64).unsqueeze(1).to(device)
            )
        return self._rotation[:tokens]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        rotation = self.rotation(tokens.shape[1], tokens.device)
        for block in self.layers:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, computed in FP32."""
        logits = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def feed_forwards(self) -> list[FeedForward]:
        return [block.ffn for block in self.layers]  # type: ignore[misc]

    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.layers]  # type: ignore[misc]

    def end_step(self) -> None:
        for ffn in self.feed_forwards():
            ffn.end_step()


def build(spec: ModelSpec, vocab_size: int, seed: int) -> Transformer:
    """A freshly initialised model; the same seed gives the same bits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(spec, spec.vocab_size or vocab_size)
