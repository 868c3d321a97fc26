"""How well the probe measures: python -m experiments.watch.probe

A few whole probes of eight fake devices as 2 x 2 x 2: how far the line through all sizes but one is off on that one,
and what was called slow although nothing was. Links and devices that are made slow are named alone: `tests/probe`.
"""

import time
from collections import Counter

import numpy as np

from experiments import bench
from experiments.bench import Table
from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.probe import judge
from meshtrain.probe.measure import measure


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="whole probes")
    runs = parser.parse_args().runs
    mesh = make_mesh(load({"mesh": {"data": 2, "tensor": 2, "pipeline": 2}}))
    errors: dict[str, list[float]] = {}
    called = Counter[str]()
    seconds = []
    for _ in range(runs):
        start = time.monotonic()
        found = measure(mesh)
        seconds.append(time.monotonic() - start)
        for c in found.collectives:
            errors.setdefault(f"{c.kind} over {c.axis}", []).extend(
                map(abs, c.left_out)
            )
        called.update(one.what for one in judge.findings(found))
    title = f"{runs} whole probes, {np.median(seconds):.0f} s each; called slow: {dict(called) or 'nothing'}"
    table = Table(
        "left out                        ", "median", "within 30%", "worst", title=title
    )
    errors["all"] = [error for found in errors.values() for error in found]
    for name, off in errors.items():
        table.row(
            name,
            f"{np.median(off):.0%}",
            f"{np.mean(np.array(off) <= 0.3):.0%}",
            f"{max(off):.0%}",
        )


if __name__ == "__main__":
    main()
