"""The shape of a language model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from harness.spec.base import Frozen

FFN = Literal["swiglu", "smooth-swiglu", "smooth-swiglu-token", "gelu"]


class MoESpec(Frozen):
    """A mixture of experts in place of each feed-forward: every expert is one of width `d_ffn`."""

    experts: int = Field(ge=2)
    top_k: int = Field(default=2, ge=1)
    """Experts a token goes to; their weights are the softmax over the chosen ones (Mixtral), with one its probability
    among all (Switch)."""
    capacity_factor: float = Field(default=0.0, ge=0)
    """An expert takes at most this times tokens · top_k / experts of each sequence's pairs of token and choice, second
    choices and later tokens are dropped first (Switch; GShard's groups are sequences here); 0: dropless."""
    aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss (Switch Transformer's)."""
    bias_update: float = Field(default=0.0, ge=0)
    """Step of the routing bias that balances load without a loss (DeepSeek-V3, 1e-3 there); 0: no bias."""

    @model_validator(mode="after")
    def _check(self) -> MoESpec:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is above experts {self.experts}")
        return self


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
    moe: MoESpec | None = None
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
        if self.moe is not None and self.ffn != "swiglu":
            raise ValueError(f"experts are SwiGLU feed-forwards; ffn is {self.ffn}")
        if self.head_width % 2 and self.positions == "rope":
            raise ValueError(f"RoPE needs an even head width, got {self.head_width}")
        return self

    @property
    def head_width(self) -> int:
        return self.d_head or self.d_model // self.num_heads


NO_MODEL = ModelSpec(name="none", num_layers=1, d_model=8, num_heads=1, num_kv_heads=1, d_ffn=8)
"""Stands where a task has no model."""
