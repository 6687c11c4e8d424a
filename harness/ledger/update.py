"""What the optimizer's step holds for the moment, beside its states.

Fused AdamW and SGD work in place. FP32 arithmetic for BF16 weights (harness.optim.widened) widens one parameter at a
time: its gradient, and without `master` the weight too. Muon makes of one matrix at a time the Nesterov direction,
and in BF16 its orthogonalisation: X, the next X, and two square matrices of the smaller side (torch.optim._muon).
"""

from __future__ import annotations

from harness.ledger.placement import local_parameters
from harness.ledger.states import is_muon, moment_bytes, shard_numel, shards
from harness.spec import RunSpec


def update_bytes(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> int:
    """The most that the update of one parameter holds."""
    precision, muon = spec.precision, spec.optimizer.name == "muon"
    widened = precision.master or precision.moments == "fp32"
    if not widened and not muon:
        return 0
    cut = shards(spec, rank)
    largest = 0
    for parameter in local_parameters(spec, vocab_size, rank):
        local = shard_numel(parameter, *cut.of(parameter))[1]
        held = 0
        if widened:
            held += local * (0 if precision.main_gradients else 4) + local * (0 if precision.master else 4)
        if muon and is_muon(parameter):
            whole, smaller = parameter.numel, min(parameter.shape)
            moment = moment_bytes(spec)
            gathered = whole * moment if cut.of(parameter)[0] > 1 else 0
            held += local * moment + gathered + 2 * 2 * whole + 2 * 2 * smaller**2
        largest = max(largest, held)
    return largest
