"""All-reduce by each program of messages, against psum: python -m experiments.communicate.algorithms

Measured on fake devices, all algorithms in turns in one run, as times of psum's median: they share one memory and two
cores, so this tells what the messages themselves cost, and nothing of links. Then the alpha-beta model of a described
cluster: who wins where.
"""

from experiments import bench
from meshtrain.allreduce import ALGORITHMS
from meshtrain.cluster.algorithms import ALL_REDUCE
from meshtrain.config import MeshConfig, load
from meshtrain.draw.picture import columns
from meshtrain.mesh import make_mesh
from meshtrain.plan import named, programs
from meshtrain.probe import links
from meshtrain.probe.figures import XLA
from meshtrain.units import duration, size

PROGRAMS = tuple(ALGORITHMS)[1:]
MEASURED = (4 * 2**10, 64 * 2**10, 2**20)
MODELLED = tuple(2**k for k in (12, 16, 20, 24, 28, 32))


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[2, 4, 8], help="to measure on"
    )
    parser.add_argument(
        "--cluster",
        default="h100",
        help="to model, as python -m meshtrain.plan --cluster takes it",
    )
    parser.add_argument(
        "--gpus", type=int, default=512, help="of the cluster, in islands of 8"
    )
    options = parser.parse_args()
    print("fake devices, in times of psum")
    print(columns([row for n in options.devices for row in measured(n)]))
    for gpus in (8, options.gpus):
        print()
        print(f"{gpus} x {options.cluster}, by the alpha-beta model")
        print(columns(modelled(options.cluster, gpus)))


def measured(devices: int) -> list[list[str]]:
    """A row a program: the ratio to psum at each size. With islands where there can be two of several devices."""
    islands = 2 if devices % 2 == 0 and devices > 2 else 1
    mesh = make_mesh(
        load(
            {
                "mesh": {"data": devices, "islands": islands},
                "train": {"global_batch_size": devices},
            }
        )
    )
    over = links.JOINED if islands > 1 else "data"
    found = list(links.collectives(mesh, over, (ALL_REDUCE,), MEASURED, PROGRAMS))
    psum = next(c for c in found if c.algorithm == XLA)
    rows = [
        [f"n = {devices}", *map(size, MEASURED)],
        ["psum", *map(duration, psum.seconds)],
    ]
    for c in found:
        if c is not psum:
            ratios = [a / b for a, b in zip(c.seconds, psum.seconds, strict=True)]
            rows.append([c.algorithm, *(f"{ratio:.1f}" for ratio in ratios)])
    return rows


def modelled(name: str, gpus: int) -> list[list[str]]:
    """A row an algorithm: seconds at each size, the fastest of ours marked."""
    mesh = MeshConfig(data=gpus, islands=max(1, gpus // 8))
    cluster = named(name, gpus)
    by = [
        algorithm
        for algorithm in ALGORITHMS
        if mesh.islands > 1 or algorithm != "hierarchical"
    ]
    seconds = {
        a: [
            programs.seconds(a, ALL_REDUCE, mesh.data_axes, mesh, cluster, n)
            for n in MODELLED
        ]
        for a in by
    }
    least = [
        min(seconds[a][i] for a in by if a != "psum") for i in range(len(MODELLED))
    ]
    rows = [["", *map(size, MODELLED)]]
    for algorithm, times in seconds.items():
        marks = [
            "*" if t == best and algorithm != "psum" else ""
            for t, best in zip(times, least, strict=True)
        ]
        rows.append(
            [
                algorithm,
                *(duration(t) + mark for t, mark in zip(times, marks, strict=True)),
            ]
        )
    return rows


if __name__ == "__main__":
    main()
