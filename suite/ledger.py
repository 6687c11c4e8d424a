"""What one training step costs a rank, for a model, an optimizer, a precision and a mesh named in words.

    answer = ask(Question(model="llama2-7b", parallelism="zero=3,dp=64"))
    answer.largest.total                 # bytes at the peak of the rank that needs most

By formula (harness.ledger), without torch: `suite ledger` prints it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from harness.data.vocabulary import vocab_size
from harness.ledger.communication import explained
from harness.ledger.parameters import num_parameters
from harness.ledger.predict import explain, predict_ranks
from harness.ledger.schedules import Pipeline
from harness.ledger.simulate import Durations, simulate
from harness.ledger.step import RankStep
from harness.ledger.terms import Term
from harness.ledger.traffic.base import Traffic
from harness.spec import RunSpec
from suite.declare.errors import CaseError, Place, Problem, problem, shown
from suite.declare.feasible import batch_problem, mesh_problem, sequence_problem
from suite.declare.layers import resolve, run_spec
from suite.declare.meshes import not_carried_out
from suite.declare.overrides import parse_overrides
from suite.declare.yaml_loader import Node, at, parse_yaml
from suite.fitting import Option, options

EQUAL_TIMES = Durations()
"""A forward pass, and the two halves of a backward pass, take equally long: what published bubbles assume."""


@dataclass(frozen=True)
class Question:
    """The words of `suite ledger`. None: chosen for the model and the mesh."""

    model: str
    optimizer: str = "adamw"
    precision: str = "bf16"
    parallelism: str = "single"
    recompute: str = "none"
    seq_len: int | None = None
    batch_size: int | None = None
    accumulation: int = 1
    device: str = "cuda"
    ranks: int | None = None
    sets: tuple[str, ...] = ()
    """`A.B=VALUE` for any other field of a run."""


@dataclass(frozen=True)
class Answer:
    """A step by formula, on one rank of each kind."""

    spec: RunSpec
    chosen: dict[str, str]
    """Field that was not given -> its value and the reason for it."""
    num_parameters: int
    ranks: tuple[RankStep, ...]
    """One of each pipeline stage: all others do the same."""
    idle_share: float | None
    """Of a pipeline, at equal times of a stage's forward pass and both halves of its backward pass; None without
    one."""
    warning: str | None = None
    """Why this suite does not train it, where it does not."""

    @property
    def largest(self) -> RankStep:
        """The rank whose peak is largest."""
        return max(self.ranks, key=lambda each: each.total)

    def terms(self, rank: int) -> list[Term]:
        """What lies between steps, what autograd keeps of one microbatch, and what the peak holds beside them."""
        return explain(self.spec, vocabulary(self.spec), rank)

    def traffic(self, rank: int) -> tuple[Traffic, ...]:
        """The rank's collectives one by one, each with its formula."""
        return explained(self.spec, vocabulary(self.spec), rank)

    def options(self, limit: int) -> list[Option]:
        """What would fit into `limit` bytes, and at what cost."""
        return options(self.spec, vocabulary(self.spec), limit)

    def as_json(self) -> dict[str, Any]:
        return {
            "spec": self.spec.model_dump(mode="json", exclude_defaults=True),
            "chosen": self.chosen,
            "num_parameters": self.num_parameters,
            "num_ranks": self.spec.parallelism.num_ranks,
            "ranks": [rank_json(each) for each in self.ranks],
            "pipeline_idle_share": self.idle_share,
            "warning": self.warning,
        }


def rank_json(one: RankStep) -> dict[str, Any]:
    """A rank's step as plain values, sums among them."""
    collectives = [asdict(each) | {"sent_bytes": each.sent_bytes} for each in one.collectives]
    return asdict(one) | {"total": one.total, "collectives": collectives}


def ask(question: Question) -> Answer:
    """The answer by formula. Raises CaseError naming the option that is wrong, what is allowed and the nearest
    match."""
    spec, chosen = spec_of(question)
    vocab = vocabulary(spec)
    mesh = spec.parallelism
    return Answer(
        spec=spec,
        chosen=chosen,
        num_parameters=num_parameters(spec.model, vocab).total,
        ranks=tuple(predict_ranks(spec, vocab)),
        idle_share=simulate(Pipeline.of(mesh), EQUAL_TIMES).idle_share() if mesh.pp > 1 else None,
        warning=not_carried_out(spec.model_copy(update={"task": "step"})),
    )


def vocabulary(spec: RunSpec) -> int:
    return spec.model.vocab_size or vocab_size(spec.data.tokenizer)


def spec_of(question: Question) -> tuple[RunSpec, dict[str, str]]:
    """The question as a run of task `ledger`, and what was chosen for it."""
    written = {
        name: _option(name.replace("_", "-"), getattr(question, name), name in _BY_NAME)
        for name in (*_BY_NAME, *_PLAIN)
        if getattr(question, name) is not None
    }
    written["task"] = at(Place("suite ledger"), "ledger")
    overrides, wrong = parse_overrides(question.sets)
    if question.ranks is not None:
        written["parallelism.ranks"] = _option("ranks", question.ranks)
    root = Place("suite ledger")
    whole, problems = resolve([Node(written, root), *(override.layer() for override in overrides)], root)
    wrong += [each for found in problems.values() for each in found]
    try:
        spec = run_spec(whole, tuple(problems))
    except CaseError as error:
        wrong += error.problems
    if wrong:
        raise CaseError(wrong)
    spec, chosen = _complete(spec, whole)
    _check(spec, written)
    return spec, chosen


_BY_NAME = ("model", "optimizer", "precision", "parallelism")
_PLAIN = ("recompute", "seq_len", "batch_size", "accumulation", "device")


def _option(name: str, value: Any, by_name: bool = False) -> Node:
    place = Place(f"--{name} {value}")
    return at(place, _inline(value, place) if by_name else value)


def _inline(text: str, place: Place) -> Any:
    """A preset's name, fields as A=B,C=D, or both: `zero3-2,tp=2`."""
    if "=" not in text:
        return text
    fields: dict[str, Any] = {}
    for position, part in enumerate(text.split(",")):
        name, equals, value = part.partition("=")
        if not equals and position == 0:
            fields["preset"] = name.strip()
            if place.file.startswith("--parallelism"):
                fields["name"] = "custom"  # it is no longer the mesh that the preset's name stands for
        elif not equals or not name.strip():
            message = f"should be a preset's name or fields as A=B,C=D (got {shown(part)})"
            raise CaseError([problem(place, message)])
        elif name.strip() in fields:
            raise CaseError([problem(place, f"{name.strip()} is written twice")])
        else:
            fields[name.strip()] = parse_yaml(value, place.file).plain() if value.strip() else None
    if place.file.startswith("--model") and "preset" not in fields:
        fields.setdefault("name", "custom")
    return fields


def _complete(spec: RunSpec, whole: Node) -> tuple[RunSpec, dict[str, str]]:
    """Sequence and batch where they were not given."""
    mesh, update, chosen = spec.parallelism, dict[str, int](), dict[str, str]()
    if whole.get("seq_len") is None:
        update["seq_len"] = spec.model.max_seq_len
        chosen["seq_len"] = f"{spec.model.max_seq_len}, the longest that {spec.model.name} takes"
    if whole.get("batch_size") is None:
        update["batch_size"] = mesh.data_shards * spec.accumulation * mesh.num_microbatches
        chosen["batch_size"] = f"{update['batch_size']}, one sequence at a time on each data shard"
    return spec.model_copy(update=update), chosen


def _check(spec: RunSpec, written: dict[str, Node]) -> None:
    """Raises CaseError. A batch that was not given is one that any mesh divides."""
    mesh = spec.parallelism
    free = (
        {}
        if "batch_size" in written
        else {"batch_size": spec.accumulation * (mesh.ranks or mesh.num_ranks) * 16}
    )
    checks = (
        ("parallelism", mesh_problem(spec.model_copy(update=free)), "suite list parallelisms"),
        ("seq_len", sequence_problem(spec), ""),
        ("accumulation", batch_problem(spec), ""),
    )
    found: list[Problem] = []
    for name, told, see in checks:
        if told:
            place = written[name].place if name in written else Place("suite ledger")
            found.append(problem(place, told, see))
    if found:
        raise CaseError(found)
