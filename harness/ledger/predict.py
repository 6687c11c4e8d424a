"""One training step of a rank by formula: memory, communication, operations.

    predict_step(spec, vocab_size, rank)        # a RankStep, as trace and measurement give it
    predict_ranks(spec, vocab_size)             # one rank of each kind

Fidelity: `predicted`. Milliseconds for 405B on 4096 ranks.
"""

from __future__ import annotations

from harness.ledger.activations import activations
from harness.ledger.communication import collectives
from harness.ledger.flops import step_flops
from harness.ledger.in_flight import saved_in_flight
from harness.ledger.moments import peak
from harness.ledger.placement import kinds_of_rank
from harness.ledger.states import explain_states, states
from harness.ledger.step import RankStep
from harness.ledger.terms import Term
from harness.spec import RunSpec


def predict_step(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> RankStep:
    """The step of one rank. `vocab_size` is the tokenizer's, for models without one of their own."""
    largest = peak(spec, vocab_size, rank)
    pipelined = spec.parallelism.pp > 1
    saved = (
        saved_in_flight(spec, vocab_size, rank) if pipelined else activations(spec, vocab_size, rank).saved
    )
    return RankStep(
        rank=rank,
        peak=largest.held,
        moment=largest.phase,
        state=states(spec, vocab_size, rank).as_dict(),
        saved=saved,
        collectives=collectives(spec, vocab_size, rank),
        flops=step_flops(spec, vocab_size, rank),
        layers={},
    )


def predict_ranks(spec: RunSpec, vocab_size: int | None = None) -> list[RankStep]:
    """The step of one rank of each kind."""
    return [predict_step(spec, vocab_size, rank) for rank in kinds_of_rank(spec.parallelism)]


def explain(spec: RunSpec, vocab_size: int | None = None, rank: int = 0) -> list[Term]:
    """The rank's states, and what one microbatch keeps for the backward pass, term by term: (category, name, formula
    in symbols, the same with numbers, bytes); then what the peak holds beside them. Bytes of states and activations
    are exact sums of these terms; with a pipeline several microbatches are in flight (harness.ledger.in_flight)."""
    largest = peak(spec, vocab_size, rank)
    terms = [*explain_states(spec, vocab_size, rank), *activations(spec, vocab_size, rank).terms]
    for category in ("communication", "temporary"):
        held = largest.held[category]
        if held:
            when = f"at the peak: {largest.phase}, {largest.name}"
            terms.append(Term(category, when, "largest over the step's moments", f"{held:,}", held))
    return terms
