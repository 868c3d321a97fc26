"""Runs while they go on, in a terminal: python -m meshtrain.monitor RUN

    metrics.jsonl, resources/*.jsonl, alerts.jsonl ─ report.rows, from their ends ─┐
    config.yaml ─ plan                                                             ├─► watched ─► screen: a block or a line a run
    survive/nodes/*.json ─ survive.history ────────────────────────────────────────┘

Reads what is new since the last look, and nothing that it writes; training knows nothing of it. Ctrl-C ends it, and so does the last step of
the last run.

- `meshtrain.monitor.watched`: what is known of one run at this moment. `meshtrain.monitor.lag`: which process the others wait for.
- `meshtrain.monitor.screen`: how it is shown, in as many lines as there is room for.
"""
