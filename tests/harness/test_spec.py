"""A run's key: the same question has the same key, any change of a number another one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from harness.spec import (
    AgeingSpec,
    DataSpec,
    LimitsSpec,
    ModelSpec,
    OptimizerSpec,
    PrecisionSpec,
    QuantizerSpec,
    RecipeSpec,
    RunSpec,
)

MODEL = {"name": "tiny", "num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 48}
FORWARD = QuantizerSpec(format="e4m3", scaling="delayed")
FP8 = PrecisionSpec(
    name="fp8",
    compute="bf16",
    recipe=RecipeSpec(activations=FORWARD, weights=FORWARD, gradients=QuantizerSpec(format="e5m2")),
)


def spec(**changes: Any) -> RunSpec:
    fields = {"model": ModelSpec(**MODEL), "precision": FP8, "tokens": 10_000}  # type: ignore[arg-type]
    return RunSpec(**{**fields, **changes})  # type: ignore[arg-type]


def changed(path: str, value: Any) -> RunSpec:
    """The spec with one field replaced, by dotted path."""
    content = spec().model_dump(mode="json")
    at = content
    *parents, last = path.split(".")
    for name in parents:
        at = at[name]
    assert at[last] != value
    at[last] = value
    return RunSpec.model_validate(content)


def test_the_key_of_a_spec_is_known() -> None:
    """Keys name stored results: this one may change only with the meaning of the spec."""
    assert spec().key == "283cce6eb25c968b"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", 1),
        ("tokens", 10_001),
        ("batch_size", 4),
        ("seq_len", 64),
        ("val_tokens", 0),
        ("threads", 2),
        ("device", "cuda"),
        ("task", "other"),
        ("format", "e4m3"),
        ("cast", "mxfp8:up"),
        ("tensor.rows", 8),
        ("attention.tile", 64),
        ("gemm.m", 8),
        ("pipeline.forward_ms", 10.0),
        ("reference", "gpt-dropout"),
        ("accumulation", 2),
        ("recompute", "full"),
        ("model.d_ffn", 64),
        ("model.ffn", "smooth-swiglu"),
        ("model.rope_theta", 5e5),
        ("precision.compute", "fp32"),
        ("precision.weights", "bf16"),
        ("precision.recipe", None),
        ("precision.recipe.activations.history", 1),
        ("precision.recipe.gradients.format", "e4m3"),
        ("precision.recipe.high_precision", ["head"]),
        ("optimizer.lr", 2e-3),
        ("optimizer.weight_decay", 0.0),
        ("optimizer.clip_norm", 0.0),
        ("data.corpus", "stdlib"),
        ("data.tokenizer", "bpe-512"),
        ("data.rare_token_every", 8),
        ("ageing.log2", 3),
        ("ageing.adam", "plain"),
        ("parallelism.dp", 2),
        ("parallelism.schedule", "gpipe"),
        ("model.moe", {"experts": 4}),
        ("probes", {"weights": 10}),
        ("fault", {"kind": "nan", "step": 1}),
    ],
)
def test_what_can_change_a_number_changes_the_key(path: str, value: Any) -> None:
    assert changed(path, value).key != spec().key


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("limits.time_s", 5.0),
        ("limits.memory_bytes", 1 << 30),
        ("limits.loss_above", 3.0),
        ("keep_checkpoint", True),
        ("checkpoint_every_s", 0.5),
        ("precision.paper", "micikevicius2022"),
        ("optimizer.paper", "fishman2024"),
    ],
)
def test_what_cannot_leaves_the_key(path: str, value: Any) -> None:
    assert changed(path, value).key == spec().key


def test_every_field_is_in_one_of_the_two_lists() -> None:
    """A new field of a run must be put to the question, whether it changes the key."""
    lists = (
        test_what_can_change_a_number_changes_the_key.pytestmark[0].args[1],  # type: ignore[attr-defined]
        test_what_cannot_leaves_the_key.pytestmark[0].args[1],  # type: ignore[attr-defined]
    )
    asked = {path.split(".")[0] for cases in lists for path, _ in cases}
    assert asked | {"start_from"} == set(RunSpec.model_fields)


def test_written_defaults_do_not_change_the_key() -> None:
    written = spec(seed=0, optimizer=OptimizerSpec(lr=1e-3), ageing=AgeingSpec(name="none"), data=DataSpec())
    assert written.key == spec().key
    assert RunSpec.model_validate(spec().model_dump(mode="json")).key == spec().key
    assert RunSpec.model_validate_json(spec().model_dump_json()) == spec()


def test_start_from_counts_by_what_it_trains() -> None:
    base = spec(seed=3)
    started = spec(start_from=base)
    assert started.key != spec().key
    assert spec(start_from=spec(seed=4)).key != started.key
    kept = base.model_copy(update={"keep_checkpoint": True, "limits": LimitsSpec(time_s=9)})
    assert spec(start_from=kept).key == started.key


def test_key_is_the_same_in_another_process_that_knows_no_torch() -> None:
    code = (
        "import sys, json; from harness.spec import RunSpec;"
        "print(RunSpec.model_validate(json.load(sys.stdin)).key, 'torch' in sys.modules)"
    )
    content = json.dumps(spec().model_dump(mode="json"))
    done = subprocess.run(
        [sys.executable, "-c", code], input=content, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [spec().key, "False"]


def test_number_of_steps_rounds_up() -> None:
    assert spec(tokens=1024, batch_size=8, seq_len=128).num_steps == 1
    assert spec(tokens=1025, batch_size=8, seq_len=128).num_steps == 2


def test_fidelity() -> None:
    assert spec().fidelity == "emulated"
    assert spec(precision=PrecisionSpec(name="bf16", compute="bf16")).fidelity == "native"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads 5 does not divide d_model 32"),
        ({"num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"d_head": 7}, "RoPE needs an even head width, got 7"),
        ({"num_heads": 32, "num_kv_heads": 32}, "RoPE needs an even head width, got 1"),
        ({"num_layers": 0}, "greater than or equal to 1"),
        ({"ffn": "relu"}, "smooth-swiglu"),
        ({"ffn": "smooth-swiglu", "bias": True}, "scales weights, not biases"),
        ({"layers": 3}, "Extra inputs are not permitted"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelSpec(**{**MODEL, **changes})


def test_head_width() -> None:
    assert ModelSpec(**MODEL).head_width == 8  # type: ignore[arg-type]
    assert ModelSpec(**MODEL, d_head=20).head_width == 20  # type: ignore[arg-type]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe", "bpe-319", "bpe-x", "bpe--5"])
def test_unknown_tokenizers(tokenizer: str) -> None:
    with pytest.raises(ValidationError, match="use bytes, or bpe-N with N >= 320"):
        DataSpec(tokenizer=tokenizer)


def test_specs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        spec().seed = 3
