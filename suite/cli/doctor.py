"""`suite doctor`: is this machine fit, and what could it do besides."""

from __future__ import annotations

from suite.cli.failures import OK, UNFIT
from suite.cli.output import DEFAULT_OUT, JsonOption, OutOption, print_json, print_table, say


def doctor(out: OutOption = DEFAULT_OUT, json: JsonOption = False) -> int:
    """Look at Python, packages, machine, GPU and out folder; exit with 4 when the machine is unfit."""
    from dataclasses import asdict

    from suite.doctor import examine

    checks = examine(out)
    if json:
        print_json([asdict(check) for check in checks])
    else:
        print_table(
            ("check", "state", "found", "advice"), [(c.name, c.state, c.found, c.advice) for c in checks]
        )
    missing = [check.name for check in checks if check.state == "missing"]
    if missing:
        say(f"not fit to run: {', '.join(missing)}")
        return UNFIT
    return OK
