"""One-off figures: each is one command, `python -m experiments.figures NAME`; see `__main__`."""
