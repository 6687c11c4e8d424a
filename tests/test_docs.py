"""What README and docs say can be done: commands parse, links lead somewhere, the guide's example loads."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from suite.cli import VERBS, make_app
from suite.declare import expand, list_cases, load_case
from suite.declare.schema import RULES, CaseFile

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "cases.md"
PAGES = sorted([README, ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
COMMAND = typer.main.get_command(make_app())


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def _command_lines() -> Iterator[str]:
    for page in PAGES:
        for block in _blocks(page, "sh"):
            yield from (line for line in block.splitlines() if line.strip())


def _spans(page: Path) -> list[str]:
    """Code in running text."""
    return re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    )


@pytest.mark.parametrize("line", [*_command_lines()])
def test_command_lines_are_commands(line: str) -> None:
    """Parsed as the command itself would, and not run."""
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert words[0] in targets
        return
    assert program == "suite"
    verb, *arguments = words
    verbs = COMMAND.commands  # type: ignore[attr-defined]
    assert verb in verbs
    verbs[verb].make_context(verb, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_in_running_text_exist(page: Path) -> None:
    named = {span.split()[1] for span in _spans(page) if re.match(r"suite [a-z]", span)}
    assert named <= {*VERBS}


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_told_of(verb: str) -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert re.search(rf"\bsuite {verb}\b", text), "neither README nor docs name it"
    described = COMMAND.commands[verb]  # type: ignore[attr-defined]
    assert described.help


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


def test_decisions_are_all_linked() -> None:
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    assert all(
        f"decisions/{path.name}" in architecture for path in (ROOT / "docs" / "decisions").glob("*.md")
    )


def test_readme_lists_the_cases() -> None:
    text = README.read_text()
    assert all(f"cases/{entry.name}.yaml" in text for entry in list_cases())


def test_the_guides_example_loads(tmp_path: Path) -> None:
    case = tmp_path / "my.yaml"
    case.write_text(_blocks(GUIDE, "yaml")[0])
    loaded = load_case(case)
    for size in loaded.sizes:
        assert len(expand(loaded, size).runs) == 12, "the guide says how many"
    assert {claim.id for claim in loaded.claims} == {"fp16-holds", "fp8-flushes-little"}


def test_the_guides_base_loads(tmp_path: Path) -> None:
    example = _blocks(GUIDE, "yaml")[0]
    base = next(block for block in _blocks(GUIDE, "yaml") if block.startswith("start_from:"))
    case = tmp_path / "my.yaml"
    case.write_text(example + base)
    plan = expand(load_case(case), "laptop")
    assert [run.role for run in plan.runs].count("base") == 1
    assert len(plan.runs) == 13


def test_the_guides_study_and_its_figures_load(tmp_path: Path) -> None:
    blocks = _blocks(GUIDE, "yaml")
    study = next(block for block in blocks if block.startswith("task: tensors"))
    figures = next(block for block in blocks if block.startswith("figures:"))
    case = tmp_path / "my.yaml"
    case.write_text("question: Which cast keeps the bulk?\n" + study)
    assert len(expand(load_case(case)).runs) == 27
    # The guide's own figures need the axis and the study that they draw.
    shown = figures.partition("tables:")[0].replace("    where: {tensor.outliers: isolated}\n", "")
    case.write_text("question: Which cast keeps the bulk?\n" + study + shown)
    assert len(expand(load_case(case)).runs) == 27


def test_the_guide_names_every_key_and_rule() -> None:
    text = GUIDE.read_text()
    spans = {word for span in _spans(GUIDE) for word in re.findall(r"\w+", span)}
    assert spans >= {*CaseFile.model_fields}
    assert spans >= {*RULES}
    assert len(text.splitlines()) < 180
