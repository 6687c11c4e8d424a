"""Casts in one word: what is left out, what contradicts itself, and the way back."""

from __future__ import annotations

import pytest

from harness.spec import QuantizerSpec
from harness.spec.notation import cast_name, parse_cast


def test_the_scaling_may_be_left_out_before_an_option() -> None:
    assert parse_cast("e4m3:sr") == parse_cast("e4m3:current:sr")
    assert parse_cast("m7:sr") == parse_cast("m7:none:sr")
    assert parse_cast("int4:top2") == parse_cast("int4:block128:top2")
    assert parse_cast("mxfp8:up:sr") == parse_cast("e4m3:mx:sr:up")


@pytest.mark.parametrize("scale", [1e-3, 448.0, 1.0000001, 2.0**-119, 1 / 3])
def test_a_static_scale_comes_back_whole(scale: float) -> None:
    spec = QuantizerSpec(format="e4m3", scaling="static", scale=scale)
    assert parse_cast(cast_name(spec)) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("e4m3:up", "'up' is a rule of MX scales, not of current"),
        ("nvfp4:pow2", "'pow2' works on delayed, current, row, block scaling, not on nvfp4"),
        ("e4m3:none:margin=1", "'margin=1' works on"),
        ("int8:special", "int8 has no infinity or NaN"),
        ("mxfp8:up:even", "'even' contradicts or repeats"),
        ("bf16:sr:sr", "'sr' contradicts or repeats"),
        ("e4m3:2d", "unknown scaling '2d'"),
        ("e4m3:row:2d", "'2d' is of mx and nvfp4"),
        ("nf4:sr", "nearest level only"),
        ("e4m3:static=inf", r"2\^-120 to 2\^120, got inf"),
        ("e4m3:static=1e-300", r"2\^-120 to 2\^120, got 1e-300"),
        ("e4m3:static=0", "scale: "),
        ("e4m3:margin=65", "margin: "),
        ("int4:block8:top8", "less than the block's 8"),
    ],
)
def test_what_is_refused_says_why(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        parse_cast(text)
    assert text in str(raised.value)
