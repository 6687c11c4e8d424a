"""The tables of `suite ledger`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.ledger.step import CATEGORIES, STATES
from suite.cli.output import print_table
from suite.declare.nearest import mesh_text

if TYPE_CHECKING:
    from harness.ledger.step import RankStep
    from suite.ledger import Answer

MAX_COLUMNS = 8
"""Pipeline ranks shown side by side; of more, the first, the largest and the last."""
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


class Tables:
    """One answer, all bytes in one unit: the largest of which the peak has at least one."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        total = answer.largest.total
        self.unit, self.size = next((unit for unit in UNITS if total >= unit[1]), UNITS[-1])

    def head(self) -> None:
        """What was asked."""
        spec, mesh = self.answer.spec, self.answer.spec.parallelism
        named = "" if mesh.name in ("custom", "single") else f"{mesh.name} "
        of = "one rank" if mesh.num_ranks == 1 else f"{named}{mesh_text(mesh)}, {mesh.num_ranks:,} ranks"
        parts = (f"{self.answer.num_parameters:,} parameters", spec.optimizer.name, spec.precision.name, of)
        print(f"{spec.model.name}: {'; '.join(parts)}")
        steps = f" in {spec.accumulation} micro-steps" if spec.accumulation > 1 else ""
        print(
            f"batch of {spec.batch_size:,} sequences{steps}, {spec.seq_len:,} tokens each; recompute {spec.recompute}; "
            f"device {spec.device}"
        )

    def memory(self) -> None:
        """The six terms at the peak, what lies between steps, operations and idle time."""
        shown = self._shown()
        rows: list[tuple[Any, ...]] = [
            (category, *(self._amount(one.peak.get(category, 0)) for one in shown)) for category in CATEGORIES
        ]
        rows.append(("total at the peak", *(self._amount(one.total) for one in shown)))
        rows.append(("the peak is in", *(f"{one.moment}" for one in shown)))
        rows += [
            (f"{name}, between steps", *(self._amount(one.state.get(name, 0)) for one in shown))
            for name in STATES
        ]
        rows.append(("kept for the backward pass", *(self._amount(one.saved) for one in shown)))
        if shown[0].flops is not None:
            rows.append(("FLOPs", *(f"{one.flops:.3e}" for one in shown)))
        self._print((self.unit, *(self._title(one) for one in shown)), rows)
        if self.answer.idle_share is not None:
            assumed = "where a stage's forward pass and both halves of its backward pass take equally long"
            print(f"\nthe pipeline is idle for {self.answer.idle_share:.1%} of a step, {assumed}")

    def communication(self) -> None:
        """Collectives of the rank that sends most."""
        one = max(self.answer.ranks, key=lambda each: sum(c.sent_bytes for c in each.collectives))
        if not one.collectives:
            return
        where = "" if self.answer.spec.parallelism.pp == 1 else f", {self._title(one)}"
        self._print(
            (
                f"communication{where}",
                "operation",
                "group",
                "calls",
                f"payload {self.unit}",
                f"sent {self.unit}",
            ),
            [
                (
                    c.axis,
                    c.op,
                    c.group_size,
                    f"{c.count:,}",
                    self._amount(c.num_bytes),
                    self._amount(c.sent_bytes),
                )
                for c in one.collectives
            ],
        )

    def explain(self) -> None:
        """Each formula with the numbers of the rank that needs most."""
        rank = self.answer.largest.rank
        self._print(
            ("term", "category", "formula", "numbers", "bytes"),
            [(t.name, t.category, t.formula, t.numbers, f"{t.num_bytes:,}") for t in self.answer.terms(rank)],
        )
        traffic = self.answer.traffic(rank)
        if traffic:
            self._print(
                ("exchanged", "axis", "operation", "calls", "formula", "numbers", "bytes"),
                [
                    (t.name, t.axis, t.op, f"{t.count:,}", t.formula, t.numbers, f"{t.num_bytes:,}")
                    for t in traffic
                ],
            )

    def beside(self, answer: Answer, tracing: Sequence[RankStep]) -> None:
        """Formula and trace of the rank that needs most by formula."""
        one = answer.largest
        other = next(each for each in tracing if each.rank == one.rank)
        rows: list[tuple[str, int, int]] = [
            (name, one.peak.get(name, 0), other.peak.get(name, 0)) for name in CATEGORIES
        ]
        rows.append(("total at the peak", one.total, other.total))
        rows.append(("kept for the backward pass", one.saved, other.saved))
        self._print(
            (f"{self.unit}, as on {answer.spec.device}", "formula", "trace", "difference"),
            [
                (name, self._amount(own), self._amount(found), _difference(own, found))
                for name, own, found in rows
            ],
        )

    def fits(self, limit: int, written: str) -> None:
        """What would fit into so many bytes, and what each option costs."""
        found = self.answer.options(limit)
        self._print(
            (
                f"to fit {written}",
                f"peak {self.unit}",
                "fits",
                "FLOPs a token",
                "sent a token",
            ),
            [
                (
                    each.change,
                    self._amount(each.peak_bytes),
                    "yes" if each.fits else "no",
                    f"{each.flops:.3f}x",
                    "" if each.sent is None else f"{each.sent:.3f}x",
                )
                for each in found
            ],
        )
        if not any(each.fits for each in found):
            print("\nnothing of this fits; more ranks or a cut of the model (tp, pp) would have to")

    def _shown(self) -> list[RankStep]:
        ranks = self.answer.ranks
        if len(ranks) <= MAX_COLUMNS:
            return [*ranks]
        wanted = {ranks[0].rank, self.answer.largest.rank, ranks[-1].rank}
        return [one for one in ranks if one.rank in wanted]

    def _title(self, one: RankStep) -> str:
        mesh = self.answer.spec.parallelism
        if mesh.pp == 1:
            return "each rank" if mesh.num_ranks > 1 else "one rank"
        return f"pp rank {mesh.place(one.rank)['pp']}"

    def _amount(self, num_bytes: float) -> str:
        """Three digits below the point, and never 0 for what is there."""
        amount = num_bytes / self.size
        return "0" if not num_bytes else f"{amount:,.3f}" if amount >= 0.001 else f"{num_bytes:,.0f} B"

    def _print(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        print()
        print_table(columns, rows)


def _difference(own: float, found: float) -> str:
    return "" if not found else f"{own / found - 1:+.1%}"
