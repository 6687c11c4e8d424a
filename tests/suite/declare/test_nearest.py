"""The nearest possible mesh: of as many ranks, possible, and with as little changed as can be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.spec import AgeingSpec, ModelSpec, ParallelismSpec, PrecisionSpec, RunSpec
from harness.spec.parallelism import AXES
from suite.declare import presets
from suite.declare.meshes import mesh_problems, not_carried_out
from suite.declare.nearest import mesh_text, nearest_mesh

LLAMA = ModelSpec(name="t", num_layers=4, d_model=64, num_heads=4, num_kv_heads=4, d_ffn=96)


def make(mesh: dict[str, Any], model: ModelSpec = LLAMA, **fields: Any) -> RunSpec:
    return RunSpec(
        model=model,
        precision=PrecisionSpec(name="p"),
        parallelism=ParallelismSpec(**mesh),
        tokens=1,
        **{"batch_size": 16, "seq_len": 32, **fields},
    )


def test_a_possible_mesh_is_its_own_nearest() -> None:
    for mesh in (
        {"dp": 4},
        {"tp": 4, "sequence_parallel": True},
        {"pp": 2, "schedule": "zbv"},
        {"cp": 2, "zero": 3},
    ):
        spec = make(mesh)
        assert not mesh_problems(spec)
        found = nearest_mesh(spec, spec.parallelism.num_ranks)
        assert found is not None and mesh_text(found) == mesh_text(spec.parallelism)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 3, 4]) for _ in AXES]),
    zero=st.sampled_from([0, 1, 2, 3]),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]),
    microbatches=st.sampled_from([0, 1, 3, 8]),
)
def test_what_is_offered_is_possible(
    sizes: tuple[int, ...], zero: int, schedule: str, microbatches: int
) -> None:
    mesh = {
        **dict(zip(AXES, sizes, strict=True)),
        "zero": zero,
        "schedule": schedule,
        "microbatches": microbatches,
    }
    spec = make(mesh)
    found = nearest_mesh(spec, spec.parallelism.num_ranks)
    if found is None:
        return
    assert found.num_ranks == spec.parallelism.num_ranks
    assert not mesh_problems(spec.model_copy(update={"parallelism": found}))
    assert ParallelismSpec.model_validate(found.model_dump()) == found


def test_a_slip_of_billions_of_ranks_is_answered_too() -> None:
    found = nearest_mesh(make({"dp": 1_000_000_007, "tp": 3}, batch_size=3_000_000_021), 3_000_000_021)
    assert found is not None and mesh_text(found) == "{dp: 3000000021}"


def test_thousands_of_ranks() -> None:
    spec = make(
        {"dp": 64, "tp": 8, "pp": 8, "zero": 3},
        presets("models")["llama3-405b"],
        batch_size=4096,
        seq_len=8192,
    )
    found = nearest_mesh(spec, 4096)
    assert found is not None and mesh_text(found) == "{dp: 64, tp: 8, pp: 8, zero: 3}"
    found = nearest_mesh(spec.model_copy(update={"batch_size": 64}), 4096)
    assert found is not None and found.num_ranks == 4096


def test_what_is_offered_is_trained() -> None:
    """Casts go with data parallelism alone, so no cut of the model is offered where the batch does not divide."""
    spec = make({"dp": 2}).model_copy(
        update={"precision": presets("precisions")["fp8-current"], "batch_size": 9, "seq_len": 36}
    )
    assert mesh_problems(spec) and not not_carried_out(spec)
    assert nearest_mesh(spec, 2) is None  # tp, pp or cp of 2 would be possible, and are not trained
    plain = spec.model_copy(update={"precision": PrecisionSpec(name="p")})
    found = nearest_mesh(plain, 2)
    assert found is not None and found.tp == 2


def test_where_there_is_none() -> None:
    assert nearest_mesh(make({"dp": 7}), 7) is None
    assert nearest_mesh(make({"dp": 1}), 1) is not None


def test_text_is_what_a_case_may_write() -> None:
    mesh = ParallelismSpec(dp=2, zero=3, tp=2, sequence_parallel=True, name="x", ranks=4)
    assert mesh_text(mesh) == "{dp: 2, tp: 2, zero: 3, sequence_parallel: true}"
    assert mesh_text(ParallelismSpec()) == "single"


@pytest.mark.parametrize(
    ("mesh", "fields", "words"),
    [
        ({"dp": 2}, {"model": LLAMA.model_copy(update={"ffn": "smooth-swiglu"})}, "smooth-swiglu"),
        ({"dp": 2}, {"ageing": AgeingSpec(name="static-8", kind="static", log2=8)}, "ageing static-8"),
        ({"tp": 2}, {"precision": "fp8-current"}, "not with tp"),
        ({"dp": 2, "zero": 3, "pp": 2, "schedule": "zbv"}, {}, "zero 2 trains right"),
        ({"dp": 2, "zero": 2}, {"precision": "bf16-main-gradients"}, "no main gradients"),
    ],
)
def test_what_the_suite_does_not_train(mesh: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    fields = {
        key: presets("precisions")[value] if key == "precision" else value for key, value in fields.items()
    }
    spec = make(mesh).model_copy(update=fields)
    assert words in str(not_carried_out(spec))
    assert not_carried_out(spec.model_copy(update={"parallelism": ParallelismSpec()})) is None


def test_casts_go_with_data_parallelism() -> None:
    spec = make({"dp": 2, "zero": 3}).model_copy(update={"precision": presets("precisions")["fp8-current"]})
    assert not_carried_out(spec) is None


def test_every_preset_is_possible_for_a_model_that_divides() -> None:
    dense = ModelSpec(name="d", num_layers=8, d_model=64, num_heads=8, num_kv_heads=8, d_ffn=128)
    experts = ModelSpec(**{**dense.model_dump(), "moe": {"experts": 8}})
    for name, mesh in presets("parallelisms").items():
        spec = make({}, experts if mesh.ep > 1 else dense, batch_size=256, seq_len=64)
        assert not mesh_problems(spec.model_copy(update={"parallelism": mesh})), name
