#!/usr/bin/env bash
# The GPU check in one call, ten minutes at most on one card of 80 GB or more (three runs of 23 GiB):
#   scripts/gpu_check.sh [OUT]
# Runs the gpu size of fp8_long_horizon (native BF16, emulated FP8) as far as it gets, compares the two ways of
# measuring memory, and leaves Parquet in OUT/published/. Copy that folder to results/published/ to keep it.
#   PYTHON   interpreter that holds torch (default: .venv, else python3)
#   WHEELS   folder of wheels for a machine that reaches no package index
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-out/gpu}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$out/packages" "$WHEELS"/*.whl
    export PYTHONPATH="$out/packages${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
suite() { "$python" -m suite "$@"; }

suite doctor --out "$out" || true
status=0
# Three runs share the card, so their step times are no measure of speed; this check is of numbers and memory.
# SIGTERM lets the command stop its runs and store what they have.
timeout --signal=TERM 540 "$python" -m suite run fp8_long_horizon --size gpu --jobs 3 --out "$out" || status=$?
suite claims fp8_long_horizon --size gpu --out "$out" || true
suite query --out "$out" "
    SELECT r.labels, t.value AS tracked_bytes, a.value AS allocator_bytes, a.value / t.value - 1 AS difference
    FROM measurements t JOIN measurements a USING (run_id, rank, step, metric) JOIN runs r USING (run_id)
    WHERE metric = 'peak_bytes' AND t.scope = 'total' AND a.scope = 'allocator' ORDER BY difference DESC"
suite export --format parquet -o "$out/published" --out "$out"
"$python" - "$out" <<'PY'
import sys
from pathlib import Path
from results.store import Store

rows = Store(Path(sys.argv[1]) / "suite.duckdb", read_only=True).query(
    "SELECT max(abs(a.value / t.value - 1)), count(*) FROM measurements t JOIN measurements a "
    "USING (run_id, rank, step, metric) WHERE metric = 'peak_bytes' AND t.scope = 'total' AND a.scope = 'allocator'"
)[1]
worst, num_runs = rows[0]
if not num_runs:
    sys.exit("no run measured memory both ways")
print(f"memory measured both ways on {num_runs} runs: largest difference {worst:.1%} (3 % allowed)")
sys.exit(worst > 0.03)
PY
exit "$([ "$status" = 124 ] && echo 0 || echo "$status")"
