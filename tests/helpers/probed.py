"""Probes that were never measured: of machines that are exactly as described, but for what a test makes slow."""

import numpy as np

from meshtrain.cluster.algorithms import KINDS
from meshtrain.config import MeshConfig
from meshtrain.probe.figures import Devices, MeasuredCollective, Pairs, Probe

SIZES = (2**12, 2**16, 2**20, 2**24)
PAIR_SIZES = (2**12, 2**24)


def collective(axis, kind, devices, latency, bandwidth, spread=0.05):
    """All kinds take latency + bytes / bandwidth of the whole array."""
    seconds = tuple(latency + size / bandwidth for size in SIZES)
    return MeasuredCollective(
        axis, kind, devices, SIZES, seconds, (spread,) * len(SIZES)
    )


def pairs(devices, latency=1e-5, bandwidth=1e10, noise=0.0, seed=0, spread=0.05):
    random = np.random.default_rng(seed)
    seconds = np.stack(
        [np.full((devices, devices), latency + size / bandwidth) for size in PAIR_SIZES]
    )
    seconds *= 1 + noise * random.uniform(-1, 1, seconds.shape)
    seconds[:, np.eye(devices, dtype=bool)] = np.nan
    return Pairs(PAIR_SIZES, seconds, spread)


def devices(number, noise=0.0, seed=0, spread=0.05):
    random = np.random.default_rng(seed)
    flops, memory = (
        rate * (1 + noise * random.uniform(-1, 1, number)) for rate in (5e14, 3e12)
    )
    rates = {"float32": 2e14, "bfloat16": 4e14, "float16": 4e14}
    return Devices("bfloat16", 8192, flops, memory, rates, 2.5e12, 80 * 2**30, spread)


def probe(mesh=None, links=None, per_machine=8, platform="gpu", kinds=KINDS, **parts):
    """`links`: by axis (latency, bandwidth) of the collectives over it."""
    mesh = mesh or MeshConfig(data=1, tensor=8, pipeline=1)
    links = {"tensor": (1e-5, 1e11)} if links is None else links
    found = [
        collective(axis, kind, mesh.ways(axis), *figures)
        for axis, figures in links.items()
        for kind in kinds
    ]
    return Probe(
        platform=platform,
        kind="cpu" if platform == "cpu" else "some-gpu",
        mesh=mesh,
        machines=tuple(i // per_machine for i in range(mesh.devices)),
        processes=1,
        barriers={"tensor": 1e-5},
        collectives=tuple(found),
        pairs=parts.get("pairs"),
        devices=parts.get("devices"),
    )
