"""The optimizer of a run: the algorithm, what it works on, and where its states lie.

ZeRO-1 is PyTorch's ZeroRedundancyOptimizer over the algorithm: whole parameters are dealt out to the ranks that share
them, largest first, each to the rank that has the fewest elements so far (matrices before vectors, since they are
groups of their own). A rank updates its own and keeps states for them alone. Then every rank sends what it updated:
one broadcast a rank, of all its parameters (parameters_as_bucket_view), of one element where it has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from harness.optim import adamw, muon
from harness.optim.several import Several
from harness.optim.sgd import SGD
from harness.optim.widened import Widened
from harness.spec import OptimizerSpec, RunSpec

if TYPE_CHECKING:
    from harness.parallel.strategy import Strategy

Gradient = Callable[[nn.Parameter], Tensor | None]
Groups = list[dict[str, Any]]


def build(strategy: Strategy) -> torch.optim.Optimizer:
    """The optimizer of this rank's part of the model. Raises ValueError for an algorithm that would not be exact
    there."""
    spec, mesh = strategy.spec, strategy.mesh
    reason = muon.problem(spec)
    if reason is not None:
        raise ValueError(reason)
    named = list(strategy.named_parameters())
    if mesh.spec.zero != 1:
        return _algorithm(parameter_groups(named, spec.optimizer), spec, strategy.gradient)
    shares = [(part, group) for part, group in strategy.replicated(named) if part]
    parts = [
        _sharded(parameter_groups(part, spec.optimizer), spec, strategy.gradient, group)
        for part, group in shares
    ]
    return parts[0] if len(parts) == 1 else Several(parts)


def parameter_groups(named: list[tuple[str, nn.Parameter]], spec: OptimizerSpec) -> Groups:
    """Matrices for Muon first where there is one, then matrices with decay, then vectors without."""
    if spec.name != "muon":
        return adamw.parameter_groups((parameter for _, parameter in named), spec)
    theirs = [parameter for name, parameter in named if muon.takes(name, parameter)]
    rest = [parameter for name, parameter in named if not muon.takes(name, parameter)]
    marked = [{**group, muon.MARK: True} for group in adamw.parameter_groups(theirs, spec)]
    return [*marked, *adamw.parameter_groups(rest, spec)]


def _algorithm(groups: Groups, spec: RunSpec, gradient: Gradient) -> torch.optim.Optimizer:
    """The optimizer over `groups`, with FP32 copies and states where BF16 weights ask for them."""
    precision, optimizer = spec.precision, spec.optimizer
    if not precision.master and precision.moments == "weights":
        return _plain(groups, optimizer)
    return Widened(groups, lambda given: _plain(given, optimizer), optimizer.lr, precision.master, gradient)


def _plain(groups: Groups, spec: OptimizerSpec) -> torch.optim.Optimizer:
    if spec.name == "sgd":
        return SGD(groups, lr=spec.lr, momentum=spec.beta1)
    theirs = [group for group in groups if group.get(muon.MARK)]
    rest = [group for group in groups if not group.get(muon.MARK)]
    parts: list[torch.optim.Optimizer] = []
    if theirs:
        parts.append(muon.Muon(theirs, **muon.options(spec)))
    if rest:
        parts.append(torch.optim.AdamW(rest, **adamw.options(spec)))
    return parts[0] if len(parts) == 1 else Several(parts)


def _sharded(groups: Groups, spec: RunSpec, gradient: Gradient, group: Any) -> torch.optim.Optimizer:
    """`groups` dealt out over the ranks of `group`; where that is None, they are this rank's own."""
    if group is None:
        return _algorithm(groups, spec, gradient)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(given: Groups, **_defaults: Any) -> torch.optim.Optimizer:
        return _algorithm(given, spec, gradient)

    dealt: Any = ZeroRedundancyOptimizer(
        groups, cast("Any", make), process_group=group, parameters_as_bucket_view=True, lr=spec.optimizer.lr
    )
    dealt.state = dealt.optim.state
    return dealt  # type: ignore[no-any-return]
