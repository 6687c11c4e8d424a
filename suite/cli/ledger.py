"""`suite ledger --model NAME`: what a training step costs each rank, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli.failures import WrongCommand
from suite.cli.output import JsonOption, print_json, say

if TYPE_CHECKING:
    from harness.ledger.step import RankStep
    from suite.ledger import Answer


def ledger(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="`suite list models`, or fields as A=B,C=D.")
    ],
    optimizer: Annotated[str, typer.Option("--optimizer", help="`suite list optimizers`")] = "adamw",
    precision: Annotated[str, typer.Option("--precision", help="`suite list precisions`")] = "bf16",
    parallelism: Annotated[
        str,
        typer.Option(
            "--parallelism",
            metavar="NAME|A=B,...",
            help="`suite list parallelisms`, fields (dp tp pp cp ep zero ...), or both: zero3-2,tp=2.",
        ),
    ] = "single",
    recompute: Annotated[str, typer.Option("--recompute", help="none, selective or full.")] = "none",
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="Tokens of a sequence; default: the model's longest.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", help="Sequences a step over all ranks; default: one at a time on each data shard."
        ),
    ] = None,
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-steps of a step.")] = 1,
    device: Annotated[
        str, typer.Option("--device", help="cuda or cpu; on a CPU attention runs in FP32.")
    ] = "cuda",
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Refuse a mesh that does not make so many ranks.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=VALUE", help="Any other field of a run; repeatable."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Each formula with its numbers.")] = False,
    fits: Annotated[
        str | None,
        typer.Option("--fits", metavar="SIZE", help="What would fit into 80GiB (or 80GB), and at what cost."),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Set the real model's step on tensors without data beside it.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Memory, communication, idle time and FLOPs of one training step by formula.

    Bytes of the six terms are those at the peak, on one rank of each pipeline stage: ranks along the other axes do the
    same. KiB, MiB and GiB are 2^10, 2^20 and 2^30 bytes. Payload is the whole tensor of a collective; sent is what a
    rank puts on its link by ring algorithms.

    \b
    Examples:
      suite ledger --model llama2-7b --parallelism zero=3,dp=64 --recompute full
      suite ledger --model gpt2-124m --precision bf16-master --fits 24GiB
      suite ledger --model llama3-405b --parallelism dp=64,zero=3,tp=8,pp=8,sequence_parallel=true --explain
    """
    from suite.ledger import Question, ask

    limit = None if fits is None else _limit(fits)
    answer = ask(
        Question(
            model=model,
            optimizer=optimizer,
            precision=precision,
            parallelism=parallelism,
            recompute=recompute,
            seq_len=seq_len,
            batch_size=batch_size,
            accumulation=accumulation,
            device=device,
            ranks=ranks,
            sets=tuple(set_ or ()),
        )
    )
    tracing = _trace(answer) if trace else None
    if json:
        print_json(_as_json(answer, tracing, limit, explain))
    else:
        _print(answer, tracing, limit, str(fits), explain)


def _trace(answer: Answer) -> tuple[RankStep, ...]:
    from suite.tracing import trace

    say("tracing the step; seconds for 7B, minutes for 405B")
    return trace(answer.spec)


def _print(
    answer: Answer, tracing: tuple[RankStep, ...] | None, limit: int | None, fits: str, explain: bool
) -> None:
    from suite.cli.ledger_tables import Tables

    for name, reason in answer.chosen.items():
        say(f"{name} was not given: {reason}")
    if answer.warning:
        say(f"this suite does not train it so: {answer.warning}")
    tables = Tables(answer)
    tables.head()
    tables.memory()
    tables.communication()
    if explain:
        tables.explain()
    if tracing is not None:
        tables.beside(answer, tracing)
    if limit is not None:
        tables.fits(limit, fits)


def _limit(text: str) -> int:
    from suite.declare.quantities import parse_quantity

    limit = parse_quantity(text)
    if not isinstance(limit, int) or limit <= 0 or "B" not in text:
        wanted = "a size such as 80GiB (2^30 bytes each) or 80GB (10^9)"
        raise WrongCommand(f"suite ledger: --fits takes {wanted}, got {text!r}")
    return limit


def _as_json(
    answer: Answer, tracing: tuple[RankStep, ...] | None, limit: int | None, explain: bool
) -> dict[str, Any]:
    from dataclasses import asdict

    from suite.ledger import rank_json

    found = answer.as_json()
    if explain:
        rank = answer.largest.rank
        found["terms"] = [asdict(each) for each in answer.terms(rank)]
        found["traffic"] = [asdict(each) for each in answer.traffic(rank)]
    if tracing is not None:
        found["trace"] = [rank_json(each) for each in tracing]
    if limit is not None:
        found["fits"] = {"limit_bytes": limit, "options": [asdict(each) for each in answer.options(limit)]}
    return found
