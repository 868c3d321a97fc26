"""How well the probe measures, and whether it finds what was made slow: python -m experiments.watch.probe

Eight fake devices as 2 x 2 x 2. Of a few whole probes: how far the line through all sizes but one is off on that one, and what was called
slow although nothing was. Then a link, all links of a device, or a device is made slow, another one each time, and must be named alone:
a link sends every message twice, a device computes every product twice.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.probe import devices, judge, links
from meshtrain.probe.clock import Job
from meshtrain.probe.measure import measure

AGAIN = 2  # times that what is slow does the same: half the speed of its like


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.watch.probe", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="whole probes, and of each kind of slowness")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mesh = make_mesh(load({"mesh": {"data": 2, "tensor": 2, "pipeline": 2}}))
    whole(mesh, options.runs)
    slowed(mesh, options.runs, random.Random(options.seed))


def whole(mesh: Mesh, runs: int) -> None:
    errors: dict[tuple[str, str], list[float]] = {}
    called, seconds = Counter[str](), []
    for _ in range(runs):
        start = time.monotonic()
        found = measure(mesh)
        seconds.append(time.monotonic() - start)
        for c in found.collectives:
            errors.setdefault((c.axis, c.kind), []).extend(map(abs, c.left_out))
        called.update(one.what for one in judge.findings(found))
    print(f"{runs} whole probes, {np.median(seconds):.0f} s each; called slow: {dict(called) or 'nothing'}")
    print(f"{'left out':32}{'median':>8}{'within 30%':>12}{'worst':>8}")
    rows = {f"{kind} over {axis}": found for (axis, kind), found in errors.items()}
    for name, off in (rows | {"all": [e for found in errors.values() for e in found]}).items():
        print(f"{name:32}{np.median(off):8.0%}{np.mean(np.array(off) <= 0.3):12.0%}{max(off):8.0%}")


def slowed(mesh: Mesh, runs: int, chance: random.Random) -> None:
    """Each kind of slowness `runs` times, at another place each."""
    places = [list(mesh.devices.flat).index(device) for device in _numbered(mesh)]

    def one_link() -> tuple[Any, ...]:
        a, b = chance.sample(range(mesh.size), 2)
        with _messages_again({(places[a], places[b])}):
            return ("pair", (a, b)), measure(mesh, ("pairs",))

    def all_links() -> tuple[Any, ...]:
        device = chance.randrange(mesh.size)
        touched = {pair for other in range(mesh.size) for pair in ((device, other), (other, device))}
        with _messages_again({(places[a], places[b]) for a, b in touched}):
            return ("links", (device,)), measure(mesh, ("pairs",))

    def one_device() -> tuple[Any, ...]:
        device = chance.randrange(mesh.size)
        with _products_again(_numbered(mesh)[device]):
            return ("device", (device,)), measure(mesh, ("products",))

    print(f"{'made slow':32}{'named alone':>12}{'shared':>8}{'wrong':>8}   score")
    for name, kind in (("one link", one_link), ("all links of a device", all_links), ("one device", one_device)):
        _row(name, [kind() for _ in range(runs)])


def _row(name: str, results: list[tuple[Any, ...]]) -> None:
    counts, scores = Counter[str](), []
    for truth, probe in results:
        found = judge.findings(probe)
        if [(one.what, one.devices) for one in found] == [truth]:
            counts["named"] += 1
            scores.append(found[0].score)
        else:
            counts["shared" if any(one.what == "machine" for one in found) else "wrong"] += 1
    told = f"{min(scores):.2f} to {max(scores):.2f}" if scores else ""
    print(f"{name:32}{counts['named']:9} / {len(results)}{counts['shared']:8}{counts['wrong']:8}   {told}")


def _numbered(mesh: Mesh) -> list[jax.Device]:
    """As the probe and the planner number them."""
    return mesh.devices.transpose(2, 0, 1).ravel().tolist()


@contextmanager
def _messages_again(pairs: set[tuple[int, int]]) -> Iterator[None]:
    honest = links.message

    def message(mesh: Mesh, source: int, target: int) -> links.Step:
        step = honest(mesh, source, target)
        if (source, target) not in pairs:
            return step
        return lambda x: jax.lax.fori_loop(0, AGAIN, lambda _, y: jax.lax.optimization_barrier(step(y)), x)

    links.message = message
    try:
        yield
    finally:
        links.message = honest


@contextmanager
def _products_again(slow: jax.Device) -> Iterator[None]:
    honest = devices._on

    def on(device: jax.Device, function: Callable, *rest: Any) -> Job:
        job = honest(device, function, *rest)
        if device != slow or function is not devices.products:
            return job

        def again() -> jax.Array:
            for _ in range(AGAIN - 1):
                jax.block_until_ready(job.run())
            return job.run()

        return Job(again)

    devices._on = on
    try:
        yield
    finally:
        devices._on = honest


if __name__ == "__main__":
    main()
