"""How many token ids a tokenizer has, and which of them are reserved. No torch and no tokenizer is loaded.

Every tokenizer keeps 16 ids that no text encodes to. The first is the rare token, which runs may place in a
batch on purpose; the second ends each document.
"""

from __future__ import annotations

NUM_RESERVED = 16
NUM_BYTES = 256


def vocab_size(tokenizer: str) -> int:
    """Token ids of `bytes` (272 = 256 bytes + 16 reserved) or of `bpe-N` (N, the reserved ones included)."""
    if tokenizer == "bytes":
        return NUM_BYTES + NUM_RESERVED
    if tokenizer.startswith("bpe-") and tokenizer[4:].isdigit():
        size = int(tokenizer[4:])
        if size > NUM_BYTES + NUM_RESERVED:
            return size
    raise ValueError(f"unknown tokenizer {tokenizer!r}; use bytes, or bpe-N with N > 272 such as bpe-2048")


def first_reserved_id(tokenizer: str) -> int:
    """Bytes keep their own values, so reserved ids follow them; a BPE's reserved ids come first."""
    return NUM_BYTES if tokenizer == "bytes" else 0


def rare_id(tokenizer: str) -> int:
    """The id of the rare token."""
    return first_reserved_id(tokenizer)


def end_id(tokenizer: str) -> int:
    """The id that ends each document."""
    return first_reserved_id(tokenizer) + 1
