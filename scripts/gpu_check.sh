#!/usr/bin/env bash
# The GPU checks, ten minutes at most in one call on one card of 80 GB or more:
#   scripts/gpu_check.sh [OUT [STEP...]]
# Steps, memory where none is named; `precision` stands for native, sweep and ties, which fit one call together:
#   memory   the gpu size of fp8_long_horizon (native BF16 and FP8) as far as it gets, three runs of 23 GiB at a time,
#            and the two ways of measuring memory against each other
#   native   native FP8 linears against the emulation (operands bit for bit, products within accumulation error) and the
#            Triton casts against the PyTorch twin, bit for bit
#   sweep    fp8_throughput: products over shapes and kernels, then whole steps on one GPU, one run at a time
#   ties     flash_attention_bias on the attention kernels that are there
#   fit      fit_on_one_gpu: peaks by formula and by trace against the allocator's, GPT and Llama sizes, recomputation,
#            optimizers; steps one at a time, so that what the device gave away is theirs alone
# What each step measured is left as Parquet in OUT/published/, with the findings of `native` as JSON beside it. Copy that
# folder to results/published/ to keep it.
#   PYTHON   interpreter that holds torch (default: .venv, else python3)
#   WHEELS   folder of wheels for a machine that reaches no package index
#   BUDGET   seconds for all steps together (default 570)
# Exit status: 0 all that was asked for ran and nothing is wrong.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-out/gpu}
shift || true
steps=()
for step in "${@:-memory}"; do
    case $step in
        memory | native | sweep | ties | fit) steps+=("$step") ;;
        precision) steps+=(native sweep ties) ;;
        *) echo "unknown step $step; there are memory, native, sweep, ties, fit and precision" >&2 && exit 2 ;;
    esac
done
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$out/packages" "$WHEELS"/*.whl
    export PYTHONPATH="$out/packages${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
ends=$((SECONDS + ${BUDGET:-570}))
worst=0

suite() { "$python" -m suite "$@"; }

# within LIMIT COMMAND...: no longer than LIMIT seconds and what is left of the budget. SIGTERM lets a command stop its
# runs and store what they have; being stopped is no failure.
within() {
    local left=$((ends - SECONDS)) limit=$1 status=0
    shift
    limit=$((limit < left ? limit : left))
    [ "$limit" -ge 5 ] || { echo "no time left for: $*" >&2 && note 4 && return 0; }
    timeout --signal=TERM "$limit" "$@" || status=$?
    [ "$status" = 124 ] && echo "stopped after $limit s: $*" >&2 && return 0
    note "$status"
}

# note STATUS: the highest status of all steps is the script's.
note() { if [ "$1" -gt "$worst" ]; then worst=$1; fi; }

run_case() { # run_case LIMIT CASE [OPTION...]
    local limit=$1 name=$2
    shift 2
    within "$limit" "$python" -m suite run "$name" --size gpu --out "$out" "$@"
    suite claims "$name" --size gpu --out "$out" || true
}

memory_check() {
    # Three runs share the card, so their step times are no measure of speed; this check is of numbers and memory.
    run_case 540 fp8_long_horizon --jobs 3
    suite query --out "$out" "
        SELECT r.labels, t.value AS tracked_bytes, a.value AS allocator_bytes, a.value / t.value - 1 AS difference
        FROM measurements t JOIN measurements a USING (run_id, rank, step, metric) JOIN runs r USING (run_id)
        WHERE metric = 'peak_bytes' AND t.scope = 'total' AND a.scope = 'allocator' ORDER BY difference DESC"
    "$python" - "$out" <<'PY' || note $?
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
}

native_check() { within 150 "$python" scripts/native_check.py paths casts --json "$out/published/native_check.json"; }

sweep_check() {
    # One run at a time: side by side they would share the card's speed.
    run_case 420 fp8_throughput --jobs 1
    suite query --out "$out" "
        SELECT l.labels->>'gemm.kernel' AS kernel, l.labels->>'gemm' AS shape,
               median(m.value) FILTER (m.metric = 'gemm_tflops') AS tflops,
               median(m.value) FILTER (m.metric = 'gemm_with_cast_tflops') AS with_cast,
               max(m.value) FILTER (m.metric = 'gemm_error') AS error,
               max(m.value) FILTER (m.metric = 'gemm_operand_mismatches') AS mismatches
        FROM measurements m JOIN latest_runs l USING (run_id) WHERE m.metric LIKE 'gemm%' GROUP BY ALL ORDER BY ALL"
}

ties_check() { run_case 150 flash_attention_bias --jobs 1; }

fit_check() {
    run_case 240 fit_on_one_gpu --jobs 6 --only task=ledger --only task=trace
    run_case 420 fit_on_one_gpu --jobs 1
    suite query --out "$out" "
        WITH peaks AS (
            SELECT l.labels->>'model' AS model, l.labels->>'precision' AS precision, l.labels->>'optimizer' AS optimizer,
                   l.labels->>'recompute' AS recompute, l.labels->>'task' AS task, m.scope, max(m.value) AS bytes
            FROM measurements m JOIN latest_runs l USING (run_id)
            WHERE m.metric = 'peak_bytes' AND l.case_name = 'fit_on_one_gpu' GROUP BY ALL)
        SELECT model, precision, optimizer, recompute,
               max(bytes) FILTER (scope = 'allocator.allocated') AS allocated,
               max(bytes) FILTER (task = 'step' AND scope = 'total') AS tensors,
               max(bytes) FILTER (task = 'ledger' AND scope = 'total') / allocated - 1 AS formula_error,
               max(bytes) FILTER (task = 'trace' AND scope = 'total') / allocated - 1 AS trace_error,
               max(bytes) FILTER (scope = 'residue.rounding') AS rounding,
               max(bytes) FILTER (scope = 'residue.fragmentation') AS fragmentation,
               max(bytes) FILTER (scope = 'residue.library') AS library,
               max(bytes) FILTER (scope = 'residue.unknown') AS unknown
        FROM peaks GROUP BY ALL ORDER BY ALL"
}

suite doctor --out "$out" || true
for step in "${steps[@]}"; do
    echo "== $step"
    "${step}_check"
done
if [ -e "$out/suite.duckdb" ]; then
    suite export --format parquet -o "$out/published" --out "$out"
fi
exit "$worst"
