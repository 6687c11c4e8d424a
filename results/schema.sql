-- The five tables of a results database and the views most questions start from.
-- Times are UTC. `results.records.METRICS` says what each metric means.

CREATE TABLE environments (
    environment_id TEXT PRIMARY KEY,    -- hash of the columns below except details
    hostname       TEXT,
    machine        TEXT,                -- short stable name, such as 'AMD EPYC 2 cores'
    cpu            TEXT,
    num_cores      INTEGER,
    memory_bytes   BIGINT,
    gpu            TEXT,
    driver         TEXT,
    os             TEXT,
    python         TEXT,
    torch          TEXT,
    packages       JSON,                -- {name: version}
    git_commit     TEXT,
    details        JSON                 -- what else was seen when first met: load, CPU flags, limits
);

CREATE TABLE runs (
    run_id            TEXT PRIMARY KEY, -- KEY.ATTEMPT
    key               TEXT NOT NULL,
    attempt           INTEGER NOT NULL,
    case_name         TEXT,
    size              TEXT,
    role              TEXT,             -- arm, or base: trained for others to start from
    labels            JSON,             -- {axis: value}
    spec              JSON,             -- the run, fully resolved
    environment_id    TEXT,
    status            TEXT NOT NULL,    -- ok oom diverged hung timeout crashed interrupted skipped
    reason            TEXT,
    fidelity          TEXT,             -- native emulated simulated predicted
    device            TEXT,
    num_parameters    BIGINT,
    started_at        TIMESTAMP,
    ended_at          TIMESTAMP,
    start_checkpoint  TEXT,             -- weights the run began with
    final_checkpoint  TEXT,             -- weights it ended with
    resume_checkpoint TEXT,             -- newest resume point it wrote, after resume_step
    resume_step       BIGINT,
    notes             JSON,             -- {name: {"value", "reason"}}: chosen values, and why a value is missing
    command           TEXT,
    suite_version     TEXT,
    journal_bytes     JSON              -- {rank: bytes of its journal already in here}
);

CREATE TABLE measurements (
    run_id TEXT NOT NULL,
    rank   INTEGER NOT NULL,
    step   BIGINT NOT NULL,             -- 0: before training
    metric TEXT NOT NULL,
    scope  TEXT NOT NULL,               -- '' or the part measured, such as layers.0.ffn.down.activations
    value  DOUBLE                       -- NULL: not known; the reason is in runs.notes
);

CREATE TABLE verdicts (
    case_name     TEXT,
    size          TEXT,
    claim_id      TEXT,
    verdict       TEXT,
    reason        TEXT,
    measure       TEXT,
    effect        DOUBLE,
    low           DOUBLE,
    high          DOUBLE,
    confidence    DOUBLE,
    num_pairs     INTEGER,
    seeds_needed  INTEGER,
    fidelity      TEXT,
    machine       TEXT,
    claim         JSON,
    pairs         JSON,
    run_keys      JSON,
    decided_at    TIMESTAMP,
    suite_version TEXT
);

CREATE TABLE alarms (
    alarm_id  TEXT PRIMARY KEY,
    case_name TEXT,
    metric    TEXT,
    state     TEXT,
    details   JSON,
    raised_at TIMESTAMP
);

-- Per key the attempt that counts: the newest that is ok, else the newest.
CREATE VIEW latest_runs AS
SELECT * FROM runs
QUALIFY row_number() OVER (PARTITION BY key ORDER BY status = 'ok' DESC, attempt DESC) = 1;

-- Resumed attempts read as one curve: each point comes from the newest attempt that has it,
-- attempts after the one that counts left out.
CREATE VIEW curves AS
SELECT r.key, l.case_name, l.labels, m.metric, m.scope, m.rank, m.step, m.value
FROM measurements m
JOIN runs r USING (run_id)
JOIN latest_runs l ON l.key = r.key AND r.attempt <= l.attempt
QUALIFY row_number() OVER (PARTITION BY r.key, m.rank, m.step, m.metric, m.scope ORDER BY r.attempt DESC) = 1;

CREATE VIEW loss_curves AS
SELECT key, case_name, labels, rank, step, value AS loss FROM curves WHERE metric = 'loss' AND scope = '';

CREATE VIEW memory_peaks AS
SELECT key, any_value(case_name) AS case_name, any_value(labels) AS labels, scope AS category,
       max(value) AS peak_bytes
FROM curves WHERE metric = 'peak_bytes'
GROUP BY key, scope;

-- Fidelity stands beside the figures: an emulated run's speed says nothing about the format's speed.
CREATE VIEW throughput AS
SELECT c.key, any_value(c.case_name) AS case_name, any_value(c.labels) AS labels,
       any_value(l.fidelity) AS fidelity, any_value(e.machine) AS machine,
       median(c.value) FILTER (c.metric = 'tokens_per_s') AS tokens_per_s,
       median(c.value) FILTER (c.metric = 'step_ms') AS step_ms,
       median(c.value) FILTER (c.metric = 'mfu') AS mfu
FROM curves c
JOIN latest_runs l USING (key)
LEFT JOIN environments e USING (environment_id)
WHERE c.metric IN ('tokens_per_s', 'step_ms', 'mfu') AND c.scope = ''
GROUP BY c.key;

CREATE VIEW quantization_health AS
SELECT key, any_value(case_name) AS case_name, any_value(labels) AS labels, scope,
       max(value) FILTER (metric = 'quant_clipped_fraction') AS clipped_fraction_max,
       max(value) FILTER (metric = 'quant_flushed_fraction') AS flushed_fraction_max,
       max(value) FILTER (metric = 'quant_amax') AS amax_max,
       min(value) FILTER (metric = 'quant_sqnr_db') AS sqnr_db_min,
       median(value) FILTER (metric = 'quant_sqnr_db') AS sqnr_db_median
FROM curves WHERE metric LIKE 'quant\_%' ESCAPE '\'
GROUP BY key, scope;

COMMENT ON TABLE runs IS 'schema 1';
