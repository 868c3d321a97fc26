"""Reports on a run from its files alone: healthy or not, how fast against what is possible, and why it is slow.

    config.yaml ─────► plan.estimate ───────┐
    metrics.jsonl, resources/*.jsonl ─ rows ┤
    answers.jsonl ─ answers ────────────────┤
    alerts.jsonl, findings.json ────────────┼─► facts ─► summary ─► sections ─┬─► text   a terminal
    checkpoints/ ─ checkpoint.manifest ─────┤              │                  └─► page   HTML, with charts
    survive/ ─ survive.history, ledger ─────┘              └─► compare, of two runs
    traces/ ─ report.trace ─► report.diagnosis ─► findings.json

Nothing here writes into a run, but for `--diagnose`; a run may be going on while it is read. A value that is not known
is left out. `report.rows` reads JSON Lines as columns, also of a file that still grows; `report.measured` holds the
figures of a summary.

Measured (`experiments/watch/page.py`): the page of 100,000 steps has 76 kB (two runs: 137 kB) and takes 2.0 s of a
processor.
"""
