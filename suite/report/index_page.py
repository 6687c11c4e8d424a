"""The front page: claims by paper with their verdicts, the cases, and what was not run and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from suite.report.case_page import CasePage
from suite.report.claims import ClaimView, claim_view
from suite.report.kernels import KernelsPage
from suite.report.setting import PaperView, paper_view
from suite.report.words import VERDICTS, join, plural

if TYPE_CHECKING:
    from suite.declare.papers import Paper


@dataclass(frozen=True)
class PaperSection:
    """A paper and the claims of all cases that rest on it."""

    paper: PaperView
    claims: tuple[ClaimView, ...]


@dataclass(frozen=True)
class CaseLine:
    """A case at one size in the list of cases."""

    name: str
    size: str
    href: str
    question: str
    bar: Markup
    sentence: str


@dataclass(frozen=True)
class Gap:
    """Runs that ended badly for one reason."""

    case: str
    size: str
    href: str
    status: str
    shape: str
    reason: str
    num_runs: int


@dataclass(frozen=True)
class IndexPage:
    """The front page, ready for its template."""

    papers: tuple[PaperSection, ...]
    cases: tuple[CaseLine, ...]
    failures: tuple[Gap, ...]
    counts: tuple[tuple[str, str, int], ...]
    """(verdict, shape, how many), in the order of VERDICTS."""
    sentence: str
    machines: tuple[str, ...]
    latest: str
    kernels: KernelsPage | None
    """The page of kernel benchmarks, where there is one."""


def index_page(
    pages: Sequence[CasePage],
    stray: Iterable[Mapping[str, Any]],
    papers: Mapping[str, Paper],
    kernels: KernelsPage | None = None,
) -> IndexPage:
    """The front page over all case pages. `stray` are stored verdicts of cases or sizes that have no page."""
    sections: dict[str, list[ClaimView]] = {}
    for page in pages:
        own = page.papers[0].key if page.papers else ""
        for claim in page.claims:
            sections.setdefault(_cited(claim, own), []).append(claim)
    for row in stray:
        view = claim_view(row)
        sections.setdefault(_cited(view, ""), []).append(view)
    claims = [claim for group in sections.values() for claim in group]
    seen = Counter(claim.verdict for claim in claims)
    counts = tuple((name, shape, seen[name]) for name, (shape, _) in VERDICTS.items() if seen[name])
    moments = [claim.when for claim in claims if claim.when.endswith("UTC")]
    return IndexPage(
        papers=tuple(
            PaperSection(paper_view(key, papers.get(key)) if key else _NO_PAPER, tuple(sections[key]))
            for key in sorted(sections, key=lambda key: (key == "", key))
        ),
        cases=tuple(_line(page) for page in pages),
        failures=tuple(gap for page in pages for gap in _failures(page)),
        counts=counts,
        sentence=_sentence(
            counts, len(claims), len([key for key in sections if key]), len(sections.get("", ()))
        ),
        machines=tuple(sorted({machine for page in pages for machine in page.machines})),
        latest=max(moments, default=""),
        kernels=kernels,
    )


_NO_PAPER = PaperView("", "Expectations of our own", "", "", "", (), (), ())


def _cited(claim: ClaimView, own: str) -> str:
    """Key of the paper that makes the claim, `own` where it is quoted without a key; "" where no paper makes it."""
    return "" if claim.paper is None else str(claim.paper.get("key") or own)


def _line(page: CasePage) -> CaseLine:
    return CaseLine(
        page.name,
        page.size,
        page.path,
        page.question,
        page.outcomes.bar,
        page.outcomes.sentence,
    )


def _failures(page: CasePage) -> list[Gap]:
    grouped: Counter[tuple[str, str, str]] = Counter(
        (f.status, f.shape, f.reason) for f in page.outcomes.failures
    )
    result = [
        Gap(page.name, page.size, page.path, status, shape, reason, count)
        for (status, shape, reason), count in grouped.items()
    ]
    waiting = sum(count for name, _, count in page.outcomes.counts if name == "not run")
    if waiting:
        reason = f"not started yet; to run {'it' if waiting == 1 else 'them'}: {page.command}"
        result.append(Gap(page.name, page.size, page.path, "not run", "ring", reason, waiting))
    return result


def _sentence(counts: Sequence[tuple[str, str, int]], num_claims: int, num_papers: int, num_own: int) -> str:
    if not num_claims:
        return "No claim is judged yet."
    parts = join([f"{count} {name}" for name, _, count in counts])
    of_papers = f"of {plural(num_papers, 'paper')}" if num_papers else ""
    of_ours = f"{num_own} of our own" if num_own else ""
    if of_papers and of_ours:
        sources = f", {num_claims - num_own} {of_papers} and {of_ours}"
    else:
        sources = f" {of_papers}" if of_papers else " of our own"
    return f"{plural(num_claims, 'claim')}{sources}: {parts}."
