"""Where the collectives of a group's ranks part, read from their flight files when the group has failed.

Ranks of a group must issue the same collectives in the same order. Two things go wrong:
- a rank *differs*: it left one out, or issued another. Of three ranks or more the majority is right; of two, the one
  that does what it did in its earlier steps; else the one into whose sequence the other fits when shifted by one.
  Found as well when the sequences kept pairing up, off by one, until the run's end.
- a rank is *absent*: all agree as far as they got, the others wait for it, and it waits for nobody.
Sends and receives differ from rank to rank by nature, so a rank's are compared with its own earlier steps alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from harness.parallel.flight import POINT_TO_POINT, Flight, Record

UNEQUAL = ("all_to_all", "gather", "scatter")
"""Operations whose bytes may differ from rank to rank and step to step."""
HABIT_STEPS = 4
"""Earlier steps that a rank's step is compared with: not only the last, since one with a probe differs from others."""

Group = tuple[int, ...]
Kind = tuple[object, ...]


@dataclass(frozen=True)
class Break:
    """Where the ranks part, in a sentence; `rank` is the culprit, None where the files cannot tell."""

    rank: int | None
    text: str
    differs: bool
    """Its sequence is another; False: it is absent."""


@dataclass(frozen=True)
class _Part:
    """What one rank issued on one group in one step."""

    step: int
    place: int
    """Of its first collective, whether issued or not."""
    records: tuple[Record, ...]
    whole: bool
    """The rank has gone on to another step."""

    @property
    def kinds(self) -> list[Kind]:
        return [_kind(record) for record in self.records]


def find_break(flights: Mapping[int, Flight]) -> Break | None:
    """The first place where the ranks of a run part; None where they agree."""
    for search in (_differences, _strays):
        found = min(search(flights), key=lambda pair: pair[0], default=None)
        if found is not None:
            return found[1]
    return _absence(flights)


def describe(record: Record, at_step: bool = True) -> str:
    """`all_reduce #17 of ranks 0,1 (4,096 bytes) at step 5`."""
    return _describe(record, f"#{record.place}", record.step if at_step else 0)


def _describe(record: Record, numbers: str, step: int) -> str:
    ranks = ",".join(map(str, record.group))
    where = f" at step {step}" if step else ""
    return f"{record.op} {numbers} of ranks {ranks} ({record.num_bytes:,} bytes){where}"


def _kind(record: Record) -> Kind:
    return record.op, None if record.op.startswith(UNEQUAL) else record.num_bytes, record.dtype


def _differences(flights: Mapping[int, Flight]) -> Iterator[tuple[float, Break]]:
    """(time of the first difference, break) for each group whose ranks' sequences differ."""
    for group in {record.group for flight in flights.values() for record in flight.records}:
        parts = {rank: _parts(flights[rank], group) for rank in group if rank in flights}
        if len(parts) < 2:
            continue
        for step in sorted(set.intersection(*(set(steps) for steps in parts.values()))):
            here = {rank: steps[step] for rank, steps in parts.items()}
            if not all(_agree(one, two) for one, two in combinations(here.values(), 2)):
                kinds = [part.kinds for part in here.values()]
                at = min(_first_difference(one, two) for one, two in combinations(kinds, 2))
                started = [part.records[at].started for part in here.values() if at < len(part.records)]
                yield min(started), _judge(here, parts)
                break


def _strays(flights: Mapping[int, Flight]) -> Iterator[tuple[float, Break]]:
    """(time, break) where a rank's sends and receives of its current step are not those of its earlier ones."""
    for rank, flight in flights.items():
        for group in {record.group for record in flight.records if record.op in POINT_TO_POINT}:
            parts = _parts(flight, group, paired=True)
            for step in sorted(parts)[-2:]:  # it may have gone on to the next step before it was missed
                part, habits = parts[step], [each for each in _habits(parts, step) if each.step > 1]
                if part.records and habits and _age(part, habits) == HABIT_STEPS:
                    at = min(_first_difference(part.kinds, habits[0].kinds), len(part.records) - 1)
                    yield part.records[at].started, _tell(rank, part, habits[0].records)
                    break


def _parts(flight: Flight, group: Group, paired: bool = False) -> dict[int, _Part]:
    """Step -> what the rank issued on the group in it, for every step that the file still has as a whole.

    `paired`: its sends and receives, else its collectives.
    """
    records = [
        each for each in flight.records if each.group == group and (each.op in POINT_TO_POINT) == paired
    ]
    by_step: dict[int, list[Record]] = {}
    for record in records:
        by_step.setdefault(record.step, []).append(record)
    is_cut = bool(flight.records) and flight.records[0].number > 1
    first = flight.records[0].step + 1 if is_cut else 0
    place = next((each.place for each in records if each.step >= first), 1)
    parts = {}
    for step in range(first, flight.step + 1):
        issued = tuple(by_step.get(step, ()))
        parts[step] = _Part(step, place, issued, step < flight.step)
        place += len(issued)
    return parts


def _agree(one: _Part, two: _Part) -> bool:
    """Whether both can be the same step, one of them not at its end yet."""
    short = min(len(one.records), len(two.records))
    if one.kinds[:short] != two.kinds[:short]:
        return False
    return len(one.records) == len(two.records) or not min(one, two, key=lambda each: len(each.records)).whole


def _judge(here: Mapping[int, _Part], parts: Mapping[int, Mapping[int, _Part]]) -> Break:
    """Who is the odd one out in a step in which the ranks differ, and what it did."""
    most = max(([b for b in here if _agree(here[a], here[b])] for a in here), key=len)
    if 2 * len(most) > len(here) and len(most) > 1:
        right = max((here[rank] for rank in most), key=lambda part: len(part.records))
        odd = next(rank for rank in here if rank not in most)
        return _tell(odd, here[odd], right.records)
    habits = {rank: _habits(parts[rank], part.step) for rank, part in here.items()}
    ages = {rank: _age(here[rank], habits[rank]) for rank in here}
    newest = min(ages.values())
    strayed = [rank for rank in here if ages[rank] > newest and len(habits[rank]) > newest]
    if strayed:
        odd = strayed[0]
        return _tell(odd, here[odd], habits[odd][newest].records)
    if len(here) == 2:
        (one, first), (two, second) = here.items()
        fits = _is_shifted(first, second.kinds), _is_shifted(second, first.kinds)
        if fits == (True, False):
            return _tell(one, first, second.records)
        if fits == (False, True):
            return _tell(two, second, first.records)
    (one, first), (two, second) = list(here.items())[:2]
    at = _first_difference(first.kinds, second.kinds)
    sides = [f"rank {rank} {_doing(here[rank], at)}" for rank in (one, two)]
    return Break(None, f"{sides[0]} while {sides[1]}", differs=True)


def _habits(steps: Mapping[int, _Part], step: int) -> list[_Part]:
    """A rank's earlier steps, the latest first; what comes before step 1 is no step."""
    return [steps[each] for each in range(step - 1, max(0, step - 1 - HABIT_STEPS), -1) if each in steps]


def _age(part: _Part, habits: Sequence[_Part]) -> int:
    """How many steps back from the last a step went like this one; HABIT_STEPS where none did.

    An older likeness is a weaker one: step 1 of FSDP, whose weights are gathered already, lacks just what was left out.
    After a run's last step more may follow.
    """
    for age, habit in enumerate(habits):
        short = min(len(part.records), len(habit.records))
        is_long_enough = len(part.records) >= len(habit.records) or not part.whole
        if part.kinds[:short] == habit.kinds[:short] and is_long_enough:
            return age
    return HABIT_STEPS


def _left_one_out(part: _Part, expected: Sequence[Kind]) -> bool:
    """Whether the step goes on, where it leaves what was expected, with what comes after that."""
    at = _first_difference(part.kinds, expected)
    rest, after = part.kinds[at:], list(expected[at + 1 :])
    short = min(len(rest), len(after))
    return at < len(expected) and rest[:short] == after[:short]


def _is_shifted(part: _Part, expected: Sequence[Kind]) -> bool:
    """The same, with at least one collective to show for it."""
    at = _first_difference(part.kinds, expected)
    return len(part.records) > at and len(expected) > at + 1 and _left_one_out(part, expected)


def _tell(rank: int, part: _Part, expected: Sequence[Record]) -> Break:
    """What the odd rank did where `expected`, another rank's step or its own earlier one, goes on."""
    kinds = [_kind(record) for record in expected]
    at = _first_difference(part.kinds, kinds)
    if at == len(kinds):
        return Break(
            rank, f"rank {rank} issued {describe(part.records[at])}, and nobody else did", differs=True
        )
    first = last = at  # of equal ones in a row nobody can tell which is missing
    while first > 0 and kinds[first - 1] == kinds[at]:
        first -= 1
    while last + 1 < len(kinds) and kinds[last + 1] == kinds[at]:
        last += 1
    if first == last:
        due = _describe(expected[at], f"#{part.place + at}", part.step)
    else:
        due = _describe(expected[at], f"#{part.place + first} to #{part.place + last}", part.step)
        due = f"one of {due}"
    if _left_one_out(part, kinds):
        return Break(rank, f"rank {rank} left out {due}", differs=True)
    return Break(
        rank, f"rank {rank} issued {describe(part.records[at], False)} in place of {due}", differs=True
    )


def _doing(part: _Part, at: int) -> str:
    if at < len(part.records):
        return f"was in {describe(part.records[at])}"
    return f"had no more to do in step {part.step}"


def _first_difference(one: Sequence[Kind], two: Sequence[Kind]) -> int:
    short = min(len(one), len(two))
    return next((at for at in range(short) if one[at] != two[at]), short)


def _absence(flights: Mapping[int, Flight]) -> Break | None:
    """The rank that others are ahead of and that is ahead of nobody: it stands still, and they wait."""
    missed: dict[int, Record] = {}
    ahead = set()
    for rank, flight in flights.items():
        for record in flight.records:
            for peer in record.group:
                if peer != rank and peer in flights and not _came(flights[peer], record):
                    ahead.add(rank)
                    missed.setdefault(peer, record)
    still = [rank for rank in missed if rank not in ahead]
    if not still:
        return None
    odd = min(still, key=lambda rank: max((each.started for each in flights[rank].records), default=0.0))
    return Break(odd, f"rank {odd} did not come to {describe(missed[odd])}", differs=False)


def _came(peer: Flight, record: Record) -> bool:
    """Whether the peer has issued what the record waits for."""
    is_between_two = record.op in POINT_TO_POINT
    if is_between_two and len(record.group) != 2:
        return True  # whom it was for is not written down
    return any(
        each.group == record.group
        and each.place >= record.place
        and (each.op in POINT_TO_POINT) == is_between_two
        for each in reversed(peer.records)
    )
