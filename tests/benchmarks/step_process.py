"""One side of the training-step comparison, in a process of its own as its user would run it.

    python tests/benchmarks/step_process.py suite llama-0.8m bf16

Sides: suite (the worker's own step, with its malloc settings), compiled (the same under torch.compile), torchao (the
same model with its FP8 emulation), nanogpt, huggingface (Trainer). Precisions: fp32, bf16; for suite also fp8-bf16 and
fp8-fp32, every hidden linear's casts emulated (preset fp8-delayed) with products in BF16 or FP32. Prints the median
tokens per CPU-second of the steps after the first few, and the first and last loss.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import yaml

from harness.data.loader import TokenBatches
from harness.data.tokens import TokenData, load_tokens
from harness.models import transformer
from harness.optim import adamw
from harness.parallel.layout import lay_out
from harness.parallel.mesh import Mesh
from harness.precision.linear import apply_recipe
from harness.run import Run
from harness.spec import DataSpec, ModelSpec, PrecisionSpec, RunSpec
from harness.tasks.pretrain import training_step
from harness.worker import keep_freed_memory

ROOT = Path(__file__).parents[2]
PRESETS = yaml.safe_load((ROOT / "cases" / "presets" / "precisions.yaml").read_text())
DELAYED = PRESETS["fp8-delayed"]["recipe"]
PRECISIONS = {
    "fp32": PrecisionSpec(name="fp32"),
    "bf16": PrecisionSpec(name="bf16", compute="bf16"),
    "fp8-fp32": PrecisionSpec(name="fp8", recipe=DELAYED, backend="emulated"),
    "fp8-bf16": PrecisionSpec(name="fp8", compute="bf16", recipe=DELAYED, backend="emulated"),
}
SHAPES = {"llama-0.8m": (8, 128, 14), "llama-15m": (8, 256, 5)}
"""Batch, sequence and timed steps of each model; the first is the laptop size of the default case."""
WARM_UP = 4


def model_spec(name: str) -> ModelSpec:
    fields = yaml.safe_load((ROOT / "cases" / "models.yaml").read_text())[name]
    return ModelSpec(name=name, **{k: v for k, v in fields.items() if k not in ("about", "source")})


def suite_step(
    model: ModelSpec,
    precision: str,
    tokens: TokenData,
    batch: int,
    seq: int,
    change: Callable[[transformer.Transformer], None] = lambda model: None,
) -> Callable[[], float]:
    """The worker's training step; `change` is done to the model before it."""
    keep_freed_memory()
    spec = RunSpec(
        model=model, precision=PRECISIONS[precision], tokens=1000 * batch * seq, batch_size=batch, seq_len=seq
    )
    built = transformer.build(model, tokens.vocab_size, seed=0)
    apply_recipe(built, spec.precision)
    change(built)
    run = Run(
        spec=spec,
        journal=None,  # type: ignore[arg-type]
        checkpoints=Path(),
        device=torch.device("cpu"),
        model=built,
        strategy=lay_out(built, spec, Mesh(spec.parallelism, 0)),
        optimizer=adamw.build(built, spec.optimizer),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        batches=TokenBatches(tokens.train, batch_size=batch, seq_len=seq, seed=0),
        validation=[],
    )
    steps = itertools.count(100)  # past the warm-up of the learning rate

    def step() -> float:
        training_step(run, next(steps))
        return run.loss

    return step


def compiled(model: transformer.Transformer) -> None:
    model.loss = torch.compile(model.loss)  # type: ignore[method-assign]


def with_torchao(model: transformer.Transformer) -> None:
    """Its FP8 emulation on every hidden linear: per-tensor scales of the tensor itself, E4M3 and E5M2."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    forward = Float8Linear.forward
    Float8Linear.forward = lambda self, x, weight=None: forward(self, x)  # our feed-forward passes None
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: name.startswith("layers."),
    )


def time_steps(step: Callable[[], float], num_steps: int) -> tuple[list[float], list[float]]:
    """Losses and CPU seconds of each step."""
    losses, seconds = [], []
    for _ in range(WARM_UP + num_steps):
        start = time.process_time()
        losses.append(step())
        seconds.append(time.process_time() - start)
    return losses, seconds


def time_trainer(
    model: ModelSpec, precision: str, tokens: TokenData, batch: int, seq: int, num_steps: int
) -> tuple[list[float], list[float]]:
    import transformers

    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.process_time() - self.start)

    windows = tokens.train[: seq * batch * (WARM_UP + num_steps)].reshape(-1, seq).astype("int64")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=tokens.vocab_size,
            hidden_size=model.d_model,
            intermediate_size=model.d_ffn,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            max_position_embeddings=seq,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=llama,
            args=transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=batch,
                max_steps=WARM_UP + num_steps,
                learning_rate=1e-3,
                bf16=precision == "bf16",
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in windows],
            callbacks=[Clock()],
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], seconds


def main(side: str, name: str, precision: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokens = model_spec(name), load_tokens(DataSpec())
    batch, seq, num_steps = SHAPES[name]
    changes = {"suite": lambda model: None, "compiled": compiled, "torchao": with_torchao}
    if side in changes:
        step = suite_step(model, precision, tokens, batch, seq, changes[side])
        losses, seconds = time_steps(step, num_steps)
    elif side == "nanogpt":
        from nano_gpt import GPT, make_step

        gpt = GPT(model.num_layers, model.d_model, model.num_heads, tokens.vocab_size, seq)
        step = make_step(gpt, tokens.train, batch, seq, bf16=precision == "bf16")
        losses, seconds = time_steps(step, num_steps)
    else:
        losses, seconds = time_trainer(model, precision, tokens, batch, seq, num_steps)
    speed = batch * seq / statistics.median(seconds[WARM_UP:])
    print(json.dumps({"tokens_per_cpu_s": speed, "first_loss": losses[0], "last_loss": losses[-1]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
