"""Numbers, rules and moments as the pages write them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest

from suite.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0123456, "0.0123"),
        (-0.5, "−0.500"),
        (12345.6, "12\N{THIN SPACE}346"),
        (1.5e9, "1.5e9"),
        (-2.5e-7, "−2.5e−7"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.05, "nats/token", "+0.0500\N{NO-BREAK SPACE}nats"),
        (-3, "dB", "−3.00\N{NO-BREAK SPACE}dB"),
        (1.34, "times", "1.34×"),
        (3 * 2**20, "bytes", "3.00\N{NO-BREAK SPACE}MiB"),
        (None, "dB", "–"),
    ],
)
def test_effect(value: float | None, unit: str, text: str) -> None:
    assert words.effect_text(value, unit) == text


@pytest.mark.parametrize(
    ("rule", "unit", "text"),
    [
        ({"above": 0.05, "below": None}, "nats/token", "above 0.05\N{NO-BREAK SPACE}nats"),
        ({"non_inferior_within": 0.01}, "", "no worse by more than 0.01"),
        ({"within": [-0.002, 0.002]}, "", "between −0.002 and 0.002"),
        ({"at_least": 1.2}, "times", "at least 1.2×"),
        ({}, "", "no rule"),
    ],
)
def test_rule(rule: dict[str, object], unit: str, text: str) -> None:
    assert words.rule_text(rule, unit) == text


def test_moments_are_utc() -> None:
    naive = datetime(2025, 11, 29, 18, 53, 7)
    assert words.moment(naive) == "2025-11-29 18:53 UTC"
    there = datetime(2025, 11, 29, 19, 53, tzinfo=timezone(timedelta(hours=1)))
    assert words.moment(there) == "2025-11-29 18:53 UTC"
    assert words.moment(datetime(2025, 1, 2, tzinfo=UTC).isoformat()) == "2025-01-02 00:00 UTC"
    assert words.moment(None) == "–"


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3.20 s"), (372, "6 min 12 s"), (11100, "3 h 5 min"), (None, "–")]
)
def test_duration(seconds: float | None, text: str) -> None:
    assert words.duration(seconds) == text


def test_labels_name_their_axis_where_the_value_alone_would_not_do() -> None:
    labels = {"precision": "fp8-delayed", "ageing": "none", "optimizer.weight_decay": 0.1, "start_from": None}
    assert words.labels_text(labels) == "fp8-delayed · ageing none · weight_decay 0.1 · from scratch"
    assert words.labels_text({"ageing": ["static-16", "none"]}) == "static-16/none"


def test_slug_keeps_file_names_plain() -> None:
    assert words.slug("../../etc/passwd") == "etc-passwd"
    assert words.slug("a b/ü") == "a-b"
    assert words.slug("///") == "unnamed"


def test_headings_keep_names_as_they_are_written() -> None:
    assert words.heading(words.from_id("cpu-bf16-over-fp32")) == "CPU BF16 over FP32"
    assert words.heading(words.from_id("dq-is-mostly-error")) == "dQ is mostly error"
    assert words.heading(words.from_id("current-scaling-holds")) == "Current scaling holds"
    assert [
        words.heading(text) for text in ("m = beta r_m", "w1 and w2", "a tie", "feed-forward output")
    ] == [
        "m = beta r_m",
        "w1 and w2",
        "A tie",
        "Feed-forward output",
    ]
