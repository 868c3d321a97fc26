"""A schedule's table inside the compiled step: run (execute), what a stage computes (stage, split_backward), where values wait (storage)."""
