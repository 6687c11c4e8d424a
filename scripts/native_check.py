"""Native casts and linears of this device against the emulation; part of scripts/gpu_check.sh.

    python scripts/native_check.py paths casts --device cuda --json FILE

Exit status 1 where something is wrong, 3 where nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from harness.verify import CASTS, Finding, check_casts, check_path
from suite.declare.presets import presets

BACKENDS = ("torch", "transformer_engine")


def findings(checks: Sequence[str], device: torch.device, precisions: Sequence[str]) -> list[Finding]:
    """All findings of the checks asked for."""
    found: list[Finding] = []
    if "casts" in checks:
        found += check_casts(CASTS, device, "triton" if device.type == "cuda" else "cpp")
    if "paths" in checks:
        known = presets("precisions")
        for name in precisions or [name for name, spec in known.items() if spec.recipe is not None]:
            for backend in BACKENDS:
                found.append(check_path(known[name].model_copy(update={"backend": backend}), device))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="+", choices=["casts", "paths"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", action="append", default=[], help="Only these presets.")
    parser.add_argument("--json", type=Path, help="Also write the findings there.")
    options = parser.parse_args(arguments)
    found = findings(options.checks, torch.device(options.device), options.precision)
    for finding in found:
        print(f"{finding.status:8}{finding.check:6} {finding.name}: {finding.detail}")
    counts = {status: sum(f.status == status for f in found) for status in ("ok", "wrong", "skipped")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(finding) for finding in found], indent=1))
    return 1 if counts["wrong"] else 0 if counts["ok"] else 3


if __name__ == "__main__":
    sys.exit(main())
