"""Every parameter by name and shape, against the model that is trained."""

import pytest
import torch

from harness.ledger.inventory import inventory
from harness.ledger.parameters import num_parameters
from harness.ledger.placement import layers_of_stage, local_parameters
from harness.models.transformer import Transformer
from harness.spec import ModelSpec, ParallelismSpec, RunSpec
from suite.declare import presets


@pytest.mark.parametrize("name", presets("models"))
def test_equals_the_models_own(name, monkeypatch):
    monkeypatch.setattr(Transformer, "_initialise", lambda self: None)
    spec = presets("models")[name]
    with torch.device("meta"):
        model = Transformer(spec, spec.vocab_size or 272)
    own = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert [(each.name, each.shape) for each in inventory(spec, 272)] == own
    assert sum(each.numel for each in inventory(spec, 272)) == num_parameters(spec, 272).total


def test_a_vocabulary_is_needed():
    with pytest.raises(ValueError, match="no vocab_size"):
        inventory(presets("models")["llama-1m"])


@pytest.mark.parametrize(("layers", "stages"), [(5, 2), (8, 4), (7, 3), (126, 16)])
def test_stages_hold_each_block_once(layers, stages):
    ranges = [layers_of_stage(layers, stages, stage) for stage in range(stages)]
    assert [block for each in ranges for block in each] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_cuts():
    model = ModelSpec(name="m", num_layers=4, d_model=64, num_heads=4, num_kv_heads=2, d_ffn=128)
    mesh = ParallelismSpec(tp=2, pp=2)
    spec = RunSpec(task="ledger", model=model, parallelism=mesh)
    here = {rank: {p.name: p.shape for p in local_parameters(spec, 272, rank)} for rank in range(4)}
    assert here[0] == here[1] and here[2] == here[3]
    assert here[0]["embedding.weight"] == (136, 64) and "head.weight" not in here[0]
    assert here[2]["head.weight"] == (136, 64) and here[2]["norm.weight"] == (64,)
    assert here[0]["layers.0.attention.qkv.weight"] == (64, 64)
    assert here[2]["layers.3.ffn.down.weight"] == (64, 64)
    assert not set(here[0]) & set(here[2])
