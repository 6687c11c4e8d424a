"""`suite quantize FILE`: how would these tensors fare in other number formats?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from suite.cli.failures import WrongCommand
from suite.cli.output import JsonOption, print_json, say

DEFAULT_CASTS = ["e4m3", "mxfp8", "nvfp4", "int4"]
COLUMNS = (
    "tensor",
    "shape",
    "dtype",
    "format",
    "SQNR dB",
    "clipped",
    "flushed",
    "bits",
    "worst dB",
    "worst block",
)
_LEFT = (0, 1, 2, 3, 9)


def quantize(
    file: Annotated[
        Path,
        typer.Argument(
            help=".npy, .npz, .safetensors, a folder of .safetensors, or a checkpoint's index JSON."
        ),
    ],
    format: Annotated[
        list[str] | None,
        typer.Option(
            "--format", metavar="CAST,...", help="Casts to try; repeatable. Default: e4m3,mxfp8,nvfp4,int4."
        ),
    ] = None,
    tensors: Annotated[
        str | None, typer.Option("--tensors", metavar="GLOB", help="Only tensors whose name matches.")
    ] = None,
    along: Annotated[
        int,
        typer.Option("--along", metavar="DIM", help="Contraction dimension, along which scale blocks lie."),
    ] = -1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of stochastic rounding.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR|FILE", help="Write the dequantised tensors: one file a cast."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Cast a file's tensors to number formats and print how they fare.

    Per tensor and cast: SQNR in dB; the fractions of non-zero elements that were clipped and that became zero; bits an
    element takes, its scales included; and the block of the cast's own with the lowest SQNR. Tensors are read one at a
    time, so a checkpoint may be larger than memory.

    A cast is FORMAT[:SCALING][:OPTION]..., such as e4m3:current, e4m3:block128x128:pow2, int4:group128, e2m1:mx:up,
    m7:none:sr; or a short name: mxfp8, mxfp6, mxfp4, mxint8, nvfp4. docs/precision.md lists them all.

    \b
    Examples:
      suite quantize model.safetensors
      suite quantize weights.npy --format mxfp8,nvfp4,e4m3:current,int4:group128
      suite quantize checkpoint/ --format mxfp4 --tensors '*mlp*weight' --json
      suite quantize weights.npz --format nvfp4:sr --seed 1 --out dequantised/
    """
    from suite.quantize import QuantizeError, Request, ask, check_file, output_paths, parse_casts

    try:
        casts = parse_casts(format or DEFAULT_CASTS)
        check_file(file)
        request = Request(file, casts, tensors, along, seed, output_paths(file, casts, out))
        # Closed at once, whatever happens: the worker must not outlive an interrupted command.
        with contextlib.closing(ask(request)) as answers:
            if json:
                print_json(_collect(answers, file))
            else:
                _print_rows(answers, casts)
    except QuantizeError as error:
        raise WrongCommand(f"suite quantize: {_printable(str(error))}") from None


def _print_rows(answers: Iterator[dict[str, Any]], casts: Sequence[str]) -> None:
    """Each row as soon as it is known, in columns whose widths the headers of the file give; totals of several."""
    widths: list[int] = []
    alone = False
    for answer in answers:
        if answer["k"] == "tensors":
            alone = len(answer["tensors"]) == 1
            widths = _widths(answer["tensors"], casts)
            _print_line(COLUMNS, widths)
        elif answer["k"] in ("row", "total"):
            if alone and answer["k"] == "total":
                continue
            _print_line(_cells(answer), widths)
            _warn(answer)
        else:
            _talk(answer)


def _collect(answers: Iterator[dict[str, Any]], file: Path) -> dict[str, Any]:
    """All answers as one value; on a terminal a count runs meanwhile."""
    result: dict[str, Any] = {"file": str(file), "rows": [], "totals": [], "skipped": [], "written": []}
    lists = {"row": "rows", "total": "totals", "skip": "skipped", "written": "written"}
    count, done = 0, set[str]()
    for answer in answers:
        kind = answer.pop("k")
        if kind == "tensors":
            count = len(answer["tensors"])
            continue
        result[lists[kind]].append(answer)
        if kind in ("row", "skip") and sys.stderr.isatty():
            done.add(answer["tensor"])
            print(f"\r{len(done)} of {count} tensors", end="", file=sys.stderr, flush=True)
    if done:
        say("")
    return result


def _widths(tensors: Sequence[dict[str, Any]], casts: Sequence[str]) -> list[int]:
    names = [_printable(tensor["name"]) for tensor in tensors]
    shapes = [_shape(tensor["shape"]) for tensor in tensors]
    dtypes = [tensor["dtype"] for tensor in tensors]
    contents = (names, shapes, dtypes, casts)
    widths = [
        max(len(text) for text in (title, *column)) for title, column in zip(COLUMNS, contents, strict=False)
    ]
    return [max(widths[0], len("total")), *widths[1:], *(max(8, len(title)) for title in COLUMNS[4:])]


def _printable(text: str) -> str:
    """A name as a terminal may see it: no line breaks and no escape sequences; quotes where it is empty."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) or "''"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def _cells(answer: dict[str, Any]) -> tuple[str, ...]:
    total = answer["k"] == "total"
    worst = answer["worst_block"] or {}
    return (
        "total" if total else _printable(answer["tensor"]),
        f"{answer['num_elements']:,}" if total else _shape(answer["shape"]),
        "" if total else answer["dtype"],
        answer["cast"],
        "exact" if answer["exact"] else _number(answer["sqnr_db"], ".2f"),
        _number(answer["clipped_fraction"], ".3%"),
        _number(answer["flushed_fraction"], ".3%"),
        _number(answer["bits_per_element"], ".4g"),
        _number(worst.get("sqnr_db"), ".2f"),
        _printable(worst.get("place", "-")),
    )


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _print_line(cells: Sequence[str], widths: Sequence[int]) -> None:
    padded = (
        cell.ljust(width) if i in _LEFT else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    print("  ".join(padded).rstrip(), flush=True)


def _warn(answer: dict[str, Any]) -> None:
    if answer["k"] == "row" and (answer["num_nonfinite"] or answer["num_lost"]):
        say(
            f"{_printable(answer['tensor'])}: {answer['num_nonfinite']} elements are NaN or infinite; "
            f"{answer['cast']} makes {answer['num_lost']} others so; all of them are left out of the SQNR"
        )


def _talk(answer: dict[str, Any]) -> None:
    if answer["k"] == "skip":
        say(f"{_printable(answer['tensor'])}: skipped, {answer['reason']}")
    elif answer["k"] == "written":
        wide = len(answer["as_fp32"])
        why = f"; {wide} of its tensors in FP32, as their own dtype cannot hold the values" if wide else ""
        say(f"{answer['path']} written{why}")
