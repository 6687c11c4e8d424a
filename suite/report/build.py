"""Builds the site: pages, downloads and static files in one folder that opens from disk.

    suite report

The same database and plans give the same bytes; a file whose content stays the same is not touched, and
files of an earlier build that are no longer part of the site are removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import suite
from results.records import METRICS
from suite.paths import site_dir
from suite.report import words
from suite.report.case_page import CasePage, case_page, case_stem
from suite.report.downloads import json_script, json_text
from suite.report.evidence import Evidence
from suite.report.index_page import index_page
from suite.report.kernels import kernels_page
from suite.report.run_page import run_page
from suite.report.svg import mark

if TYPE_CHECKING:
    from jinja2 import Environment

    from results.store import Store
    from suite.declare import Plan, PlannedRun

DATA_SCHEMA = 1
"""Version of the layout of data/*; raised when a reader of an older one would misread it."""
RUNS_AT_ONCE = 8
"""Runs whose measurements are held in memory together while their pages are written."""


class Site:
    """The folder being written: keeps account of its files, and writes only what changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: set[str] = set()
        self._before = _files_of(folder / "manifest.json")

    def write(self, name: str, content: str | bytes) -> Path:
        """Write `content` to the file `name` below the site, unless it is there already."""
        data = content.encode() if isinstance(content, str) else content
        path = self.folder / name
        self.files.add(name)
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return path

    def remove_old(self) -> None:
        """Remove files that the last build wrote and this one did not; no other file is touched."""
        for name in self._before - self.files:
            inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
            if inside and (self.folder / name).is_file():
                (self.folder / name).unlink()


def build_site(out: Path, store: Store, plans: Sequence[Plan], site: Path | None = None) -> Path:
    """Write the site of `plans` to `site` (default: OUT/site) and return its index.html.

    Verdicts are those stored; verdicts of cases or sizes without a plan appear on the front page alone.
    """
    from suite.declare import papers

    known = papers()
    target = Site(site or out / "site")
    templates = _templates()
    evidence = Evidence(store, dict.fromkeys(run.key for plan in plans for run in plan.runs))
    verdicts = store.verdicts()
    pages = []
    for plan in plans:
        page = case_page(plan, evidence, verdicts, known)
        pages.append(page)
        target.write(page.path, templates.get_template("case.html").render(page=page, root="../"))
        for name, content in page.downloads.items():
            target.write(f"data/{name}", content)
    num_runs = _write_runs(target, templates, evidence, plans)
    paged = {(page.name, page.size) for page in pages}
    stray = [row for row in verdicts if (row["case_name"], row["size"]) not in paged]
    kernels = kernels_page(store)
    if kernels is not None:
        html = templates.get_template("kernels.html").render(page=kernels, root="")
        target.write(kernels.path, html)
        target.write("data/kernels.json", kernels.data)
    index = index_page(pages, stray, known, kernels)
    first = target.write("index.html", templates.get_template("index.html").render(page=index, root=""))
    _copy_static(target)
    _write_manifest(target, pages, num_runs)
    return first


def _write_runs(target: Site, templates: Environment, evidence: Evidence, plans: Sequence[Plan]) -> int:
    """Pages and downloads of all runs that have a row; the number of them."""
    runs = list(_unique_runs(plans, evidence))
    keys = {run.key for run, _ in runs}
    template = templates.get_template("run.html")
    for start in range(0, len(runs), RUNS_AT_ONCE):
        part = runs[start : start + RUNS_AT_ONCE]
        points = evidence.points([run.key for run, _ in part], *METRICS)
        for run, href in part:
            page = run_page(run, href, evidence, points, keys)
            target.write(page.path, template.render(page=page, root="../"))
            for name, content in page.downloads.items():
                target.write(f"data/{name}", content)
    return len(runs)


def _unique_runs(plans: Sequence[Plan], evidence: Evidence) -> Iterator[tuple[PlannedRun, str]]:
    """Each run that has a row, with the page of the first case that plans it."""
    seen: set[str] = set()
    for plan in plans:
        for run in plan.runs:
            if run.key in evidence.rows and run.key not in seen:
                seen.add(run.key)
                yield run, f"cases/{case_stem(plan.case.name, plan.size)}.html"


def _grouped(rows: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """Rows by their panel, panels and rows in the order given."""
    panels: dict[str, list[Any]] = {}
    for row in rows:
        panels.setdefault(row.panel, []).append(row)
    return list(panels.items())


def _copy_static(target: Site) -> None:
    source = site_dir() / "static"
    for path in sorted(source.rglob("*")):
        if path.is_file():
            target.write(f"static/{path.relative_to(source).as_posix()}", path.read_bytes())


def _write_manifest(target: Site, pages: Sequence[CasePage], num_runs: int) -> None:
    target.remove_old()
    target.write(
        "manifest.json",
        json_text(
            {
                "data_schema": DATA_SCHEMA,
                "suite_version": suite.__version__,
                "num_cases": len(pages),
                "num_claims": sum(len(page.claims) for page in pages),
                "num_runs": num_runs,
                "cases": [{"name": page.name, "size": page.size, "page": page.path} for page in pages],
                "files": sorted(target.files),
            }
        ),
    )


def _files_of(manifest: Path) -> set[str]:
    """Files that an earlier build listed; none where there was none or it cannot be read."""
    try:
        listed: Any = json.loads(manifest.read_text())
    except (OSError, ValueError):
        return set()
    files = listed.get("files", []) if isinstance(listed, Mapping) else []
    return {name for name in files if isinstance(name, str)}


def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(site_dir() / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    templates.globals.update(
        mark=mark,
        json_script=json_script,
        grouped=_grouped,
        VERDICTS=words.VERDICTS,
        STATUSES=words.STATUSES,
        FIDELITIES=words.FIDELITIES,
        PROVENANCE=words.PROVENANCE,
        NOTHING=words.NOTHING,
        plural=words.plural,
    )
    return templates
