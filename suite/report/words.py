"""How the report writes numbers, moments, rules and outcomes, so that every page says it the same way."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from results.records import digits_between

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
"""Stands where there is no value; the reason is said elsewhere on the page."""

VERDICTS: dict[str, tuple[str, str]] = {
    "reproduced": ("tick", "the rule written before the runs is met"),
    "direction reproduced": ("half", "the sign agrees, the size is not shown"),
    "differs": ("cross", "the rule is not met, and the interval says so"),
    "inconclusive": ("ring", "the interval leaves both open"),
    "not comparable": ("unequal", "what was run cannot speak for this claim"),
    "not run": ("dash", "no run here could decide it"),
}
"""Verdict -> (shape drawn beside the word, what the word means)."""

STATUSES: dict[str, tuple[str, str]] = {
    "ok": ("dot", "ran to its last step"),
    "oom": ("up", "ran out of memory"),
    "diverged": ("cross", "loss became non-finite or passed its limit"),
    "hung": ("pause", "gave no sign of life"),
    "timeout": ("clock", "passed its time limit"),
    "crashed": ("bang", "ended by an error"),
    "interrupted": ("half", "stopped from outside; resumes at the next run"),
    "skipped": ("dash", "could not start"),
    "not run": ("ring", "planned, never started"),
}

FIDELITIES: dict[str, str] = {
    "native": "the hardware's own arithmetic",
    "emulated": "quantise, dequantise, multiply in a wider type: numbers are the format's, speed is not",
    "simulated": "a schedule or a fake process group stood in for the machine",
    "predicted": "from a formula, not measured",
}

PROVENANCE: dict[str, str] = {
    "read": "read in the paper or its code",
    "secondary": "read in someone else's account of the paper",
    "recalled": "remembered, not checked",
    "derived": "worked out here from a formula that was read",
}

_UNITS = {"nats/token": "nats", "ratio": "", "1": "", "count": "", "bytes": ""}


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits, a true minus, and a power of ten past six places."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}".replace("-", MINUS)
    places = max(0, digits - 1 - math.floor(math.log10(size)))
    text = f"{value:,.{places}f}"
    return text.replace("-", MINUS).replace(",", "\N{THIN SPACE}")


def given(value: float) -> str:
    """A number that somebody wrote, as written: no zeros added."""
    return f"{value:g}".replace("-", MINUS)


def signed(value: float | None, digits: int = 3) -> str:
    """Like `number`, with a plus in front of what is above zero."""
    text = number(value, digits)
    return f"+{text}" if value is not None and value > 0 else text


def unit_text(unit: str) -> str:
    """A unit as it stands behind a number: short, with a thin space before it, or nothing."""
    short = _UNITS.get(unit, unit)
    return f"\N{NO-BREAK SPACE}{short}" if short else ""


def effect_text(value: float | None, unit: str, digits: int = 3) -> str:
    """An effect in its unit: ratios (`times`) bare with ×, bytes in binary units, everything else signed."""
    if value is None or math.isnan(value):
        return NOTHING
    if unit == "bytes":
        return byte_text(value)
    if unit == "times":
        return f"{number(value, digits)}×"
    return f"{signed(value, digits)}{unit_text(unit)}"


def interval_text(low: float | None, high: float | None) -> str:
    """`[low, high]`, or "" where no interval exists."""
    if low is None or high is None or (math.isinf(low) and math.isinf(high)):
        return ""
    digits = digits_between(low, high)
    return f"[{number(low, digits)}, {number(high, digits)}]"


def byte_text(value: float | None) -> str:
    """Bytes in binary units (KiB, MiB, GiB)."""
    if value is None or math.isnan(value):
        return NOTHING
    size = abs(value)
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{number(value / scale)}\N{NO-BREAK SPACE}{unit}"
    text = f"{value:.0f}" if value == round(value) else number(value)
    return f"{text}\N{NO-BREAK SPACE}B".replace("-", MINUS)


def count_text(value: float | None) -> str:
    """A large count in short form: 125M, 1.5B, 400k."""
    if value is None:
        return NOTHING
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:g}"


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 41 s, 6 min 12 s, 3 h 5 min."""
    if seconds is None or math.isnan(seconds):
        return NOTHING
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def moment(value: Any) -> str:
    """A stored time as `2025-11-29 18:53 UTC`; the store keeps UTC without a zone."""
    if value is None:
        return NOTHING
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if value.tzinfo is not None:
        value = value.astimezone(UTC)
    return f"{value:%Y-%m-%d %H:%M} UTC"


_NAMES = {
    "bf16": "BF16",
    "cpu": "CPU",
    "dq": "dQ",
    "fp32": "FP32",
    "int4": "INT4",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}
_NAMES |= {"as2b": "as²b", "flops": "FLOPs", "fp64": "FP64", "hsdp": "HSDP", "sgd": "SGD"}
_NAMES |= {"e4m3": "E4M3", "e5m2": "E5M2", "fp16": "FP16", "pytorch": "PyTorch", "wq": "W_Q"}


def from_id(identifier: str) -> str:
    """A claim's id as a sentence: `cpu-bf16-over-fp32` is "CPU BF16 over FP32"."""
    return " ".join(_NAMES.get(word, word) for word in identifier.strip().split("-"))


def heading(text: str) -> str:
    """`text` with a capital, unless it begins with a symbol's or a metric's name (w1, step_ms, m, dQ)."""
    first = text.partition(" ")[0]
    is_word = first.replace("-", "").isalpha() and first == first.lower() and (len(first) > 1 or first == "a")
    return text[:1].upper() + text[1:] if is_word else text


def plural(count: int, noun: str, many: str | None = None) -> str:
    """`1 run`, `3 runs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {many or noun + 's'}"


def join(words: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def labels_text(labels: Mapping[str, Any], separator: str = " · ") -> str:
    """The values of a selection, each with its axis where the value alone would not say which."""
    parts = []
    for axis, value in labels.items():
        if axis == "start_from" and value is None:
            parts.append("from scratch")
            continue
        values = value if isinstance(value, list | tuple) else [value]
        text = "/".join("none" if item is None else str(item) for item in values)
        bare = isinstance(values[0], str) and values[0] not in ("none", "") if values else False
        parts.append(text if bare else f"{axis.rsplit('.', 1)[-1]} {text}")
    return separator.join(parts)


def rule_text(rule: Mapping[str, Any], unit: str) -> str:
    """The decision rule of a claim in words, from the one field of its `expect` that is set."""
    suffix = "×" if unit == "times" else unit_text(unit)
    say = _bytes_given if unit == "bytes" else given
    for name, value in rule.items():
        if value is None:
            continue
        if name == "within":
            low, high = value
            if low == high:
                return f"exactly {say(low)}{suffix}"
            return f"between {say(low)} and {say(high)}{suffix}"
        words = {
            "above": "above",
            "below": "below",
            "at_least": "at least",
            "at_most": "at most",
            "non_inferior_within": "no worse by more than",
        }
        if name in words:
            return f"{words[name]} {say(value)}{suffix}"
    return "no rule"


def _bytes_given(value: float) -> str:
    """Bytes that somebody wrote: few as written, many in binary units."""
    return byte_text(value) if abs(value) >= 1024 else f"{given(value)}\N{NO-BREAK SPACE}B"


def slug(text: str) -> str:
    """`text` as a file name: ASCII letters, digits, dot, dash and underscore."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "unnamed"
