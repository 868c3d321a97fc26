"""Runs while they go on, in a terminal: python -m meshtrain.monitor RUN

    metrics.jsonl, resources/*.jsonl, alerts.jsonl ─ report.rows, from their ends ─┐
    config.yaml ─ plan                                                             ├─► watched ─► __main__: text
    survive/nodes/*.json ─ survive.history ────────────────────────────────────────┘

Reads what is new since the last look, and nothing that it writes; training knows nothing of it.
"""
