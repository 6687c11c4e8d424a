"""Tokens per CPU-second of our training step against nanoGPT's and the Hugging Face Trainer's, same shape.

    python -m pytest tests/benchmarks/test_training_step.py --benchmark-json=step.json

Steps alternate in one process, so the ratios hold on a busy machine; they stand in `extra_info` and nothing
is asserted about them. Both sides run with the C library's default malloc; the suite's workers keep freed
memory, which adds to ours.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harness.data.loader import TokenBatches
from harness.data.tokens import TokenData, load_tokens
from harness.models import transformer
from harness.optim import adamw
from harness.run import Run
from harness.spec import DataSpec, ModelSpec, PrecisionSpec, RunSpec
from harness.tasks.pretrain import training_step

from .nano_gpt import GPT, make_step
from .timing import alternate, cpu_seconds, ratio_as_run

pytestmark = pytest.mark.slow

BATCH_SIZE, SEQ_LEN = 8, 256
MODELS = Path(__file__).parents[2] / "cases" / "models.yaml"
PRECISIONS = {"fp32": PrecisionSpec(name="fp32"), "bf16": PrecisionSpec(name="bf16", compute="bf16")}
ROUNDS = {"llama-1m": 6, "llama-15m": 3}


def shape(name: str) -> ModelSpec:
    fields = yaml.safe_load(MODELS.read_text())[name]
    return ModelSpec(name=name, **{k: v for k, v in fields.items() if k not in ("about", "source")})


def our_step(model: ModelSpec, precision: str, tokens: TokenData) -> Callable[[], float]:
    """The loop's own step, one a call."""
    spec = RunSpec(
        model=model,
        precision=PRECISIONS[precision],
        tokens=60 * BATCH_SIZE * SEQ_LEN,
        batch_size=BATCH_SIZE,
        seq_len=SEQ_LEN,
    )
    built = transformer.build(model, tokens.vocab_size, seed=0)
    run = Run(
        spec=spec,
        journal=None,  # type: ignore[arg-type]
        checkpoints=Path(),
        device=torch.device("cpu"),
        model=built,
        optimizer=adamw.build(built, spec.optimizer),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        batches=TokenBatches(tokens.train, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, seed=0),
        validation=[],
    )
    steps = itertools.count(1)

    def step() -> float:
        training_step(run, next(steps))
        return run.loss

    return step


def note(benchmark: Any, ours: float, theirs: float, ratio: float) -> None:
    tokens = BATCH_SIZE * SEQ_LEN
    benchmark.extra_info["tokens_per_cpu_s"] = round(tokens / ours)
    benchmark.extra_info["their_tokens_per_cpu_s"] = round(tokens / theirs)
    benchmark.extra_info["speed_ratio"] = round(ratio, 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama-1m", "llama-15m"])
def test_against_nano_gpt(benchmark: Any, name: str, precision: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokens = shape(name), load_tokens(DataSpec())
    gpt = GPT(model.num_layers, model.d_model, model.num_heads, tokens.vocab_size, SEQ_LEN)
    ours = our_step(model, precision, tokens)
    theirs = make_step(gpt, tokens.train, BATCH_SIZE, SEQ_LEN, bf16=precision == "bf16")
    first = ours(), theirs()
    note(benchmark, *alternate(ours, theirs, ROUNDS[name]))
    if name == "llama-1m" and sys.platform == "linux":
        benchmark.extra_info["speed_ratio_as_run"] = round(ratio_as_run(ours, theirs, rounds=4), 3)
    last = benchmark.pedantic(ours, rounds=1), theirs()
    assert last[0] < first[0] - 0.3
    assert last[1] < first[1] - 0.3  # both learn: the comparison is of real steps


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama-1m", "llama-15m"])
def test_against_hugging_face_trainer(benchmark: Any, name: str, precision: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'lowprec-suite[bench]'")
    torch.set_num_threads(1)
    model, tokens = shape(name), load_tokens(DataSpec())
    ours = our_step(model, precision, tokens)
    pairs: list[tuple[float, float]] = []

    class Alternate(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        """Between two of the Trainer's steps, one of ours."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            mine = cpu_seconds(ours)
            self.started = time.process_time(), mine

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            started, mine = self.started
            pairs.append((mine, time.process_time() - started))

    windows = tokens.train[: SEQ_LEN * 512].reshape(-1, SEQ_LEN).astype("int64")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=tokens.vocab_size,
            hidden_size=model.d_model,
            intermediate_size=model.d_ffn,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            max_position_embeddings=SEQ_LEN,
        )
    )
    trainer = transformers.Trainer(
        model=llama,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=ROUNDS[name] + 1,
            learning_rate=1e-3,
            bf16=precision == "bf16",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in windows],
        callbacks=[Alternate()],
    )
    trainer.train()
    pairs = pairs[1:]
    assert len(pairs) == ROUNDS[name]
    ratio = statistics.median(theirs / mine for mine, theirs in pairs)
    note(benchmark, statistics.median(m for m, _ in pairs), statistics.median(t for _, t in pairs), ratio)
    benchmark.pedantic(ours, rounds=1)
