"""What belongs to a run, not to a checkpoint: its directory and its lock, its processes, requests to stop, its rows of metrics."""
