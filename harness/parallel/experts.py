"""Expert parallelism: a layer's experts dealt out over the ranks of the mesh axis ep, tokens sent to them and back.

    experts.shard(model, mesh)          # after pipeline stages are cut, before the data-parallel wrapper

Rank i of ep has experts i E / ep ... (i + 1) E / ep - 1 of E. Each rank of ep has sequences of its own, so ep also
shares out data: dense parameters are averaged over dp, ep and cp, those of an expert are added up over dp and cp and
divided by dp · ep · cp, since tokens of all ep ranks have already come to it
(harness.parallel.layout and harness.parallel.strategy see to both).

Collectives of one layer and micro-step, per rank, with T local tokens of which k pairs a token are taken (T k of them
unless capacity drops some), R pairs that come to the rank's experts, width h, e bytes of the compute dtype:

              axis      op           forward                          backward
    counts    ep        all_to_all   8 E bytes (int64)                -
    dispatch  ep        all_to_all   T k h e                          R h e
    combine   ep        all_to_all   R h e                            T k h e
    aux loss  dp+ep+cp  all_reduce   8 E bytes, with aux_loss alone   -

Over the ranks of ep the R add up to the T k, so their total is 4 T k h e a rank, of which (ep - 1) / ep leaves it
when routing is uniform. Full recomputation runs the forward column twice. After the optimizer one all_reduce of 24 E
bytes a layer over dp+ep+cp, all layers together, adds up what the experts had to do (axis `control`); the routing
bias follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from harness.models.moe import Experts
from harness.models.transformer import Transformer
from harness.parallel import recorder
from harness.parallel.mesh import Mesh
from harness.spec.parallelism import DENSE


def shard(model: Transformer, mesh: Mesh) -> None:
    """Leave this rank's experts in `model`, and let its layers count the tokens of all ranks that share a batch.

    For any mesh of several ranks, ep among its axes or not. ValueError where ep does not divide the experts.
    """
    for mixture in model.mixtures():
        if mesh.size(*DENSE) > 1:
            mixture.total = _Total(mesh.group(*DENSE), control=False)
            mixture.total_of_step = _Total(mesh.group(*DENSE), control=True)
        if mesh.spec.ep == 1:
            continue
        count, more = divmod(mixture.moe.experts, mesh.spec.ep)
        if more:
            raise ValueError(f"ep {mesh.spec.ep} does not divide {mixture.moe.experts} experts")
        first = count * mesh.place["ep"]
        for name, whole in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, name, nn.Parameter(whole.detach()[first : first + count].clone()))
        mixture.exchange = AllToAll(mesh.group("ep"))


class _Total:
    """Adds counts up over a group."""

    def __init__(self, group: dist.ProcessGroup, control: bool) -> None:
        self._group, self._control = group, control

    def __call__(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        if self._control:
            with recorder.control():
                dist.all_reduce(total, group=self._group)
        else:
            dist.all_reduce(total, group=self._group)
        return total


class AllToAll:
    """A MoE layer's `exchange` over the ranks of a group, which have equally many experts each, in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, counts: Sequence[int], experts: Experts) -> Tensor:
        """rows [pairs, d_model] sorted by expert, counts[i] of them for expert i of all the layer's -> what the
        experts, wherever they lie, make of them, in the same order."""
        size = self.group.size()
        each = len(counts) // size
        came = self._counts(rows, counts).tolist() if not isinstance(rows, FakeTensor) else self._even(counts)
        sent = [sum(counts[rank * each : (rank + 1) * each]) for rank in range(size)]
        got = [sum(of_rank) for of_rank in came]
        here: Tensor = _Exchange.apply(rows, sent, got, self.group)
        by_expert = [list(of_expert) for of_expert in zip(*came, strict=True)]
        out = experts(_transposed(here, came), [sum(of_expert) for of_expert in by_expert])
        back: Tensor = _Exchange.apply(_transposed(out, by_expert), got, sent, self.group)
        return back

    def _counts(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """[ranks, experts here]: rows that come from each rank to each of this rank's experts."""
        mine = torch.tensor(counts, device=rows.device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        return theirs.view(self.group.size(), -1)

    def _even(self, counts: Sequence[int]) -> list[list[int]]:
        """The same for tensors without data: every rank sends what this one does."""
        mine = torch.empty(len(counts), dtype=torch.int64)
        dist.all_to_all_single(torch.empty_like(mine), mine, group=self.group)
        each = len(counts) // self.group.size()
        first = each * self.group.rank()
        return [list(counts[first : first + each])] * self.group.size()


def _transposed(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Rows that lie by i and then by j, counts[i][j] each -> by j and then by i."""
    parts = iter(rows.split(list(chain.from_iterable(counts))))
    grid = [[next(parts) for _ in of_first] for of_first in counts]
    return torch.cat(list(chain.from_iterable(zip(*grid, strict=True))))


class _Exchange(torch.autograd.Function):
    """rows [sum(sent), width] -> [sum(got), width]: the first sent[0] rows go to rank 0, and so on."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = (sent, got), group
        return _all_to_all(rows, sent, got, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, got = ctx.splits
        return _all_to_all(grads[0], got, sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(got), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), got, sent, group=group)
    return out
