"""The token cache and its tokenizers: lossless, split by document, safe under crashes and company."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.data import tokens as cache
from harness.data.corpora import DataError
from harness.data.tokenizers import PIECE_CHARS, BpeTokenizer, ByteTokenizer, _pieces, training_sample
from harness.data.tokens import load_tokenizer, load_tokens, split_documents
from harness.data.vocabulary import end_id, rare_id, vocab_size
from harness.spec import DataSpec

TEXT = "The state of the Union — naïve, 学び; <|rare|> spelt out.\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i:02}.txt").write_text(f"document {i}: " + TEXT * (5 + i % 3), "utf-8")
    return texts


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path / "cache"))


def test_vocabulary_needs_no_torch() -> None:
    assert vocab_size("bytes") == 272
    assert rare_id("bytes") == 256
    assert vocab_size("bpe-2048") == 2048
    assert rare_id("bpe-2048") == 0
    for wrong in ("words", "bpe-", "bpe-100"):
        with pytest.raises(ValueError, match="unknown tokenizer"):
            vocab_size(wrong)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-400"])
def test_tokens_are_the_text_again(folder: Path, tokenizer: str) -> None:
    data = DataSpec(corpus=str(folder), tokenizer=tokenizer)
    found = load_tokens(data)
    whole = np.concatenate([found.train, found.validation])
    documents = np.flatnonzero(whole == end_id(tokenizer))
    assert len(documents) == found.num_documents == 40
    assert rare_id(tokenizer) not in whole
    assert whole.max() < found.vocab_size
    assert whole.dtype == np.uint16
    expected = "".join((folder / f"{i:02}.txt").read_text("utf-8") for i in range(40))
    assert load_tokenizer(data).decode(whole.tolist()) == expected
    assert found.num_bytes == len(expected.encode())


def test_held_out_are_the_last_documents(folder: Path) -> None:
    found = load_tokens(DataSpec(corpus=str(folder)))
    text = bytes(b for b in found.validation if b < 256).decode()
    assert text.startswith("document 38: ")
    share = len(found.validation) / (len(found.validation) + len(found.train))
    assert 0.05 <= share < 0.08


@pytest.mark.parametrize("sizes", [[1000], [10, 990], [10] * 9 + [900]])
def test_a_large_last_document_is_cut_at_a_line(sizes: list[int]) -> None:
    documents = ["123456789\n" * (size // 10) for size in sizes]
    parts = list(split_documents(iter(documents), sizes))
    held_out = "".join(text for out, text in parts if out)
    assert "".join(text for _, text in parts) == "".join(documents)
    assert 45 <= len(held_out) <= 70
    assert held_out.startswith("1")


def test_cached_tokens_are_found_without_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokens(DataSpec(corpus=str(folder)))
    monkeypatch.setattr("harness.data.corpora._read_file", lambda file: pytest.fail("read again"))
    again = load_tokens(DataSpec(corpus=str(folder)))
    assert again.sha256 == first.sha256
    assert np.array_equal(again.train, first.train)


def test_dataset_hash_follows_the_text_alone(folder: Path, tmp_path: Path) -> None:
    first = load_tokens(DataSpec(corpus=str(folder)))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert load_tokens(DataSpec(corpus=str(copy))).sha256 == first.sha256
    (copy / "00.txt").write_text("changed")
    assert load_tokens(DataSpec(corpus=str(copy))).sha256 != first.sha256


def test_a_file_cut_short_is_made_again(folder: Path) -> None:
    first = load_tokens(DataSpec(corpus=str(folder)))
    expected = np.array(first.train)
    (file,) = cache.cache_dir().glob("tokens/*/train.bin")
    file.unlink()
    file.write_bytes(b"short")
    assert np.array_equal(load_tokens(DataSpec(corpus=str(folder))).train, expected)


def test_a_failed_build_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ByteTokenizer, text: str) -> None:
        raise DataError("on purpose")

    monkeypatch.setattr(ByteTokenizer, "encode", fail)
    with pytest.raises(DataError, match="on purpose"):
        load_tokens(DataSpec(corpus=str(folder)))
    assert [path.suffix for path in (cache.cache_dir() / "tokens").iterdir()] == [".lock"]


def _load(folder: str, out: multiprocessing.Queue[str]) -> None:
    out.put(load_tokens(DataSpec(corpus=folder, tokenizer="bpe-400")).tokenizer_sha256 or "")


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_two_processes_at_once(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    out: multiprocessing.Queue[str] = context.Queue()
    both = [context.Process(target=_load, args=(str(folder), out)) for _ in range(2)]
    for process in both:
        process.start()
    hashes = {out.get(timeout=30) for _ in both}
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert len(hashes) == 1
    assert len(list(cache.cache_dir().glob("tokens/*/meta.json"))) == 1


def test_bpe_training_is_deterministic() -> None:
    texts = [TEXT * 50, "other words entirely\n" * 30]
    first, second = (BpeTokenizer.train("bpe-400", texts) for _ in range(2))
    assert first.serialised == second.serialised
    ids = first.encode(TEXT)
    assert len(ids) < len(TEXT.encode())
    assert np.array_equal(BpeTokenizer("bpe-400", first.serialised).encode(TEXT), ids)


def test_training_sample_spreads_over_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.data.tokenizers.MAX_TRAINING_BYTES", 100)
    sample = list(training_sample(iter(["a" * 100, "b" * 300]), 400))
    assert sample == ["a" * 25, "b" * 75]


def test_long_texts_are_cut_after_lines() -> None:
    text = ("x" * 999 + "\n") * (PIECE_CHARS // 600)
    pieces = list(_pieces(text))
    assert "".join(pieces) == text
    assert len(pieces) == 2
    assert pieces[0].endswith("\n")


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="5 bytes of text; a run needs at least 1000"):
        load_tokens(DataSpec(corpus=str(tmp_path / "a.txt")))


def test_unwritable_cache_names_the_variable(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Set SUITE_CACHE"):
        load_tokens(DataSpec(corpus=str(folder)), cache=tmp_path / "file")


def test_split_streams() -> None:
    def documents() -> Iterator[str]:
        yield "a" * 99 + "\n"
        raise AssertionError("read ahead")

    assert next(iter(split_documents(documents(), [100] * 100))) == (False, "a" * 99 + "\n")
