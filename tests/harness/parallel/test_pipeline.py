"""Training in pipeline stages against one process: losses, norms, weights, and what the ranks send each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.ledger.communication import collectives
from harness.models import transformer
from harness.parallel import layout, mesh, recorder
from harness.parallel.pipeline import Pipeline, cut
from harness.spec import ModelSpec, ParallelismSpec, PrecisionSpec, RunSpec
from harness.tasks.pretrain import training_step
from tests.harness.parallel.conftest import run_ranks
from tests.harness.parallel.training import (
    FP32,
    FP64,
    TINY,
    VOCAB,
    Batches,
    Trained,
    difference,
    make_spec,
    prepare,
    train,
)

SCHEDULES: list[dict[str, Any]] = [
    *({"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "interleaved"}),
    *({"schedule": "zero-bubble"}, {"schedule": "zero-bubble", "stages_per_rank": 2}),
    *({"schedule": "zbv"}, {"schedule": "dualpipev"}),
]
FOUR_LAYERS: dict[str, Any] = {"num_layers": 4}


def name(schedule: dict[str, Any]) -> str:
    return "-".join(str(value) for value in schedule.values())


def compare(
    parallelism: dict[str, Any], steps: int = 4, limit_s: float = 60, **changes: Any
) -> list[Trained]:
    """Train on ranks and on one process; in FP64 all agrees to rounding, in FP32 losses do. Returns the ranks'."""
    changes = {"model": FOUR_LAYERS, **changes}
    spec = make_spec(parallelism, steps, **changes)
    alone = train(make_spec(None, steps, **changes))
    ranks: list[Trained] = run_ranks(spec.num_ranks, train, spec, limit_s=limit_s)
    for rank, trained in enumerate(ranks):
        gap = difference(trained, alone)
        if spec.precision == FP64:
            assert gap["loss"] < 1e-12, (rank, gap)
            assert max(gap["norm"], gap["weights"]) < 1e-9, (rank, gap)  # AdamW's first steps are signs
        else:
            assert gap["loss"] < 1e-6, (rank, gap)
        assert trained.collectives == collectives(spec, VOCAB, rank), rank
    return ranks


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_every_schedule_trains_as_one_process(schedule: dict[str, Any]) -> None:
    """Each batch in two micro-steps of four microbatches, in FP64; the loss is on every rank."""
    compare({"pp": 2, "microbatches": 4, **schedule}, accumulation=2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [FP64, FP32], ids=lambda precision: precision.name)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=name)
def test_every_schedule_for_20_steps(schedule: dict[str, Any], precision: PrecisionSpec) -> None:
    compare({"pp": 2, "microbatches": 4, **schedule}, steps=20, precision=precision, optimizer={"lr": 1e-3})


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zbv"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_in_stages(schedule: str, recompute: str) -> None:
    compare({"pp": 2, "microbatches": 4, "schedule": schedule}, steps=2, recompute=recompute)


@pytest.mark.parametrize("model", [{"num_layers": 3}, {"num_layers": 5, "ffn": "gelu", "norm": "layernorm"}])
def test_layers_that_do_not_divide(model: dict[str, Any]) -> None:
    """One more on the first stages; learned positions and biases go with the embedding and the blocks."""
    compare({"pp": 2}, model={"positions": "learned", "bias": True, **model})


SHARDED = [
    *((schedule, zero) for schedule in ("1f1b", "interleaved") for zero in (0, 1, 2, 3)),
    *((schedule, zero) for schedule in ("zbv", "dualpipev") for zero in (0, 1, 2)),
    *(("gpipe", 3), ("zero-bubble", 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "zero"), SHARDED)
def test_data_parallel_pipelines(schedule: str, zero: int) -> None:
    """Gradients are averaged once a step (zero 0, 1), or reduced by FSDP2 after each micro-step."""
    parallelism = {"dp": 2, "pp": 2, "zero": zero, "schedule": schedule, "microbatches": 4}
    compare(parallelism, batch_size=16, accumulation=2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_four_ranks(schedule: str) -> None:
    compare({"pp": 4, "microbatches": 8, "schedule": schedule}, steps=20, model={"num_layers": 8})


@pytest.mark.slow
def test_fully_sharded_pipeline_for_20_steps_in_fp32() -> None:
    compare({"dp": 2, "pp": 2, "zero": 3}, steps=20, precision=FP32, optimizer={"lr": 1e-3})


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_pipelines_of_tensor_parallel_stages(sequence_parallel: bool) -> None:
    compare({"pp": 2, "tp": 2, "schedule": "zbv", "sequence_parallel": sequence_parallel})


@pytest.mark.slow
def test_pipelines_of_contexts() -> None:
    compare({"pp": 2, "cp": 2, "schedule": "interleaved"})


@pytest.mark.slow
def test_three_axes_on_eight_ranks() -> None:
    compare({"dp": 2, "pp": 2, "tp": 2}, steps=20, limit_s=180)


BF16 = PrecisionSpec(name="bf16", compute="bf16")


def _losses_and_copies(spec: RunSpec) -> tuple[list[float], int]:
    """Losses of some steps, and how often a weight was cast in the last."""
    run = prepare(spec)
    for step in (1, 2, 3):
        with CountCasts() as casts:
            training_step(run, step)
    return [run.loss, run.gradient_norm], casts.count


class CountCasts(TorchDispatchMode):
    """Counts casts of matrices from FP32 to BF16: those of the weights, since the stream has three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and out.dim() == 2:
            self.count += 1
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_microbatches_share_autocast_s_copies(schedule: str) -> None:
    """BF16 products of FP32 weights: as one process, and each weight is cast once a pass."""
    alone, copies = _losses_and_copies(make_spec(None, 3, model=FOUR_LAYERS, precision=BF16))
    spec = make_spec({"pp": 2, "schedule": schedule, "microbatches": 4}, 3, model=FOUR_LAYERS, precision=BF16)
    ranks = run_ranks(2, _losses_and_copies, spec)
    assert sum(each for _, each in ranks) == copies == 4 * 4 + 1
    for found, _ in ranks:
        assert found == pytest.approx(alone, rel=2e-3)


def _evaluations(spec: Any) -> tuple[float, float, float]:
    """Loss of a batch without gradients before a step, in it, and after it."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    model = transformer.build(spec.model, VOCAB, 0).double()
    laid_out = layout.lay_out(model, spec, mesh.build(spec.parallelism, dist.get_rank()))
    batch = Batches(spec).batch(1)
    before = float(laid_out.evaluate(*batch))
    trained = float(laid_out.forward_backward(*batch))
    return before, trained, float(laid_out.evaluate(*batch))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_evaluation_is_the_loss_without_a_backward_pass(schedule: str) -> None:
    spec = make_spec({"pp": 2, "schedule": schedule}, model=FOUR_LAYERS)
    for before, trained, after in run_ranks(2, _evaluations, spec):
        assert before == after == pytest.approx(trained, rel=1e-14)


def _first_two_passes(spec: Any) -> list[list[str]]:
    import torch.distributed as dist

    torch.set_num_threads(1)
    model = transformer.build(spec.model, VOCAB, 0).double()
    laid_out = layout.lay_out(model, spec, mesh.build(spec.parallelism, dist.get_rank()))
    found = []
    for step in (1, 2):
        with recorder.recording() as calls:
            laid_out.forward_backward(*Batches(spec).batch(step))
        found.append([f"{call.op} {call.num_bytes}" for call in calls if not call.control])
    return found


def test_the_first_pass_sends_what_later_ones_do() -> None:
    """What torch's stages exchange before their first pass is bookkeeping."""
    spec = make_spec({"pp": 2, "schedule": "zbv"}, model=FOUR_LAYERS)
    for first, second in run_ranks(2, _first_two_passes, spec):
        assert sorted(first) == sorted(second)
        assert len(first) == 16


def tiny(**changes: Any) -> transformer.Transformer:
    return transformer.build(ModelSpec(**{**TINY, **FOUR_LAYERS, **changes}), VOCAB, 0)


def test_stages_share_out_the_model_s_parameters() -> None:
    """Each on one stage, under its name in the whole model, first embedding and last norm and head."""
    model = tiny(num_layers=5)
    names = [name for name, _ in model.named_parameters()]
    for schedule in ("1f1b", "interleaved", "zbv"):
        parallelism = ParallelismSpec(pp=2, schedule=schedule)  # type: ignore[arg-type]
        stages = [stage for rank in range(2) for stage in cut(model, parallelism, rank)]
        found = [
            name for stage in sorted(stages, key=lambda s: s.number) for name, _ in stage.named_parameters()
        ]
        assert sorted(found) == sorted(names)
        by_number = {stage.number: stage for stage in stages}
        assert by_number[0].embedding is model.embedding
        assert by_number[len(stages) - 1].head is model.head
        assert sum(len(stage.attentions()) for stage in stages) == 5


def test_stages_in_turn_are_the_model() -> None:
    model = tiny().double()
    parallelism = ParallelismSpec(pp=2, schedule="zbv")
    stages = sorted((s for rank in range(2) for s in cut(model, parallelism, rank)), key=lambda s: s.number)
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    x = tokens
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, model(tokens), rtol=0, atol=0)


def test_models_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="embedding and head of tiny on different ranks, and they are tied"):
        cut(tiny(tie_embeddings=True), ParallelismSpec(pp=2), 0)
    with pytest.raises(ValueError, match="8 stages are more than 4 layers"):
        cut(tiny(), ParallelismSpec(pp=4, schedule="zbv"), 0)
    with pytest.raises(ValueError, match="6 rows of a micro-step do not make 4 microbatches"):
        parallelism = ParallelismSpec(pp=2, microbatches=4)
        stages = cut(tiny(), parallelism, 0)
        Pipeline(stages, parallelism, None, rows=6, tokens=16, width=32, dtype=torch.float32)
