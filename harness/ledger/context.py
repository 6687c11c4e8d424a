"""Sequences cut over ranks: when ring attention hides its messages, what it keeps, what Ulysses sends.

Symbols as in Ring Attention (Liu, Zaharia & Abbeel 2023, arXiv 2310.01889): c tokens of a block, one block a host; F
FLOPs and B bytes a second of a host; b sequences, h width, e bytes an element. Read in notes on the paper, not in
itself.

    overlap     4 d c^2 FLOPs of a pair of blocks against 4 c d bytes of its keys and values (16 bit): c >= F / B
    memory      6 b c h elements' bytes a layer whatever the sequence: a block of queries, two of keys and values, two
                that arrive meanwhile, one of the output
    sequence    6 c tokens a host at the smallest such block

The paper counts every pair of blocks. Under a causal mask half of the products fall away and the messages stay, so
the block must be twice as long (derived here; `causal`). Its own volumes and those of an all-gather:
harness.ledger.volumes; what the suite sends, to the byte: harness.ledger.communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from harness.ledger.volumes import ring_attention_block


@dataclass(frozen=True)
class Link:
    """A host and what joins it to the next, with the numbers that the paper prints (table 2, from notes)."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    printed_block: float
    """Tokens."""
    printed_sequence: float


LINKS = (
    Link("A100 NVLink", 312e12, 300e9, 1.0e3, 6.2e3),
    Link("A100 InfiniBand", 312e12, 12.5e9, 24.5e3, 149.5e3),
    Link("TPUv4 ICI", 275e12, 268e9, 1.0e3, 6.2e3),
)
"""InfiniBand's two are inconsistent with F / B: 312 / 12.5 makes 24.96k and 149.76k, and 24.5 · 6 is 147. TPUv4's F
and B are recalled; they give what is printed."""


def least_block(flops_per_s: float, bytes_per_s: float, causal: bool = False) -> float:
    """c: tokens of a block whose products take as long as its messages; twice as many where a mask halves the
    products."""
    return ring_attention_block(flops_per_s, bytes_per_s) * (2 if causal else 1)


def least_sequence(flops_per_s: float, bytes_per_s: float, causal: bool = False) -> float:
    """6 c: tokens on a host that the blocks in flight of the least such block make up."""
    return 6 * least_block(flops_per_s, bytes_per_s, causal)


def ring_activation_bytes(b: int, c: int, h: int, bytes_each: int = 1) -> int:
    """6 b c h: what a layer of ring attention holds on a host, in the paper's count of one byte an element."""
    return 6 * b * c * h * bytes_each


def vanilla_activation_bytes(b: int, s: int, n: int) -> int:
    """2 b n s^2: the scores of n heads that plain attention holds, 16 bit."""
    return 2 * b * n * s * s


def ulysses_forward(b: int, s: int, h: int, kv_width: int, bytes_each: int, p: int) -> Fraction:
    """(2 h + 2 h_kv) b (s / P) e (P - 1) / P: bytes a rank sends in a layer's forward pass, all-to-alls of q, k, v
    and the output (Jacobs et al. 2023, arXiv 2309.14509, who print 4 N h / P for h_kv = h and many ranks). As much
    backward."""
    return Fraction((2 * h + 2 * kv_width) * b * s * bytes_each * (p - 1), p * p)
