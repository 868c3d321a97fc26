"""Levels found in shuffled matrices, wrong orders repaired, and what an order of the axes is worth: python -m
experiments.communicate.topology
"""

import time

import numpy as np

from experiments import bench
from experiments.bench import Table
from meshtrain.cluster.levels import clustered, cost
from meshtrain.config import Config, MeshConfig, load
from meshtrain.plan import Cluster, axes, named, plan

SIZES = (2**12, 2**25)  # bytes of a message
LINKS = (
    (3e-6, 450e9),
    (8e-6, 50e9),
    (3e-5, 12.5e9),
)  # seconds, bytes/s: NVLink, a rail, an oversubscribed spine
SHAPES = (
    (8, 16),
    (8, 64),
    (4, 36),
    (8, 256),
    (8, 32, 64),
    (8, 64, 512),
)  # devices in blocks of each level
SEEDS = 10
MESH = MeshConfig(data=8, tensor=4, pipeline=2)
WEIGHTS = {"data": 1.0, "tensor": 8.0, "pipeline": 0.3}  # bytes of a step


def matrix(
    sizes: tuple[int, ...], place: np.ndarray, noise: float, random: np.random.Generator
) -> np.ndarray:
    """Seconds [sizes, from, to] of devices that stand at `place`, each up to `noise` off."""
    seconds = np.full((len(SIZES), sizes[-1], sizes[-1]), np.nan)
    for size, (latency, bandwidth) in reversed(list(zip(sizes, LINKS, strict=False))):
        same = place[:, None] // size == place // size
        for i, nbytes in enumerate(SIZES):
            seconds[i][same] = latency + nbytes / bandwidth
    seconds[:, np.eye(sizes[-1], dtype=bool)] = np.nan
    return seconds * (1 + noise * random.uniform(-1, 1, seconds.shape))


def recovered(sizes: tuple[int, ...], noise: float) -> tuple[int, float]:
    """(of `SEEDS` shuffled matrices those of which every block of every level was found, seconds each)."""
    found, begun = 0, time.perf_counter()
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        place = random.permutation(sizes[-1])
        levels = clustered(SIZES, matrix(sizes, place, noise, random)).levels
        true = [
            {
                frozenset(np.flatnonzero(place // s == b).tolist())
                for b in range(sizes[-1] // s)
            }
            for s in sizes
        ]
        found += [set(map(frozenset, level.blocks)) for level in levels] == true
    return found, (time.perf_counter() - begun) / SEEDS


def repaired(sizes: tuple[int, ...], noise: float) -> tuple[float, float]:
    """Cost of a shuffled order and of the repaired one, the worst of `SEEDS`, over that of the best: links without
    noise.
    """
    wrong, right = 0.0, 0.0
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        place = random.permutation(sizes[-1])
        true = matrix(sizes, place, 0.0, random)[-1]
        best = cost(true, np.argsort(place), MESH, WEIGHTS)
        order = clustered(SIZES, matrix(sizes, place, noise, random)).order
        wrong = max(wrong, cost(true, range(sizes[-1]), MESH, WEIGHTS) / best)
        right = max(right, cost(true, order, MESH, WEIGHTS) / best)
    return wrong, right


def order_of_axes(config: Config, cluster: Cluster) -> tuple[float, float]:
    """(share of a step that the best order of the axes saves of the usual one, and of the reverse)."""
    reverse = load(config, [f"mesh.order=[{', '.join(reversed(config.mesh.order))}]"])
    usual, worst = (axes.faster_order(plan(one, cluster)) for one in (config, reverse))
    return (usual[1] if usual else 0.0), (worst[1] if worst else 0.0)


def main() -> None:
    bench.parser(__doc__).parse_args()
    title = f"levels recovered exactly, of {SEEDS} shuffled matrices, by noise"
    table = Table("blocks      ", "20%", "30%", "40%", "seconds each", title=title)
    for sizes in SHAPES:
        results = [recovered(sizes, noise) for noise in (0.2, 0.3, 0.4)]
        table.row(
            "/".join(map(str, sizes)), *(n for n, _ in results), f"{results[0][1]:.3f}"
        )
    title = (
        f"64 devices, {MESH}, bytes {WEIGHTS}: cost over the best order's, noise 20%"
    )
    table = Table("blocks      ", "shuffled", "repaired", title=title)
    for sizes in ((8, 64), (8, 32, 64)):
        wrong, right = repaired(sizes, 0.2)
        table.row("/".join(map(str, sizes)), f"{wrong:.2f}", f"{right:.4f}")
    title = "what the best order of the axes saves of a step"
    table = Table(
        "model     ",
        "mesh                           ",
        "cluster",
        "usual order",
        "the reverse",
        title=title,
    )
    for name, mesh in (("llama3_8b", (8, 4, 2)), ("llama3_70b", (8, 8, 8))):
        sizes = [
            f"mesh.{axis}={n}"
            for axis, n in zip(("data", "tensor", "pipeline"), mesh, strict=True)
        ]
        config = load(f"configs/{name}.yaml", [*sizes, "train.global_batch_size=128"])
        for cluster in ("h100", "a100-80", "gb200"):
            usual, reverse = order_of_axes(config, named(cluster, config.mesh.devices))
            table.row(name, config.mesh, cluster, f"{usual:.1%}", f"{reverse:.1%}")


if __name__ == "__main__":
    main()
