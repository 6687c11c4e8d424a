"""Every collective of one training step of one rank, by formula: axis, operation, calls, bytes.

    collectives(spec, vocab_size, rank)       # summed up by axis and operation, as a recorder counts them
    explained(spec, vocab_size, rank)         # one by one, each with its formula

Integers, exact: tests/harness/ledger/test_communication.py holds them against what the recorder of harness.parallel
counts on real ranks. Payload is the whole tensor of an all_reduce, all_gather (output), reduce_scatter (input) and
broadcast, a rank's input of an all_to_all, and what is sent or received point to point; a ring puts 2 S (n - 1) / n
of an all_reduce's S bytes on a rank's link, S (n - 1) / n of the others' (`Collective.sent_bytes`).

P: parameters of a rank as pp, tp and ep leave them, P_n with first dimensions padded to a multiple of the n shards; A
micro-steps of m microbatches (1 without a pipeline); L layers on the rank; b sequences of s tokens on it, h wide, v the
vocabulary; e bytes an element.

    scheme          axis         op              calls a step                 payload of all of them
    DDP             dp+ep+cp     all_reduce      DDP's buckets                P e_g (once a step, whatever A)
    ZeRO-1          dp+ep+cp     all_reduce      DDP's buckets                P e_g
                                 broadcast       ranks that own something     P e_w
    ZeRO-2          dp+ep+cp     all_gather      A (L + 1)                    A P_n e_p
                                 reduce_scatter  A (L + 1)                    A P_n e_g
    ZeRO-3          dp+ep+cp     all_gather      A (2 L + 1)                  A (2 P_n - root) e_p
                                 reduce_scatter  A (L + 1)                    A P_n e_g
      in a pipeline              all_gather      A ((m + 1) L + roots)        whole backward passes; else as ZeRO-2
    HSDP            dp           all_reduce      A (L + 1)                    A P_n e_g / n, beside ZeRO-2's or 3's
    TP              tp           all_reduce      A m (4 L) + 1 embedding, 1 head          b s h e each
                                 all_gather      A m                          b s v e each, the logits
    TP + SP         tp           all_gather      A m (4 L), 1, 2              b s h e each; one of b s v e
                                 reduce_scatter  A m (4 L), 1, 1              b s h e each
    PP              pp           send, recv      A m each way and boundary    b s h e each
    CP ring         cp           send, recv      A m L 3 (cp - 1)             S keys and values, twice; S_g gradients
    CP all-gather   cp           all_gather      A m L 2                      cp S each
                                 reduce_scatter  A m L                        cp S_g each
    EP              ep           all_to_all      A m L 5                      4 pairs h e and 8 E each
                    dp+ep+cp     all_reduce      A m L                        8 E each, with an auxiliary loss
    always          control      all_reduce      1                            16: the loss and the squared gradient norm

Recomputation runs forward collectives again: of CP's product with `selective`, of whole layers with `full`, but for the
last of a layer, whose result nothing needs. Experts' gradients go over dp+cp. harness.ledger.traffic has the details.
"""

from __future__ import annotations

from harness.ledger.step import Collective
from harness.ledger.traffic.base import Traffic, summed
from harness.ledger.traffic.context import context
from harness.ledger.traffic.control import control
from harness.ledger.traffic.data import data
from harness.ledger.traffic.experts import Routing, experts
from harness.ledger.traffic.pipeline import pipeline
from harness.ledger.traffic.tensor import tensor
from harness.spec import RunSpec


def collectives(
    spec: RunSpec, vocab_size: int | None = None, rank: int = 0, routing: Routing | None = None
) -> tuple[Collective, ...]:
    """Calls of one step by axis and operation, in the order of their names. Bytes are integers, exact.

    `vocab_size` is the tokenizer's, for models without one of their own. `routing`: what a router sent where, where it
    was counted; uniform otherwise.
    """
    return summed(explained(spec, vocab_size, rank, routing))


def explained(
    spec: RunSpec, vocab_size: int | None = None, rank: int = 0, routing: Routing | None = None
) -> tuple[Traffic, ...]:
    """The same part by part, each with its formula; a group of one exchanges nothing."""
    found = (
        *(each for part in (data, tensor, pipeline, context) for each in part(spec, vocab_size, rank)),
        *experts(spec, vocab_size, rank, routing),
        *control(spec, vocab_size, rank),
    )
    return tuple(each for each in found if each.group_size > 1 and each.count)
