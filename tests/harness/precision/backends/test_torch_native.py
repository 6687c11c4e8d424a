"""Native products against the emulation: the same operands bit for bit, the same results within accumulation error.

PyTorch multiplies FP8 operands scaled per tensor or row on a CPU too, in a plain loop: shapes are tiny. Products with
blocks need a GPU; here their operands and the layout of their scales are checked.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.precision.backends import products
from harness.precision.backends.errors import NotExpressibleError
from harness.precision.backends.operands import Operand, decoded, e2m1_codes, to_operand
from harness.precision.backends.products import arguments, multiply
from harness.precision.backends.torch_native import ScaledLinear, apply_torch
from harness.precision.cast import cast, dequantize
from harness.precision.linear import Linear, QuantizedLinear
from harness.spec import RecipeSpec
from harness.spec.notation import parse_cast

from .conftest import precision, recipe

TENSOR = ["e4m3:current", "e5m2:current", "e4m3:none", "e4m3:static=4", "e4m3:row", "e4m3:row:pow2"]
BLOCKS = [
    "e4m3:block128",
    "e4m3:block128x128:pow2",
    "mxfp8:up",
    "mxfp8:2d",
    "mxfp8-e5m2:even",
    "nvfp4",
    "nvfp4:2d",
]


def wide(rows: int = 200, cols: int = 168, seed: int = 0) -> Tensor:
    """Values over many binades, some rows zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(
        3 * torch.randn(rows, cols, generator=generator)
    )
    x[: rows // 6] = 0
    return x


@pytest.mark.parametrize("along", [1, 0])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("word", [*TENSOR, *BLOCKS])
def test_operands_are_the_emulations_bit_for_bit(word: str, rounding: str, along: int) -> None:
    spec = parse_cast(word).model_copy(update={"rounding": rounding})
    x = wide()
    result = cast(x, spec, along=along, seed=3 if rounding == "stochastic" else None, implementation="torch")
    emulated = dequantize(result) if along == 1 else dequantize(result).t()
    operand = to_operand(result, x, spec)
    assert operand.codes.dtype.itemsize == 1 and operand.codes.is_contiguous()
    assert emulated.abs().max() > 0 and torch.equal(decoded(operand), emulated)


@pytest.mark.parametrize("word", ["e4m3:current", "e4m3:block128x128", "mxfp8:2d", "nvfp4:2d"])
def test_square_blocks_turn(word: str) -> None:
    spec = parse_cast(word)
    x = wide()
    operand = to_operand(cast(x, spec, implementation="torch"), x, spec)
    assert torch.equal(decoded(operand.transposed()), decoded(operand).t())
    assert torch.equal(
        decoded(operand.transposed()), dequantize(cast(x.t(), spec, implementation="torch"))
    ), "and are the cast of the turned tensor"


def test_rows_do_not_turn() -> None:
    operand = to_operand(cast(wide(), parse_cast("e4m3:row")), wide(), parse_cast("e4m3:row"))
    with pytest.raises(ValueError, match="one contraction"):
        operand.transposed()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("e4m3:current", "e4m3:current"),
        ("e5m2:current", "e4m3:current"),
        ("e4m3:static=8", "e4m3:none"),
        ("e4m3:row", "e4m3:row"),
        ("e4m3:row", "e4m3:current"),
        ("e4m3:current", "e4m3:row"),
    ],
)
def test_product(left: str, right: str) -> None:
    """Also where the contraction, 40, has to be padded."""
    x, w = wide(24, 40), wide(16, 40, seed=1)
    a, b = (
        to_operand(cast(tensor, parse_cast(word)), tensor, parse_cast(word))
        for tensor, word in ((x, left), (w, right))
    )
    wanted = decoded(a).double() @ decoded(b).double().t()
    got = multiply(a, b)
    assert (got.dtype, got.shape) == (torch.bfloat16, (24, 16))
    assert torch.allclose(got.double(), wanted, rtol=2**-8, atol=1e-5 * float(wanted.abs().max()))


def test_unlike_schemes_have_no_product() -> None:
    x = wide(32, 128)
    row, mx = (to_operand(cast(x, parse_cast(word)), x, parse_cast(word)) for word in ("e4m3:row", "mxfp8"))
    with pytest.raises(NotExpressibleError, match="row and mx"):
        multiply(row, mx)


def linear(d_in: int = 32, d_out: int = 48, bias: bool = False) -> Linear:
    torch.manual_seed(1)
    return Linear(d_in, d_out, bias=bias)


def step(layer: Linear, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dw)."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(g.to(y.dtype))
    assert x.grad is not None and layer.weight.grad is not None
    return y.detach().float(), x.grad.float(), layer.weight.grad.float()


NATIVE = {
    "current": recipe("e4m3:current", gradients="e5m2:current"),
    "delayed": recipe("e4m3:delayed=4", gradients="e5m2:delayed=4"),
    "static": recipe("e4m3:static=2", gradients="e5m2:static=1024"),
    "none": recipe("e4m3:none", gradients="e5m2:none"),
    "row": recipe("e4m3:row"),
    "row-gw-hp": recipe(
        "e4m3:row:pow2", dgrad={"weights": parse_cast("e4m3:current:pow2")}, wgrad={"quantized": False}
    ),
    "stochastic": recipe("e4m3:current", gradients="e5m2:current:sr"),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spec", NATIVE.values(), ids=NATIVE.keys())
def test_a_training_step_is_the_emulations(spec: RecipeSpec, bias: bool) -> None:
    """Output and gradients over two steps (delayed scales then come from a history), tokens not a multiple of 16."""
    p = precision(spec)
    native, emulated = (
        ScaledLinear(linear(bias=bias), p, "a", 5),
        QuantizedLinear(linear(bias=bias), p, "a", 5),
    )
    for i in range(2):
        x, g = torch.randn(2, 9, 32), torch.randn(2, 9, 48) * 1e-3
        for got, wanted in zip(step(native, x, g), step(emulated, x, g), strict=True):
            assert got.shape == wanted.shape and wanted.abs().max() > 0
            tolerance = 2**-6 * wanted.abs().max()  # up to three roundings to BF16, in another order
            assert (got - wanted).abs().max() <= tolerance, i
        for layer in (native, emulated):
            for module in layer.modules():
                if hasattr(module, "end_step"):
                    module.end_step()
    plain = step(linear(bias=bias), x, g)[0]
    assert (step(native, x, g)[0] - plain).abs().max() > 0, "something was quantised"


def test_a_replaced_weight_and_an_input_without_gradient() -> None:
    p = precision(NATIVE["current"])
    native, emulated = ScaledLinear(linear(), p), QuantizedLinear(linear(), p)
    x, weight = torch.randn(16, 32), torch.randn(48, 32, requires_grad=True)
    y, wanted = native(x, weight), emulated(x, weight)
    assert torch.allclose(y.float(), wanted.float(), atol=2**-7 * float(wanted.detach().abs().max()))
    y.sum().backward()
    assert weight.grad is not None and native.weight.grad is None


def test_sizes_that_do_not_divide_stay_as_they_are() -> None:
    model = torch.nn.Sequential(linear(32, 48), linear(48, 24), linear(24, 32))
    weights = [layer.weight for layer in model]
    assert apply_torch(model, precision(NATIVE["current"])) == (["0"], ["1", "2"])
    assert [type(layer) for layer in model] == [ScaledLinear, Linear, Linear]
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 32)).sum().backward()
    assert all(weight.grad is not None for weight in weights)


def test_exceptions_stay_plain() -> None:
    model = torch.nn.ModuleDict({"head": linear(), "up": linear()})
    assert apply_torch(model, precision(NATIVE["row"])) == (["up"], [])


@pytest.mark.parametrize(
    ("word", "kinds", "layout"),
    [
        ("e4m3:block128", "BlockWise1x128", "NO_SWIZZLE"),
        ("e4m3:block128x128", "BlockWise128x128", "NO_SWIZZLE"),
        ("mxfp8", "BlockWise1x32", "SWIZZLE_32_4_4"),
        ("nvfp4", ["BlockWise1x16", "TensorWise"], ["SWIZZLE_32_4_4", "NO_SWIZZLE"]),
    ],
)
def test_layouts(word: str, kinds: Any, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ScaledBlas.cpp checks of scales, for the left operand [256, 384] and the right one [128, 384]; the call has
    the parameters that the installed `scaled_mm` has."""
    signature = inspect.signature(F.scaled_mm)
    seen: dict[str, Any] = {}

    def fake(*given: Any, **named: Any) -> Tensor:
        seen.update(signature.bind(*given, **named).arguments)
        return torch.zeros(256, 128, dtype=torch.bfloat16)

    monkeypatch.setattr(products.F, "scaled_mm", fake)
    left, right = (
        to_operand(cast(x, parse_cast(word)), x, parse_cast(word)) for x in (wide(256, 384), wide(128, 384))
    )
    multiply(left, right)

    def names(value: Any) -> Any:
        return [member.name for member in value] if isinstance(value, list) else value.name

    assert names(seen["scale_recipe_a"]) == names(seen["scale_recipe_b"]) == kinds
    assert names(seen["swizzle_a"]) == names(seen["swizzle_b"]) == layout
    packing = 2 if word == "nvfp4" else 1
    assert seen["mat_a"].shape == (256, 384 // packing) and seen["mat_a"].is_contiguous()
    assert seen["mat_b"].shape == (384 // packing, 128) and seen["mat_b"].t().is_contiguous()
    scale = seen["scale_a"]
    if word == "e4m3:block128":
        assert (scale.shape, scale.stride(), scale.dtype) == ((256, 3), (1, 256), torch.float32)
    elif word == "e4m3:block128x128":
        assert (scale.shape, scale.stride()) == ((4, 2), (1, 4)), (
            "3 blocks of the contraction, rounded up to 4"
        )
    else:
        block, dtype = (32, torch.float8_e8m0fnu) if word == "mxfp8" else (16, torch.float8_e4m3fn)
        tiles = scale[0] if word == "nvfp4" else scale
        columns = -(-384 // block // 4) * 4
        assert (tiles.shape, tiles.dtype) == ((256 * columns,), dtype)
        if word == "nvfp4":
            assert scale[1].dtype == torch.float32 and scale[1].numel() == 1


def test_padding_of_blocks_adds_nothing() -> None:
    """A contraction of 200 tokens in blocks of 128, 32 and 16."""
    for word in ("e4m3:block128", "mxfp8", "nvfp4"):
        x = wide(32, 200)
        operand = to_operand(cast(x, parse_cast(word)), x, parse_cast(word))
        multiple = products.MULTIPLES[operand.scheme]
        padded = products._padded(operand, -200 % multiple)
        assert padded.codes.shape[1] % multiple == 0
        assert torch.equal(decoded(padded)[:, :200], decoded(operand)) and not decoded(padded)[:, 200:].any()


def test_e2m1_codes_are_those_of_the_format() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert e2m1_codes(torch.cat((values, -values))).tolist() == [*range(16)]
    packed = products._packed(torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8))
    assert packed.view(torch.uint8).tolist() == [[0x21, 0xF3]], "the first code is the low one"


def test_e8m0_codes() -> None:
    powers = torch.tensor([2.0**-127, 2.0**-126, 0.5, 1.0, 2.0**127])
    assert products.to_e8m0(powers).view(torch.uint8).tolist() == [0, 1, 126, 127, 254]


def test_arguments_are_for_blocks() -> None:
    square = Operand(torch.zeros(128, 512, dtype=torch.uint8), torch.ones(1, 4), "block", (128, 128))
    assert arguments(square)[0].shape == (4, 1)


@pytest.mark.parametrize("word", ["mxfp8", "mxfp8:up", "mxfp8-e5m2:up"])
def test_mx_operands_are_torchaos(word: str) -> None:
    """Codes, E8M0 scales and their order in memory as torchao hands them to the same product."""
    formats = "torchao.prototype.mx_formats"
    config, tensors, utils = (
        pytest.importorskip(f"{formats}.{name}") for name in ("config", "mx_tensor", "utils")
    )
    spec = parse_cast(word)
    x = torch.randn(192, 256, generator=torch.Generator().manual_seed(0))
    operand = to_operand(cast(x, spec), x, spec)
    modes = config.ScaleCalculationMode
    mode = modes.RCEIL if spec.scale_rounding == "up" else modes.FLOOR
    scale, codes = tensors.to_mx(x, operand.codes.dtype, 32, mode)
    assert torch.equal(operand.codes.view(torch.uint8), codes.view(torch.uint8))
    tiles, _, _ = arguments(operand)
    assert torch.equal(tiles.view(torch.uint8), utils.to_blocked(scale.view(torch.uint8)).flatten())
