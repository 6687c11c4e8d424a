"""Whatever stands in a file or in `--set`: out comes a case, or a CaseError that can be printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from suite.declare import CaseError, expand, load_case
from suite.declare.schema import CaseFile, Claim, Expect, PaperSays

FUZZ = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

VALID: dict[str, Any] = {
    "question": "Does it hold?",
    "paper": ["fishman2024"],
    "base": {"model": "llama-0.3m", "tokens": "4k", "optimizer": {"preset": "adamw", "lr": 1e-3}},
    "matrix": {"precision": ["bf16", "fp8-delayed"], "ageing": ["none", "static-12"], "seed": [0, 1]},
    "exclude": [{"precision": "bf16", "ageing": "static-12"}],
    "include": [{"precision": "fp32", "seed": [0, 1], "start_from": None}],
    "start_from": {"precision": "bf16", "tokens": "1M"},
    "probes": {"loss": 1},
    "sizes": {"laptop": {"batch_size": 4}, "gpu": {"model": "llama-125m", "matrix": {"seed": [0]}}},
    "claims": [
        {
            "id": "a",
            "paper": {"says": "x", "value": 1, "provenance": "read"},
            "measure": "final_loss_gap",
            "of": {"precision": "fp8-delayed"},
            "against": {"precision": "bf16"},
            "expect": {"above": 0.05},
        }
    ],
}

WORDS = [
    *CaseFile.model_fields, *Claim.model_fields, *Expect.model_fields, *PaperSays.model_fields,
    *("model", "precision", "parallelism", "optimizer", "data", "tokens", "seed", "ageing", "recipe"),
    *("preset", "name", "label", "model.ffn", "optimizer.lr", "limits.time_s", "keep_checkpoint", "fault"),
    *("laptop", "gpu", "bf16", "fp8-delayed", "static-12", "none", "llama-0.3m", "final_loss", "400k"),
    *("a..b", ".", "", "<<", "*", "static-K", "[0]", "1e-3", "\x85", "é", "🐍", "a" * 3000),
]  # fmt: skip
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(WORDS),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=5),
    ),
    max_leaves=12,
)


def survives(path: Path, overrides: list[str] | None = None) -> None:
    """Load and expand at every size; a CaseError must print as one line a problem, each with a message."""
    try:
        case = load_case(path, overrides or [])
        for size in [*case.sizes] or [None]:
            assert expand(case, size).case is case
    except CaseError as error:
        assert error.problems and all(problem.message for problem in error.problems)
        assert len(str(error).splitlines()) >= len(error.problems)
        assert "Traceback" not in str(error)


@FUZZ
@given(content=st.binary(max_size=200))
def test_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "case.yaml"
    path.write_bytes(content)
    survives(path)


@FUZZ
@given(text=st.text(alphabet=st.sampled_from(list("ab:-[]{}&*!|>'\"%@`#,?\n\t 01.é~<=\\")), max_size=80))
def test_yaml_like_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(text)
    survives(path)


@FUZZ
@given(data=st.dictionaries(st.sampled_from(WORDS), values, max_size=8))
def test_random_structure(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True))
    survives(path)


@FUZZ
@given(data=st.data())
def test_a_valid_case_with_one_part_replaced(tmp_path: Path, data: st.DataObject) -> None:
    case = yaml.safe_load(yaml.safe_dump(VALID))
    node: Any = case
    while True:
        key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else list(range(len(node)))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    action = data.draw(st.sampled_from(["replace", "delete", "add"]))
    if action == "delete":
        del node[key]
    elif action == "add" and isinstance(node, dict):
        node[data.draw(st.sampled_from(WORDS))] = data.draw(values)
    else:
        node[key] = data.draw(values)
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case, allow_unicode=True))
    survives(path)


paths = st.sampled_from(WORDS) | st.text(max_size=8)


@FUZZ
@given(
    overrides=st.lists(
        st.text(max_size=15)
        | st.builds("{}={}".format, paths, st.text(max_size=8))
        | st.builds("{}={}".format, paths, values.map(lambda value: yaml.safe_dump(value).strip())),
        max_size=3,
    )
)
def test_overrides(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(VALID))
    survives(path, overrides)


def test_the_valid_case_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(VALID))
    assert len(expand(load_case(path), "laptop").runs) == 9


@pytest.mark.parametrize("override", ["a=\ud800", "\ud800=1", "seed=\ud800", "seed=\x00"])
def test_arguments_that_are_no_text(tmp_path: Path, override: str) -> None:
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(VALID))
    survives(path, [override])
