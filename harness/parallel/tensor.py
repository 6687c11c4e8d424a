"""Tensor parallelism (Shoeybi et al. 2019), and with it sequence parallelism (Korthikanti et al. 2022).

Every rank of the tp axis holds its heads, its part of the feed-forward and its part of the vocabulary, as plain local
parameters; so DDP, FSDP2, pipelining and the optimizers see nothing unusual. DTensor moves the activations: `_enter`
before a matrix cut by rows of its output (column-parallel), `_leave` after one cut by its input (row-parallel).

    tp                                     forward                       backward
      attention, feed-forward, each        1 all_reduce [b, s, d]        1 all_reduce [b, s, d]
      embedding                            1 all_reduce [b, s, d]        none
      head                                 1 all_gather [b, s, vocab]    1 all_reduce [b, s, d]
    tp with sequence_parallel
      attention, feed-forward, each        1 all_gather, 1 reduce_scatter, each [b, s, d], both ways
      embedding                            1 reduce_scatter [b, s, d]    1 all_gather [b, s, d]
      head                                 1 all_gather [b, s, d] and 1 [b, s, vocab]; 1 reduce_scatter [b, s, d]

b: sequences of a micro-step (or microbatch); payloads in the dtype that the activation has there. Once a step, one
all_reduce over tp adds up the gradients of parameters that every rank holds whole but sees only a part of: norms of
queries and keys, and with sequence_parallel all norms, the biases behind row-parallel matrices and learned positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models.transformer import Transformer
from harness.precision.linear import Linear
from harness.spec import ModelSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from harness.parallel.mesh import Mesh

ROWS = ("attention.qkv.weight", "attention.qkv.bias", "ffn.gate_up.weight", "ffn.gate_up.bias", "ffn.up.weight",
        "ffn.up.bias", "embedding.weight", "head.weight")  # fmt: skip
"""Parameters cut along their first dimension."""
COLUMNS = ("attention.output.weight", "ffn.down.weight")
"""Parameters cut along their second."""


def is_cut(name: str) -> bool:
    """Whether a parameter lies in parts on the ranks of tp."""
    return name.endswith((*ROWS, *COLUMNS))


def apply(model: Transformer, mesh: Mesh) -> None:
    """Cut `model` (or a pipeline's stage), in place, to this rank's part."""
    spec, ranks, rank = model.spec, mesh.spec.tp, mesh.place["tp"]
    check(spec, ranks, None if model.head is None else model.head.out_features)
    devices = mesh.over("tp")
    shared = model.head is not None and model.embedding is not None and spec.tie_embeddings
    _cut_parameters(model, spec, ranks, rank)
    sequence = mesh.spec.sequence_parallel
    for attention, ffn in zip(model.attentions(), model.feed_forwards(), strict=True):
        attention.num_heads //= ranks
        attention.num_kv_heads //= ranks
        attention.qkv = Column(attention.qkv, devices, sequence)
        attention.output = Row(attention.output, devices, sequence)
        ffn.d_ffn //= ranks
        wide = "up" if ffn.kind == "gelu" else "gate_up"
        setattr(ffn, wide, Column(getattr(ffn, wide), devices, sequence))
        ffn.down = Row(ffn.down, devices, sequence)
    if model.embedding is not None:
        model.embedding = Vocabulary(model, devices, rank, sequence)  # type: ignore[assignment]
    if model.head is not None:
        model.head = Head(model.head, devices, sequence)
        if shared:
            model.head.weight = model.embedding.weight


def check(spec: ModelSpec, ranks: int, vocab_size: int | None) -> None:
    """Raises ValueError where the model does not divide."""
    if spec.moe is not None:
        raise ValueError("tp cuts dense feed-forwards; experts are shared out by ep")
    for what, number in (
        ("num_kv_heads", spec.num_kv_heads),
        ("d_ffn", spec.d_ffn),
        ("the vocabulary", vocab_size or ranks),
    ):
        if number % ranks:
            raise ValueError(f"tp {ranks} does not divide {what}, {number}")


def _groups(name: str, spec: ModelSpec) -> list[int] | None:
    """Rows of the matrices that a fused parameter is made of; None for one matrix."""
    if "attention.qkv." in name:
        return [spec.num_heads * spec.head_width, *[spec.num_kv_heads * spec.head_width] * 2]
    return [spec.d_ffn, spec.d_ffn] if "ffn.gate_up." in name else None


def shard(name: str, whole: Tensor, spec: ModelSpec, ranks: int, rank: int) -> Tensor:
    """This rank's part: of each fused matrix its own rows, so that [q heads | k heads | v heads] stays the order."""
    if not is_cut(name):
        return whole
    if name.endswith(COLUMNS):
        return whole.chunk(ranks, 1)[rank]
    groups = _groups(name, spec) or [whole.shape[0]]
    return torch.cat([part.chunk(ranks)[rank] for part in whole.split(groups)])


def join(name: str, parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """Undo `shard`: the whole parameter from all ranks' parts."""
    if not is_cut(name):
        return parts[0]
    if name.endswith(COLUMNS):
        return torch.cat(parts, 1)
    groups = [rows // len(parts) for rows in _groups(name, spec) or [parts[0].shape[0] * len(parts)]]
    matrices = zip(*(part.split(groups) for part in parts), strict=True)
    return torch.cat([torch.cat(of_ranks) for of_ranks in matrices])


def _cut_parameters(model: nn.Module, spec: ModelSpec, ranks: int, rank: int) -> None:
    with torch.no_grad():
        for name, parameter in list(model.named_parameters()):
            if is_cut(name):
                part = shard(name, parameter.detach(), spec, ranks, rank).clone()
                home, _, last = name.rpartition(".")
                setattr(model.get_submodule(home), last, nn.Parameter(part))


# The two moves


def _enter(x: Tensor, devices: DeviceMesh, sequence: bool) -> Tensor:
    """The stream as a column-parallel matrix reads it, whole; backward adds the ranks' gradients up."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    stream = DTensor.from_local(x, devices, [Shard(1) if sequence else Replicate()], run_check=False)
    whole: Tensor = stream.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return whole


def _leave(partial: Tensor, devices: DeviceMesh, sequence: bool) -> Tensor:
    """The stream from the ranks' sums: added up, and with sequence parallelism cut along the tokens."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    summed = DTensor.from_local(partial, devices, [Partial()], run_check=False)
    stream: Tensor = summed.redistribute(placements=[Shard(1) if sequence else Replicate()]).to_local()
    return stream


class _Cut(Linear):
    """A linear on this rank's part of the weight."""

    def __init__(self, linear: nn.Linear, devices: DeviceMesh, sequence: bool) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = linear.weight.shape
        self.weight, self.bias = linear.weight, linear.bias
        self.devices, self.sequence = devices, sequence


class Column(_Cut):
    """x as the stream lies, [..., d_in] -> this rank's part of the output, [batch, tokens, d_out / tp]."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.linear(_enter(x, self.devices, self.sequence), self.weight, self.bias)


class Row(_Cut):
    """This rank's part of the input, [batch, tokens, d_in / tp] -> the stream."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        y = _leave(F.linear(x, self.weight), self.devices, self.sequence)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Head(_Cut):
    """The stream -> logits of the whole vocabulary, on every rank."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        part = F.linear(_enter(x, self.devices, self.sequence), self.weight, self.bias)
        cut = DTensor.from_local(part, self.devices, [Shard(part.dim() - 1)], run_check=False)
        logits: Tensor = cut.redistribute(placements=[Replicate()]).to_local()
        return logits


class Vocabulary(nn.Module):
    """Token ids [batch, tokens] -> the stream. Tokens of other ranks' part of the vocabulary add nothing here."""

    def __init__(self, model: Transformer, devices: DeviceMesh, rank: int, sequence: bool) -> None:
        super().__init__()
        self.weight = model.embedding.weight
        self.devices, self.rank, self.sequence = devices, rank, sequence
        if sequence and model.positions is not None:
            model.embed = self._embed_with_positions(model)  # type: ignore[method-assign]

    def forward(self, tokens: Tensor) -> Tensor:
        size = len(self.weight)
        own = tokens - self.rank * size
        elsewhere = (own < 0) | (own >= size)
        rows = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return _leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.devices, self.sequence)

    def _embed_with_positions(self, model: Transformer):  # type: ignore[no-untyped-def]
        """Transformer.embed where each rank has a part of the tokens, so needs that part's positions."""

        def embed(tokens: Tensor, at: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            x = self(tokens)
            places = torch.arange(tokens.shape[1], device=tokens.device) if at is None else at
            assert model.positions is not None
            own = places.chunk(self.devices.size())[self.rank]
            return x + model.positions.weight[own], model.rotation_at(tokens.shape[1], tokens.device, at)

        return embed


def add_up_partial(gradients: Iterable[Tensor], mesh: Mesh) -> None:
    """One all_reduce over tp of gradients that each rank saw a part of, in place; they are of one dtype."""
    import torch.distributed as dist

    parts = list(gradients)
    if not parts:
        return
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=mesh.group("tp"))
    for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))
