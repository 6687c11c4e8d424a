"""Ageing: the outliers of a long run, given to a young model.

Fishman et al. (arXiv 2409.12517) see FP8 fail after some 200B tokens, when the two input branches of a few SwiGLU
channels have aligned and rare tokens drive them to outliers. A small run never gets there by itself, so its end state
is built: `static` outliers in channels the model uses, or `sporadic` ones in an aligned channel that a rare token alone
drives. Every factor is a power of two, so in FP32 and BF16 a static ageing leaves each logit as it was, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.models.ffn import FeedForward
from harness.models.transformer import Transformer
from harness.spec import AgeingSpec

RESIDUAL_DOMINANCE = 4.0
"""Norm of the rare token's embedding over the residual stream's; large, so that every layer sees its direction."""


@dataclass(frozen=True)
class Ageing:
    """What was done: per layer the channels, and the largest change of any ordinary token's logit (FP32)."""

    channels: list[list[int]]
    function_change: float


def prepare(model: Transformer) -> None:
    """Make the buffers ageing writes to, all ones; a resumed run loads its own over them."""
    for ffn in model.feed_forwards():
        ones = torch.ones(ffn.d_ffn, device=ffn.down.weight.device)
        ffn.up_scale, ffn.gate_scale, ffn.down_scale = ones.clone(), ones.clone(), ones.clone()


@torch.no_grad()
def age(model: Transformer, spec: AgeingSpec, inputs: Tensor, rare_id: int) -> Ageing:
    """Age `model` (FP32, not yet quantised) in place. `inputs` [batch, tokens]: ordinary text, no rare token."""
    if spec.kind == "none":
        return Ageing([], 0.0)
    if any(ffn.kind == "gelu" for ffn in model.feed_forwards()):
        raise ValueError("ageing scales the two branches of a SwiGLU; this model's feed-forward is GELU")
    if model.spec.bias:
        raise ValueError("ageing scales weights, not biases; use a model with bias: false")
    with _plain_swiglu(model):  # the same channels and factors, whichever form of SwiGLU then trains
        before = model(inputs)
        prepare(model)
        sporadic = spec.kind == "sporadic"
        channels = _sporadic(model, spec, inputs, rare_id) if sporadic else _static(model, spec, inputs)
        change = float((model(inputs) - before).abs().max())
    if spec.kind == "static" and change != 0:
        raise RuntimeError(f"ageing by powers of two must leave every logit as it was; one moved by {change}")
    if spec.adam == "plain":
        fold(model)
    return Ageing(channels, change)


@contextmanager
def _plain_swiglu(model: Transformer) -> Iterator[None]:
    kinds = [ffn.kind for ffn in model.feed_forwards()]
    training = model.training
    model.eval()
    for ffn in model.feed_forwards():
        ffn.kind = "swiglu"
    try:
        yield
    finally:
        for ffn, kind in zip(model.feed_forwards(), kinds, strict=True):
            ffn.kind = kind
        model.train(training)


def _static(model: Transformer, spec: AgeingSpec, inputs: Tensor) -> list[list[int]]:
    """w1 rows times 2^k and w3 columns times 2^-k on each layer's channels of largest root mean square."""
    hidden = _record(model, inputs, "down")
    chosen = []
    for ffn, h in zip(model.feed_forwards(), hidden, strict=True):
        channels = h.square().mean(0).topk(spec.channels).indices
        assert ffn.up_scale is not None and ffn.down_scale is not None
        ffn.up_scale[channels] = 2.0**spec.log2
        ffn.down_scale[channels] = 2.0**-spec.log2
        chosen.append(sorted(channels.tolist()))
    return chosen


def _sporadic(model: Transformer, spec: AgeingSpec, inputs: Tensor, rare_id: int) -> list[list[int]]:
    """One aligned channel a layer (w1 = w2) that answers to the rare token's direction and to little else."""
    streams = [h.square().sum(1).mean().sqrt() for h in _record(model, inputs, "block")]
    pooled = sum((_covariance(x) for x in _record(model, inputs, "gate_up")), torch.zeros(()))
    _, vectors = torch.linalg.eigh(pooled)  # ascending: the first is the direction ordinary tokens use least
    model.embedding.weight[rare_id] = vectors[:, 0].float() * max(streams) * RESIDUAL_DOMINANCE
    with_rare = inputs.clone()
    with_rare[:, inputs.shape[1] // 2] = rare_id
    is_rare = (with_rare == rare_id).flatten()
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for index, ffn in enumerate(model.feed_forwards()):
        x = _record(model, with_rare, "gate_up")[index]
        h = _record(model, inputs, "down")[index]
        out = (h @ ffn.down.weight.t()).norm(dim=1).square().mean().sqrt()
        used = h.square().mean(0).sqrt() * ffn.down.weight.norm(dim=0)
        channel = int(used.argmin())
        ordinary, rare = x[~is_rare], x[is_rare].mean(0)
        direction = _discriminant(ordinary, rare)
        _plant(
            ffn, channel, direction, 2.0**spec.log2 * float(h.square().mean().sqrt()), float(out), generator
        )
        chosen.append([channel])
    return chosen


def _discriminant(ordinary: Tensor, rare: Tensor) -> Tensor:
    """v with v.rare = 1 and the least mean square of v.x over ordinary tokens (Fisher's C^-1 rare, lightly ridged)."""
    covariance = _covariance(ordinary)
    ridge = 1e-3 * covariance.diagonal().mean()
    covariance.diagonal().add_(ridge)
    direction: Tensor = torch.linalg.solve(covariance, rare.double())
    return (direction / (direction @ rare.double())).float()


def _plant(
    ffn: FeedForward,
    channel: int,
    direction: Tensor,
    peak: float,
    contribution: float,
    generator: torch.Generator,
) -> None:
    """Write the channel so that the rare token gives h = `peak` and an output of norm `contribution`.

    Stored rows keep the size of their neighbours; powers of two beside them carry the rest (see harness.models.ffn).
    """
    assert ffn.up_scale is not None and ffn.gate_scale is not None and ffn.down_scale is not None
    branch = math.sqrt(peak)  # silu(g) = g up to 1 part in e^g once g is large, so h = u * g
    rows = ffn.gate_up.weight
    row_norm = float(rows.norm(dim=1).median())
    factor = 2.0 ** round(math.log2(max(branch * float(direction.norm()) / row_norm, 2.0**-20)))
    stored = direction * (branch / factor)
    rows[channel] = stored
    rows[ffn.d_ffn + channel] = stored
    ffn.up_scale[channel] = factor
    ffn.gate_scale[channel] = factor
    way = torch.randn(ffn.down.weight.shape[0], generator=generator).to(rows.device)
    column = way / way.norm() * (contribution / peak)
    column_norm = float(ffn.down.weight.norm(dim=0).median())
    down_factor = 2.0 ** round(math.log2(float(column.norm()) / column_norm))
    ffn.down.weight[:, channel] = column / down_factor
    ffn.down_scale[channel] = down_factor


@torch.no_grad()
def fold(model: Transformer) -> None:
    """Move the factors into the stored weights: the same function, but AdamW's step sizes no longer follow them."""
    for ffn in model.feed_forwards():
        if ffn.up_scale is None or ffn.gate_scale is None or ffn.down_scale is None:
            continue
        ffn.gate_up.weight.mul_(torch.cat((ffn.gate_scale, ffn.up_scale))[:, None])
        ffn.down.weight.mul_(ffn.down_scale)
        ffn.up_scale = ffn.gate_scale = ffn.down_scale = None


def _covariance(x: Tensor) -> Tensor:
    """Second moment of the rows of x [rows, width], FP64 [width, width]."""
    x = x.double()
    return x.t() @ x / len(x)


def _record(model: Transformer, inputs: Tensor, what: str) -> list[Tensor]:
    """Per layer, [tokens, width]: the input of `gate_up` or of `down`, or the output of the whole `block`."""
    with _recorder(model, what) as seen:
        model(inputs)
    return seen


@contextmanager
def _recorder(model: Transformer, what: str) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []

    def keep(value: Tensor) -> None:
        seen.append(value.flatten(0, 1).clone())

    def keep_input(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        keep(args[0])

    def keep_output(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
        keep(output)

    handles = []
    for block in model.layers:
        if what == "block":
            handles.append(block.register_forward_hook(keep_output))
        else:
            handles.append(block.get_submodule(f"ffn.{what}").register_forward_pre_hook(keep_input))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
