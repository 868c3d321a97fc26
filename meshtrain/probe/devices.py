"""Measures the FLOPs and memory passes of each device: by itself, and while all the others do the same.

Fake devices share their cores and their memory, so that only the second tells what each has of them. Matrices are
random: a GPU multiplies zeros or ones faster, as it then stays below its power limit (He 2024, "Strangely, matrix
multiplications on GPUs run faster when given predictable data").
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.mesh import platform
from meshtrain.probe.clock import Job, own_times, times
from meshtrain.probe.figures import Devices
from meshtrain.run.processes import gathered

CHAIN = 4  # products of a program, so that its start does not count
# Over memory that is there already: pages that are touched for the first time would count several times
PASSES = 4
DTYPES = ("float32", "bfloat16", "float16")
# By platform: the side of the matrices, and elements of the array that is passed over, which fits no cache. An
# accelerator takes milliseconds for them, as does a share of a laptop's cores.
SIDES = {"cpu": 512}
OTHER_SIDE = 8192
ELEMENTS = {"cpu": 2**23}
OTHER_ELEMENTS = 2**28


def products(a: jax.Array) -> jax.Array:
    """Returns a chain of products of `a` [side, side], of variance 1, with itself: they neither vanish nor overflow."""
    y = a
    for _ in range(CHAIN):
        y = (y @ a) * a.shape[-1] ** -0.5
    return y


def passes(a: jax.Array) -> jax.Array:
    """Reads and writes all of `a` again and again."""
    return jax.lax.fori_loop(0, PASSES, lambda _, x: x * 0.5, a)


def devices(mesh: Mesh, order: Sequence[int]) -> Devices:
    """Measures them.

    `order` [devices]: of each device, as the planner numbers them, its place in `mesh.devices.flat`.
    """
    where = platform(mesh)
    side = SIDES.get(where, OTHER_SIDE)
    elements = ELEMENTS.get(where, OTHER_ELEMENTS)
    dtype = "float32" if where == "cpu" else "bfloat16"
    matrix = np.random.default_rng(0).standard_normal((side, side), np.float32)
    jobs = [
        _everywhere(mesh, products, matrix.astype(jnp.dtype(name))) for name in DTYPES
    ]
    vector = np.ones(elements, np.float32)
    together = times([*jobs, _everywhere(mesh, passes, vector)])
    *seconds, memory_seconds = together.median.tolist()
    flops, memory, spread = _each(mesh, matrix.astype(jnp.dtype(dtype)), vector)
    stats = mesh.local_devices[0].memory_stats() or {}
    host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Devices(
        dtype=dtype,
        side=side,
        flops=flops[list(order)],
        memory_bandwidth=memory[list(order)],
        matmul={
            name: _flops(side, taken)
            for name, taken in zip(DTYPES, seconds, strict=True)
        },
        memory_rate=_rate(elements, memory_seconds),
        memory_bytes=float(stats.get("bytes_limit", 0)) or host / mesh.size,
        spread=spread,
    )


def _flops(side: int, seconds: Any) -> Any:
    return CHAIN * 2 * side**3 / seconds


def _rate(elements: int, seconds: Any) -> Any:
    return PASSES * 2 * 4 * elements / seconds


def _everywhere(mesh: Mesh, function: Callable, x: np.ndarray) -> Job:
    everywhere = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, everywhere)
    whole = jax.make_array_from_callback(
        (mesh.size * len(x), *x.shape[1:]), sharding, lambda _: x
    )
    run = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    )
    return Job(lambda: run(whole))


def _each(
    mesh: Mesh, matrix: np.ndarray, vector: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns FLOP/s and bytes/s of every device by its place in `mesh.devices.flat`, one device of a process after
    another; their spread.
    """
    inputs = ((products, matrix), (passes, vector))
    taken = own_times(
        [
            _device_job(device, function, x)
            for device in mesh.local_devices
            for function, x in inputs
        ]
    )
    own = {
        device.id: seconds
        for device, seconds in zip(
            mesh.local_devices, taken.least.reshape(-1, 2).tolist(), strict=True
        )
    }
    of_processes = gathered([own, taken.unsteady])
    # JSON makes words of their numbers.
    everyone = {
        int(number): seconds
        for one, _ in of_processes
        for number, seconds in one.items()
    }
    multiplied, passed = np.array(
        [everyone[device.id] for device in mesh.devices.flat]
    ).T
    return (
        _flops(len(matrix), multiplied),
        _rate(len(vector), passed),
        max(spread for _, spread in of_processes),
    )


def _device_job(device: jax.Device, function: Callable, x: np.ndarray) -> Job:
    run, there = jax.jit(function), jax.device_put(x, device)
    return Job(lambda: run(there))
