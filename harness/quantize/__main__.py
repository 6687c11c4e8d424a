"""The process that measures a file's tensors, so that `suite` need not load torch.

    python -m harness.quantize < request

The request is one line of JSON: file, casts, tensors (a glob or null), along, seed, and outs (cast -> path) or null.
Stdin stays open as long as somebody waits for the answer: its end ends the work. Answers are JSON lines on stdout,
each with a key `k`: tensors, row, skip, total, written, error.
"""

from __future__ import annotations

import _thread
import contextlib
import fnmatch
import json
import math
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from harness.quantize.measure import Sums, Worst, measure
from harness.quantize.sinks import Sink, narrowest, open_sink
from harness.quantize.sources import BadFile, Entry, Source, open_source
from harness.spec.notation import parse_cast

WRONG, UNFIT, INTERRUPTED = 2, 4, 130
GRACE_S = 5.0


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"k": kind, **fields}), flush=True)


def work(request: dict[str, Any]) -> None:
    """Answer one request. Raises BadFile, and OSError with the path that could not be read or written."""
    path = Path(request["file"])
    source = open_source(path)
    chosen = _choose(source, path, request["tensors"])
    reasons = {entry.name: _why_skipped(entry, request["along"]) for entry in chosen}
    if all(reasons.values()):
        why = "; ".join(f"{name}: skipped, {reason}" for name, reason in [*reasons.items()][:5])
        raise BadFile(f"{path}: no tensor to measure ({why})")
    for out in map(Path, (request["outs"] or {}).values()):
        if out.exists() and any(out.samefile(read) for read in source.paths):
            raise BadFile(f"--out: {out} is a file of the input; name another")
    totals = {text: Sums() for text in request["casts"]}
    worsts: dict[str, Worst] = {}
    widened: dict[str, list[str]] = {text: [] for text in request["casts"]}
    with contextlib.ExitStack() as stack:
        sinks = {
            text: stack.enter_context(open_sink(Path(out), source.kind, source.entries, source.metadata))
            for text, out in (request["outs"] or {}).items()
        }
        say("tensors", tensors=[{"name": e.name, "shape": e.shape, "dtype": e.dtype} for e in chosen])
        for entry in source.entries:
            if entry.name in reasons and reasons[entry.name] is None:
                _measure_one(source, entry, request, totals, worsts, widened, sinks)
                continue
            if entry.name in reasons:
                reason = reasons[entry.name]
                say("skip", tensor=entry.name, dtype=entry.dtype, shape=entry.shape, reason=reason)
            if sinks:
                tensor = source.load(entry.name)
                for sink in sinks.values():
                    sink.add(entry.name, tensor)
    for text, sums in totals.items():
        say("total", cast=text, **_figures(sums, worsts.get(text)))
    for text, sink in sinks.items():
        say("written", cast=text, path=str(sink.path), as_fp32=widened[text])


def _choose(source: Source, path: Path, glob: str | None) -> list[Entry]:
    chosen = [e for e in source.entries if glob is None or fnmatch.fnmatchcase(e.name, glob)]
    if not chosen and glob is not None and source.entries:
        names = ", ".join(entry.name for entry in source.entries[:5])
        more = f" and {len(source.entries) - 5} more" if len(source.entries) > 5 else ""
        raise BadFile(f"{path}: no tensor matches --tensors {glob!r}; it has {names}{more}")
    if not chosen:
        raise BadFile(f"{path}: holds no tensors")
    return chosen


def _why_skipped(entry: Entry, along: int) -> str | None:
    if not entry.is_float:
        return f"{entry.dtype} is not a float"
    dims = len(entry.shape)
    if dims > 1 and not -dims <= along < dims:
        return f"has {dims} dimensions, from {-dims} to {dims - 1}; --along {along} is none of them"
    return None


def _measure_one(
    source: Source,
    entry: Entry,
    request: dict[str, Any],
    totals: dict[str, Sums],
    worsts: dict[str, Worst],
    widened: dict[str, list[str]],
    sinks: dict[str, Sink],
) -> None:
    x = source.load(entry.name)
    assert isinstance(x, Tensor)
    along = request["along"] if x.ndim > 1 else -1
    for text, sums in totals.items():
        one, worst, values = measure(x, parse_cast(text), along, request["seed"])
        sums.add(one)
        if worst is not None and (text not in worsts or worst.sqnr_db < worsts[text].sqnr_db):
            worsts[text] = Worst(worst.sqnr_db, f"{entry.name}{worst.place}")
        say(
            "row",
            tensor=entry.name,
            cast=text,
            shape=entry.shape,
            dtype=entry.dtype,
            **_figures(one, worst),
        )
        if text in sinks:
            kept = narrowest(values, x.dtype)
            if kept.dtype != x.dtype:
                widened[text].append(entry.name)
            sinks[text].add(entry.name, kept)


def _figures(sums: Sums, worst: Worst | None) -> dict[str, Any]:
    """The numbers of a row; JSON has no infinity, so an exact cast has no SQNR."""

    def share(count: int) -> float | None:
        return count / max(sums.num_nonzero, 1) if sums.num_elements else None

    return asdict(sums) | {
        "exact": sums.num_compared > 0 and sums.noise == 0,
        "sqnr_db": _finite(sums.sqnr_db),
        "clipped_fraction": share(sums.num_clipped),
        "flushed_fraction": share(sums.num_flushed),
        "bits_per_element": sums.bits_per_element,
        "worst_block": worst and {"place": worst.place, "sqnr_db": _finite(worst.sqnr_db)},
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _watch(stream: TextIO) -> None:
    """Stop the work when nobody waits for it any more."""
    while stream.read(1):
        pass
    _thread.interrupt_main(signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os._exit(INTERRUPTED)


def main() -> int:
    """Answer the request on stdin."""
    request = json.loads(sys.stdin.readline())
    # Not by SIGINT, which a shell's background jobs ignore: what was being written is cleared away on SIGTERM too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_watch, args=(sys.stdin,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            work(request)
    except BadFile as error:
        say("error", text=str(error), code=WRONG)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except MemoryError as error:
        say("error", text=f"{request['file']}: memory is too short ({error})", code=UNFIT)
        return UNFIT
    except OSError as error:
        where = (
            error.filename or (request["outs"] and next(iter(request["outs"].values()))) or request["file"]
        )
        # NumPy's own error of a short write has no number.
        word = error.strerror or f"could not be read or written whole ({error}); is the disk full?"
        say("error", text=f"{where}: {word}", code=UNFIT)
        return UNFIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
