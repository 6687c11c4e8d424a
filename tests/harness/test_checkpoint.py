"""Checkpoints: named by their content, whole or absent, and enough to go on from."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import checkpoint
from harness.models.transformer import Transformer, build
from harness.optim import adamw
from harness.precision.linear import apply_recipe
from harness.spec import ModelSpec, OptimizerSpec, PrecisionSpec, QuantizerSpec, RecipeSpec

SPEC = ModelSpec(name="tiny", num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, d_ffn=24)
DELAYED = QuantizerSpec(format="e4m3", scaling="delayed", history=3)
FP8 = PrecisionSpec(name="fp8", recipe=RecipeSpec(activations=DELAYED, weights=DELAYED, gradients=DELAYED))


def trained(steps: int, **changes: object) -> tuple[Transformer, torch.optim.Optimizer]:
    net = build(SPEC.model_copy(update=changes), 31, 0)
    apply_recipe(net, FP8)
    optimizer = adamw.build(net, OptimizerSpec(lr=1e-2))
    train(net, optimizer, range(steps))
    return net, optimizer


def train(net: Transformer, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    from harness.precision.linear import end_step

    losses = []
    for step in steps:
        tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = net.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step(net)
        net.end_step()
        losses.append(float(loss.detach()))
    return losses


def test_the_name_is_the_hash_of_the_content(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3, dtype=torch.int64)}
    sha256 = checkpoint.save_checkpoint(tmp_path / "new", tensors, {"step": 7})
    path = checkpoint.checkpoint_path(tmp_path / "new", sha256)
    assert [path.name] == [file.name for file in path.parent.iterdir()] == [f"{sha256}.safetensors"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    loaded, state = checkpoint.load_checkpoint(tmp_path / "new", sha256)
    assert state == {"step": 7}
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_same_content_same_file(tmp_path: Path) -> None:
    names = {checkpoint.save_checkpoint(tmp_path, {"a": torch.ones(3)}) for _ in range(2)}
    names.add(checkpoint.save_checkpoint(tmp_path, {"a": torch.ones(3)}, {"step": 1}))
    assert len(names) == len(list(tmp_path.iterdir())) == 2


def test_a_write_that_fails_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_checkpoint(tmp_path, {"a": torch.ones(3)})
    assert not list(tmp_path.glob("*.safetensors"))


def test_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    wanted = torch.arange(6.0).view(2, 3).t()
    sha256 = checkpoint.save_checkpoint(tmp_path, {"a": wanted})
    assert torch.equal(checkpoint.load_checkpoint(tmp_path, sha256)[0]["a"], wanted)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_a_damaged_checkpoint_is_removed_and_said(tmp_path: Path, damage: str) -> None:
    sha256 = checkpoint.save_checkpoint(tmp_path, {"weight": torch.arange(64.0)})
    path = tmp_path / f"{sha256}.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
    path.write_bytes({"flip": content, "cut": content[:-4], "grow": content + b"\0"}[damage])
    with pytest.raises(checkpoint.DamagedCheckpoint, match="was damaged and has been removed"):
        checkpoint.load_checkpoint(tmp_path, sha256)
    assert not path.exists()


def test_a_missing_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is missing; the next `suite run` makes it anew"):
        checkpoint.load_checkpoint(tmp_path, "0" * 64)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"ffn": "smooth-swiglu"}])
def test_training_goes_on_to_the_bit(tmp_path: Path, changes: dict[str, object]) -> None:
    straight, optimizer = trained(3, **changes)
    sha256 = checkpoint.save_checkpoint(tmp_path, checkpoint.training_state(straight, optimizer))
    resumed, other = trained(0, **changes)
    checkpoint.load_training_state(resumed, other, checkpoint.load_checkpoint(tmp_path, sha256)[0])
    for (name, one), two in zip(straight.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    assert train(straight, optimizer, range(3, 6)) == train(resumed, other, range(3, 6))


def test_training_state_has_moments_histories_and_scales() -> None:
    net, optimizer = trained(1, ffn="smooth-swiglu")
    names = checkpoint.training_state(net, optimizer).keys()
    assert {
        "model.embedding.weight",
        "model.layers.0.ffn.smooth_scale",
        "model.layers.0.ffn.down.activations.amax_history",
        "optimizer.layers.0.ffn.down.weight.exp_avg",
        "optimizer.layers.0.ffn.down.weight.exp_avg_sq",
        "optimizer.layers.0.ffn.down.weight.step",
    } <= names


def test_tied_embeddings_are_saved_once() -> None:
    net, optimizer = trained(1, tie_embeddings=True)
    assert "model.head.weight" not in checkpoint.training_state(net, optimizer)
    assert "head.weight" not in checkpoint.weights(net)


def test_weights_load_into_another_precision_and_form(tmp_path: Path) -> None:
    net, _ = trained(2)
    sha256 = checkpoint.save_checkpoint(tmp_path, checkpoint.weights(net))
    tensors, _ = checkpoint.load_checkpoint(tmp_path, sha256)
    other = build(SPEC.model_copy(update={"ffn": "smooth-swiglu"}), 31, 1)
    checkpoint.load_weights(other, tensors)
    for (name, one), two in zip(net.named_parameters(), other.named_parameters(), strict=True):
        assert one.equal(two[1]) and name == two[0]
    narrow = build(SPEC, 31, 1).bfloat16()
    checkpoint.load_weights(narrow, tensors)
    assert torch.equal(narrow.head.weight, net.head.weight.bfloat16())


def test_weights_of_another_shape_are_refused_by_name() -> None:
    net = build(SPEC, 31, 0)
    with pytest.raises(
        ValueError, match=r"embedding.weight is \[31, 16\] in the checkpoint, \[40, 16\] here"
    ):
        checkpoint.load_weights(build(SPEC, 40, 0), checkpoint.weights(net))
    with pytest.raises(KeyError, match=r"no parameter layers.1.attention_norm.weight"):
        checkpoint.load_weights(
            build(SPEC.model_copy(update={"num_layers": 2}), 31, 0), checkpoint.weights(net)
        )


def test_buffers_of_another_recipe_are_left() -> None:
    """A history of another length belongs to another quantiser."""
    one, other = nn.Module(), nn.Module()
    one.register_buffer("history", torch.ones(3))
    other.register_buffer("history", torch.zeros(5))
    checkpoint.load_weights(other, dict(one.named_buffers()))
    assert not other.get_buffer("history").any()
