"""The entry point: which implementation runs, what it refuses, and that compiling the twin changes nothing."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from harness.precision import cast as module
from harness.precision import graph_operator
from harness.precision.cast import CastResult, cast, dequantize, implementation_for
from harness.spec import QuantizerSpec
from harness.spec.notation import parse_cast

X = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
CURRENT = parse_cast("e4m3:current")


@pytest.fixture
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A kernel that answers for E4M3 and leaves all else."""

    def answer(x: Tensor, spec: QuantizerSpec, **_: object) -> CastResult | None:
        return CastResult(x * 0 + 7, None, None) if spec.format == "e4m3" else None

    kernel = types.SimpleNamespace(available=lambda: True, reason=lambda: "built", cast_tensor=answer)
    monkeypatch.setattr(
        module, "_kernel", lambda name: (kernel if kernel.available() else None, kernel.reason())
    )
    yield kernel


def test_the_kernel_runs_where_it_covers_the_cast(fake_kernel: types.SimpleNamespace) -> None:
    assert implementation_for("cpu") == ("cpp", "built")
    assert implementation_for("cuda") == ("triton", "built")
    assert (cast(X, CURRENT).values == 7).all()
    assert (cast(X, CURRENT, implementation="cpp").values == 7).all()
    left = cast(X, parse_cast("e5m2:current")).values
    assert torch.equal(left, cast(X, parse_cast("e5m2:current"), implementation="torch").values)
    assert not (cast(X, CURRENT, implementation="torch").values == 7).all()


def test_without_a_kernel_the_twin_runs_and_says_why(fake_kernel: types.SimpleNamespace) -> None:
    fake_kernel.available, fake_kernel.reason = lambda: False, lambda: "no compiler"
    assert implementation_for("cpu") == ("torch", "no compiler")
    assert not (cast(X, CURRENT).values == 7).all()
    with pytest.raises(ValueError, match=r"no cpp kernel here: no compiler"):
        cast(X, CURRENT, implementation="cpp")
    assert implementation_for("meta")[0] == "torch"


def test_the_reason_is_a_sentence_part() -> None:
    for device in ("cpu", "cuda"):
        name, why = implementation_for(device)
        assert name in ("torch", "cpp", "triton")
        assert why


def test_arguments_that_do_not_fit_are_refused() -> None:
    one = torch.ones(())
    for arguments, message in (
        ((torch.ones(3), CURRENT, {}), "matrix"),
        ((torch.ones(3, 3, dtype=torch.int32), CURRENT, {}), "matrix"),
        ((X, CURRENT, {"along": 2}), "along"),
        ((X, CURRENT, {"carrier": torch.float16}), "carrier"),
        ((X, parse_cast("mxfp8"), {"scale": one}), "scale"),
        ((X, CURRENT, {"scale": torch.ones(2)}), "scale"),
        ((X, parse_cast("e4m3:row"), {"amax": one}), "amax"),
        ((X, parse_cast("e4m3:current:sr"), {}), "seed"),
        ((X, CURRENT, {"implementation": "numba"}), "numba"),
    ):
        x, spec, more = arguments  # type: ignore[misc]
        with pytest.raises(ValueError, match=message):
            cast(x, spec, **more)  # type: ignore[arg-type]


def test_no_gradient_and_the_input_is_left_alone() -> None:
    x = X.clone().requires_grad_()
    result = cast(x, CURRENT)
    assert not result.values.requires_grad
    assert torch.equal(x, X)
    none = cast(X, parse_cast("e4m3:none"), implementation="torch")
    assert none.values.data_ptr() != X.data_ptr()
    same_format = cast(X, parse_cast("fp32:none"), implementation="torch")
    assert same_format.values.data_ptr() != X.data_ptr()


def test_dequantize_places_the_factor() -> None:
    values = torch.ones(2, 3)
    rows, columns = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])
    assert dequantize(CastResult(values, None, None)).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert dequantize(CastResult(values, rows, None)).tolist() == [[2, 2, 2], [3, 3, 3]]
    assert dequantize(CastResult(values, columns, None, along=0)).tolist() == [[1, 2, 3], [1, 2, 3]]
    assert dequantize(CastResult(values.bfloat16(), torch.tensor(0.1), None)).dtype == torch.float32


@pytest.mark.slow
def test_the_twin_compiles_whole_to_the_same_bits() -> None:
    """The common casts in one graph, without a break."""
    words = (
        "e4m3:delayed",
        "e4m3:current",
        "mxfp8",
        "e4m3:block128",
        "e4m3:block128x128",
        "nvfp4",
        "bf16:none:sr",
    )
    specs = [parse_cast(word) for word in words]

    def casts(x: Tensor, scale: Tensor) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for spec in specs:
            given = scale if spec.scaling == "delayed" else None
            result = cast(x, spec, scale=given, seed=3, carrier=torch.bfloat16, implementation="torch")
            found += [result.values, result.inverse, result.amax]
        return found

    scale = torch.tensor(100.0)
    compiled = torch.compile(casts, fullgraph=True)(X, scale)
    for wanted, got in zip(casts(X, scale), compiled, strict=True):
        assert (wanted is got) if wanted is None or got is None else torch.equal(wanted, got)


def test_the_operators_text_keeps_what_the_cast_reads() -> None:
    for word in (
        "e4m3:static=0.3",
        "e5m2:current:pow2:margin=2",
        "mxfp4:even:2d:sr",
        "int4:group8:top2",
        "e4m3:row:special",
    ):
        spec = parse_cast(word)
        assert graph_operator.spec_of(graph_operator.text(spec)) == spec
    history = parse_cast("e4m3:delayed=7")
    assert graph_operator.spec_of(graph_operator.text(history)).scaling == "delayed"


@pytest.mark.slow
def test_a_kernel_is_one_operator_of_a_compiled_graph() -> None:
    """Where there is a kernel, compiled casts equal eager ones, with and without an inverse, per row and seeded."""
    if implementation_for("cpu")[0] != "cpp":
        pytest.skip(implementation_for("cpu")[1])
    specs = [parse_cast(word) for word in ("e4m3:delayed", "e5m2:row", "mxfp8:up", "bf16:none:sr")]

    def casts(x: Tensor, scale: Tensor) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for spec in specs:
            result = cast(x, spec, scale=scale if spec.scaling == "delayed" else None, seed=3, along=0)
            found += [result.values * 2, result.inverse, result.amax]
        return found

    graphs: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph.code)
        return graph.forward

    scale = torch.tensor(100.0)
    compiled = torch.compile(casts, fullgraph=True, backend=look)(X, scale)
    assert graphs[0].count("harness.quantize") == len(specs)
    for wanted, got in zip(casts(X, scale), compiled, strict=True):
        assert (wanted is got) if wanted is None or got is None else torch.equal(wanted, got)
    for spec in specs:
        given = (
            X,
            graph_operator.text(spec),
            0,
            True,
            scale if spec.scaling == "delayed" else None,
            None,
            3,
            False,
        )
        torch.library.opcheck(graph_operator.quantize, given, test_utils=("test_schema", "test_faketensor"))
