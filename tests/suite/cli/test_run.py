"""`suite run`: what it prints, what it returns, and that a second one does nothing again."""

from __future__ import annotations

from pathlib import Path

import pytest

import suite.judge
import suite.pipeline


def test_run_and_run_again(suite_command, sites, monkeypatch) -> None:
    first = suite_command("run", "case.yaml")
    assert first.code == 0, first.stderr
    assert first.stderr.count(" ok ") == 6 and "[6/6]" in first.stderr
    assert "site: out/site/index.html" in first.stderr
    lines = first.stdout.splitlines()
    assert lines[0].split() == ["claim", "verdict", "effect", "interval", "pairs"]
    assert lines[1].split()[:2] == ["same", "reproduced"]
    assert any(line.startswith("same: ") for line in lines), "the reason"
    monkeypatch.setattr(suite.judge, "judge", lambda *_: pytest.fail("judged again"))
    second = suite_command("run", "case.yaml")
    assert (second.code, second.stdout) == (0, first.stdout)
    assert "0 runs made, 6 were done before" in second.stderr
    assert sites == [["case"]], "built once"


def test_new_results_are_judged_and_shown(suite_command, sites) -> None:
    half = suite_command("run", "case.yaml", "--only", "seed=0", "--only", "seed=1", "--json").data
    assert len(half["statuses"]) == 4
    whole = suite_command("run", "case.yaml", "--json").data
    assert (whole["num_ran"], whole["num_done_before"]) == (2, 4)
    assert [verdict["num_pairs"] for verdict in half["verdicts"]] == [2, 2]
    assert [verdict["num_pairs"] for verdict in whole["verdicts"]] == [3, 3]
    assert len(sites) == 2


def test_changed_case_is_judged_again(suite_command, sites) -> None:
    suite_command("run", "case.yaml")
    text = Path("case.yaml").read_text()
    Path("case.yaml").write_text(text.replace("above: 0.1", "above: 0.2"))
    assert suite_command("run", "case.yaml").code == 0
    assert len(sites) == 2


def test_other_cases_stay_on_the_site(suite_command, sites) -> None:
    suite_command("run", "case.yaml", "--set", "tokens=32")
    Path("other.yaml").write_text(Path("case.yaml").read_text().replace("seed: [0, 1, 2]", "seed: [3, 4]"))
    suite_command("run", "other.yaml")
    assert sites == [["case"], ["other", "case"]]
    said = suite_command("report")
    assert (said.code, said.stdout) == (0, "out/site/index.html\n")
    Path("case.yaml").unlink()
    said = suite_command("report")
    assert said.code == 0
    assert "left out of the site: case case" in said.stderr
    assert sites[-1] == ["other"]


def test_strict(suite_command, sites) -> None:
    assert suite_command("run", "case.yaml", "--no-report").code == 0
    said = suite_command("run", "case.yaml", "--strict", "--no-report")
    assert said.code == 1
    assert "differs" in said.stdout
    assert sites == []


def test_failed_runs(suite_command, sites) -> None:
    with Path("case.yaml").open("a") as file:
        file.write("include:\n  - {seed: 9, precision: fp32, fault.kind: crash, fault.step: 1}\n")
    said = suite_command("run", "case.yaml")
    assert said.code == 3
    assert "(told to crash)" in said.stderr
    assert "not ok: 1 crashed" in said.stderr
    rows = suite_command("status", "case.yaml", "--json").data
    assert [row["reason"] for row in rows if row["status"] != "ok"] == ["told to crash"]
    assert suite_command("run", "case.yaml").code == 3, "tried again, failed again"


def test_interrupt_says_how_to_go_on(suite_command, sites, monkeypatch) -> None:
    from suite.execute import Outcome

    monkeypatch.setattr(
        suite.pipeline, "execute", lambda *_, **__: Outcome(1, 0, 1, True, {"a": "interrupted"})
    )
    said = suite_command("run", "case.yaml")
    assert said.code == 130
    assert "Go on with: suite" in said.stderr
    assert sites == []


def test_nothing_to_run(suite_command, sites, monkeypatch) -> None:
    from suite.execute import Outcome

    monkeypatch.setattr(suite.pipeline, "execute", lambda *_, **__: Outcome(0, 0, 0, False, {}))
    assert suite_command("run", "case.yaml", "--no-report").code == 5


def test_real_site(suite_command) -> None:
    """The one test here that builds the real pages."""
    said = suite_command("run", "case.yaml", "--only", "seed=0")
    assert said.code == 0, said.stderr
    assert "Is bf16 as good as fp32?" in Path("out/site/index.html").read_text()
