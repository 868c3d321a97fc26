"""Pipeline schedules as data, without JAX: tables, the formulas that make them, proof, memory, time and pictures."""
