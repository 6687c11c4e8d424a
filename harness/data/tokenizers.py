"""Text to token ids: plain bytes, or a byte-level BPE trained on the corpus itself.

A BPE of N tokens is trained on at most 5 MB of the training documents (seconds, and the same result each
time) and is kept as `tokenizer.json` beside the tokens it made. Both tokenizers are lossless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from harness.data.vocabulary import NUM_RESERVED, end_id, rare_id, vocab_size

MAX_TRAINING_BYTES = 5_000_000
PIECE_CHARS = 1 << 20
"""A longer document is encoded in pieces: the library needs some 30 times a text's size in memory."""

Ids = npt.NDArray[np.unsignedinteger[Any]]


def token_dtype(tokenizer: str) -> np.dtype[Any]:
    """uint16 where every id fits, else uint32."""
    return np.dtype(np.uint16 if vocab_size(tokenizer) <= 1 << 16 else np.uint32)


class Tokenizer(Protocol):
    """What the token cache needs of a tokenizer."""

    name: str
    sha256: str | None
    """Hash of what was trained; None where nothing was."""

    def encode(self, text: str) -> Ids:
        """Ids of one document, closed by the end-of-document id."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, reserved ones left out."""


class ByteTokenizer:
    """UTF-8 bytes are their own ids."""

    name = "bytes"
    sha256: str | None = None

    def encode(self, text: str) -> Ids:
        data = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
        ids = np.empty(len(data) + 1, dtype=np.uint16)
        ids[:-1] = data
        ids[-1] = end_id(self.name)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < rare_id(self.name)).decode("utf-8", errors="replace")


class BpeTokenizer:
    """Byte-level BPE of the `tokenizers` library; ids 0-15 are reserved and no text encodes to them."""

    def __init__(self, name: str, serialised: str) -> None:
        from tokenizers import Tokenizer as Library

        self.name = name
        self.sha256: str | None = hashlib.sha256(serialised.encode()).hexdigest()
        self._library = Library.from_str(serialised)
        # A text that happens to spell a reserved token's name is text.
        self._library.encode_special_tokens = True

    @classmethod
    def train(cls, name: str, texts: Iterable[str]) -> BpeTokenizer:
        """Train on `texts`; the caller keeps them below MAX_TRAINING_BYTES."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        library = Library(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size(name),
            special_tokens=["<|rare|>", "<|end|>", *(f"<|reserved-{i}|>" for i in range(2, NUM_RESERVED))],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(texts, trainer)
        return cls(name, library.to_str())

    @property
    def serialised(self) -> str:
        """The library's JSON; `BpeTokenizer(name, serialised)` gives the same tokenizer again."""
        return str(self._library.to_str())

    def encode(self, text: str) -> Ids:
        parts = [encoding.ids for encoding in self._library.encode_batch(list(_pieces(text)))]
        return np.array(
            [i for part in parts for i in part] + [end_id(self.name)], dtype=token_dtype(self.name)
        )

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._library.decode(list(ids), skip_special_tokens=True))


def _pieces(text: str) -> Iterator[str]:
    """Cut after a line end near each PIECE_CHARS, so that hardly a word is split."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = end if end > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def training_sample(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    """The same leading share of every text, so that at most MAX_TRAINING_BYTES of `num_bytes` are kept.

    A prefix of the corpus would do as well for size, but a corpus in order of time or topic is not alike
    throughout.
    """
    share = min(1.0, MAX_TRAINING_BYTES / max(num_bytes, 1))
    for text in texts:
        yield text[: int(len(text) * share)]


def load_bpe(name: str, file: Path) -> BpeTokenizer:
    """A tokenizer stored by an earlier run."""
    return BpeTokenizer(name, file.read_text("utf-8"))
