"""The page of kernel benchmarks: how long a cast takes over a copy of the same tensor, machine by machine, over time.

Ratios to a copy measured beside them lead: times of one machine say nothing about another's, and a busy machine slows
both sides of a ratio. The times that a file holds stand beside them as what they are, that machine's on that day.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from results.exchange.benchmarks import RATIO, TASK
from suite.report.look import looks
from suite.report.plots import dot_axis
from suite.report.scale import LogScale, logarithmic
from suite.report.svg import interval_strip, swatch
from suite.report.words import NOTHING, count_text, moment, number, plural

if TYPE_CHECKING:
    from results.store import Store

PATH = "kernels.html"
MEDIAN = "benchmark_median_s"
KNOWN = ("format", "implementation", "dtype", "elements")
"""What a benchmark of a cast says of itself in `extra_info`, in the order of columns."""
SPARK_WIDTH, SPARK_HEIGHT = 90, 22


@dataclass(frozen=True)
class Session:
    """One ingested file."""

    run_id: str
    started_at: datetime
    commit: str
    entries: Mapping[str, Mapping[str, Any]]
    """Scope -> what the file says of the benchmark, times apart."""
    values: Mapping[tuple[str, str], float]
    """(metric, scope) -> value."""


@dataclass(frozen=True)
class KernelRow:
    """One benchmark, its newest figures and what became of its ratio."""

    name: str
    facts: tuple[str, ...]
    """In the order of KNOWN."""
    sample: Markup
    ratio: str
    strip: Markup
    median: str
    history: Markup
    change: str


@dataclass(frozen=True)
class OtherRow:
    """A benchmark that has no ratio to a copy."""

    name: str
    median: str
    more: str
    """What else it noted, in words."""


@dataclass(frozen=True)
class MachineView:
    """All benchmarks of one machine."""

    name: str
    anchor: str
    about: tuple[str, ...]
    axis: Markup
    rows: tuple[KernelRow, ...]
    others: tuple[OtherRow, ...]
    sessions: tuple[tuple[str, str, str], ...]
    """(when, commit, number of benchmarks), newest first."""
    summary: str


@dataclass(frozen=True)
class KernelsPage:
    """The page, ready for its template."""

    machines: tuple[MachineView, ...]
    data: str
    """Everything on the page as JSON."""
    path: str = PATH


def kernels_page(store: Store) -> KernelsPage | None:
    """The page of all benchmarks in the database; None where there are none."""
    found = _machines(store)
    if not found:
        return None
    machines = tuple(
        _machine_view(name, about, sessions, f"machine-{position}")
        for position, ((name, about), sessions) in enumerate(found.items(), 1)
    )
    return KernelsPage(machines, _data(found))


def _machines(store: Store) -> dict[tuple[str, tuple[str, ...]], list[Session]]:
    """(machine, what is known of it) -> its sessions, oldest first."""
    _, rows = store.query(
        "SELECT r.key, r.run_id, r.started_at, r.spec, e.machine, e.hostname, e.os, e.python, e.git_commit "
        "FROM runs r LEFT JOIN environments e USING (environment_id) "
        "WHERE r.case_name IS NULL AND r.spec->>'task' = ? ORDER BY e.machine, r.key, r.started_at",
        [TASK],
    )
    _, points = store.query(
        "SELECT m.run_id, m.metric, m.scope, m.value FROM measurements m JOIN runs r USING (run_id) "
        "WHERE r.case_name IS NULL AND r.spec->>'task' = ? AND m.step = 0",
        [TASK],
    )
    values: dict[str, dict[tuple[str, str], float]] = {}
    for run_id, metric, scope, value in points:
        values.setdefault(run_id, {})[metric, scope] = value
    by_key: dict[str, list[Session]] = {}
    about: dict[str, tuple[str, tuple[str, ...]]] = {}
    for key, run_id, started_at, spec, machine, hostname, system, python, commit in rows:
        entries = {e["fullname"]: e for e in json.loads(spec)["document"]["benchmarks"]}
        session = Session(run_id, started_at, commit or "", entries, values.get(run_id, {}))
        by_key.setdefault(key, []).append(session)
        known = (f"host {hostname}" if hostname else "", system or "", f"Python {python}" if python else "")
        about[key] = (machine or "unknown machine", tuple(word for word in known if word))
    return {about[key]: sessions for key, sessions in by_key.items()}


def _machine_view(name: str, about: tuple[str, ...], sessions: Sequence[Session], anchor: str) -> MachineView:
    newest: dict[str, Session] = {}
    for session in sessions:
        newest |= dict.fromkeys(session.entries, session)
    rated = [scope for scope, session in newest.items() if (RATIO, scope) in session.values]
    ratios = {scope: newest[scope].values[RATIO, scope] for scope in rated}
    scale = logarithmic([1.0, *ratios.values()])
    appearance = looks((_fact(newest[scope].entries[scope], "implementation"),) for scope in rated)
    rows = tuple(
        _row(scope, newest[scope], sessions, scale, appearance)
        for scope in sorted(rated, key=lambda scope: _order(newest[scope].entries[scope], ratios[scope]))
    )
    others = tuple(_other(scope, session) for scope, session in newest.items() if scope not in ratios)
    summary = ""
    if ratios:
        low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        summary = (
            f"{plural(len(ratios), 'benchmark')} with a copy beside them: from {number(ratios[low])} "
            f"({_spoken(newest[low].entries[low])}) to {number(ratios[high])} copies "
            f"({_spoken(newest[high].entries[high])}), median {number(statistics.median(ratios.values()))}."
        )
    return MachineView(
        name,
        anchor,
        about,
        dot_axis(scale),
        rows,
        others,
        tuple(
            (moment(session.started_at), session.commit or NOTHING, str(len(session.entries)))
            for session in reversed(sessions)
        ),
        summary,
    )


def _row(
    scope: str,
    session: Session,
    sessions: Sequence[Session],
    scale: LogScale,
    appearance: Mapping[tuple[str, ...], Any],
) -> KernelRow:
    entry, ratio = session.entries[scope], session.values[RATIO, scope]
    look = appearance[_fact(entry, "implementation"),]
    title = _spoken(entry)
    past = [(s, s.values[RATIO, scope]) for s in sessions if (RATIO, scope) in s.values]
    change = ""
    if len(past) > 1:
        before = past[-2][1]
        change = f"{ratio / before - 1:+.0%}".replace("-", "\N{MINUS SIGN}")
    return KernelRow(
        name=_title(entry),
        facts=tuple(_fact(entry, name) or NOTHING for name in KNOWN),
        sample=swatch(look),
        ratio=number(ratio),
        strip=interval_strip(
            scale, ratio, ratio, ratio, look=look, reference=1.0, label=f"{title}: {number(ratio)} copies"
        ),
        median=_seconds(session.values.get((MEDIAN, scope))),
        history=_spark([value for _, value in past], title) if len(past) > 1 else Markup(""),
        change=change,
    )  # fmt: skip


def _other(scope: str, session: Session) -> OtherRow:
    info = session.entries[scope].get("extra_info") or {}
    words = [
        f"{name.replace('_', ' ')} {number(value) if _is_number(value) else value}"
        for name, value in info.items()
        if _is_number(value) or isinstance(value, str)
    ]
    return OtherRow(
        _title(session.entries[scope]), _seconds(session.values.get((MEDIAN, scope))), "; ".join(words)
    )


def _spark(values: Sequence[float], title: str) -> Markup:
    """Ratios from session to session as a line of small dots, the newest the largest."""
    low, high = min(values), max(values)
    room = (high - low) or 1.0
    places = [
        (position / (len(values) - 1), 4 + (SPARK_HEIGHT - 8) * (1 - (value - low) / room))
        for position, value in enumerate(values)
    ]
    spoken = f"{title}, from session to session: {', '.join(number(value) for value in values)} copies"
    path = "L".join(f"{4 + x * (SPARK_WIDTH - 8):.1f} {y:.1f}" for x, y in places)
    dots = Markup("").join(
        Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="s0 dot"/>').format(
            4 + x * (SPARK_WIDTH - 8), y, 3 if index == len(places) - 1 else 1.6
        )
        for index, (x, y) in enumerate(places)
    )
    return Markup(
        '<svg class="spark" width="{}" height="{}" role="img" aria-label="{}"><path d="M{}" class="s0 series"/>{}</svg>'
    ).format(SPARK_WIDTH, SPARK_HEIGHT, spoken, path, dots)


def _order(entry: Mapping[str, Any], ratio: float) -> tuple[Any, ...]:
    """By elements and dtype, so that what is compared stands together, then by format and ratio."""
    info = entry.get("extra_info") or {}
    elements = info.get("elements")
    return (
        elements if _is_number(elements) else 0,
        str(info.get("dtype", "")),
        str(info.get("format", "")),
        ratio,
        str(entry.get("name")),
    )


def _fact(entry: Mapping[str, Any], name: str) -> str:
    value = (entry.get("extra_info") or {}).get(name, "")
    return count_text(value) if _is_number(value) else str(value)


def _title(entry: Mapping[str, Any]) -> str:
    """The benchmark's name without `test_`."""
    return str(entry.get("name") or entry["fullname"]).removeprefix("test_").replace("_", " ")


def _spoken(entry: Mapping[str, Any]) -> str:
    """What a benchmark says it measured, in words; its name where it says nothing."""
    facts = [fact for name in KNOWN if (fact := _fact(entry, name))]
    return ", ".join(facts) if facts else _title(entry)


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{number(value / size)}\N{NO-BREAK SPACE}{unit}"
    return f"{number(value * 1e9)}\N{NO-BREAK SPACE}ns"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _data(found: Mapping[tuple[str, tuple[str, ...]], Iterable[Session]]) -> str:
    from suite.report.downloads import json_text

    return json_text(
        {
            "machines": [
                {
                    "machine": name,
                    "about": list(about),
                    "sessions": [
                        {
                            "started_at": session.started_at.isoformat(),
                            "git_commit": session.commit,
                            "benchmarks": [
                                {
                                    "name": scope,
                                    "extra_info": dict(entry.get("extra_info") or {}),
                                    **{m: v for (m, s), v in sorted(session.values.items()) if s == scope},
                                }
                                for scope, entry in session.entries.items()
                            ],
                        }
                        for session in sessions
                    ],
                }
                for (name, about), sessions in found.items()
            ]
        }
    )
