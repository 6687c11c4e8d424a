"""Attention over ranks against PyTorch's own on one, its gradients, its bytes, and training with it."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness.ledger.communication import collectives
from harness.ledger.step import Collective
from harness.models.transformer import set_recompute
from harness.parallel import blocks, context, context_native, recorder
from harness.parallel.mesh import build
from harness.spec import ModelSpec, ParallelismSpec, PrecisionSpec, RunSpec
from tests.harness.models.conftest import model, spec
from tests.harness.parallel.conftest import run_ranks
from tests.harness.parallel.test_equivalence import compare

Kind = Literal["ring", "all-gather"]
KINDS: list[Kind] = ["ring", "all-gather"]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def heads(
    kv_heads: int, tokens: int, dtype: torch.dtype = torch.float64, batch: int = 2
) -> tuple[Tensor, ...]:
    """q, k, v and a gradient for the output: 4 heads of 16, the same on every rank."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(batch, count, tokens, 16) for count in (4, kv_heads, kv_heads, 4)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output and the three gradients by one process, FP64."""
    q, k, v = (part.double().requires_grad_() for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double()))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_a_part_written_out_is_the_kernel_s(
    kv_heads: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, grad = heads(kv_heads, 10)
    if not causal:
        q, grad = q[:, :, :6], grad[:, :, :6]
    out, lse = blocks.forward(q, k, v, causal)
    gradients = blocks.backward(grad, q, k, v, out, lse, causal)
    monkeypatch.setattr(blocks, "_kernel", lambda _: "none")
    other, other_lse = blocks.forward(q, k, v, causal)
    torch.testing.assert_close((other, other_lse), (out, lse), rtol=0, atol=1e-13)
    torch.testing.assert_close(
        blocks.backward(grad, q, k, v, out, lse, causal), gradients, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_cuda_s_kernel_is_called_with_what_it_takes(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data: what it computes takes a GPU to check."""
    monkeypatch.setattr(blocks, "_kernel", lambda _: "cuda")
    q, k, v, grad = (part.to("meta", torch.bfloat16) for part in heads(kv_heads, 10))
    out, lse = blocks.forward(q, k, v, True)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    found = blocks.backward(grad[:, :, :4], q[:, :, :4], k, v, out[:, :, :4], lse[:, :, :4], False)
    assert found[0].shape == q[:, :, :4].shape
    # The op's description without data gives k's gradient as many heads as q has; a kernel gives it k's own.
    assert {part.shape[2:] for part in found[1:]} == {k.shape[2:]}


@pytest.mark.parametrize(("size", "rank", "wanted"), [(1, 0, [0, 1, 2, 3]), (2, 0, [0, 3]), (2, 1, [1, 2])])
def test_pieces_of_a_rank(size: int, rank: int, wanted: list[int]) -> None:
    assert context.local_positions(4, size, rank).tolist() == wanted


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="10 tokens does not make 4 equal pieces"):
        context.local_positions(10, 2, 0)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_ranks_multiply_equally_much(size: int) -> None:
    """Of queries times keys under the causal mask; the rectangles are those that the rank's positions ask for."""
    tokens = 4 * size

    class Group:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def rank(self) -> int:
            return self._rank

        def size(self) -> int:
            return size

    work = set()
    for rank in range(size):
        mine = context.local_positions(tokens, size, rank)
        seen = 0
        parts = context._parts(torch.empty(1, 1, len(mine), 1), Group(rank))  # type: ignore[arg-type]
        for hop, (rows, columns, causal) in enumerate(parts):
            theirs = context.local_positions(tokens, size, (rank - hop) % size)
            allowed = mine[:, None] >= theirs[None, :]
            covered = torch.zeros_like(allowed)
            covered[rows, columns] = True
            assert torch.equal(allowed, covered.tril() if causal else covered)
            seen += int(allowed.sum())
        work.add(seen)
    assert len(work) == 1


def _attend(size: int, kind: Kind, kv_heads: int, tokens: int, dtype: torch.dtype) -> Any:
    """On a rank: the largest relative errors of output and gradients, and what was communicated."""
    mesh = build(ParallelismSpec(cp=size, context=kind), torch.distributed.get_rank())
    at = context.local_positions(tokens, size, mesh.rank)
    q, k, v, grad = heads(kv_heads, tokens, dtype)
    parts = [part[:, :, at].clone().requires_grad_() for part in (q, k, v)]
    attend = context.product(mesh.group("cp"), kind)
    with recorder.recording() as calls:
        out = attend(*parts)
        found = (out.detach(), *torch.autograd.grad(out, parts, grad[:, :, at]))
    errors = [
        float((mine.double() - right[:, :, at]).abs().max() / right.abs().max())
        for mine, right in zip(found, whole(q, k, v, grad), strict=True)
    ]
    return errors, set(recorder.collectives(calls, mesh.spec))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "kv_heads", "tokens", "dtype"),
    [
        (2, 4, 32, torch.float64),
        (2, 1, 12, torch.float32),
        (2, 2, 72, torch.bfloat16),
        pytest.param(4, 2, 48, torch.float64, marks=pytest.mark.slow),
        pytest.param(3, 1, 30, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_ranks_attend_as_one_process_and_send_what_the_formula_says(
    kind: Kind, size: int, kv_heads: int, tokens: int, dtype: torch.dtype
) -> None:
    shape = ModelSpec(name="one", num_layers=1, d_model=64, num_heads=4, num_kv_heads=kv_heads, d_ffn=8)
    wanted = _formula(shape, kind, size, dtype, batch=2, tokens=tokens, device="cuda")
    for errors, calls in run_ranks(size, _attend, size, kind, kv_heads, tokens, dtype):
        assert max(errors) < TOLERANCE[dtype], errors
        assert wanted and calls == wanted


def _attend_natively(size: int) -> str:
    mesh = build(ParallelismSpec(cp=size, context="native"), torch.distributed.get_rank())
    q, k, v, _ = (part.chunk(size, dim=2)[mesh.rank] for part in heads(2, 32, torch.float32))
    try:
        context_native.product(mesh.over("cp"))(q, k, v)
    except NotImplementedError as error:
        return str(error)
    return "it ran"


def test_pytorch_s_own_reaches_its_operators_and_has_none_for_a_cpu() -> None:
    """Once it has, `native` need not be refused on a CPU (suite.declare.meshes) and must be held against the others."""
    for said in run_ranks(2, _attend_natively, 2):
        assert "attention_for_cpu" in said and "sharding strategy" in said


BATCH, TOKENS = 2, 16


def _train(size: int, kind: Kind, dtype: torch.dtype, steps: int, recompute: str) -> Any:
    """Losses and gradients of each step, averaged over the ranks by hand; the collectives of the last step."""
    mesh = build(ParallelismSpec(cp=size, context=kind), torch.distributed.get_rank())
    net = model(max_seq_len=TOKENS).to(dtype)
    context.apply(net, mesh.over("cp"), kind)
    set_recompute(net, recompute)  # type: ignore[arg-type]
    at = context.local_positions(TOKENS, size, mesh.rank)
    return _steps(net, dtype, steps, at, mesh)


def _steps(net: Any, dtype: torch.dtype, steps: int, at: Tensor, mesh: Any = None) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    curve, first, seen = [], [], ()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 61, (BATCH, TOKENS + 1), generator=generator)
        with recorder.recording() as calls:
            loss = net.loss(tokens[:, :-1][:, at], tokens[:, 1:][:, at], at)
            loss.backward()
        if mesh is not None:
            seen = recorder.collectives(calls, mesh.spec)
            for tensor in (loss.detach(), *(parameter.grad for parameter in net.parameters())):
                torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.AVG)
        if step == 0:
            first = [parameter.grad.clone() for parameter in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        curve.append(float(loss.detach()))
    return curve, first, seen


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance", "recompute"),
    [
        ("ring", torch.float64, 1e-12, "none"),
        ("all-gather", torch.float64, 1e-12, "selective"),
        ("ring", torch.float32, 1e-6, "full"),
        ("all-gather", torch.float32, 1e-6, "none"),
    ],
)
def test_training_on_two_parts_of_a_sequence_is_training_on_the_whole(
    kind: Kind, dtype: torch.dtype, tolerance: float, recompute: str
) -> None:
    curve, gradients, _ = _steps(model(max_seq_len=TOKENS).to(dtype), dtype, 20, torch.arange(TOKENS))
    for found, theirs, calls in run_ranks(2, _train, 2, kind, dtype, 20, recompute):
        assert found == pytest.approx(curve, rel=tolerance, abs=0)
        for mine, right in zip(theirs, gradients, strict=True):
            assert float((mine - right).abs().max()) <= tolerance * float(right.abs().max())
        wanted = _formula(spec(), kind, 2, dtype, batch=BATCH, tokens=TOKENS, recompute=recompute)
        assert wanted and set(calls) == wanted


def _formula(
    shape: ModelSpec,
    kind: Kind,
    size: int,
    dtype: torch.dtype,
    *,
    batch: int,
    tokens: int,
    device: str = "cpu",
    recompute: str = "none",
) -> set[Collective]:
    """What the ledger says of cp. On CUDA attention runs in the compute dtype, on a CPU in FP32 or wider."""
    compute = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    run = RunSpec(
        task="ledger",
        model=shape,
        precision=PrecisionSpec(name=compute, compute=compute, weights=compute),  # type: ignore[arg-type]
        parallelism=ParallelismSpec(cp=size, context=kind),
        batch_size=batch,
        seq_len=tokens,
        recompute=recompute,  # type: ignore[arg-type]
        device=device,  # type: ignore[arg-type]
    )
    return {each for each in collectives(run, 61) if each.axis == "cp" and each.op != "all_reduce"}


@pytest.mark.parametrize(
    "mesh",
    [
        {"cp": 2, "zero": 3},
        {"cp": 2, "zero": 2, "context": "all-gather"},
        pytest.param({"dp": 2, "cp": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2, "context": "all-gather"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "cp": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "cp": 2, "context": "all-gather"}, marks=pytest.mark.slow),
        pytest.param({"cp": 4}, marks=pytest.mark.slow),
    ],
    ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()),
)
def test_with_other_axes_it_trains_as_one_process_and_sends_what_the_formula_says(
    mesh: dict[str, Any],
) -> None:
    compare(mesh, steps=20, optimizer={"lr": 1e-3})
