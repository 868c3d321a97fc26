"""Programs that use the links: a barrier, each collective over each axis of a mesh, a message between two devices.

A program does the same thing several times in a loop, so that its start counts little; each round needs what the round
before received.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.allreduce import ALGORITHMS
from meshtrain.cluster.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
)
from meshtrain.compat import vary, varying
from meshtrain.mesh import DATA, ISLAND, platform
from meshtrain.parallel.reduce.algorithms import all_gather, all_reduce, reduce_scatter
from meshtrain.probe.clock import Job, times
from meshtrain.probe.figures import XLA, MeasuredCollective, Pairs

KIB = 2**10
MIB = 2**20
# Accelerators: from what latency rules to what bandwidth rules. Fake devices copy in caches that all of them share, and
# two to five times slower once those are full (8 devices of a small machine: from 512 KiB on), so that no one line
# tells of both; training on fake devices sends messages that fit.
SIZES = {"cpu": (4 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB)}
OTHER_SIZES = (4 * KIB, 256 * KIB, 4 * MIB, 32 * MIB, 128 * MIB)
PAIR_SIZES = {"cpu": (4 * KIB, 256 * KIB)}
OTHER_PAIR_SIZES = (4 * KIB, 32 * MIB)
# rounds of a program: as many as move `ENOUGH` bytes, within bounds
MOST_ROUNDS = 16
LEAST_ROUNDS = 4
ENOUGH = 4 * MIB
ALL_PAIRS = (
    # Of so many devices every pair is measured; of more, each with those 1, 2, 4, ... further
    16
)
PAIRS_A_PROGRAM = 64

Step = Callable[[jax.Array], jax.Array]
_STEPS: dict[str, Callable[[Any, int], Step]] = {
    ALL_REDUCE: lambda axes, _: lambda x: jax.lax.psum(x, axes),
    ALL_GATHER: lambda axes, _: lambda x: jax.lax.all_gather(x, axes, tiled=True),
    REDUCE_SCATTER: lambda axes, _: lambda x: jax.lax.psum_scatter(x, axes, tiled=True),
    ALL_TO_ALL: lambda axes, _: lambda x: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
    PERMUTE: lambda axes, n: (
        lambda x: jax.lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])
    ),
}


def algorithms_of(
    kind: str, devices: int, islands: bool, asked: Sequence[str]
) -> list[str]:
    """Returns XLA's own, and those asked for that have a program for this kind; `islands`: over these and what is
    within them.
    """

    def has(name: str) -> bool:
        algorithm = ALGORITHMS[name]
        scatters = kind in (ALL_GATHER, REDUCE_SCATTER) and not algorithm.no_scatter(
            devices
        )
        return (kind == ALL_REDUCE or scatters) and (islands or not algorithm.by_levels)

    return [XLA, *filter(has, asked)]


def step_of(kind: str, algorithm: str, axes: Any, devices: int) -> Step:
    """Returns one round of a collective by an algorithm, of a device's array [elements]."""
    if algorithm == XLA:
        return _STEPS[kind](axes, devices)
    if kind == ALL_REDUCE:
        return lambda x: all_reduce(algorithm, x, axes)
    if kind == ALL_GATHER:
        return lambda x: all_gather(algorithm, x, axes)
    return lambda x: reduce_scatter(algorithm, x, axes, 0)


class Arrays:
    """One array of ones a size on every device; programs take its memory and give it back."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.arrays = dict[int, jax.Array]()
        self.sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def program(
        self, loop: Callable[..., jax.Array], elements: int, *before: jax.Array
    ) -> Callable[..., jax.Array]:
        """`loop` takes what is the same on all devices, and a device's array [elements] of float32, which it returns.

        The returned program takes the former alone: other arrays of the shapes of `before`.
        """
        everywhere = PartitionSpec(self.mesh.axis_names)
        specs = (*(PartitionSpec() for _ in before), everywhere)
        manual = jax.shard_map(
            loop, mesh=self.mesh, in_specs=specs, out_specs=everywhere
        )
        if elements not in self.arrays:
            ones = np.ones(elements, np.float32)
            whole = (self.mesh.size * elements,)
            self.arrays[elements] = jax.make_array_from_callback(
                whole, self.sharding, lambda _: ones
            )
        compiled = (
            jax.jit(manual, donate_argnums=len(before))
            .lower(*before, self.arrays[elements])
            .compile()
        )

        def run(*arguments: jax.Array) -> jax.Array:
            self.arrays[elements] = compiled(*arguments, self.arrays[elements])
            return self.arrays[elements]

        return run


def repeated(step: Step, rounds: int) -> Step:
    """Repeats `step` on one array, of which each round changes one element by what it received."""

    def body(_: jax.Array, x: jax.Array) -> jax.Array:
        # All of it is received before a part is taken, or XLA might send that part alone.
        received = jax.lax.optimization_barrier(step(x))
        return x.at[0].set(vary(received[0], varying(x)))

    return lambda x: jax.lax.fori_loop(0, rounds, body, x)


def rounds_of(nbytes: int) -> int:
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, ENOUGH // nbytes))


def barrier(mesh: Mesh, axes: Sequence[str] = ()) -> Job:
    """All devices of the axes' groups (by default of all axes) wait for each other: a sum of one number each."""
    loop = repeated(_STEPS[ALL_REDUCE](tuple(axes) or mesh.axis_names, 0), MOST_ROUNDS)
    return Job(Arrays(mesh).program(loop, 1), MOST_ROUNDS)


def one_barrier(mesh: Mesh) -> Callable[[], jax.Array]:
    """Returns a program that brings all processes to the same moment."""
    return Arrays(mesh).program(repeated(_STEPS[ALL_REDUCE](mesh.axis_names, 0), 1), 1)


JOINED = f"{ISLAND}+{DATA}"  # all of data, where it consists of islands


def axes_of(mesh: Mesh) -> list[str]:
    """Returns the axes that have links: those of more than one device."""
    return [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]


def groups_of(mesh: Mesh) -> list[str]:
    """Returns what collectives are measured over: each axis that has links, and all of data where it has islands of
    several devices.
    """
    axes = axes_of(mesh)
    return [*axes, JOINED] if {ISLAND, DATA} <= set(axes) else axes


def barriers(mesh: Mesh) -> dict[str, float]:
    """Returns seconds by axis; of a mesh with several also those of all devices."""
    groups: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in axes_of(mesh)}
    if len(groups) > 1:
        groups["+".join(mesh.axis_names)] = mesh.axis_names
    taken = times([barrier(mesh, axes) for axes in groups.values()], one_barrier(mesh))
    return dict(zip(groups, taken.median.tolist(), strict=True))


def collectives(
    mesh: Mesh,
    axis: str,
    kinds: Sequence[str],
    sizes: Sequence[int] = (),
    algorithms: Sequence[str] = (),
) -> Iterator[MeasuredCollective]:
    """Measures each kind at each size over one axis, or two joined by +, in all of its groups at once, as in training;
    by XLA's own algorithm and those programs of messages that have this kind.
    """
    axes = tuple(axis.split("+"))
    n = math.prod(mesh.shape[one] for one in axes)
    arrays = Arrays(mesh)
    ways = [
        (kind, by)
        for kind in kinds
        for by in algorithms_of(kind, n, axis == JOINED, algorithms)
    ]
    # A device's part of every array is whole numbers.
    sizes = [
        math.ceil(size / (4 * n)) * 4 * n
        for size in sizes or SIZES.get(platform(mesh), OTHER_SIZES)
    ]
    jobs = []
    for kind, by in ways:
        for size in sizes:
            elements = size // (4 * n) if kind == ALL_GATHER else size // 4
            loop = repeated(
                step_of(kind, by, axes if len(axes) > 1 else axis, n), rounds_of(size)
            )
            jobs.append(Job(arrays.program(loop, elements), rounds_of(size)))
    taken = times(jobs, one_barrier(mesh))
    shape = (len(ways), len(sizes))
    for (kind, by), median, spread in zip(
        ways, taken.median.reshape(shape), taken.spread.reshape(shape), strict=True
    ):
        yield MeasuredCollective(
            axis,
            kind,
            n,
            tuple(sizes),
            tuple(median.tolist()),
            tuple(spread.tolist()),
            by,
        )


def partners(devices: int, every: bool = False) -> list[tuple[int, int]]:
    """Returns the pairs (from, to) that are measured, both ways."""
    if every or devices <= ALL_PAIRS:
        return [(a, b) for a in range(devices) for b in range(devices) if a != b]
    steps = [1 << k for k in range((devices - 1).bit_length())]
    pairs = {(a, (a + step) % devices) for a in range(devices) for step in steps}
    return sorted(pairs | {(b, a) for a, b in pairs})


def pairs(
    mesh: Mesh, order: Sequence[int], sizes: Sequence[int] = (), every: bool = False
) -> Pairs:
    """Sends one message at a time, between `every` two devices or some of them (`partners`).

    `order` [devices]: of each device, as the planner numbers them, its place in `mesh.devices.flat`.
    """
    chosen = partners(mesh.size, every)
    sizes = tuple(sizes or PAIR_SIZES.get(platform(mesh), OTHER_PAIR_SIZES))
    seconds = np.full((len(sizes), mesh.size, mesh.size), np.nan)
    jobs = []
    arrays = Arrays(mesh)
    for size in sizes:
        for begin in range(0, len(chosen), PAIRS_A_PROGRAM):
            jobs += _messages(
                arrays,
                [
                    (order[a], order[b])
                    for a, b in chosen[begin : begin + PAIRS_A_PROGRAM]
                ],
                size,
            )
    taken = times(jobs, one_barrier(mesh))
    least = iter(taken.least.tolist())
    for level in seconds:
        for source, target in chosen:
            level[source, target] = next(least)
    return Pairs(sizes, seconds, taken.unsteady)


def _messages(
    arrays: Arrays, places: Sequence[tuple[int, int]], size: int
) -> list[Job]:
    """Returns a job a pair, all of one program, which is told by a number which pair is meant: one compilation for all
    of them.
    """
    rounds = rounds_of(size)
    branches = [
        repeated(message(arrays.mesh, source, target), rounds)
        for source, target in places
    ]
    same = NamedSharding(arrays.mesh, PartitionSpec())

    def number(i: int) -> jax.Array:
        return jax.make_array_from_callback((), same, lambda _: np.int32(i))

    send = arrays.program(
        lambda which, x: jax.lax.switch(which, branches, x), size // 4, number(0)
    )
    return [Job(functools.partial(send, number(i)), rounds) for i in range(len(places))]


def message(mesh: Mesh, source: int, target: int) -> Step:
    return lambda x: jax.lax.ppermute(x, mesh.axis_names, [(source, target)])
