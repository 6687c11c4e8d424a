"""The feed-forward block: SwiGLU, its two smooth forms, GELU, and the outlier scales of an aged model.

In Fishman et al.'s letters: w1 is the linear branch (`up`), w2 the gate, w3 the way down; channel i computes
h_i = (w1_i x) * silu(w2_i x). The gate and up projections are one fused weight [2 * d_ffn, d_model], gate first.

smooth-swiglu        (the paper, arXiv 2409.12517) each channel's linear branch is scaled to a maximum of about 1 before
                     the cast and scaled back by w3: s_i * w1_i and w3_i / s_i. The part of s_i known from earlier
                     steps is folded into w1 before its GEMM, the rest, from this batch's maximum, multiplies h. Scales
                     are powers of two, so without quantisers the function is exactly SwiGLU's.
smooth-swiglu-token  (the released code) each token's h is divided by max_i |w1_i x| and the block's output multiplied
                     by it; no power of two, no epsilon but for a token whose maximum is 0.

Ageing gives channel i of w1 the factor a_i and of w3 the factor 1/a_i. As factors beside the stored weights they
leave AdamW's steps in function space as they were (its update does not depend on the gradient's scale), so a
difference between two precisions comes from the precision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models.functions import SwiGLU
from harness.precision.linear import Linear
from harness.spec import FFN, ModelSpec


def power_of_two_inverse(amax: Tensor) -> Tensor:
    """2^-floor(log2 amax), and 1 where amax is 0 or not finite: brings amax into [1, 2) without rounding.

    Never beyond 2^±60, so that products of two such factors stay finite; a channel that small has no effect.
    """
    _, exponent = torch.frexp(amax)
    usable = (amax > 0) & torch.isfinite(amax)
    return torch.where(usable, torch.exp2((1.0 - exponent.float()).clamp(-60, 60)), 1.0)


class FeedForward(nn.Module):
    """x [batch, tokens, d_model] -> the same shape."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.kind: FFN = spec.ffn
        self.d_ffn = spec.d_ffn
        self.removed = False
        self.calibrating = False
        if self.kind == "gelu":
            self.up = Linear(spec.d_model, spec.d_ffn, bias=spec.bias)
        else:
            self.gate_up = Linear(spec.d_model, 2 * spec.d_ffn, bias=spec.bias)
        self.down = Linear(spec.d_ffn, spec.d_model, bias=spec.bias)
        self.up_scale: Tensor | None
        self.gate_scale: Tensor | None
        self.down_scale: Tensor | None
        for name in ("up_scale", "gate_scale", "down_scale"):  # set by harness.models.ageing
            self.register_buffer(name, None)
        self.smooth_scale: Tensor
        self.channel_amax: Tensor
        if self.kind == "smooth-swiglu":
            self.register_buffer("smooth_scale", torch.ones(spec.d_ffn))
            self.register_buffer("channel_amax", torch.zeros(spec.d_ffn))

    def forward(self, x: Tensor) -> Tensor:
        if self.removed:  # the ablation that shows how much loss the feed-forward saves
            return torch.zeros_like(x)
        if self.kind == "gelu":
            return self._down(F.gelu(self.up(x)))
        gate_up = self.gate_up(x, self._gate_up_weight())
        hidden: Tensor = SwiGLU.apply(gate_up)
        if self.kind == "swiglu":
            return self._down(hidden)
        up = gate_up.detach()[..., self.d_ffn :]
        if self.kind == "smooth-swiglu-token":
            token = up.abs().amax(dim=-1, keepdim=True)
            token = torch.where(token > 0, token, 1.0).to(hidden.dtype)
            return self._down(hidden / token) * token
        amax = up.abs().flatten(0, -2).amax(dim=0).float()
        now = power_of_two_inverse(amax)
        if self.training or self.calibrating:
            torch.maximum(self.channel_amax, amax / self.smooth_scale, out=self.channel_amax)
        return self._down(hidden * now.to(hidden.dtype), self.smooth_scale * now)

    def _down(self, hidden: Tensor, smooth: Tensor | None = None) -> Tensor:
        out: Tensor = self.down(hidden, self._down_weight(smooth))
        return out

    def _gate_up_weight(self) -> Tensor | None:
        """The fused weight with ageing and the folded smooth scale, or None where the stored one serves."""
        weight = self.gate_up.weight
        if self.up_scale is None and self.kind != "smooth-swiglu":
            return None
        rows = torch.ones(2 * self.d_ffn, device=weight.device)
        if self.up_scale is not None and self.gate_scale is not None:
            rows[: self.d_ffn] *= self.gate_scale
            rows[self.d_ffn :] *= self.up_scale
        if self.kind == "smooth-swiglu":
            rows[self.d_ffn :] *= self.smooth_scale
        return weight * rows.to(weight.dtype)[:, None]

    def _down_weight(self, smooth: Tensor | None) -> Tensor | None:
        if self.down_scale is None and smooth is None:
            return None
        columns = torch.ones(self.d_ffn, device=self.down.weight.device)
        if self.down_scale is not None:
            columns *= self.down_scale
        if smooth is not None:
            columns /= smooth
        return self.down.weight * columns.to(self.down.weight.dtype)

    @torch.no_grad()
    def end_step(self) -> None:
        """Fold this step's channel maxima into the scale the next step's w1 is given."""
        if self.kind == "smooth-swiglu":
            self.smooth_scale.copy_(power_of_two_inverse(self.channel_amax))
            self.channel_amax.zero_()
