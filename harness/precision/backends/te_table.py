"""Transformer Engine's recipe classes as two of its releases have them: parameters in order, with defaults.

Read from `transformer_engine/common/recipe/__init__.py` of the wheels on PyPI:

    2.9.0    the oldest release that the suite takes (November 2025; the first with `te.autocast`)
    2.20.2   the newest one read (October 2026)

`Format` members stand as their names. Defaults that come from environment variables are those of an empty
environment. Parameters that a later release added stand with the release they were found in; only the two releases
above were compared, so the true first one may lie between them.
"""

from __future__ import annotations

from typing import Any

OLDEST, NEWEST = "2.9.0", "2.20.2"

RECIPES: dict[str, dict[str, Any]] = {
    "DelayedScaling": {
        "margin": 0,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
    },
    "Float8CurrentScaling": {
        "use_power_2_scales": False,
        "fp8_format": "HYBRID",
        "fp8_gemm_fprop": {"use_split_accumulator": False},
        "fp8_gemm_dgrad": {"use_split_accumulator": True},
        "fp8_gemm_wgrad": {"use_split_accumulator": True},
        "fp8_dpa": False,
        "fp8_mha": False,
    },
    "Float8BlockScaling": {
        "use_f32_scales": False,
        "fp8_format": "E4M3",
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": {"use_split_accumulator": True},
        "fp8_gemm_dgrad": {"use_split_accumulator": True},
        "fp8_gemm_wgrad": {"use_split_accumulator": True},
        "fp8_dpa": False,
        "fp8_mha": False,
    },
    "MXFP8BlockScaling": {"margin": 0, "fp8_format": "E4M3", "fp8_dpa": False, "fp8_mha": False},
    "NVFP4BlockScaling": {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "fp4_format": "E2M1",
        "fp8_format": "E4M3",
        "fp8_dpa": False,
        "fp8_mha": False,
    },
}
"""Class -> parameter -> default, in release 2.9.0."""

ADDED: dict[str, dict[str, Any]] = {
    "DelayedScaling": {"backward_override": None},
    "Float8CurrentScaling": {"backward_override": None},
    "Float8BlockScaling": {"backward_override": None},
    "MXFP8BlockScaling": {"backward_override": None, "enable_2d_quantization": False},
    "NVFP4BlockScaling": {
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "backward_override": None,
    },
}
"""Class -> parameter -> default that release 2.20.2 has besides."""

QPARAMS: dict[str, Any] = {
    "power_2_scale": False,
    "amax_epsilon": 0.0,
    "random_hadamard_transform": False,
    "stochastic_rounding": False,
    "fp4_2d_quantization": False,
}
"""Fields of `QParams`, in both releases. Of this kind are `Float8BlockScaling.fp8_quant_fwd_inp`, `..._fwd_weight` and
`..._bwd_grad`, class attributes made once from the environment: no argument of the constructor reaches them."""

AUTOCAST = ("enabled", "calibrating", "recipe", "amax_reduction_group")
"""Parameters of `te.autocast`: a function in 2.9.0, a class later."""

LINEAR = ("in_features", "out_features", "bias", "params_dtype", "device")
"""Those parameters of `te.Linear` that the suite passes; both releases have them."""
