"""Each probe's numbers, against the same quantity computed another way."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.ledger.parameters import num_parameters
from harness.probes.gradients import Gradients
from harness.probes.memory import Memory, measure_step, undone
from harness.probes.peaks import DENSE_BF16_TFLOPS, dense_bf16_peak
from harness.probes.quantization import _decibel
from harness.probes.weights import Weights
from harness.spec import MoESpec
from harness.trace import live as trace

from .conftest import FP8, Records

Train = Callable[..., tuple[Any, Records]]


def context(model: torch.nn.Module, **more: Any) -> Any:
    """A stand-in for RunContext with a plain module."""
    from types import SimpleNamespace

    return SimpleNamespace(model=model, strategy=None, record=Records(), first_step=1, **more)


def test_loss_and_rate_each_step(train: Train) -> None:
    _, records = train(rare_token_every=2)
    assert records.steps("loss") == records.steps("learning_rate") == [1, 2, 3, 4, 5, 6]
    assert records.of("loss")[0] == pytest.approx(math.log(272), abs=0.3)
    assert set(records.of("rare_tokens_in_batch")) <= {0, 1}


def test_throughput(train: Train) -> None:
    spec, records = train(probes={"throughput": 3})
    assert records.steps("step_ms") == [1, 3, 6]
    per_token = 6 * num_parameters(spec.model, 272).matmul + 12 * 2 * 2 * 16 * 16
    for ms, tokens, flops in zip(
        records.of("step_ms"), records.of("tokens_per_s"), records.of("model_flops_per_s"), strict=True
    ):
        assert tokens == pytest.approx(32 / ms * 1000)  # type: ignore[operator]
        assert flops == pytest.approx(tokens * per_token)  # type: ignore[operator]
    assert records.of("mfu") == [None] * 3
    assert records.notes["mfu"] == (None, dense_bf16_peak(torch.device("cpu"))[1])


def test_peaks_are_by_exact_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    peak, source = dense_bf16_peak(torch.device("cuda"))
    assert peak == 989.5e12
    assert "data sheet" in source
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 NVL")
    peak, reason = dense_bf16_peak(torch.device("cuda"))
    assert peak is None
    assert "'NVIDIA H200 NVL' is not in the table" in reason
    assert all(value > 0 and source for value, source in DENSE_BF16_TFLOPS.values())


def test_gradients_count_what_is_not_finite() -> None:
    model = torch.nn.Linear(4, 3)
    model.weight.grad = torch.ones(3, 4)
    model.bias.grad = torch.tensor([1.0, math.nan, math.inf])
    probe = Gradients()
    probe.run = context(model)
    probe.after_backward(1, math.nan)
    model.bias.grad = torch.zeros(3)
    probe.after_backward(2, None)
    assert probe.run.record.of("num_nonfinite_gradients") == [2, 0]  # type: ignore[attr-defined]
    assert probe.run.record.of("gradient_norm")[1] == pytest.approx(math.sqrt(12))  # type: ignore[attr-defined]


def test_spectral_norms_follow_the_weights() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 30), torch.nn.Linear(30, 40, bias=False), torch.nn.Linear(40, 30, bias=False)
    )
    probe = Weights()
    probe.run = context(model)
    before = torch.get_rng_state()
    probe.begin()
    for step in range(1, 4):
        with torch.no_grad():
            for weight in (model[0].weight, model[1].weight, model[2].weight):
                weight += 0.01 * torch.outer(torch.linspace(-1, 1, len(weight)), torch.ones(weight.shape[1]))
        probe.after_step(step, None)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    for index in range(3):
        exact = float(torch.linalg.matrix_norm(model[index].weight.detach(), ord=2))
        found = probe.run.record.of("weight_spectral_norm", f"{index}.weight")  # type: ignore[attr-defined]
        assert len(found) == 4
        assert found[-1] == pytest.approx(exact, rel=0.05)
        assert found[-1] <= exact * (1 + 1e-5)


def test_alignment(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.models.transformer import Transformer

    initialise = Transformer._initialise

    def aligned(self: Transformer) -> None:
        initialise(self)
        with torch.no_grad():
            weight = self.layers[1].ffn.gate_up.weight  # type: ignore[union-attr]
            weight[48] = -3 * weight[0]

    monkeypatch.setattr(Transformer, "_initialise", aligned)
    _, records = train(probes={"alignment": 6})
    assert records.steps("alignment_cosine_max", "layers.0") == [0, 1, 6]
    assert records.of("alignment_cosine_max", "layers.1")[0] == pytest.approx(1)
    assert records.of("alignment_cosine_max", "layers.0")[0] < 0.9  # type: ignore[operator]
    assert 0.05 < records.of("alignment_cosine_mean", "layers.0")[0] < 0.3  # type: ignore[operator]
    products = [records.of("alignment_norm_product_max", f"layers.{layer}")[0] for layer in range(2)]
    assert products[1] > 2 * products[0]  # type: ignore[operator]


def test_alignment_of_gelu_says_why_not(train: Train) -> None:
    _, records = train(model={"ffn": "gelu"}, probes={"alignment": 2})
    assert "alignment_cosine_mean" in records.notes
    assert not records.scopes("alignment_cosine_mean")


def test_activations(train: Train) -> None:
    _, records = train(probes={"activations": 4})
    scopes = {f"layers.{layer}.{tensor}" for layer in range(2) for tensor in ("residual", "ffn.hidden")}
    assert records.scopes("activation_peak") == scopes
    for scope in scopes:
        assert records.steps("activation_peak", scope) == [1, 4, 6]
        for peak, rms, over in zip(
            *(records.of(f"activation_{name}", scope) for name in ("peak", "rms", "peak_over_rms")),
            strict=True,
        ):
            assert over == pytest.approx(peak / rms)  # type: ignore[operator]
            assert 1 < over < math.sqrt(2 * 16 * 48)  # type: ignore[operator]


def test_quantization_health(train: Train) -> None:
    _, records = train(precision=FP8, probes={"quantization": 3})
    layers = [f"layers.{i}.{part}" for i in range(2) for part in ("attention.qkv", "ffn.down")]
    for scope in (f"{layer}.{role}" for layer in layers for role in ("activations", "weights", "gradients")):
        assert records.steps("quant_amax", scope) == [1, 3, 6]
        assert all(0 <= v <= 1 for v in records.of("quant_clipped_fraction", scope))  # type: ignore[operator]
        assert all(v > 10 for v in records.of("quant_sqnr_db", scope))  # type: ignore[operator]
    for layer in range(2):
        assert all(20 < v < 60 for v in records.of("ffn_output_sqnr_db", f"layers.{layer}"))  # type: ignore[operator]


def test_quantization_of_fp32_says_why_not(train: Train) -> None:
    _, records = train(probes={"quantization": 1})
    assert records.notes["quant_sqnr_db"] == (None, "precision fp32 has no quantisers")


def test_decibel() -> None:
    assert _decibel(10.0, 1.0) == pytest.approx(20)
    assert _decibel(1.0, 0.0) == 300
    assert _decibel(0.0, 1.0) is None
    assert _decibel(math.nan, 1.0) is None


def test_memory_by_category(train: Train) -> None:
    spec, records = train(precision=FP8, probes={"memory": 1})
    peak = {scope: records.of("peak_bytes", scope)[0] for scope in records.scopes("peak_bytes")}
    num_bytes = 4 * num_parameters(spec.model, 272).total
    assert sum(value for scope, value in peak.items() if scope != "total") == peak["total"]  # type: ignore[misc]
    assert num_bytes <= peak["weights"] < 1.02 * num_bytes + 2048  # type: ignore[operator]
    assert 2 * num_bytes <= peak["optimizer"] < 2.02 * num_bytes + 2048  # type: ignore[operator]
    assert records.steps("peak_bytes", "total") == [6]


def test_memory_of_a_step_known_by_hand() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000, bias=False), torch.nn.Linear(1000, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(50, 1000)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    following = trace.Live([model], [optimizer])
    peaks, allocator = measure_step(following, torch.device("cpu"), step)
    assert allocator is None
    assert peaks["weights"] == 4 * 1_001_000
    assert peaks["gradients"] + peaks["temporary"] >= 4 * 1_001_000
    assert 2 * peaks["weights"] < peaks["total"] < 2 * peaks["weights"] + 700_000


class Live(TorchDispatchMode):
    """Bytes of live storages, counted independently of MemTracker: a weak reference on each storage seen."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result


def test_memory_agrees_with_an_independent_count(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count(self: Memory, step: int) -> None:
        run = self.run
        state = [v for slots in run.optimizer.state.values() for v in slots.values() if torch.is_tensor(v)]
        with undone([run.model], run.optimizer):
            live = Live([*run.model.parameters(), *run.model.buffers(), *state])
            with live:
                run.train_step(step)
            counted.append(live.peak)
        measure(self, step)

    measure = Memory.finish
    monkeypatch.setattr(Memory, "finish", count)
    _, records = train(precision=FP8, probes={"memory": 1}, model={"d_model": 64, "d_ffn": 192})
    assert records.of("peak_bytes", "total")[0] == pytest.approx(counted[0], rel=0.01)


def test_experts_of_a_step(train: Train) -> None:
    moe = MoESpec(experts=4, capacity_factor=1.0, aux_loss=0.01)
    _, records = train(probes={"experts": 2}, model={"moe": moe})
    assert records.steps("expert_load_gini", "layers.1") == [1, 2, 4, 6]
    for layer in ("layers.0", "layers.1"):
        loads = records.of("expert_load_max_over_mean", layer)
        assert all(1 <= value <= moe.experts / moe.top_k for value in loads), "a token goes to two experts"  # type: ignore[operator]
        assert max(records.of("expert_dropped_share", layer)) > 0  # type: ignore[type-var]
        assert max(records.of("expert_load_entropy", layer)) <= 1  # type: ignore[type-var,operator]
        assert min(records.of("expert_load_cv", layer)) >= 0  # type: ignore[type-var,operator]
        assert records.of("expert_balance_loss", layer)[0] == pytest.approx(1, abs=0.05)
    assert not set(records.notes) & {"expert_load_max_over_mean"}


def test_experts_of_a_dense_model_are_none(train: Train) -> None:
    _, records = train(probes={"experts": 1})
    assert records.notes["expert_load_max_over_mean"][1] == "tiny has dense feed-forwards, no experts"
