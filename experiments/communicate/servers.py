"""Data parallelism three ways on the same model, data and devices: all-reduce, and a parameter server, in step and out
of step.

    all-reduce          worker ──gradients summed over all workers──► every worker updates its own copy

    synchronous         workers ─push gradients─► server: sum, update ─pull weights─► workers      a step waits for the slowest
    server

    asynchronous        worker 0 ──┤pull   push├┤pull   push├┤pull                                 nobody waits; but what worker 1
    server              worker 1 ──┤pull                            push├                          pushes was computed on weights
                        version    0       1            2           3                              that are 2 updates old: its staleness

Li et al. 2014 (OSDI, section 3.1) and Dean et al. 2012 (DistBelief, section 4.1) have the servers. The arrivals of the
asynchronous one are those of workers with given seconds a gradient, the earliest first, of equal ones the lower number:
so a run repeats.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.compat import vary

Tree = Any
Rows = tuple[np.ndarray, ...]
WORKER = "worker"


@dataclass(frozen=True)
class Trained:
    """What a run did: the loss of each step or gradient on its own rows, how many updates older than the server's the
    weights were that it was computed on, and by (gradients so far, simulated seconds so far, loss) how the weights did
    on rows held out.
    """

    losses: list[float]
    staleness: list[int]
    held_out: list[tuple[int, float, float]]


class Task:
    """A loss, weights to begin with, and `rows` of (step, worker), for so many workers of a device each and a server on
    one more.

    Descent by gradients alone, at a rate that falls to 0: momentum would hide what staleness does, which acts like it
    (Mitliagkas et al. 2016).
    """

    def __init__(
        self,
        loss: Callable,
        weights: Tree,
        rows: Callable[[int, int], Rows],
        unseen: Rows,
        workers: int,
    ) -> None:
        self.rows, self.unseen, self.of = rows, unseen, loss
        self.devices, self.server = jax.devices()[:workers], jax.devices()[workers]
        self.weights = jax.device_put(weights, self.server)
        self.gradient = jax.jit(jax.value_and_grad(loss))
        self._loss = jax.jit(loss)

    def loss(self, weights: Tree) -> float:
        """Of the rows held out."""
        return float(self._loss(jax.device_put(weights, self.server), *self.unseen))


@jax.jit
def updated(weights: Tree, rate: float, *gradients: Tree) -> Tree:
    """One step down along the mean of the gradients."""
    return jax.tree.map(
        lambda w, *gs: w - rate * (sum(gs) / len(gs)), weights, *gradients
    )


def all_reduce(task: Task, steps: int, rate: float) -> Trained:
    """Every worker has the weights, sums gradients with all others, and makes the same update as they."""
    workers = len(task.devices)
    mesh, split, whole = (
        Mesh(np.array(task.devices), (WORKER,)),
        PartitionSpec(WORKER),
        PartitionSpec(),
    )

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(whole, whole, split),
        out_specs=(whole, split),
    )
    def step(weights: Tree, now: float, rows: Rows) -> tuple[Tree, jax.Array]:
        loss, own = jax.value_and_grad(task.of)(vary(weights, [WORKER]), *rows)
        mean = jax.tree.map(lambda g: jax.lax.psum(g, WORKER) / workers, own)
        return updated(weights, now, mean), loss[None]

    weights, losses = (
        jax.device_put(task.weights, NamedSharding(mesh, whole)),
        list[float](),
    )
    for k in range(steps):
        shares = [task.rows(k, worker) for worker in range(workers)]
        together = tuple(map(np.concatenate, zip(*shares, strict=True)))
        weights, by_worker = step(weights, rate * (1 - k / steps), together)
        losses.append(float(by_worker.mean()))
    one = jax.tree.map(lambda leaf: leaf.addressable_data(0), weights)
    return Trained(
        losses, [0] * steps, [(steps * workers, float(steps), task.loss(one))]
    )


def synchronous(
    task: Task, steps: int, rate: float, seconds: Sequence[float]
) -> Trained:
    """The server waits for a gradient of every worker, which take `seconds` [workers], and makes one update of their
    mean.

    Held-out loss at the start and at the end.
    """
    weights, losses, held_out = (
        task.weights,
        list[float](),
        [(0, 0.0, task.loss(task.weights))],
    )
    for k in range(steps):
        found = []
        for worker, device in enumerate(task.devices):
            found.append(
                task.gradient(jax.device_put(weights, device), *task.rows(k, worker))
            )
        weights = updated(
            weights,
            rate * (1 - k / steps),
            *(jax.device_put(own, task.server) for _, own in found),
        )
        losses.append(sum(float(loss) for loss, _ in found) / len(found))
    held_out.append(
        (steps * len(task.devices), steps * max(seconds), task.loss(weights))
    )
    return Trained(losses, [0] * steps, held_out)


def asynchronous(
    task: Task, gradients: int, rate: float, seconds: Sequence[float]
) -> Trained:
    """The server makes an update of every gradient as it arrives. Workers that become free take the next rows.

    Held-out loss at the start and at the end. With the synchronous rate over the number of workers, as
    many gradients as there are workers move the weights as far as one synchronous step.
    """
    weights, losses, staleness = task.weights, list[float](), list[int]()
    held_out, workers = [(0, 0.0, task.loss(task.weights))], len(task.devices)
    # when it arrives, the worker, the version of the weights that it pulled, number of its rows
    working = [(seconds[w], w, 0, w) for w in range(workers)]
    pulled = [jax.device_put(weights, device) for device in task.devices]
    for version in range(gradients):
        now, worker, seen, rows = heapq.heappop(working)
        loss, own = task.gradient(pulled[worker], *task.rows(*divmod(rows, workers)))
        weights = updated(
            weights, rate * (1 - version / gradients), jax.device_put(own, task.server)
        )
        losses.append(float(loss))
        staleness.append(version - seen)
        pulled[worker] = jax.device_put(weights, task.devices[worker])
        heapq.heappush(
            working, (now + seconds[worker], worker, version + 1, version + workers)
        )
    held_out.append((gradients, now, task.loss(weights)))
    return Trained(losses, staleness, held_out)
