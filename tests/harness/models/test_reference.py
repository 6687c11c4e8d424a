"""Korthikanti et al.'s layer: what it keeps for its backward pass is what the paper counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.models import reference, transformer
from harness.spec import ModelSpec, PrecisionSpec, RunSpec
from harness.trace.live import Live

BF16 = PrecisionSpec(name="bf16-pure", compute="bf16", weights="bf16")
NORM_STATISTICS = 8
"""Bytes a token: two norms keep mean and 1 / standard deviation, on a CPU in BF16. The paper leaves them out."""


def make_spec(b: int, s: int, h: int, a: int, **changes: Any) -> RunSpec:
    shape = {
        "num_layers": 3,
        "d_model": h,
        "num_heads": a,
        "num_kv_heads": a,
        "d_ffn": 4 * h,
        "max_seq_len": s,
    }
    gpt = {"ffn": "gelu", "norm": "layernorm", "positions": "learned", "bias": True}
    model = ModelSpec(name="gpt", **{**shape, **gpt, **changes.pop("model", {})})
    fields = {"precision": BF16, "batch_size": b, "seq_len": s, "reference": "gpt-dropout", **changes}
    return RunSpec(task="step", model=model, **fields)


def kept(spec: RunSpec) -> int:
    """Bytes that the middle layer keeps."""
    model = transformer.build(spec.model, 64, 0).to(torch.bfloat16)
    transformer.set_recompute(model, spec.recompute)
    reference.refer(model, spec)
    inputs = torch.randint(64, (spec.batch_size, spec.seq_len))
    for _ in range(2):  # the causal mask is made once
        live = Live([model], [])
        with live:
            model.loss(inputs, inputs).backward()
    return live.account().layers["layers.1"]


@pytest.mark.parametrize(
    ("b", "s", "h", "a"), [(1, 32, 32, 2), (2, 64, 32, 4), (3, 32, 64, 8), (2, 16, 48, 3)]
)
def test_a_layer_keeps_what_the_paper_says(b: int, s: int, h: int, a: int) -> None:
    """Table 2: 34 s b h + 5 a s^2 b; selective 34 s b h; full 2 s b h. No deviation but the norms' statistics."""
    paper = {"none": 34 * s * b * h + 5 * a * s * s * b, "selective": 34 * s * b * h, "full": 2 * s * b * h}
    for recompute, expected in paper.items():
        statistics = 0 if recompute == "full" else NORM_STATISTICS * s * b
        assert kept(make_spec(b, s, h, a, recompute=recompute)) == expected + statistics, recompute


def test_other_shapes_and_precisions_are_refused() -> None:
    model = transformer.build(make_spec(1, 16, 32, 2).model, 64, 0)
    with pytest.raises(ValueError, match="norm rmsnorm"):
        reference.refer(model, make_spec(1, 16, 32, 2, model={"norm": "rmsnorm"}))
    with pytest.raises(ValueError, match="16 bits throughout"):
        reference.refer(model, make_spec(1, 16, 32, 2, precision=PrecisionSpec(name="fp32")))
    reference.refer(model, make_spec(1, 16, 32, 2, precision=PrecisionSpec(name="fp32"), reference="none"))
    assert not any(isinstance(block, reference.DropoutBlock) for block in model.layers)


def test_dropout_masks_take_a_byte() -> None:
    live = Live([], [])
    x = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
    with live:
        out = reference.dropout(x)
    sizes = sorted(life.num_bytes for life in live.lives.all)
    assert sizes == [1000, 2000]
    assert 0 < (out == 0).sum() < 1000
