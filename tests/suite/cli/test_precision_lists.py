"""`suite list precisions`, `formats` and `casts`."""

from __future__ import annotations

from typing import Any

from harness.precision.formats import FORMATS
from harness.spec import notation
from suite.cli.precision_rows import OPTIONS, SCALINGS
from suite.declare import presets


def rows(suite_command: Any, kind: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in suite_command("list", kind, "--json").data}


def test_precisions_say_what_they_need(suite_command: Any) -> None:
    found = rows(suite_command, "precisions")
    assert found.keys() == presets("precisions").keys()
    assert all(row.keys() == {"name", "about", "paper", "native"} and row["native"] for row in found.values())
    assert found["fp32"]["native"] == "torch: any device"
    assert "compute capability 8.9 or above" in found["fp8-current"]["native"]
    assert found["fp8-delayed"]["paper"] == "tweo2025"


def test_formats_show_their_constants(suite_command: Any) -> None:
    found = rows(suite_command, "formats")
    assert found.keys() == FORMATS.keys()
    constants = ("bits", "max", "min_normal", "min_positive", "epsilon", "specials")
    assert [found["e4m3"][name] for name in constants] == [8, 448, 2**-6, 2**-9, 0.125, "NaN"]
    assert [found["e5m2"][name] for name in constants] == [8, 57344, 2**-14, 2**-16, 0.25, "Inf NaN"]
    assert found["fp16"]["max"] == 65504 and found["e2m1"]["max"] == 6 and found["int4"]["max"] == 7
    assert abs(found["e4m3"]["binades"] - 17.81) < 0.01
    table = suite_command("list", "formats").stdout
    assert "65504" in table and table.count("\n") == len(FORMATS) + 1


def test_casts_are_those_of_the_notation(suite_command: Any) -> None:
    assert (*SCALINGS,) == notation._SCALINGS
    assert (*OPTIONS,) == notation._OPTIONS
    printed = suite_command("list", "casts", "--json").data
    assert {row["name"] for row in printed if row["kind"] == "short name"} == notation.SHORT_NAMES.keys()
    assert {row["kind"] for row in printed} == {"short name", "scaling", "option", "notation"}
