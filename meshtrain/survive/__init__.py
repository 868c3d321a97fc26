"""A run outlives its faults: one supervisor a node over the run directory, one training process under each."""
