"""The numbers behind the pages as files: JSON and CSV, the same bytes for the same database."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from results.records import METRICS
from suite.report.arms import Layout
from suite.report.evidence import Evidence, Points

if TYPE_CHECKING:
    from results.records import RunRow


def clean(value: Any) -> Any:
    """`value` as JSON can hold it: no NaN or infinity (null), times as text, keys as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): clean(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [clean(part) for part in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def json_text(value: Any) -> str:
    """Readable JSON with a newline at its end."""
    return json.dumps(clean(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def compact_json(value: Any) -> str:
    """JSON on one line. Values are cleaned only where they need it: bulk data rarely does."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        return json.dumps(clean(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def json_script(value: Any) -> Markup:
    """Compact JSON that cannot end the script element that holds it."""
    text = compact_json(value)
    for character, escape in (
        ("<", "\\u003c"),
        (">", "\\u003e"),
        ("&", "\\u0026"),
        ("\u2028", "\\u2028"),
        ("\u2029", "\\u2029"),
    ):
        text = text.replace(character, escape)
    return Markup(text)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV with a header line and newlines of one byte; floats in full, so that they read back exactly."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return stream.getvalue()


def run_json(row: RunRow, environment: Mapping[str, Any], points: Points) -> str:
    """A run with all its measurements: metric -> scope -> [[step, value], ...]."""
    measured = {name: scopes for name in METRICS if (scopes := points.scopes(name, row.key))}
    head = json_text({"run": asdict(row), "environment": environment})
    # Measurements are kept on one line: indented, a curve would take a line for each number.
    body = compact_json(measured)
    return head.rstrip()[:-1].rstrip() + ',\n "measurements": ' + body + "\n}\n"


def run_csv(key: str, points: Points) -> str:
    """A run's measurements, one a line."""
    rows = (
        (step, name, scope, METRICS[name].unit, value)
        for name in METRICS
        for scope, curve in points.scopes(name, key).items()
        for step, value in curve
    )
    return csv_text(("step", "metric", "scope", "unit", "value"), rows)


def runs_csv(layout: Layout, evidence: Evidence, losses: Mapping[str, float]) -> str:
    """A case's runs, one a line: labels, status, final training loss."""
    axes = sorted({axis for arm in layout.arms for run in arm.runs for axis in run.labels})
    rows = []
    for run in (*layout.bases, *(run for arm in layout.arms for run in arm.runs)):
        row = evidence.rows.get(run.key)
        rows.append(
            (
                run.key,
                run.role,
                *(run.labels.get(axis, "") for axis in axes),
                evidence.status(run.key),
                row.reason if row else "",
                row.fidelity if row else run.spec.fidelity,
                losses.get(run.key, ""),
            )
        )
    return csv_text(("key", "role", *axes, "status", "reason", "fidelity", "final_loss"), rows)
