"""Colour, dash and marker of a label: the same label looks the same on every page, and never by colour alone.

The preferred colour is a hash of the label's text, so a new arm does not repaint the old ones; of two labels
that fall on the same colour the later (in name order) moves to the next free one. Slot 0 is ink, kept for
what the others are compared with.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

NUM_COLORS = 6
"""Colours s1..s6 in site.css, chosen to stay apart under the common colour-vision deficiencies."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "9 3 2 3 2 3")
MARKERS = ("circle", "square", "triangle", "diamond", "plus", "wedge")
"""One a colour, so that an arm of one axis is told apart by each of the three."""
REFERENCE = 0
DIVERGED = ("1 3", "cross")
"""Dash and marker of a seed that is drawn alone because it diverged; its colour stays its arm's."""


@dataclass(frozen=True)
class Look:
    """How one series is drawn; `color` is a class suffix (s0..s6), `dash` an SVG dash array."""

    color: int
    dash: str
    marker: str


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def slots(labels: Iterable[str], num_slots: int) -> dict[str, int]:
    """Label -> slot 0..num_slots-1, by hash; clashes move on while a free slot is left."""
    taken: dict[int, str] = {}
    chosen: dict[str, int] = {}
    for label in sorted(set(labels)):
        slot = _hash(label) % num_slots
        if len(taken) < num_slots:
            while slot in taken:
                slot = (slot + 1) % num_slots
        taken.setdefault(slot, label)
        chosen[label] = slot
    return chosen


def looks(
    arms: Iterable[tuple[str, ...]], reference: tuple[str | None, ...] = ()
) -> dict[tuple[str, ...], Look]:
    """Arm (its values along the compared axes) -> Look: colour from the first axis, dash from the rest.

    `reference` holds, per axis, the value the others are compared with (None where there is none): it gets
    ink and a full line. An arm of one axis takes its dash from its colour's turn, so that dash still helps.
    """
    arms = sorted(set(arms))
    reference = reference or (None,)
    # An arm that does not set the first axis is coloured by the first one that it sets.
    mains = [next((i for i, value in enumerate(arm) if value), 0) for arm in arms]
    firsts = [arm[i] if arm else "" for arm, i in zip(arms, mains, strict=True)]
    references = [reference[i] if i < len(reference) else None for i in mains]
    # An axis that an arm does not set counts as the reference's value.
    rests = [
        tuple(
            "" if v == ref or i == main else v
            for i, (v, ref) in enumerate(zip(arm, reference, strict=False))
            if i
        )
        for arm, main in zip(arms, mains, strict=True)
    ]
    colors = slots((f for f, ref in zip(firsts, references, strict=True) if f != ref), NUM_COLORS)
    unlike = sorted({rest for rest in rests if any(rest)})
    dashes = {rest: 1 + position % (len(DASHES) - 1) for position, rest in enumerate(unlike)}
    result = {}
    seen: Counter[int] = Counter()
    for arm, first, main, rest in zip(arms, firsts, references, rests, strict=True):
        color = REFERENCE if first == main else 1 + colors[first]
        # More arms than colours: who shares a colour differs in dash and marker.
        turn = dashes.get(rest, 0) if unlike else (color + seen[color]) % len(DASHES)
        seen[color] += 1
        result[arm] = Look(color, DASHES[turn], MARKERS[turn])
    return result
