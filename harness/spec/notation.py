"""Casts in one word, as `suite quantize` and case files write them, and back.

    FORMAT[:SCALING][:OPTION]...          e4m3:current   e4m3:block128x128:pow2   int4:group128   e2m1:mx:up
    mxfp8  mxfp6  mxfp4  nvfp4  ...       short names of such casts

SCALING  none, static=S, delayed or delayed=H (steps of history), current, row, blockM or blockNxM (M elements
         along the contraction, N across), groupM (the same as blockM), mx, nvfp4
OPTION   pow2 (power-of-two scales), up, even, floor (rule of an MX scale), 2d (square blocks of mx and nvfp4),
         sr (stochastic rounding), away (ties away from zero), topK (K largest of each block kept), margin=K,
         special (overflow as the format's own cast does it), rhtN (random Hadamard transform of size N)
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import ValidationError

from harness.precision.formats import FloatFormat, Format, IntFormat, TableFormat, find_format
from harness.spec.precision import QuantizerSpec

SHORT_NAMES = {
    "mxfp8": "e4m3:mx",
    "mxfp8-e5m2": "e5m2:mx",
    "mxfp6": "e3m2:mx",
    "mxfp6-e2m3": "e2m3:mx",
    "mxfp4": "e2m1:mx",
    "mxint8": "int8:mx",
    "nvfp4": "e2m1:nvfp4",
}

_SCALINGS = ("none", "static=S", "delayed=H", "current", "row", "blockM", "blockNxM", "groupM", "mx", "nvfp4")
_OPTIONS = ("pow2", "up", "even", "floor", "2d", "sr", "away", "topK", "margin=K", "special", "rhtN")
_BLOCK = re.compile(r"(?:block|group)(?:(\d+)x)?(\d+)")
_COUNT = re.compile(r"(top|rht|margin=)(-?\d+)")
_WORDS: dict[str, dict[str, Any]] = {
    "pow2": {"power_of_two": True},
    "floor": {"scale_rounding": "floor"},
    "up": {"scale_rounding": "up"},
    "even": {"scale_rounding": "even"},
    "sr": {"rounding": "stochastic"},
    "away": {"rounding": "half_away"},
    "special": {"overflow": "special"},
}
_COUNTED = {"top": "keep_top", "rht": "hadamard", "margin=": "margin"}


def parse_cast(text: str) -> QuantizerSpec:
    """The cast that `text` stands for. Raises ValueError with the part that is wrong and what is allowed."""
    head, *words = text.strip().split(":")
    short = SHORT_NAMES.get(head)
    name, *implied = (short or head).split(":")
    try:
        fmt = find_format(name)
    except ValueError as error:
        raise ValueError(f"{error}; short names: {', '.join(SHORT_NAMES)}") from None
    fields: dict[str, Any] = {"format": name}
    parts = [*implied, *words]
    fields |= _default_scaling(fmt) if not parts or _is_option(parts[0]) else _scaling(parts.pop(0), text)
    given: set[str] = set()
    for word in parts:
        option = _option(word, text, fields)
        if given & option.keys():
            raise ValueError(f"cast {text!r}: {word!r} contradicts or repeats an option before it")
        given |= option.keys()
        _check_use(word, option, fields["scaling"], fmt, text)
        fields |= option
    try:
        return QuantizerSpec.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"][:1])
        raise ValueError(f"cast {text!r}: {where}{str(first['msg']).removeprefix('Value error, ')}") from None


def cast_name(spec: QuantizerSpec) -> str:
    """The word for a cast: `parse_cast(cast_name(spec)) == spec`."""
    words = [spec.format, _scaling_word(spec)]
    if spec.block is not None and spec.scaling in ("mx", "nvfp4"):
        words.append("2d")
    for word, fields in _WORDS.items():
        if word != "floor" and all(getattr(spec, key) == value for key, value in fields.items()):
            words.append(word)
    for prefix, field in _COUNTED.items():
        if getattr(spec, field):
            words.append(f"{prefix}{getattr(spec, field)}")
    name = ":".join(words)
    for short, long in SHORT_NAMES.items():
        if name == long or name.startswith(long + ":"):
            return short + name[len(long) :]
    return name


def _is_option(word: str) -> bool:
    return word in _WORDS or _COUNT.fullmatch(word) is not None


def _check_use(word: str, option: dict[str, Any], scaling: str, fmt: Format, text: str) -> None:
    """Raises ValueError for an option that would do nothing, lest a table name it."""
    of_data = ("delayed", "current", "row", "block")
    if "scale_rounding" in option and scaling != "mx":
        raise ValueError(f"cast {text!r}: {word!r} is a rule of MX scales, not of {scaling} scaling")
    if option.keys() & {"power_of_two", "margin"} and scaling not in of_data:
        raise ValueError(f"cast {text!r}: {word!r} works on {', '.join(of_data)} scaling, not on {scaling}")
    if "overflow" in option and not isinstance(fmt, FloatFormat):
        raise ValueError(f"cast {text!r}: {fmt.name} has no infinity or NaN; leave {word!r} away")


def _default_scaling(fmt: Format) -> dict[str, Any]:
    """What users of a format do when they say no more."""
    if isinstance(fmt, TableFormat):
        return {"scaling": "block", "block": (1, 64)}
    if isinstance(fmt, IntFormat):
        return {"scaling": "row"} if fmt.bits >= 8 else {"scaling": "block", "block": (1, 128)}
    wide = fmt.bits > 8 or not fmt.signed
    return {"scaling": "none" if wide else "current"}


def _scaling(word: str, text: str) -> dict[str, Any]:
    key, equals, value = word.partition("=")
    if match := _BLOCK.fullmatch(word):
        return {"scaling": "block", "block": (int(match[1] or 1), int(match[2]))}
    if word in ("none", "current", "row", "mx", "nvfp4", "delayed"):
        return {"scaling": word}
    try:
        if key == "static" and equals:
            return {"scaling": "static", "scale": float(value)}
        if key == "delayed" and equals:
            return {"scaling": "delayed", "history": int(value)}
    except ValueError:
        pass
    raise ValueError(_unknown("scaling", word, text, _SCALINGS))


def _option(word: str, text: str, fields: dict[str, Any]) -> dict[str, Any]:
    if word == "2d":
        if fields["scaling"] not in ("mx", "nvfp4"):
            raise ValueError(f"cast {text!r}: '2d' is of mx and nvfp4; write blockNxM")
        side = 32 if fields["scaling"] == "mx" else 16
        return {"block": (side, side)}
    if match := _COUNT.fullmatch(word):
        return {_COUNTED[match[1]]: int(match[2])}
    if word in _WORDS:
        return _WORDS[word]
    raise ValueError(_unknown("option", word, text, _OPTIONS))


def _unknown(what: str, word: str, text: str, allowed: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ";"
    return f"cast {text!r}: unknown {what} {word!r}{hint} allowed: {', '.join(allowed)}"


def _scaling_word(spec: QuantizerSpec) -> str:
    if spec.scaling == "static":
        short = f"{spec.scale:g}"
        return f"static={short if float(short) == spec.scale else repr(spec.scale)}"
    if spec.scaling == "delayed":
        return "delayed" if spec.history == 16 else f"delayed={spec.history}"
    if spec.scaling == "block":
        across, along = spec.block_shape or (1, 128)
        return f"block{along}" if across == 1 else f"block{across}x{along}"
    return spec.scaling
