"""Checks an accelerator: small runs of every feature beside the same runs on the CPU, and what it gives.

    parent ──► children on the accelerator ──► losses, norms ─┐
       └─────► children on the CPU ──────────► losses, norms ─┴─► differences      then: products and memory by `probe`

- `meshtrain.check_gpu.cases`: the runs, and how far they may be apart.
- `meshtrain.check_gpu.child`: the program of a child, a JSON line a run.
- `meshtrain.check_gpu.compared`: a check's differences, and the report.
"""
