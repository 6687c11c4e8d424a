"""`python -m harness.trace SPEC.json`: trace one step, print the ranks' RankSteps as JSON.

SPEC.json holds a RunSpec (- reads standard input). The answer is kept in `$SUITE_CACHE/traces` under a hash of what it
depends on, and given from there the next time. Exit status 2: the spec is wrong, with the reason on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from harness.data.vocabulary import vocab_size
from harness.ledger.step import RankStep
from harness.spec import RunSpec
from harness.trace.stored import known_or_made, to_json


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.trace", description="One training step without data."
    )
    parser.add_argument("spec", help="a RunSpec as JSON; - for standard input")
    parser.add_argument("--cache", type=Path, help="folder of earlier answers (default $SUITE_CACHE/traces)")
    given = parser.parse_args(arguments)
    text = sys.stdin.read() if given.spec == "-" else Path(given.spec).read_text("utf-8")
    try:
        spec = RunSpec.model_validate_json(text)
    except ValidationError as error:
        print(error, file=sys.stderr)
        return 2

    def make() -> list[RankStep]:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from harness.trace.ranks import trace_ranks  # loads torch

        return trace_ranks(spec, vocab_size(spec.data.tokenizer))

    json.dump(to_json(known_or_made(spec, given.cache or _cache(), make)), sys.stdout)
    print()
    return 0


def _cache() -> Path:
    from harness.data.tokens import cache_dir

    return cache_dir() / "traces"


if __name__ == "__main__":
    sys.exit(main())
