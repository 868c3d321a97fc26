"""Faults, injected for real, and what becomes of each: see `__main__`."""
