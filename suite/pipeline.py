"""A case's whole road in one call: run what is left, judge, store the verdicts, build the site.

from suite.declare import expand, load_case
from suite.pipeline import answer
answer(expand(load_case("fp8_long_horizon")), Path("out"))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.execute import Event, Message, Outcome, OutFolder, execute
from suite.execute.folder import FileLock
from suite.execute.select import select_runs

if TYPE_CHECKING:
    from results.store import Store
    from suite.declare import Plan


@dataclass(frozen=True)
class Answer:
    """What became of the runs, what they say about each claim, and where that is shown."""

    outcome: Outcome
    verdicts: list[dict[str, Any]]
    """As `Verdict.as_json` gives them, in the case's order."""
    site: Path | None
    """Page to open; None where no site was asked for."""


def answer(
    plan: Plan,
    out: Path,
    *,
    only: Sequence[str] = (),
    jobs: int | None = None,
    retry: bool = False,
    report: bool = True,
    command: str | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Answer:
    """Run, judge and show a plan. `only` narrows what is run; what is judged is the whole plan.

    Raises what `execute` raises, and SelectionError for an `only` that matches nothing.
    """
    outcome = execute(
        select_runs(plan, only), out, jobs=jobs, retry=retry, command=command, on_event=on_event
    )
    folder = OutFolder(out)
    store = open_store(folder, on_event)
    if outcome.interrupted or not outcome.statuses:
        return Answer(outcome, [], None)
    # Two commands on one folder draw its site one after the other; the second finds it done.
    with FileLock(out / "site.lock"):
        remember_plan(folder, plan)
        if not report:
            return Answer(outcome, _judge(plan, store), None)
        return Answer(outcome, *_show(folder, plan, store, on_event))


def _show(
    folder: OutFolder, plan: Plan, store: Store, on_event: Callable[[Event], None]
) -> tuple[list[dict[str, Any]], Path]:
    """Verdicts and site, made anew only where something that they depend on changed."""
    stamp = folder.site / ".stamp"
    index = folder.site / "index.html"
    done = _read_stamp(stamp) if index.exists() else None
    if done is not None and done["fingerprint"] == fingerprint(plan, store):
        return done["verdicts"], index
    from suite.report import build_site

    verdicts = _judge(plan, store)
    site = build_site(folder.root, store, known_plans(folder, store, on_event, plan), folder.site)
    stamp.write_text(json.dumps({"fingerprint": fingerprint(plan, store), "verdicts": verdicts}))
    return verdicts, site


def open_store(folder: OutFolder, on_event: Callable[[Event], None]) -> Store:
    """The out folder's database; waiting for it is told as a message."""
    from results.store import Store

    return Store(folder.database, on_wait=lambda text: on_event(Message(text)))


def report(
    out: Path, *, site: Path | None = None, on_event: Callable[[Event], None] = lambda event: None
) -> Path:
    """Judge everything in the database again, build the site, return its page. Raises NoDatabase."""
    from results.database import NoDatabase
    from suite.report import build_site

    folder = OutFolder(out)
    if not folder.database.exists():
        raise NoDatabase(f"there is no database {folder.database}; `suite run CASE` makes one")
    store = open_store(folder, on_event)
    with FileLock(out / "site.lock"):
        plans = known_plans(folder, store, on_event)
        for plan in plans:
            _judge(plan, store)
        return build_site(out, store, plans, site or folder.site)


def _judge(plan: Plan, store: Store) -> list[dict[str, Any]]:
    from suite.judge import judge

    with store:
        verdicts = judge(plan, store)
    store.save_verdicts([verdict.as_row() for verdict in verdicts])
    return [verdict.as_json() for verdict in verdicts]


# Which plans the database is about: it knows a case by name, this keeps its file and what was overridden.


def remember_plan(folder: OutFolder, plan: Plan) -> None:
    """Note how a plan was declared, so that a later report can declare it again."""
    entries = _read_plans(folder)
    entries[f"{plan.case.name} {plan.size}"] = {
        "case": str(plan.case.path.resolve()),
        "size": plan.size,
        "set": list(plan.case.overrides),
    }
    temporary = folder.root / ".plans.json.new"
    temporary.write_text(json.dumps(entries, indent=1))
    temporary.replace(folder.root / "plans.json")


def _read_plans(folder: OutFolder) -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads((folder.root / "plans.json").read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def known_plans(
    folder: OutFolder, store: Store, on_event: Callable[[Event], None], newest: Plan | None = None
) -> list[Plan]:
    """A plan for each (case, size) in the database, as last declared; a lost case is told and left out."""
    from suite.declare import CaseError, expand, load_case

    plans = [newest] if newest is not None else []
    entries = _read_plans(folder)
    _, rows = store.query(
        "SELECT DISTINCT case_name, size FROM runs WHERE case_name IS NOT NULL ORDER BY ALL"
    )
    for name, size in rows:
        if newest is not None and (name, size) == (newest.case.name, newest.size):
            continue
        entry = entries.get(f"{name} {size}", {"case": name, "set": []})
        try:
            plans.append(expand(load_case(entry["case"], entry["set"]), size))
        except CaseError as error:
            on_event(Message(f"left out of the site: case {name} at size {size}: {error}"))
    return plans


# A second command with nothing new must not judge and draw again.


def fingerprint(plan: Plan, store: Store) -> str:
    """Changes with the plan, the database's runs and verdicts, and the code and templates of the report."""
    import hashlib

    import suite
    from suite.paths import cases_dir, site_dir

    digest = hashlib.sha256(repr((suite.__version__, plan)).encode())
    package = Path(suite.__file__).parent
    for root, pattern in (
        (package, "**/*.py"),
        (package.parent / "results", "**/*.*"),
        (site_dir(), "**/*"),
        (cases_dir(), "**/*"),
    ):
        for path in sorted(root.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                stat = path.stat()
                digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for sql in (
        "SELECT count(*), sum(hash(run_id, status, reason, journal_bytes)::HUGEINT) FROM runs",
        "SELECT count(*), sum(hash(case_name, size, claim_id, verdict, decided_at)::HUGEINT) FROM verdicts",
    ):
        digest.update(repr(store.query(sql)[1]).encode())
    return digest.hexdigest()


def _read_stamp(path: Path) -> dict[str, Any] | None:
    try:
        stamp = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) and {"fingerprint", "verdicts"} <= stamp.keys() else None
