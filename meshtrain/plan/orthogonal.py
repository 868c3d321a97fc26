"""Muon's matrices in a step: what travels to the ranks that iterate them and back, the products, and the bytes held.

    sent       each way K whole matrices of a stack, of which a rank has its own shards already
    products   5 iterations of a matrix [m, n], m <= n: 2 of (m, m, n), 1 of (m, m, m)
    held       CPUs iterate all stacks at once: of all of a rank's matrices the numbers 6.5 times, and of x times its
               transpose 1.5 times. GPUs iterate one after the other: all matrices, and of the largest stack both once
               more, or twice where messages brought them. Read off XLA's programs

K are the matrices of a rank, see `parallel.stacks`.
"""

import math
from collections.abc import Iterator

from meshtrain.cluster.accelerators import Accelerator
from meshtrain.cluster.algorithms import ALL_GATHER, ALL_TO_ALL
from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config
from meshtrain.optimizers import NEWTON_SCHULZ_STEPS, OPTIMIZERS, orthogonalized
from meshtrain.parallel.placement import all_placed
from meshtrain.parallel.stacks import Stack, make_stacks
from meshtrain.plan.compute import product
from meshtrain.plan.gradient_traffic import FLOAT32, Transfer

HELD = 6.5
GRAMS = 1.5


def stacks(config: Config) -> list[Stack]:
    """Returns the stacks of a step, of a stage's own layers; none where the optimizer orthogonalizes nothing."""
    if not OPTIMIZERS[config.optimizer.name].orthogonalizes:
        return []
    return make_stacks(
        config.mesh, [p for p in all_placed(config) if p.updated and orthogonalized(p)]
    )


def orthogonal_transfers(config: Config) -> list[Transfer]:
    """Returns the collectives that lay matrices out and back."""
    return [
        transfer for stack in stacks(config) for transfer in _transfers(config, stack)
    ]


def _transfers(config: Config, stack: Stack) -> Iterator[Transfer]:
    mesh = config.mesh
    form = stack.form
    ranks = lambda axes: math.prod(mesh.ways(axis) for axis in axes)
    name = lambda axes: "+".join(axis for axis in mesh.shape if axis in axes)
    nbytes = FLOAT32 * stack.on_rank * math.prod(form.padded)
    holders = form.holders
    copies = form.copies
    for what in ("matrices laid out", "matrices laid back") if holders else ():
        yield Transfer(name(holders), ALL_TO_ALL, what, nbytes, 1, ranks(holders))
    if copies:
        size = ranks(copies)
        yield Transfer(
            name(copies), ALL_GATHER, "matrices given back", size * nbytes, 1, size
        )


def held_bytes(config: Config, platform: str) -> float:
    """Bytes of a device while matrices are iterated, beside state."""
    cpu = platform == "cpu"
    every = 0.0
    most = 0.0
    for stack in stacks(config):
        matrices = stack.on_rank * math.prod(stack.form.padded)
        grams = stack.on_rank * min(stack.form.sides) ** 2
        every += HELD * matrices + GRAMS * grams if cpu else matrices
        again = 1 + bool(stack.form.holders)
        most = max(most, again * matrices + (1 + again) * grams)
    return FLOAT32 * (every + most * (not cpu))


def transfer_seconds(config: Config, cluster: Cluster) -> float:
    """Seconds of all of them, one after the other; nothing hides them."""
    return sum(t.seconds(cluster, config.mesh) for t in orthogonal_transfers(config))


def product_seconds(config: Config, accelerator: Accelerator) -> float:
    """Seconds of the products on a device."""
    seconds = 0.0
    for stack in stacks(config):
        m, n = sorted(stack.form.sides)
        iteration = 2 * product(accelerator, "float32", m, n, m)
        iteration += product(accelerator, "float32", m, m, m)
        seconds += stack.on_rank * NEWTON_SCHULZ_STEPS * iteration
    return seconds
