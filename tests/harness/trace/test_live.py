"""The mode that follows storages, held against PyTorch's own trackers and against steps known by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from harness.models import transformer
from harness.optim import adamw
from harness.spec import ModelSpec, OptimizerSpec
from harness.trace.live import Live

from .steps import GPT, SHAPE


def memtracker_peak(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> int:
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    total: int = snapshot["Total"]
    return total


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 8)
    )


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("clip", [False, True])
def test_a_plain_model_peaks_where_memtracker_says(make: Any, clip: bool) -> None:
    torch.manual_seed(0)
    model = plain()
    optimizer = make(model.parameters(), lr=1e-3)
    x = torch.randn(32, 64)

    def step() -> None:
        model(x).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    expected = memtracker_peak(model, optimizer, step)
    live = Live([model], [optimizer])
    with live:
        step()
    assert live.account().total == expected > 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("changes", [{}, GPT], ids=["llama", "gpt"])
def test_the_transformer_differs_from_memtracker_by_views_of_what_was_there_before(
    changes: dict[str, Any], recompute: Any
) -> None:
    """MemTracker takes a view of a tensor that it never saw made (targets, flattened, and the slice of the rotation)
    for a new one; Live does not. Nothing else differs."""
    batch, tokens = 4, 32
    spec = ModelSpec(**{**SHAPE, **changes})
    model = transformer.build(spec, 101, 0)
    transformer.set_recompute(model, recompute)
    optimizer = adamw.build(model, OptimizerSpec())
    inputs, targets = torch.randint(101, (2, batch, tokens))
    inputs, targets = inputs.clone(), targets.clone()

    def step() -> None:
        model.loss(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    expected = memtracker_peak(model, optimizer, step)
    live = Live([model], [optimizer])
    with live:
        step()
    rotation = tokens * spec.head_width // 2 * 8 if spec.positions == "rope" else 0
    assert expected - live.account().total == batch * tokens * 8 + rotation


def test_categories_of_a_step_known_by_hand() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(50, 1000)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    live = Live([model], [optimizer])
    with live:
        step()
    held = live.account()
    matrices = 4 * 1_001_000
    assert held.state == {"weights": matrices, "gradients": matrices, "optimizer": matrices}
    assert held.peak["weights"] == held.peak["optimizer"] == matrices
    assert held.peak["communication"] == 0
    hidden, output, loss = 50 * 1000 * 4, 50 * 4, 4
    assert hidden + loss <= held.saved <= hidden + output + 2 * loss
    assert (
        live.flops == 2 * 50 * 1000 * (1000 + 1) * 2 + 2 * 50 * 1000
    )  # x wants no gradient; the hidden layer does


def test_bytes_are_put_down_to_the_block_that_made_them() -> None:
    model = transformer.build(ModelSpec(**SHAPE), 101, 0)
    inputs = torch.randint(101, (2, 32))
    live = Live([model], [])
    with live:
        model.loss(inputs, inputs).backward()
    held = live.account()
    assert held.layers["layers.0"] == held.layers["layers.1"] > 0
    assert sum(held.layers.values()) == held.saved
    assert set(held.layers) <= {"embedding", "layers.0", "layers.1", "norm", "head", "other"}


def test_accumulated_gradients_are_gradients_and_saved_is_of_one_micro_step() -> None:
    model = plain()
    x = torch.randn(64, 64)

    def run(pieces: int) -> Any:
        model.zero_grad(set_to_none=True)
        live = Live([model], [])
        with live:
            for part in x.chunk(pieces):
                model(part).square().mean().backward()
        return live.account()

    one, two = run(1), run(2)
    assert two.state["gradients"] == one.state["gradients"] == one.state["weights"]
    assert two.saved - 8 < one.saved / 2 < two.saved + 8


def test_storages_that_are_resized_come_and_go() -> None:
    """As FSDP2 frees what it gathered."""
    live = Live([], [])
    with live:
        gathered = torch.empty(0)
        gathered.untyped_storage().resize_(4096)
        torch.ones(1)
        gathered.untyped_storage().resize_(0)
        torch.ones(2000)
    held = live.account()
    assert (held.total, held.peak["communication"], held.peak["temporary"]) == (8000, 0, 8000)
    assert torch.UntypedStorage.resize_ is Live([], [])._resize


def test_nothing_stays_when_a_step_fails() -> None:
    model = plain()
    before = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), Live([model], []):
        model(torch.ones(2, 64))
        _ = 1 / 0
    assert torch.UntypedStorage.resize_ is before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_in_place_and_views_make_nothing() -> None:
    x = torch.ones(1000)
    live = Live([], [])
    with live:
        x.add_(1).view(10, 100).t().mul_(2)
    assert live.account().total == 0


def fully_sharded_peaks() -> tuple[dict[str, int], Any]:
    """FSDPMemTracker's peak by its own kinds, and ours, of one step under FSDP2 on 8 ranks that are not there."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from harness.trace.fake import group_of, without_data

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with group_of(8, 0):
        devices = init_device_mesh("cpu", (8,))
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        with without_data():
            model.to_empty(device="cpu")
            for layer in model:
                fully_shard(layer, mesh=devices, mp_policy=policy)
            fully_shard(model, mesh=devices, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            x = torch.ones(16, 64)

            def step() -> None:
                loss: Tensor = model(x).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            step()
            live = Live([model], [optimizer])
            with live:
                step()
            tracker = FSDPMemTracker(model, optimizer)
            with tracker:
                step()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(getattr(kind, "name", kind)): value for kind, value in peak.items()}, live.account()


def test_a_sharded_model_peaks_where_fsdpmemtracker_says() -> None:
    theirs, ours = fully_sharded_peaks()
    matrices = 3 * 64 * 64
    assert ours.state == {
        "weights": matrices * 4 // 8,
        "gradients": matrices * 4 // 8,
        "optimizer": 2 * matrices * 4 // 8 + 3 * 4,
    }
    assert ours.total == theirs["Total"]
