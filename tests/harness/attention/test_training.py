"""A model that trains through the emulation, with ties put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.attention.emulation import Emulation, emulate
from harness.attention.function import Rounding
from harness.models import transformer
from harness.spec import AttentionSpec, DataSpec, ModelSpec, OptimizerSpec, PrecisionSpec, RunSpec
from harness.tasks.pretrain import pretrain

SHAPE = ModelSpec(name="tiny", num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ffn=64)
HEAD = "layers.1.heads.0"


class Records:
    """Stands for a journal."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], list[float]] = {}

    def measure(self, step: int, values: dict[str, float], scope: str = "") -> None:
        for name, value in values.items():
            self.values.setdefault((name, scope), []).append(value)

    def note(self, *_: Any) -> None:
        pass

    def beat(self) -> None:
        pass


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 256, (2, 25), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def _model(**fields: Any) -> transformer.Transformer:
    model = transformer.build(SHAPE, 272, 0)
    emulate(model, AttentionSpec(**fields))
    return model


def test_unrounded_it_is_the_models_own_attention() -> None:
    plain, emulated = _model(), _model(kernel="fp32", tile=8)
    losses = [model.loss(*_tokens()) for model in (plain, emulated)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(losses[0], losses[1], atol=1e-6)
    for (name, mine), theirs in zip(emulated.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6), name


def test_default_leaves_the_model_alone() -> None:
    assert all(attention.emulation is None for attention in _model().attentions())


def test_ties_are_put_into_one_head_of_one_layer() -> None:
    model = _model(kernel="paper", inject_ties=2)
    first, second = (attention.emulation for attention in model.attentions())
    assert isinstance(first, Emulation) and isinstance(second, Emulation)
    assert (first.num_ties, second.num_ties) == (0, 2)
    seen: list[Rounding] = []
    first.watch = second.watch = lambda x, rounding: seen.append(rounding)
    model.loss(*_tokens()).backward()
    ones = seen[0].num_ones.squeeze(-1)  # the last layer comes first in a backward pass
    assert bool((ones[:, 0, 1:] == 2).all()) and bool((ones[:, 0, 0] == 1).all()), (
        "the first token sees one key"
    )
    assert not bool((ones[:, 1:, 12:] == 2).all(1).any())


def test_what_cannot_be_is_refused() -> None:
    for fields, text in (
        ({"kernel": "flash"}, "not flash"),
        ({"kernel": "paper", "inject_ties": 2, "inject_layer": 2}, "inject_layer 2 is not below 2"),
        ({"kernel": "paper", "inject_ties": 2, "inject_head": 4}, "inject_head 4"),
    ):
        with pytest.raises(ValueError, match=text):
            _model(**fields)


def _train(tmp_path: Path, **fields: Any) -> Records:
    corpus = tmp_path / "text.txt"
    if not corpus.exists():
        words = [f"w{i * i % 97}" for i in range(16)]
        corpus.write_text("\n\n".join(" ".join(words[i % 7 :] + words[: i % 11]) for i in range(600)))
    spec = RunSpec(
        model=SHAPE,
        precision=PrecisionSpec(name="fp32"),
        optimizer=OptimizerSpec(lr=2e-3, weight_decay=0.0),
        data=DataSpec(corpus=str(corpus)),
        tokens=30 * 4 * 48,
        batch_size=4,
        seq_len=48,
        val_tokens=0,
        attention=AttentionSpec(inject_ties=2, **fields),
        probes={"attention": 1, "throughput": 0},
    )
    records = Records()
    pretrain(spec, {}, records, tmp_path)  # type: ignore[arg-type]
    return records


@pytest.mark.slow
def test_biased_delta_makes_wq_grow_and_dp_p_does_not(tmp_path: Path) -> None:
    growth, drift = {}, {}
    for name, fields in {
        "fp32": {"kernel": "fp32"},
        "biased": {"kernel": "paper"},
        "repaired": {"kernel": "paper", "beta": 7.0},
        "dp-p": {"kernel": "paper", "delta": "dp-p"},
    }.items():
        values = _train(tmp_path, **fields).values
        norms = values["weight_spectral_norm", f"{HEAD}.query"]
        growth[name] = norms[-1] - norms[0]
        drift[name] = max(map(abs, values["delta_error_sum", HEAD]))
        assert len(norms) == 31 and len(values["coherence", HEAD]) == 30
        assert all(0 < value <= 1 for value in values["coherence", HEAD])
        tied = values["tied_one_share", HEAD][-1]
        assert tied < 0.1 if name == "repaired" else tied > 0.9
    assert growth["biased"] > 0.02 > 10 * abs(growth["dp-p"])
    assert drift["biased"] > 20 * drift["dp-p"] > 0
    assert drift["dp-p"] > drift["fp32"]
