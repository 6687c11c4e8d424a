"""`suite list [KIND]`: what can be named in a case file, and the cases there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from suite.cli.failures import WrongCommand
from suite.cli.mesh_rows import mesh_rows
from suite.cli.output import JsonOption, print_json, print_table
from suite.cli.precision_rows import cast_rows, format_rows, precision_rows

Rows = Sequence[dict[str, Any]]
NAMES = (
    "cases, models, precisions, formats, casts, optimizers, parallelisms, ageing, papers, probes, metrics "
    "or measures"
)


def list(
    kind: Annotated[str, typer.Argument(help=NAMES)] = "cases",
    json: JsonOption = False,
) -> None:
    """List cases, presets, formats, casts, papers, probes, metrics or measures."""
    lister = KINDS.get(kind)
    if lister is None:
        import difflib

        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise WrongCommand(f"suite list: unknown kind {kind!r}; there are {', '.join(KINDS)}{hint}")
    rows = lister()
    if json:
        print_json(rows)
    elif rows:
        print_table([*rows[0]], [[*row.values()] for row in rows])


def _cases() -> Rows:
    from suite.declare import list_cases

    return [
        {
            "name": entry.name,
            "question": entry.question,
            "sizes": " ".join(entry.sizes),
            "claims": entry.num_claims,
            "papers": " ".join(entry.papers),
        }
        for entry in list_cases()
    ]


def _models() -> Rows:
    from harness.data.vocabulary import vocab_size
    from harness.ledger.parameters import num_parameters
    from suite.declare import preset_texts, presets

    texts = preset_texts("models")
    return [
        {
            "name": name,
            "parameters": num_parameters(spec, spec.vocab_size or vocab_size("bytes")).total,
            "layers": spec.num_layers,
            "d_model": spec.d_model,
            "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads,
            "d_ffn": spec.d_ffn,
            "about": texts[name].about.get("about", ""),
        }
        for name, spec in presets("models").items()
    ]


def _presets(kind: str) -> Callable[[], Rows]:
    def rows() -> Rows:
        from suite.declare import preset_texts, presets

        specs = presets(kind)
        return [
            {
                "name": name,
                "about": text.about.get("about", ""),
                "paper": getattr(specs[name], "paper", None) or text.about.get("source"),
            }
            for name, text in preset_texts(kind).items()
        ]

    return rows


def _papers() -> Rows:
    from suite.declare import papers

    return [
        {
            "key": key,
            "year": paper.year,
            "title": paper.title,
            "facts": len(paper.facts),
            "authors": paper.authors,
        }
        for key, paper in papers().items()
    ]


def _probes() -> Rows:
    from harness.registry import DEFAULT_PERIODS, PROBES

    return [{"name": name, "records by itself": _period(DEFAULT_PERIODS.get(name, 0))} for name in PROBES]


def _period(steps: int) -> str:
    return {0: "no", 1: "each step"}.get(steps, f"every {steps} steps")


def _metrics() -> Rows:
    from results.records import METRICS

    return [
        {
            "name": info.name,
            "unit": info.unit,
            "better": info.direction,
            "about": info.kind,
            "meaning": info.meaning,
        }
        for info in METRICS.values()
    ]


def _measures() -> Rows:
    from suite.judge.catalogue import STATISTICS

    return [
        {
            "name": info.name,
            "metric": info.metric,
            "unit": info.unit,
            "better": info.direction,
            "scoped": "yes" if info.scoped else "no",
            "meaning": info.meaning,
        }
        for info in STATISTICS.values()
    ]


KINDS: dict[str, Callable[[], Rows]] = {
    "cases": _cases,
    "models": _models,
    "precisions": precision_rows,
    "formats": format_rows,
    "casts": cast_rows,
    "optimizers": _presets("optimizers"),
    "parallelisms": mesh_rows,
    "ageing": _presets("ageing"),
    "papers": _papers,
    "probes": _probes,
    "metrics": _metrics,
    "measures": _measures,
}
