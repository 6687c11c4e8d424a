"""A run's fidelity is that of the backend which ran it, as its worker noted, however often it is read."""

from __future__ import annotations

from typing import Any

import pytest

from results.store import Store

RECIPE = {"precision": {"recipe": {"weights": {}}}}


@pytest.mark.parametrize(
    ("requested", "noted", "stored"),
    [
        ("emulated", "torch", "native"),
        ("emulated", "transformer_engine", "native"),
        ("emulated", "emulated", "emulated"),
        ("native", "emulated", "emulated"),
        ("native", None, "native"),
        ("emulated", None, "emulated"),
        (None, None, "emulated"),
        (None, "torch", "native"),
        ("emulated", "something else", "emulated"),
        ("emulated", ["torch"], "emulated"),
    ],
)
def test_the_note_decides(run_folder: Any, store: Store, requested: Any, noted: Any, stored: str) -> None:
    more = {} if requested is None else {"fidelity": requested}
    folder = run_folder(spec=RECIPE, **more)
    if noted is not None:
        folder.writer.note("backend", noted, "because")
    store.ingest(folder.train(range(1, 3)).path)
    assert store.runs()[0].fidelity == stored
    assert not store.ingest(folder.path), "reading again changes nothing"
    assert store.runs()[0].fidelity == stored


def test_what_was_requested_holds_until_the_worker_says_more(run_folder: Any, store: Store) -> None:
    folder = run_folder(spec=RECIPE, fidelity="emulated")
    store.ingest(folder.train(range(1, 2), status=None).path)
    assert store.runs()[0].fidelity == "emulated"
    folder.writer.note("backend", "torch", "the device has 9.0")
    folder.writer.end("ok")
    assert store.ingest(folder.path)
    row = store.runs()[0]
    assert (row.fidelity, row.notes["backend"]) == (
        "native",
        {"value": "torch", "reason": "the device has 9.0"},
    )
    assert not store.ingest(folder.path)


def test_a_note_of_the_request_is_no_note_of_the_worker(run_folder: Any, store: Store) -> None:
    auto = {"backend": {"value": "torch", "reason": "expected"}}
    store.ingest(run_folder(spec=RECIPE, fidelity="emulated", auto=auto).train(range(1, 2)).path)
    assert store.runs()[0].fidelity == "emulated"


def test_an_emulated_part_makes_the_run_emulated(run_folder: Any, store: Store) -> None:
    folder = run_folder(spec=RECIPE, fidelity="emulated")
    folder.writer.note("fidelity", "emulated", "attention is emulated")
    folder.writer.note("backend", "torch", "the device has 9.0")
    store.ingest(folder.train(range(1, 3)).path)
    assert store.runs()[0].fidelity == "emulated"
