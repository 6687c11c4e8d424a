"""Which backend, and why; and what each recipe needs. No GPU is asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from harness.precision.backends.errors import BackendError
from harness.precision.backends.requirements import Need, native_requirements, parse_version
from harness.precision.backends.select import choose_backend
from harness.spec import PrecisionSpec, RecipeSpec

from .conftest import cast, nvfp4, precision, recipe

TORCH = {"torch": "2.13.0", "cuda": "13.0"}
BOTH = {**TORCH, "transformer-engine": "2.9.0"}
CURRENT = recipe("e4m3:current", gradients="e5m2:current")
BLOCK = recipe("e4m3:block128:pow2", "e4m3:block128x128:pow2")
MX = recipe("mxfp8:up")
Device = tuple[str, tuple[int, int] | None]
ADA, HOPPER, BLACKWELL, CONSUMER = (("cuda", c) for c in ((8, 9), (9, 0), (10, 0), (12, 0)))
AMPERE, CPU = ("cuda", (8, 0)), ("cpu", None)


@pytest.mark.parametrize(
    ("spec", "device", "packages", "backend"),
    [
        (CURRENT, ADA, TORCH, "torch"),
        (CURRENT, HOPPER, BOTH, "torch"),
        (CURRENT, AMPERE, BOTH, "emulated"),
        (CURRENT, CPU, BOTH, "emulated"),
        (CURRENT, HOPPER, {"torch": "2.13.0+rocm6.4"}, "emulated"),
        (recipe("e4m3:static=2"), HOPPER, BOTH, "torch"),
        (recipe("e4m3:none"), HOPPER, BOTH, "torch"),
        (recipe("e4m3:row"), HOPPER, BOTH, "torch"),
        (recipe("e4m3:row", "e4m3:current"), HOPPER, TORCH, "torch"),
        (BLOCK, HOPPER, TORCH, "torch"),
        (BLOCK, HOPPER, {**BOTH, "cuda": "12.8"}, "emulated"),
        (BLOCK, BLACKWELL, TORCH, "emulated"),
        (BLOCK, BLACKWELL, BOTH, "transformer_engine"),
        (recipe("e4m3:block128", "e4m3:block128x128"), BLACKWELL, BOTH, "emulated"),
        (recipe("e4m3:block128", "e4m3:block128x128"), HOPPER, BOTH, "torch"),
        (MX, HOPPER, BOTH, "emulated"),
        (MX, BLACKWELL, BOTH, "torch"),
        (MX, CONSUMER, BOTH, "emulated"),
        (nvfp4(), HOPPER, BOTH, "emulated"),
        (nvfp4(), BLACKWELL, TORCH, "torch"),
        (nvfp4(), CONSUMER, BOTH, "transformer_engine"),
        (nvfp4(), CONSUMER, {**TORCH, "transformer-engine": "2.8"}, "emulated"),
        (recipe("int4:group128"), BLACKWELL, BOTH, "emulated"),
        (recipe("mxfp6"), BLACKWELL, BOTH, "emulated"),
        (recipe("e4m3:current", accumulation={}), BLACKWELL, BOTH, "emulated"),
    ],
)
def test_auto(spec: RecipeSpec, device: Device, packages: Mapping[str, str], backend: str) -> None:
    choice = choose_backend(precision(spec), *device, packages)
    assert choice.backend == backend
    assert choice.fidelity == ("emulated" if backend == "emulated" else "native")
    assert choice.reason


@pytest.mark.parametrize(
    ("spec", "device", "packages", "words"),
    [
        (CURRENT, AMPERE, BOTH, ("8.9", "8.0")),
        (CURRENT, CPU, BOTH, ("8.9", "a CPU")),
        (CURRENT, HOPPER, {"torch": "2.13.0"}, ("without CUDA",)),
        (MX, HOPPER, BOTH, ("10.0", "9.0")),
        (BLOCK, BLACKWELL, TORCH, ("9.x", "has 10.0", "transformer-engine is not installed", "[te]")),
        (BLOCK, HOPPER, {**TORCH, "cuda": "12.8"}, ("cuda 12.9", "12.8")),
        (recipe("int4:group128"), HOPPER, BOTH, ("no native form", "int4")),
        (recipe("e3m2:mx"), BLACKWELL, BOTH, ("no native form", "e3m2")),
        (recipe("e4m3:current", accumulation={}), HOPPER, BOTH, ("accumulator",)),
        (recipe("e5m2:current"), HOPPER, BOTH, ("no two E5M2",)),
        (recipe("e4m3:block128x128"), HOPPER, BOTH, ("128x128",)),
        (
            recipe("mxfp8:up", gradients="mxfp8-e5m2:up"),
            BLACKWELL,
            TORCH,
            ("transformer-engine is not installed",),
        ),
        (recipe("mxfp8", gradients="mxfp8-e5m2"), BLACKWELL, BOTH, ("mx-scaled products take E4M3",)),
        (recipe("e4m3:row", "e5m2:row", "e4m3:row"), HOPPER, BOTH, ("E4M3 on the right",)),
    ],
)
def test_the_reason_names_what_is_missing(
    spec: RecipeSpec, device: Device, packages: Mapping[str, str], words: tuple[str, ...]
) -> None:
    choice = choose_backend(precision(spec), *device, packages)
    assert choice.backend == "emulated"
    assert all(word in choice.reason for word in words), choice.reason


@pytest.mark.parametrize("backend", ["torch", "transformer_engine"])
@pytest.mark.parametrize(
    ("device", "packages", "words"),
    [
        (CPU, BOTH, ("compute capability 10.0", "the device is a CPU")),
        (HOPPER, BOTH, ("compute capability 10.0", "the device has 9.0")),
    ],
)
def test_asking_for_what_the_device_lacks(
    backend: str, device: Device, packages: Mapping[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(BackendError) as error:
        choose_backend(precision(MX, name="mine", backend=backend), *device, packages)
    assert all(word in str(error.value) for word in ("precision mine", f"backend {backend}", *words))


def test_asking_for_a_package_that_is_absent() -> None:
    with pytest.raises(
        BackendError, match=r"transformer-engine is not installed \(pip install 'lowprec-suite\[te\]'\)"
    ):
        choose_backend(precision(CURRENT, backend="transformer_engine"), *HOPPER, TORCH)
    old = {**BOTH, "transformer-engine": "2.8.0"}
    with pytest.raises(BackendError, match=r"transformer-engine 2.9 or newer is needed, 2.8.0 is installed"):
        choose_backend(precision(CURRENT, backend="transformer_engine"), *HOPPER, old)
    with pytest.raises(BackendError, match="row scaling"):
        choose_backend(precision(recipe("e4m3:row"), backend="transformer_engine"), *HOPPER, BOTH)


def test_asking_for_a_backend_that_is_there() -> None:
    for backend in ("torch", "transformer_engine", "emulated"):
        choice = choose_backend(precision(CURRENT, backend=backend), *HOPPER, BOTH)
        assert (choice.backend, choice.reason) == (backend, "asked for")
        assert choice.fidelity == ("emulated" if backend == "emulated" else "native")


def test_without_a_recipe_everything_is_native() -> None:
    for compute in ("fp32", "bf16", "fp16"):
        spec = PrecisionSpec(name=compute, compute=compute)
        assert choose_backend(spec, "cpu", None, {"torch": "2.11"}).fidelity == "native"
        assert native_requirements(spec).torch == Need()


def test_fp32_products_are_not_native() -> None:
    choice = choose_backend(precision(CURRENT, compute="fp32"), *HOPPER, BOTH)
    assert choice.backend == "emulated" and "BF16" in choice.reason


def test_one_unquantised_operand_has_no_native_form() -> None:
    weights_only = RecipeSpec(weights=cast("e4m3:current"))
    assert "unquantised operand" in choose_backend(precision(weights_only), *HOPPER, BOTH).reason


def test_the_strictest_gemm_decides() -> None:
    """Blocks forward and MX backward are on no device; blocks with a per-tensor weight gradient are on Hopper."""
    mixed = recipe("e4m3:block128", "e4m3:block128x128")
    wgrad = {"activations": cast("e4m3:current"), "gradients": cast("e4m3:current")}
    need = native_requirements(precision(mixed.model_validate({**mixed.model_dump(), "wgrad": wgrad}))).torch
    assert need is not None and (need.capability, need.below) == ((9, 0), (10, 0))
    high = mixed.model_validate({**mixed.model_dump(), "wgrad": {"quantized": False}})
    assert native_requirements(precision(high)).torch == need


def test_requirements_in_words() -> None:
    assert str(native_requirements(precision(CURRENT))) == (
        "torch: compute capability 8.9 or above; "
        "transformer_engine: compute capability 8.9 or above, transformer-engine 2.9"
    )
    assert str(native_requirements(precision(BLOCK))).startswith("torch: compute capability 9.x, CUDA 12.9; ")
    assert str(native_requirements(precision(recipe("int4:group128")))).startswith("none: ")


@pytest.mark.parametrize(
    ("text", "version"), [("2.13.0+cpu", (2, 13)), ("12.9", (12, 9)), ("3", (3, 0)), ("x", (0, 0))]
)
def test_versions(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_choosing_needs_no_torch() -> None:
    code = (
        "import sys; import harness.precision.backends.select, harness.precision.backends.te_table; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
