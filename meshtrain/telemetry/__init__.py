"""What a run tells: `metrics` writes metrics.jsonl, `progress` shows a bar on a terminal and plain lines elsewhere."""
