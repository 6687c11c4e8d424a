"""docs/precision.md says what the code does: its table, its notation, its example's output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.precision.formats import FORMATS, FloatFormat, Format, IntFormat
from harness.spec.notation import _OPTIONS, _SCALINGS, SHORT_NAMES, parse_cast

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "precision.md"
TEXT = PAGE.read_text()

HEAD = (
    "format", "bits", "maximum", "smallest normal", "smallest positive", "step at 1", "beyond the maximum",
    "what it is",
)  # fmt: skip


def _power(value: float) -> str:
    exponent = value.hex().partition("p")[2]
    assert value == 2.0 ** int(exponent)
    return f"2^{int(exponent)}"


def table_row(fmt: Format) -> str:
    """A format's line of the table, from its description alone."""
    cells = [f"`{fmt.name}`", str(fmt.bits)]
    if isinstance(fmt, FloatFormat):
        special = "infinity" if fmt.has_infinity else "NaN" if fmt.has_nan else "none"
        cells += [
            f"{fmt.max:.7g}",
            _power(fmt.min_normal),
            _power(fmt.min_positive),
            _power(fmt.epsilon),
            special,
        ]
    elif isinstance(fmt, IntFormat):
        cells += [str(fmt.max), "", "", "1 × scale", "none"]
    else:
        cells += [f"{fmt.max:g}", "", "", f"{len(fmt.levels)} levels", "none"]
    return f"| {' | '.join([*cells, fmt.about])} |"


def test_the_table_is_that_of_the_code() -> None:
    lines = TEXT.splitlines()
    start = lines.index(f"| {' | '.join(HEAD)} |")
    assert lines[start + 2 : start + 2 + len(FORMATS)] == [table_row(fmt) for fmt in FORMATS.values()]
    assert not lines[start + 2 + len(FORMATS)].startswith("|")


def test_the_notation_is_complete() -> None:
    spans = set(re.findall(r"`([^`\n]+)`", TEXT))
    assert spans >= {*_SCALINGS}, {*_SCALINGS} - spans
    assert spans >= {*_OPTIONS}, {*_OPTIONS} - spans
    for short, long in SHORT_NAMES.items():
        assert f"| `{short}` | `{long}` |" in TEXT


def test_every_cast_on_the_page_is_one() -> None:
    formats = "|".join(sorted([*FORMATS, *SHORT_NAMES], key=len, reverse=True))
    found = set(re.findall(rf"`((?:{formats})(?::[^`\s]+)?)`", TEXT))
    assert len(found) > 25
    for text in found:
        parse_cast(text)
    for words in re.findall(r"--format (\S+)", TEXT):
        for text in words.split(","):
            parse_cast(text)


def test_the_example_gives_what_the_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (script,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    example = r"^```sh\n(suite quantize weights.*?)\n```\n+```\n(.*?)^```"
    ((command, shown),) = re.findall(example, TEXT, re.DOTALL | re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for line in ([sys.executable, "-c", script], [sys.executable, "-m", *command.split()]):
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == shown
