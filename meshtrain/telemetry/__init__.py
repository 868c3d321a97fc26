"""What a person sees of a run while it goes on: `progress`, a bar on a terminal and plain lines elsewhere. Its rows: `run.rows`."""
