"""Servers under load, and behind balancers: `servers` starts them, `load` asks one, `balance` kills one of two."""
