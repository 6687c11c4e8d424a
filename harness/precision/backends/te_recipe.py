"""From a `RecipeSpec` to the Transformer Engine recipe that does the same, as data: class, arguments, attributes.

No torch and no Transformer Engine is imported here, so the mapping can be tested on any machine, against the recorded
table (`te_table`) or the classes of an installed release. `build` makes the object from TE's own module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.precision.backends.errors import ACCUMULATION, NotExpressibleError
from harness.spec import GemmOverride, QuantizerSpec, RecipeSpec

TE = "Transformer Engine"
RHT_SIZE = 16
"""Size of TE's random Hadamard transform."""


@dataclass(frozen=True)
class TERecipe:
    """A recipe of Transformer Engine, before it is made."""

    class_name: str
    arguments: dict[str, Any]
    """Of the constructor; `Format` members and `MMParams` stand as in `te_table`."""
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Attribute -> fields of the `QParams` it is set to after construction: no argument reaches these."""


def te_recipe(recipe: RecipeSpec) -> TERecipe:
    """The TE recipe with this recipe's numerics. Layer exceptions are no part of it: those linears stay plain.

    Raises NotExpressibleError with the part that TE lacks.
    """
    roles = _roles(recipe)
    if recipe.accumulation is not None:
        raise NotExpressibleError(ACCUMULATION)
    scalings = {name: spec.scaling for name, spec in roles.items()}
    if len(set(scalings.values())) > 1:
        raise NotExpressibleError(f"{TE} scales all roles the same way, this recipe {_listed(scalings)}")
    scaling = scalings["activations"]
    build = _BUILDERS.get(scaling)
    if build is None:
        raise NotExpressibleError(f"{TE} has no recipe with {scaling} scaling")
    for name, spec in roles.items():
        _check_plain(name, spec, allow_stochastic=scaling == "nvfp4" and name == "gradients")
    if scaling != "nvfp4":  # NVFP4's own recipe treats wgrad specially
        for gemm in ("forward", "dgrad", "wgrad"):
            if getattr(recipe, gemm) != GemmOverride():
                raise NotExpressibleError(
                    f"{TE}'s {scaling} recipe casts all three GEMMs alike; {gemm}: is set"
                )
    return build(recipe, roles)


def build(planned: TERecipe, module: Any) -> Any:
    """The object, from the classes of `module` (transformer_engine.common.recipe)."""
    arguments = {name: _value(value, module) for name, value in planned.arguments.items()}
    made = getattr(module, planned.class_name)(**arguments)
    for name, fields in planned.attributes.items():
        setattr(made, name, module.QParams(**fields))
    return made


def _value(value: Any, module: Any) -> Any:
    if isinstance(value, str) and value in module.Format.__members__:
        return module.Format[value]
    return value


def _roles(recipe: RecipeSpec) -> dict[str, QuantizerSpec]:
    roles = {}
    for name in ("activations", "weights", "gradients"):
        spec = getattr(recipe, name)
        if spec is None:
            raise NotExpressibleError(f"{TE} quantises all roles; {name} is left out")
        roles[name] = spec
    return roles


def _check_plain(name: str, spec: QuantizerSpec, *, allow_stochastic: bool) -> None:
    """Raise for what no TE recipe does to a role."""
    if spec.hadamard:
        raise NotExpressibleError(
            f"{TE} transforms operands of wgrad only; {name} has hadamard: {spec.hadamard}"
        )
    if spec.rounding == "half_away" or (spec.rounding == "stochastic" and not allow_stochastic):
        raise NotExpressibleError(
            f"{TE} rounds {name} to nearest even here, the recipe asks for {spec.rounding}"
        )
    if spec.overflow != "saturate":
        raise NotExpressibleError(f"{TE}'s casts saturate; {name} has overflow: {spec.overflow}")
    if spec.keep_top:
        raise NotExpressibleError(f"{TE} keeps no values apart; {name} has keep_top: {spec.keep_top}")


def _format(roles: dict[str, QuantizerSpec]) -> str:
    """Name of the `Format` member: E4M3, or HYBRID (E5M2 gradients)."""
    formats = tuple(spec.format for spec in roles.values())
    known = {("e4m3", "e4m3", "e4m3"): "E4M3", ("e4m3", "e4m3", "e5m2"): "HYBRID"}
    if formats not in known:
        raise NotExpressibleError(
            f"{TE} has E4M3 for all roles or E5M2 for gradients alone, this recipe "
            f"{_listed({name: spec.format for name, spec in roles.items()})}"
        )
    return known[formats]


def _same(roles: dict[str, QuantizerSpec], field_name: str) -> Any:
    values = {name: getattr(spec, field_name) for name, spec in roles.items()}
    if len(set(values.values())) > 1:
        raise NotExpressibleError(f"{TE} has one {field_name} for all roles, this recipe {_listed(values)}")
    return values["activations"]


def _no_margin(roles: dict[str, QuantizerSpec]) -> None:
    for name, spec in roles.items():
        if spec.margin:
            raise NotExpressibleError(f"{TE} has a margin for delayed scaling only; {name} has {spec.margin}")


def _delayed(recipe: RecipeSpec, roles: dict[str, QuantizerSpec]) -> TERecipe:
    if _same(roles, "power_of_two"):
        raise NotExpressibleError(f"{TE}'s DelayedScaling has no power-of-two scales")
    return TERecipe(
        "DelayedScaling",
        {
            "margin": _same(roles, "margin"),
            "fp8_format": _format(roles),
            "amax_history_len": _same(roles, "history"),
            "amax_compute_algo": _same(roles, "amax"),
        },
    )


def _current(recipe: RecipeSpec, roles: dict[str, QuantizerSpec]) -> TERecipe:
    _no_margin(roles)
    arguments = {"use_power_2_scales": _same(roles, "power_of_two"), "fp8_format": _format(roles)}
    return TERecipe("Float8CurrentScaling", arguments)


def _block(recipe: RecipeSpec, roles: dict[str, QuantizerSpec]) -> TERecipe:
    _no_margin(roles)
    dims = {}
    for name, spec in roles.items():
        dim = {(1, 128): 1, (128, 128): 2}.get(spec.block_shape or (0, 0))
        if dim is None:
            raise NotExpressibleError(f"{TE}'s blocks are 1x128 or 128x128; {name} has {spec.block_shape}")
        dims[name] = dim
    if list(dims.values()).count(2) > 1:
        raise NotExpressibleError(
            f"{TE} multiplies no two operands with 128x128 blocks, this recipe {_listed(dims)}"
        )
    arguments = {
        "fp8_format": _format(roles),
        "x_block_scaling_dim": dims["activations"],
        "w_block_scaling_dim": dims["weights"],
        "grad_block_scaling_dim": dims["gradients"],
    }
    attributes = {}
    if not all(spec.power_of_two for spec in roles.values()):
        names = {"activations": "fwd_inp", "weights": "fwd_weight", "gradients": "bwd_grad"}
        attributes = {
            f"fp8_quant_{names[role]}": {"power_2_scale": spec.power_of_two, "amax_epsilon": 0.0}
            for role, spec in roles.items()
        }
    return TERecipe("Float8BlockScaling", arguments, attributes)


def _mx(recipe: RecipeSpec, roles: dict[str, QuantizerSpec]) -> TERecipe:
    _no_margin(roles)
    arguments: dict[str, Any] = {"fp8_format": _format(roles)}
    if _same(roles, "scale_rounding") != "up":
        raise NotExpressibleError(f"{TE} rounds MX scales up, this recipe: {roles['weights'].scale_rounding}")
    for name, spec in roles.items():
        if spec.block_shape == (32, 32) and name == "weights":
            arguments["enable_2d_quantization"] = True
        elif spec.block_shape != (1, 32):
            raise NotExpressibleError(f"{TE}'s MX blocks are 1x32; {name} has {spec.block_shape}")
    return TERecipe("MXFP8BlockScaling", arguments)


def _nvfp4(recipe: RecipeSpec, roles: dict[str, QuantizerSpec]) -> TERecipe:
    _no_margin(roles)
    for name, spec in roles.items():
        allowed = ((1, 16), (16, 16)) if name == "weights" else ((1, 16),)
        if spec.block_shape not in allowed:
            raise NotExpressibleError(
                f"{TE}'s NVFP4 blocks of {name} are 1x16, the recipe's {spec.block_shape}"
            )
    for gemm in ("forward", "dgrad"):
        if getattr(recipe, gemm) != GemmOverride():
            raise NotExpressibleError(f"{TE}'s NVFP4 recipe has no exception for {gemm}")
    left, right = recipe.operands("wgrad")
    if left is None or right is None:
        raise NotExpressibleError(f"{TE}'s NVFP4 recipe quantises wgrad too; it has quantized: false")
    plain = (left.model_copy(update={"hadamard": 0}), right.model_copy(update={"hadamard": 0}))
    if plain != (roles["gradients"], roles["activations"]) or left.hadamard not in (0, RHT_SIZE):
        raise NotExpressibleError(
            f"{TE}'s NVFP4 wgrad differs from the other GEMMs by a {RHT_SIZE}-point Hadamard transform at most"
        )
    arguments = {
        "disable_rht": left.hadamard == 0,
        "disable_stochastic_rounding": roles["gradients"].rounding != "stochastic",
        "disable_2d_quantization": roles["weights"].block_shape != (16, 16),
    }
    return TERecipe("NVFP4BlockScaling", arguments)


_BUILDERS: dict[str, Callable[[RecipeSpec, dict[str, QuantizerSpec]], TERecipe]] = {
    "delayed": _delayed,
    "current": _current,
    "block": _block,
    "mx": _mx,
    "nvfp4": _nvfp4,
}


def _listed(values: dict[str, Any]) -> str:
    return "has " + ", ".join(f"{name} {value}" for name, value in values.items())
